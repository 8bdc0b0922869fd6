"""What a run of the benchmark gives: timings, ratios, the summary, and the row in the report."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

MARK = "<!-- whole path: rows are written by `make bench ARGS=--write` -->"
# Model, machine and checkpoints say what kind of measurement a row is.
_KIND_COLUMNS = 3


@dataclass(slots=True)
class Run:
    """One generation as its reader saw it; times are monotonic seconds.

    Attributes:
        asked, ended: when it was asked for, and when its end was known.
        arrivals: when each token came.
        cpu: processor time that the decoding process had used at each of them; empty where the
            system does not tell.
        tokens: their ids.
    """

    asked: float
    arrivals: list[float]
    ended: float
    cpu: list[float]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """The speed of one generation.

    Attributes:
        decode: tokens a second from the first token to the last; the prompt is not in it.
        whole: tokens a second from asking to the end.
        cpu: milliseconds of processor time a token, from the first to the last; None if unknown.
    """

    decode: float
    whole: float
    cpu: float | None

    @classmethod
    def of(cls, run: Run, clock: Callable[[float], float]) -> Timing:
        """`clock` says how long the process had run at a time; it may be stopped now and then."""
        steps = len(run.arrivals) - 1
        return cls(
            decode=steps / (clock(run.arrivals[-1]) - clock(run.arrivals[0])),
            whole=len(run.arrivals) / (clock(run.ended) - clock(run.asked)),
            cpu=1000 * (run.cpu[-1] - run.cpu[0]) / steps if run.cpu else None,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side."""

    baseline: Timing
    tenuto: Timing
    same_tokens: bool

    @property
    def decode(self) -> float:
        """Ratio of the decode speeds."""
        return self.tenuto.decode / self.baseline.decode

    @property
    def whole(self) -> float:
        """Ratio of the speeds of the whole runs."""
        return self.tenuto.whole / self.baseline.whole

    @property
    def cpu(self) -> float | None:
        """Ratio of processor time a token, as a speed: below 1, Tenuto needs more."""
        if self.baseline.cpu is None or self.tenuto.cpu is None:
            return None
        return self.baseline.cpu / self.tenuto.cpu


def lower_bound(ratios: list[float]) -> float:
    """Of the median, at 95 %, by bootstrap; always the same for the same ratios."""
    medians = _medians(ratios)
    return medians[len(medians) // 20]


def upper_bound(ratios: list[float]) -> float:
    """The same from above."""
    medians = _medians(ratios)
    return medians[-1 - len(medians) // 20]


def _medians(ratios: list[float]) -> list[float]:
    draw = random.Random(1)
    return sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(5000))


def summary(
    model: str, pairs: list[Pair], tokens: int, checkpoint_seconds: float
) -> dict[str, Any]:
    """The figures, and what they were measured on."""
    ratios = [pair.decode for pair in pairs]
    cpu = [pair.cpu for pair in pairs if pair.cpu is not None]
    return {
        "model": Path(model).name,
        "machine": machine(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "tenuto-worker")}
        | {"python": platform.python_version()},
        "pairs": len(pairs),
        "tokens": tokens,
        "checkpoint_seconds": checkpoint_seconds,
        "mlx_lm_tps": statistics.median(pair.baseline.decode for pair in pairs),
        "tenuto_tps": statistics.median(pair.tenuto.decode for pair in pairs),
        "ratio": statistics.median(ratios),
        "ratio_lower_bound": lower_bound(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "whole_ratio": statistics.median(pair.whole for pair in pairs),
        "cpu_ratio": statistics.median(cpu) if cpu else None,
        "same_tokens": all(pair.same_tokens for pair in pairs),
    }


def machine() -> dict[str, Any]:
    """What this runs on."""
    import mlx.core as mx

    is_gpu = mx.default_device().type == mx.DeviceType.gpu
    name = dict(mx.device_info()).get("device_name", "unknown")
    return {
        "device": f"{'GPU' if is_gpu else 'CPU'} {name}",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versioned_machine() -> str:
    """The same in one cell, with the versions of what computes."""
    known = machine()
    where = f"{known['device']}, {known['cores']} cores, {known['system']}"
    return f"{where}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"


def describe(facts: dict[str, Any]) -> str:
    """The figures for people."""
    machine, cpu = facts["machine"], facts["cpu_ratio"]
    measured = f"{facts['pairs']} pairs of {facts['tokens']} tokens"
    spread = f"pairs from {facts['ratio_min']:.3f} to {facts['ratio_max']:.3f}"
    lines = [
        "",
        f"{facts['model']} on {machine['device']}, {machine['cores']} cores; {measured}",
        f"  mlx-lm      {facts['mlx_lm_tps']:8.2f} tokens/s (median)",
        f"  tenuto      {facts['tenuto_tps']:8.2f} tokens/s (median)",
        f"  ratio       {facts['ratio']:8.3f} at least {facts['ratio_lower_bound']:.3f}, {spread}",
        f"  whole run   {facts['whole_ratio']:8.3f}",
        f"  by CPU time {'     n/a' if cpu is None else f'{cpu:8.3f}'}",
    ]
    return "\n".join(lines)


def write_row(report: Path, facts: dict[str, Any]) -> None:
    """Put a row into the table of `report`, in the place of an older one of the same kind.

    Raises:
        ValueError: the report has no such table.
    """
    write_rows(report, MARK, [_row(facts)], _KIND_COLUMNS)


def write_rows(report: Path, mark: str, new: Sequence[Sequence[str]], kind_columns: int) -> None:
    """Put rows into the table under `mark`, in the place of older ones of the same kinds.

    Args:
        kind_columns: how many of the first columns say what kind of measurement a row is.

    Raises:
        ValueError: the report has no such table.
    """
    lines = report.read_text("utf-8").splitlines()
    top = lines.index(mark) + 1
    end = next((at for at in range(top, len(lines)) if not lines[at].startswith("|")), len(lines))
    kinds = [list(row[:kind_columns]) for row in new]
    kept = [row for row in lines[top + 2 : end] if _cells(row)[:kind_columns] not in kinds]
    table = [*lines[top : top + 2], *kept, *(f"| {' | '.join(row)} |" for row in new)]
    report.write_text("\n".join([*lines[:top], *table, *lines[end:]]) + "\n", "utf-8")


def _row(facts: dict[str, Any]) -> list[str]:
    machine, versions, cpu = facts["machine"], facts["versions"], facts["cpu_ratio"]
    return [
        facts["model"],
        f"{machine['device']}, {machine['cores']} cores, {machine['system']}",
        f"every 256 tokens or {facts['checkpoint_seconds']:g} s",
        f"mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}, Python {versions['python']}",
        f"{facts['pairs']} x {facts['tokens']}",
        f"{facts['mlx_lm_tps']:.2f}",
        f"{facts['tenuto_tps']:.2f}",
        f"**{facts['ratio']:.3f}** (>= {facts['ratio_lower_bound']:.3f})",
        f"{facts['whole_ratio']:.3f}",
        "n/a" if cpu is None else f"{cpu:.3f}",
        time.strftime("%Y-%m-%d"),
    ]


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]
