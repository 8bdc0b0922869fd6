"""From what was measured to the tables of the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.checkpoint_cost import Costs, median
from bench.checkpoint_resume import Prefill, Resumes
from bench.checkpoint_runs import Runs
from bench.figures import lower_bound, upper_bound, write_rows

# What a checkpoint may cost.
MOST_GROWTH: Final = 1.1
LEAST_SAVING: Final = 20.0
MOST_CPU: Final = 1.01

_KIB: Final = 1024
_MIB: Final = 2**20


class Goal(NamedTuple):
    """A figure that has to hold.

    Attributes:
        what: it, for people.
        value: as measured.
        limit: at most; or, for a factor that is better the larger it is, at least.
        is_least: which of the two.
    """

    what: str
    value: float
    limit: float
    is_least: bool = False

    @property
    def holds(self) -> bool:
        """NaN, for what was not measured, does not."""
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        relation = ">=" if self.is_least else "<="
        missed = "" if self.holds else "   MISSED"
        return f"{self.what:60} {self.value:8.3f}   ({relation} {self.limit:g}){missed}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report.

    Attributes:
        title: of it.
        mark: the line of the report above it.
        columns: their names.
        kind_columns: how many of them, from the left, say what a row is about.
        rows: the cells.
    """

    title: str
    mark: str
    columns: tuple[str, ...]
    kind_columns: int
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join(["", self.title, *(f"  {line}" for line in padded)])

    def write(self, report: Path, machine: str, date: str) -> None:
        """Put the rows into `report`, with the machine before and the date behind each."""
        rows = [(machine, *row, date) for row in self.rows]
        write_rows(report, self.mark, rows, 1 + self.kind_columns)


# -- what a checkpoint costs -----------------------------------------------------------


def cost_table(measured: Sequence[Sequence[Costs]], every: int) -> Table:
    """Bytes, stall and steps by kind of caches and context; then the largest by the smallest."""
    rows: list[tuple[str, ...]] = []
    for kind in measured:
        for cost in kind:
            cells = [_ms(times) for times in (cost.stalls, cost.steps, cost.after, cost.held)]
            rows.append((cost.kind, _context(cost.context), _kib(median(cost.nbytes)), *cells))
        if len(kind) > 1:
            ratio = f"{_context(kind[-1].context)} by {_context(kind[0].context)}"
            nbytes, stall = growth(kind)
            rows.append((kind[0].kind, ratio, f"{nbytes:.3f}", f"{stall:.3f}", "", "", ""))
    return Table(
        f"A checkpoint of {every} new positions",
        "<!-- checkpoint cost: rows are written by `make bench-checkpoints ARGS=--write` -->",
        ("caches", "context", "KiB", "stall ms", "step ms", "step after ms", "slice held ms"),
        2,
        rows,
    )


def growth(kind: Sequence[Costs]) -> tuple[float, float]:
    """Bytes and stall at the largest context by those at the smallest."""
    first, last = kind[0], kind[-1]
    return (
        median(last.nbytes) / median(first.nbytes),
        median(last.stalls) / median(first.stalls),
    )


def saving_table(measured: Sequence[Sequence[Costs]]) -> Table:
    """Against mlx-lm's `save_prompt_cache`, where that was measured."""
    rows = []
    for cost in (cost for kind in measured for cost in kind if cost.saves):
        fewer, less = savings(cost)
        rows.append(
            (
                cost.kind,
                _context(cost.context),
                _kib(median(cost.save_bytes)),
                _ms(cost.saves),
                f"{fewer:.1f}",
                f"{less:.1f}",
            )
        )
    return Table(
        "mlx-lm's save_prompt_cache of the same caches",
        "<!-- save_prompt_cache: rows are written by `make bench-checkpoints ARGS=--write` -->",
        ("caches", "context", "KiB", "stall ms", "times the bytes", "times the stall"),
        2,
        rows,
    )


def savings(cost: Costs) -> tuple[float, float]:
    """How many times the bytes and the stall of a checkpoint mlx-lm's saving takes."""
    return (
        median(cost.save_bytes) / median(cost.nbytes),
        median(cost.saves) / median(cost.stalls),
    )


# -- whole runs ------------------------------------------------------------------------


