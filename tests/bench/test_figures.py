"""The benchmark's arithmetic and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.figures import MARK, Pair, Timing, describe, lower_bound, summary, write_row

TIMING = Timing(decode=100.0, whole=90.0, cpu=10.0, tokens=(1, 2, 3))


def test_decode_speed_leaves_out_what_comes_before_the_first_token() -> None:
    timing = Timing.of(0.0, [5.0, 5.5, 6.0], 7.0, 0.2, [1, 2, 3])
    assert timing == Timing(decode=2.0, whole=3 / 7, cpu=100.0, tokens=(1, 2, 3))


def test_a_ratio_is_that_of_its_pair_and_the_bound_is_below_the_median() -> None:
    pair = Pair(TIMING, replace(TIMING, decode=97.0, cpu=12.5))
    assert (pair.decode, pair.whole, pair.cpu) == (0.97, 1.0, 0.8)
    assert Pair(TIMING, replace(TIMING, cpu=None)).cpu is None
    ratios = [0.9, 0.95, 0.98, 0.99, 1.0]
    assert 0.9 <= lower_bound(ratios) < 0.98
    assert lower_bound(ratios) == lower_bound(list(ratios))


def test_a_row_replaces_the_older_one_of_its_kind_and_leaves_the_rest(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text(f"above\n{MARK}\n| model |\n|---|\n| other | x | y |\n\nbelow\n")
    for speed in (50.0, 99.0):
        facts = summary("some/folder", [Pair(TIMING, replace(TIMING, decode=speed))], 3, 2.0)
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
        write_row(report, summary("m", [Pair(TIMING, TIMING)], 3, 2.0))
    assert report.read_text() == "nothing\n"
