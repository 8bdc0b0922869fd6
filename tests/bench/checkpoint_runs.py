"""Processor time of whole runs with checkpoints by that of runs without, pair by pair.

A run begins from a checkpoint at the context wanted, which takes the place of reading a prompt,
decodes a number of tokens by `Engine.step`, and ends when all that it handed to the writer is on
disk. What counts is the processor time of the whole process while it is this run's turn, with that
of the writer's thread. The other side is the same with no store and no callback.

The two runs of a pair take turns of a few tokens, so that whatever else the machine does slows
both alike. A turn ends when the writer has nothing left to do.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import mlx.core as mx

from bench.checkpoint_model import ModelSize, SyntheticKV, build_model, random_prompt
from tenuto_engine import (
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    Engine,
    GenerationOptions,
    resume_options,
)
from tenuto_engine._live import LiveCheckpoint

# A row that has reached its end takes no checkpoint, so it may go on a little.
_SPARE: Final = 8
_TURN: Final = 16


@dataclass(slots=True)
class MeasuredRun:
    """One run.

    Attributes:
        cpu, wall: seconds of the whole run.
        tokens: ids that were handed out.
        steps: seconds of each step of the engine that took no checkpoint.
        taking: of those that did.
        after: of those right after one.
    """

    cpu: float = 0.0
    wall: float = 0.0
    tokens: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    taking: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Counts the time within as the run's."""
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - began
        self.cpu += time.process_time() - cpu


@dataclass(slots=True)
class Runs:
    """All pairs of a model at a context.

    Attributes:
        model, context: which.
        tokens: of each run.
        every: tokens between checkpoints.
        pairs: without, and with checkpoints.
    """

    model: str
    context: int
    tokens: int
    every: int
    pairs: list[tuple[MeasuredRun, MeasuredRun]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Processor time with checkpoints by that without, of each pair."""
        return [with_.cpu / without.cpu for without, with_ in self.pairs]


def measure_runs(
    folder: Path,
    size: ModelSize,
    context: int,
    *,
    pairs: int,
    tokens: int,
    every: int,
    report: Callable[[Runs], object] | None = None,
) -> Runs:
    """Measure all pairs, after one that is thrown away.

    Args:
        folder: for model and checkpoints; emptied afterwards of the checkpoints.
        tokens: of each run; checkpoints are taken at the multiples of `every` among them.
        report: called after each pair.
    """
    model = build_model(folder / "model", size, context + tokens + _SPARE)
    engine = Engine.load(model, slots=1)
    # The same weights, so that neither side finds more of them in the processor's cache.
    other = Engine(engine._loaded, slots=1, chunk_size=1, pipelined=None)
    job = folder / "job"
    start = _saved(job, SyntheticKV(size.layers, context), random_prompt(engine, context))
    runs = Runs(size.name, context, tokens, every)
    for number in range(pairs + 1):
        without = _Side(engine, start, tokens)
        with_ = _SideWithCheckpoints(other, start, tokens, job, number + 1, every)
        _take_turns([without, with_] if number % 2 else [with_, without])
        if without.run.tokens != with_.run.tokens:
            raise RuntimeError("checkpoints changed the tokens")
        if number:
            runs.pairs.append((without.run, with_.run))
            if report is not None:
                report(runs)
    CheckpointStore(job).delete()
    return runs


def _saved(job: Path, kv: SyntheticKV, prompt: tuple[int, ...]) -> Checkpoint:
    """A checkpoint that knows where in a log it is, as after a crash."""
    store = CheckpointStore(job)
    store.save(kv.checkpoint(prompt))
    store.close()
    return store.candidates()[0].load()


def _take_turns(sides: list[_Side]) -> None:
    gc.collect()
    mx.clear_cache()
    for side in sides:
        side.begin()
    are_over = [False]
    while not all(are_over):
        are_over = [side.take_turn() for side in sides]
        sides.reverse()
    for side in sides:
        side.end()


class _Side:
    """A run that saves nothing.

    Args:
        engine: its own.
        start: where it begins.
        tokens: how far it goes.
    """

    def __init__(self, engine: Engine, start: Checkpoint, tokens: int) -> None:
        self.run = MeasuredRun()
        self._engine = engine
        self._start = start
        self._tokens = tokens
        self._times = self.run.steps
        self._took = False

    def begin(self) -> None:
        """From the checkpoint to a row."""
        with self.run.clock():
            self._sequence = self._engine.add(*resume_options(self._start, self._options()))

    def take_turn(self) -> bool:
        """Decode a few tokens; returns whether it was the last turn."""
        with self.run.clock():
            for _ in range(_TURN):
                if not self._is_over:
                    self._step()
            self._settle()
        return self._is_over

    def end(self) -> None:
        """Free the row; after a step that is not counted, since a checkpoint may be before it."""
        counted = len(self.run.tokens)
        self._step()
        del self.run.tokens[counted:]
        with self.run.clock():
            self._engine.close(self._sequence)

    @property
    def _is_over(self) -> bool:
        # The last token asked for is forwarded, too, so that the checkpoint behind it is taken.
        return len(self.run.tokens) > self._tokens

    def _step(self) -> None:
        began = time.perf_counter()
        events = self._engine.step()
        seconds = time.perf_counter() - began
        self.run.tokens += [event.token.token for event in events]
        if self._took:
            self.run.taking.append(seconds)
            self._took, self._times = False, self.run.after
        else:
            self._times.append(seconds)
            self._times = self.run.steps

    def _settle(self) -> None:
        """Wait for what the run has others do."""

    def _options(
        self,
        every: int | None = None,
        callback: Callable[[LiveCheckpoint], object] | None = None,
    ) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=self._tokens + _SPARE,
            seed=1,
            ignore_eos=True,
            checkpoint_every_tokens=every,
            checkpoint_every_seconds=None,
            on_decode_checkpoint=callback,
        )


class _SideWithCheckpoints(_Side):
    """A run that goes on in a log of its own, as a worker does."""

    def __init__(
        self, engine: Engine, start: Checkpoint, tokens: int, job: Path, epoch: int, every: int
    ) -> None:
        super().__init__(engine, start, tokens)
        self._job, self._epoch, self._every = job, epoch, every
        self._errors: list[Exception] = []

    def begin(self) -> None:
        with self.run.clock():
            self._writer = CheckpointWriter(on_error=lambda _, error: self._errors.append(error))
            self._store = CheckpointStore(self._job, epoch=self._epoch)
            self._store.open(self._start.cache_tokens, self._start.seed, self._start.origin)
        super().begin()

    def end(self) -> None:
        super().end()
        with self.run.clock():
            self._writer.close()
            self._store.close()
        due = self._tokens // self._every
        saved = self._store.durable.generated
        if self._errors or saved < due * self._every or len(self.run.taking) < due:
            raise RuntimeError(f"checkpoints are missing after {saved} tokens: {self._errors}")

    def _settle(self) -> None:
        self._writer.flush()

    def _options(
        self,
        every: int | None = None,
        callback: Callable[[LiveCheckpoint], object] | None = None,
    ) -> GenerationOptions:
        return super()._options(every or self._every, callback or self._take)

    def _take(self, live: LiveCheckpoint) -> None:
        self._took = True
        self._writer.submit(self._store, live)
