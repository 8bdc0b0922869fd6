"""The benchmark's arithmetic and its table."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic as now

import pytest

from bench.figures import MARK, Pair, Run, Timing, describe, lower_bound, summary, write_row
from bench.turns import Turns
from workers import poll_until

TIMING = Timing(decode=100.0, whole=90.0, cpu=10.0)


def pair(decode: float) -> Pair:
    return Pair(TIMING, replace(TIMING, decode=decode), same_tokens=True)


def test_decode_speed_leaves_out_what_comes_before_the_first_token() -> None:
    run = Run(asked=0.0, arrivals=[5.0, 5.5, 6.0], ended=7.0, cpu=[1.0, 1.1, 1.2], tokens=[1, 2, 3])
    timing = Timing.of(run, lambda at: at)
    assert (timing.decode, timing.whole) == (2.0, 3 / 7)
    assert timing.cpu == pytest.approx(100.0)
    assert Timing.of(run, lambda at: at / 2).decode == 4.0
    assert Timing.of(replace(run, cpu=[]), lambda at: at).cpu is None


def test_a_ratio_is_that_of_its_pair_and_the_bound_is_below_the_median() -> None:
    slower = Pair(TIMING, replace(TIMING, decode=97.0, cpu=12.5), same_tokens=True)
    assert (slower.decode, slower.whole, slower.cpu) == (0.97, 1.0, 0.8)
    ratios = [0.9, 0.95, 0.98, 0.99, 1.0]
    assert 0.9 <= lower_bound(ratios) < 0.98
    assert lower_bound(ratios) == lower_bound(list(ratios))


def test_of_processes_that_take_turns_one_runs_and_the_clocks_stop_for_the_others() -> None:
    body = "import time\nwhile True: time.sleep(1)"
    busy = [subprocess.Popen([sys.executable, "-c", body]) for _ in range(2)]
    try:
        began = now()
        with Turns([process.pid for process in busy], 0.02) as turns:
            poll_until(lambda: min(turns.clock(0, now()), turns.clock(1, now())) > 0.1, "turns")
        ended = now()
        clocks = [turns.clock(number, ended) for number in (0, 1)]
        assert sum(clocks) <= ended - began
        assert turns.clock(0, began) == 0.0
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_row_replaces_the_older_one_of_its_kind_and_leaves_the_rest(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text(f"above\n{MARK}\n| model |\n|---|\n| other | x | y |\n\nbelow\n")
    for speed in (50.0, 99.0):
        facts = summary("some/folder", [pair(speed)], 3, 2.0)
        write_row(report, facts)
        assert f"{speed / 100:.3f}" in describe(facts)
    lines = report.read_text().splitlines()
    assert lines[:5] == ["above", MARK, "| model |", "|---|", "| other | x | y |"]
    assert lines[5].startswith("| folder | ")
    assert "**0.990** (>= 0.990)" in lines[5]
    assert lines[6:] == ["", "below"]


def test_a_report_without_the_table_is_not_touched(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("nothing\n")
    with pytest.raises(ValueError, match="not in list"):
        write_row(report, summary("m", [pair(100.0)], 3, 2.0))
    assert report.read_text() == "nothing\n"
