"""The report of `load.py`: for people, and as tables in BENCHMARKS.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import figures
from bench.load_figures import Latency, Memory, Spread, Turns
from bench.load_queue import QueueCost

REPORT = Path(__file__).resolve().parents[2] / "BENCHMARKS.md"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All that one run gives.

    Attributes:
        cores: how many cores each side kept busy.
    """

    latency: Latency
    turns: Sequence[Turns]
    memory: Sequence[Memory]
    cores: Mapping[str, float]


def describe(args: argparse.Namespace, run: LoadRun, costs: Sequence[QueueCost]) -> str:
    """All tables as text."""
    lines = []
    for title, (names, rows) in _tables(args, run, costs).items():
        lines += ["", title]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        for row in (names, *rows):
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(cells))
    lines += [f"reader: {error}" for error in run.latency.errors[:10]]
    return "\n".join(lines)


def write(args: argparse.Namespace, run: LoadRun, costs: Sequence[QueueCost]) -> None:
    """Put each table into BENCHMARKS.md, in the place of older rows of the same kind."""
    where = figures.machine()
    machine = f"{where['device']}, {where['cores']} cores, {where['system']}"
    date = time.strftime("%Y-%m-%d")
    for title, (_, rows) in _tables(args, run, costs).items():
        mark = f"<!-- {title}: rows are written by `make bench-load ARGS=--write` -->"
        figures.write_rows(REPORT, mark, [[machine, *row, date] for row in rows], 2)


_Table = tuple[list[str], list[list[str]]]


def _tables(
    args: argparse.Namespace, run: LoadRun, costs: Sequence[QueueCost]
) -> dict[str, _Table]:
    return {
        "load latency": _latency(args, run),
        "load memory": _memory(run),
        "load turns": _turns(run),
        "load queue": _queue(costs),
    }


def _latency(args: argparse.Namespace, run: LoadRun) -> _Table:
    load = (
        f"{args.queued} queued, {args.slots} slots, {args.step_ms} ms a step, "
        f"{args.readers} readers in {args.processes} processes"
    )
    names = ["load", "from the token until", "values", "p50 ms", "p99 ms", "max ms", "cores busy"]

    def row(what: str, spread: Spread, busy: str) -> list[str]:
        figures = [f"{each:.2f}" for each in (spread.p50, spread.p99, spread.max)]
        return [f"{load}: {what}", str(spread.count), *figures, busy]

    del names[1]
    cores = {what: f"{what} {count:.2f}" for what, count in run.cores.items()}
    found = run.latency
    return names, [
        row("until Redis has it", found.sent, f"{cores['worker']}, {cores['Redis']}"),
        row("from there until a reader has it", found.carried, ""),
        row("until a reader has it", found.read, cores["readers"]),
        row("until its last reader has it", found.last, ""),
    ]


def _memory(run: LoadRun) -> _Table:
    def mib(count: float) -> str:
        return f"{count / _MIB:.1f}"

    names = ["of", "first MiB", "largest MiB", "last MiB", "growth in the last quarter MiB"]
    rows = [
        [each.what, mib(each.samples[0]), mib(max(each.samples)), mib(each.samples[-1]),
         mib(each.growth)]
        for each in run.memory
    ]  # fmt: skip
    return names, rows


def _turns(run: LoadRun) -> _Table:
    """The new tenants, which have a job each, are one row."""
    new = [each for each in run.turns if each.tenant.startswith("new-")]
    together = Turns(
        "new ones, a job each",
        sum(each.queued for each in new),
        sum(each.started for each in new),
        max((each.longest_wait for each in new), default=0.0),
        max((each.longest_gap for each in new), default=0.0),
    )
    shown = [each for each in run.turns if each not in new]
    names = ["tenant", "queued", "started", "longest gap s", "longest wait s"]
    rows = [
        [
            each.tenant,
            str(each.queued),
            str(each.started),
            "" if is_new else f"{each.longest_gap:.1f}",
            f"{each.longest_wait:.1f}" if is_new else "",
        ]
        for each in (*shown, together)
        for is_new in (each is together or each.tenant == "urgent",)
    ]
    return names, rows


def _queue(costs: Sequence[QueueCost]) -> _Table:
    names = [
        "queued", "submit ms", "claim ms", "claim in Redis ms", "mend ms", "mend in Redis ms",
        "mend without tickets, in Redis ms", "bytes a job",
    ]  # fmt: skip
    rows = [
        [str(each.queued), *(f"{value:.2f}" for value in (
            each.submit, each.claim, each.claim_redis, each.mend, each.mend_redis,
            each.mend_empty_redis,
        )), f"{each.bytes:.0f}"]
        for each in costs
    ]  # fmt: skip
    return names, rows
