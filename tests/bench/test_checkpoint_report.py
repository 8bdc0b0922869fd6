"""The checkpoint benchmark's arithmetic, its tables, and that it still runs, at tiny sizes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from bench import checkpoint_report as report
from bench.checkpoint_caches import KINDS, Shape
from bench.checkpoint_cost import Costs, measure_costs
from bench.checkpoint_model import ModelSize, SyntheticKV, build_model, random_prompt
from bench.checkpoint_resume import (
    Prefill,
    Resumes,
    integrate,
    measure_prefill,
    measure_resume,
)
from bench.checkpoint_runs import MeasuredRun, Runs, measure_runs
from bench.checkpoints import REPORT, Figures, parse, tables
from bench.figures import lower_bound, upper_bound
from tenuto_engine import Engine

TINY = ModelSize(64, 2)


def costs(context: int, nbytes: int, stall: float, saves: float | None = None) -> Costs:
    found = Costs("KVCache", context, [nbytes], [stall], [0.001], [0.002], [0.5])
    if saves is not None:
        found.save_bytes, found.saves = [40 * nbytes], [saves]
    return found


def pair(without: float, with_: float) -> tuple[MeasuredRun, MeasuredRun]:
    return MeasuredRun(cpu=without, tokens=[1, 2]), MeasuredRun(cpu=with_, tokens=[1, 2])


def resumes(*, is_cold: bool = True) -> Resumes:
    return Resumes(1024, 256, 4, 3 * 2**20, is_cold, [0.5], [1.0], [0.5], [0.75])


COSTS = [[costs(1024, 1000, 0.002), costs(8192, 1000, 0.003, 0.09), costs(32768, 1050, 0.0022)]]
RUNS = Runs("m", 1024, 2, 256, [pair(1.0, 1.01), pair(2.0, 2.04), pair(1.0, 0.99)])
FIGURES = Figures(COSTS, [RUNS], [(Prefill(1024, 20.0, 320), [resumes()])])


# -- arithmetic ------------------------------------------------------------------------


def test_growth_is_the_largest_context_by_the_smallest() -> None:
    assert list(report.growth(COSTS[0])) == pytest.approx([1.05, 1.1])


def test_savings_say_how_much_more_mlx_lm_takes_at_the_same_context() -> None:
    assert list(report.savings(COSTS[0][1])) == pytest.approx([40.0, 30.0])


def test_a_goal_that_was_not_measured_is_missed() -> None:
    assert report.Goal("a", 1.1, 1.1).holds
    assert not report.Goal("a", 1.11, 1.1).holds
    assert report.Goal("a", 20.0, 20.0, is_least=True).holds
    assert not report.Goal("a", math.nan, 1.1).holds
    assert "MISSED" in str(report.Goal("a", 19.0, 20.0, is_least=True))


def test_the_goals_are_those_of_growth_savings_and_processor_time() -> None:
    goals = report.cost_goals(COSTS) + report.run_goals([RUNS])
    values = [1.05, 1.1, 40.0, 30.0, 1.01]
    assert [goal.value for goal in goals] == pytest.approx(values)
    assert [goal.limit for goal in goals] == [1.1, 1.1, 20.0, 1.0, 1.01]


def test_the_bounds_lie_around_the_median_and_are_always_the_same() -> None:
    ratios = [0.9, 0.95, 0.98, 0.99, 1.0]
    assert lower_bound(ratios) < 0.98 < upper_bound(ratios) <= 1.0
    assert upper_bound(ratios) == upper_bound(list(ratios))


def test_time_between_samples_lies_on_straight_lines_and_is_level_outside() -> None:
    assert integrate([(0, 1.0)], 10) == 10.0
    assert integrate([(0, 1.0), (10, 3.0)], 10) == 20.0
    assert integrate([(2, 1.0), (6, 3.0)], 8) == 2.0 + 8.0 + 6.0


# -- tables ----------------------------------------------------------------------------


def test_the_tables_have_the_figures() -> None:
    cost, saving, runs, resume = tables(parse([]), FIGURES)
    assert cost.rows[0] == ("KVCache", "1k", "1", "2.00", "1.00", "2.00", "500.00")
    assert cost.rows[3] == ("KVCache", "32k by 1k", "1.050", "1.100", "", "", "")
    assert saving.rows == [("KVCache", "8k", "39", "90.00", "40.0", "30.0")]
    assert runs.rows[0][:6] == ("m", "1k", "256", "3 x 2", "500.00", "505.00")
    assert runs.rows[0][6].startswith("**1.0100** (")
    _, context, records, *figures = resume.rows[0]
    assert (context, records) == ("1k", "4 of 256")
    assert figures[:7] == ["3.0", "500.00", "1000.00", "500.00", "2000.00", "2", "4"]
    assert figures[7:] == ["20.0 (by 320 of its tokens)", "51.2", "10"]
    assert "a checkpoint of 256 new positions" in str(cost).lower()


def test_a_disk_that_was_read_from_memory_and_a_whole_prefill_say_so() -> None:
    measured = [(Prefill(1024, 20.0, 1024), [resumes(is_cold=False)])]
    (row,) = report.resume_table("m", measured).rows
    assert (row[9], row[10]) == ("4 (warm)", "20.0")


def test_sections_that_were_not_measured_have_no_table() -> None:
    assert tables(parse([]), Figures()) == []


def test_the_report_has_a_table_with_these_columns_for_each(tmp_path: Path) -> None:
    copy = tmp_path / "report.md"
    shutil.copy(REPORT, copy)
    for table in tables(parse([]), FIGURES):
        for _ in range(2):
            table.write(copy, "the machine", "2026-01-02")
        lines = copy.read_text("utf-8").splitlines()
        header = lines[lines.index(table.mark) + 1]
        assert header == f"| {' | '.join(('machine', *table.columns, 'date'))} |"
        written = f"| {' | '.join(('the machine', *table.rows[0], '2026-01-02'))} |"
        assert lines.count(written) == 1


def test_arguments_that_leave_no_checkpoint_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--runs", "64x2@512:100"], ["--only", "nothing"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            parse(arguments)
    assert "usage" in capsys.readouterr().err
    assert parse(["--runs", "64x2@512:256"]).runs == [(TINY, 512, 256)]


# -- measuring -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_bytes_of_the_new_positions_at_any_context(
    tmp_path: Path, kind: str
) -> None:
    found = measure_costs(
        tmp_path / "jobs", kind, Shape(layers=2), [200, 400], compared=400, rounds=2, every=16
    )
    # A bfloat16 takes 2 bytes; 8 bits take 1, and a scale and a bias for each 64 of them 4.
    each = 64 + 4 if kind.startswith("Quantized") else 2 * 64
    payload = 2 * 2 * 4 * 16 * each
    for cost in found:
        assert all(payload < nbytes < payload + 2500 for nbytes in cost.nbytes)
        assert [len(times) for times in (cost.nbytes, cost.stalls, cost.after)] == [2, 2, 2]
    assert [len(cost.saves) for cost in found] == [0, 2]
    assert [len(cost.held) for cost in found] == [1, 1]
    assert not list((tmp_path / "jobs").iterdir())


def test_both_sides_of_a_pair_decode_the_same_and_one_takes_checkpoints(tmp_path: Path) -> None:
    runs = measure_runs(tmp_path, TINY, 40, pairs=1, tokens=20, every=8)
    ((without, with_),) = runs.pairs
    assert (len(without.tokens), len(without.taking), len(with_.taking)) == (21, 0, 2)
    assert without.cpu > 0
    assert len(with_.steps) + len(with_.taking) + len(with_.after) == len(without.steps)


def test_a_resume_reads_the_newest_of_all_records(tmp_path: Path) -> None:
    engine = Engine.load(build_model(tmp_path / "model", TINY, 101), chunk_size=16)
    kv, prompt = SyntheticKV(TINY.layers, 100), random_prompt(engine, 100)
    found = measure_resume(tmp_path / "job", engine, kv, prompt, 8, 2)
    assert (found.context, found.records) == (100, 13)
    assert found.nbytes > 100 * 2 * 2 * 4 * 64 * 4
    parts = (found.finds, found.loads, found.rebuilds, found.disk)
    assert [len(times) for times in parts] == [2, 2, 2, 2]
    assert not (tmp_path / "job").exists()
    assert measure_prefill(engine, kv, prompt, 16, most_seconds=60).measured == 100
    sampled = measure_prefill(engine, kv, prompt, 16, most_seconds=0)
    assert sampled.measured == 5 * 2 * 16
