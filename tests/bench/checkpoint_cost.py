"""What a checkpoint costs where it is taken: bytes, stall of the decode thread, the step after it.

Measured on synthetic rows, with a real `CheckpointStore` and `CheckpointWriter` on a real disk. The
contexts take turns, and the first round is thrown away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import mlx.core as mx

from bench.checkpoint_caches import Shape, SyntheticRow, mlx_caches
from tenuto_engine import CheckpointStore, CheckpointWriter

# Rows stay as near to their context as this share of it; one that has grown beyond begins again.
_SPAN: Final = 1 / 16
# Copying everything takes long, so only every so many rounds do it.
_SELDOM: Final = 4
# So that no buffer is enlarged at a checkpoint: where the first is, and what is decoded before.
_OFF_BORDER: Final = 100
_RUN_UP: Final = 50


@dataclass(slots=True)
class Costs:
    """What was measured of one kind of caches at one context; seconds, one a checkpoint.

    Attributes:
        kind, context: of what.
        nbytes: how much the log grew by.
        stalls: from the begin of the callback to its end.
        steps: of all steps.
        after: of the steps right after a checkpoint.
        held: of steps while a slice of each array was held, for contrast.
        save_bytes, saves: of mlx-lm's `save_prompt_cache`.
    """

    kind: str
    context: int
    nbytes: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    save_bytes: list[int] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)


def measure_costs(
    folder: Path,
    kind: str,
    shape: Shape,
    contexts: Sequence[int],
    *,
    compared: int | None,
    rounds: int,
    every: int,
) -> list[Costs]:
    """One figure a context.

    Args:
        folder: where the checkpoints go; emptied afterwards.
        compared: the context at which mlx-lm saves its caches, too.
        rounds: checkpoints at each context.
        every: new positions of each.
    """
    errors: list[Exception] = []
    writer = CheckpointWriter(on_error=lambda _, error: errors.append(error))
    jobs = [_Job(folder / f"at-{n}", kind, shape, n, every, writer) for n in contexts]
    for number in range(rounds + 1):
        for job in jobs if number % 2 else jobs[::-1]:
            job.checkpoint(contrast=number % _SELDOM == 1, save=job.context == compared)
        if number == 0:
            for job in jobs:
                job.costs = Costs(kind, job.context)
    writer.close()
    for job in jobs:
        job.store.delete()
    if errors:
        raise errors[0]
    return [job.costs for job in jobs]


class _Job:
    """A synthetic row that is checkpointed again and again at about the same context."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        shape: Shape,
        context: int,
        every: int,
        writer: CheckpointWriter,
    ) -> None:
        self.context = context
        self.costs = Costs(kind, context)
        self._folder, self._kind, self._shape = folder, kind, shape
        self._every, self._writer = every, writer
        self._begin()

    def _begin(self) -> None:
        first = int((1 - _SPAN) * self.context) + _OFF_BORDER
        prompt = max(1, first - self._every - _RUN_UP)
        self._row = SyntheticRow(self._kind, self._shape, prompt)
        for _ in range(_RUN_UP):
            self._row.step()
        self.store = CheckpointStore(self._folder)
        self.store.save(self._row.live())
        self._saved = self._row.position

    def checkpoint(self, *, contrast: bool, save: bool) -> None:
        """Decode up to the next checkpoint, take it, and decode one step more."""
        if self._row.position + self._every > (1 + _SPAN) * self.context:
            self.store.delete()
            self._begin()
        while self._row.position < self._saved + self._every:
            self.costs.steps.append(self._step())
        before = self._log_bytes()
        self.costs.stalls.append(self._submit())
        self._saved = self._row.position
        self.costs.after.append(self._step())
        if not self._writer.wait(self.store):
            raise RuntimeError("the checkpoint was not written")
        self.costs.nbytes.append(self._log_bytes() - before)
        if contrast:
            self.costs.held.append(self._step_with_a_slice_held())
        if save:
            self._save_as_mlx_lm()

    def _step(self) -> float:
        began = time.perf_counter()
        self._row.step()
        return time.perf_counter() - began

    def _submit(self) -> float:
        began = time.perf_counter()
        live = self._row.live()
        accepted = self._writer.submit(self.store, live)
        live.close()
        stall = time.perf_counter() - began
        if not accepted or live.deferred:
            raise RuntimeError("the checkpoint was put off")
        return stall

    def _log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.log"))

    def _step_with_a_slice_held(self) -> float:
        held = [buffer[..., :1, :] for buffer in self._row.buffers()]
        mx.eval(held)
        seconds = self._step()
        del held
        return seconds

    def _save_as_mlx_lm(self) -> None:
        path = self._folder.with_suffix(".safetensors")
        began = time.perf_counter()
        mlx_caches.save_prompt_cache(str(path), self._row.caches)
        self.costs.saves.append(time.perf_counter() - began)
        self.costs.save_bytes.append(path.stat().st_size)
        path.unlink()


def median(values: Sequence[float]) -> float:
    """NaN if nothing was measured."""
    return statistics.median(values) if values else float("nan")