def runs_table(measured: Sequence[Runs]) -> Table:
    """Processor time a token, with checkpoints and without."""
    rows = []
    for runs in measured:
        without, with_ = zip(*runs.pairs, strict=True)
        rows.append(
            (
                runs.model,
                _context(runs.context),
                f"{runs.every}",
                f"{len(runs.pairs)} x {runs.tokens}",
                _ms([run.cpu / len(run.tokens) for run in without]),
                _ms([run.cpu / len(run.tokens) for run in with_]),
                _bounded(runs.ratios),
                _ms([seconds for run in with_ for seconds in run.steps]),
                _ms([seconds for run in with_ for seconds in run.taking]),
                _ms([seconds for run in with_ for seconds in run.after]),
            )
        )
    return Table(
        "Processor time a token of whole runs",
        "<!-- whole runs: rows are written by `make bench-checkpoints ARGS=--write` -->",
        (
            *("model", "context", "every", "pairs x tokens", "without, ms", "with, ms", "ratio"),
            *("step ms", "with checkpoint ms", "step after ms"),
        ),
        3,
        rows,
    )


def _bounded(ratios: list[float]) -> str:
    middle = statistics.median(ratios)
    return f"**{middle:.4f}** ({lower_bound(ratios):.4f} to {upper_bound(ratios):.4f})"


# -- resume ----------------------------------------------------------------------------


def resume_table(model: str, measured: Sequence[tuple[Prefill, Sequence[Resumes]]]) -> Table:
    """Reading a checkpoint against reading the prompt again."""
    rows = [
        _resume_row(model, prefill, resume) for prefill, resumes in measured for resume in resumes
    ]
    return Table(
        "From a checkpoint on disk to a row that decodes, against reading the prompt again",
        "<!-- resume: rows are written by `make bench-checkpoints ARGS=--write` -->",
        (
            *("model", "context", "records", "MiB", "find ms", "load ms", "rebuild ms", "total ms"),
            *("MiB/s", "disk MiB/s", "prefill s", "prefill tokens/s", "times quicker"),
        ),
        3,
        rows,
    )


def _resume_row(model: str, prefill: Prefill, resume: Resumes) -> tuple[str, ...]:
    parts = (resume.finds, resume.loads, resume.rebuilds)
    total = sum(map(median, parts))
    reading = median(resume.finds) + median(resume.loads)
    whole = prefill.measured == prefill.context
    how = "" if whole else f" (by {prefill.measured} of its tokens)"
    return (
        model,
        _context(resume.context),
        f"{resume.records} of {resume.every}",
        f"{resume.nbytes / _MIB:.1f}",
        *map(_ms, parts),
        _ms([total]),
        f"{resume.nbytes / _MIB / reading:.0f}",
        f"{resume.nbytes / _MIB / median(resume.disk):.0f}" + ("" if resume.is_cold else " (warm)"),
        f"{prefill.seconds:.1f}{how}",
        f"{prefill.context / prefill.seconds:.1f}",
        f"{prefill.seconds / total:.0f}",
    )


# -- goals -----------------------------------------------------------------------------


def cost_goals(measured: Sequence[Sequence[Costs]]) -> list[Goal]:
    """Of the costs; a ring has no more than its window to save, so mlx-lm's bytes are few there."""
    goals = []
    for kind in measured:
        name = kind[0].kind
        if len(kind) > 1:
            nbytes, stall = growth(kind)
            span = f"{_context(kind[-1].context)} by {_context(kind[0].context)}"
            goals.append(Goal(f"{name}: bytes at {span}", nbytes, MOST_GROWTH))
            goals.append(Goal(f"{name}: stall at {span}", stall, MOST_GROWTH))
        for cost in kind:
            if cost.saves and not name.startswith("Rotating"):
                fewer, less = savings(cost)
                goals.append(Goal(f"{name}: times fewer bytes", fewer, LEAST_SAVING, True))
                goals.append(Goal(f"{name}: times less stall", less, 1.0, True))
    return goals


def run_goals(measured: Sequence[Runs]) -> list[Goal]:
    """Of the whole runs."""
    return [
        Goal(
            f"{runs.model} at {_context(runs.context)}: CPU a token, with by without",
            statistics.median(runs.ratios),
            MOST_CPU,
        )
        for runs in measured
    ]


# -- cells -----------------------------------------------------------------------------


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):.2f}" if seconds else "n/a"


def _kib(nbytes: float) -> str:
    return f"{nbytes / _KIB:.0f}"


def _context(tokens: int) -> str:
    return f"{tokens // _KIB}k" if tokens % _KIB == 0 else str(tokens)
