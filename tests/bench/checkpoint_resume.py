"""How long a resume takes by reading a checkpoint, and how long by reading the prompt again.

A job is written as it would be in a run: by a `CheckpointStore`, a record every so many tokens,
each synced. Then, with nothing of it in the page cache (where the system lets it be dropped), the
newest checkpoint is found, loaded, and made a row of the engine. For comparison the same files are
read from end to end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from bench.checkpoint_model import SyntheticKV
from tenuto_engine import (
    CheckpointStore,
    Engine,
    GenerationOptions,
    SequenceState,
    Token,
    resume_options,
)
from tenuto_engine._live import LiveCheckpoint, Moment
from tenuto_engine._sequence import Drawn

_READ_AT_ONCE: Final = 8 * 2**20
# Where a prefill that would take too long is sampled, as shares of it.
_SAMPLED: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_CHUNKS_A_SAMPLE: Final = 2


@dataclass(slots=True)
class Resumes:
    """Of a job's checkpoints; seconds, one a repetition.

    Attributes:
        context, every: tokens that the newest covers, and between one and the next.
        records, nbytes: of the log.
        is_cold: whether the files were dropped from the page cache before each reading.
        finds: listing the folder and scanning all headers.
        loads: reading and checking the newest.
        rebuilds: from it to a row of the engine: the caches, and the text of all tokens again.
        disk: reading the same bytes from end to end.
    """

    context: int
    every: int
    records: int
    nbytes: int
    is_cold: bool
    finds: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    rebuilds: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Reading the prompt again.

    Attributes:
        context: tokens of the prompt.
        seconds: how long it takes.
        measured: tokens that were read to find out; the time of the others lies on straight lines
            between those.
    """

    context: int
    seconds: float
    measured: int


def measure_resume(
    folder: Path, engine: Engine, kv: SyntheticKV, prompt: Sequence[int], every: int, repeats: int
) -> Resumes:
    """Write a job whose caches cover `prompt`, read it, and delete it again."""
    store = CheckpointStore(folder)
    _write(store, kv, tuple(prompt), every)
    files = sorted(folder.iterdir())
    found = Resumes(
        context=len(prompt),
        every=every,
        records=len(store.candidates()),
        nbytes=sum(path.stat().st_size for path in files),
        is_cold=_drop(files),
    )
    for _ in range(repeats):
        _drop(files)
        found.disk.append(_read(files))
        _drop(files)
        _resume(store, engine, found)
    store.delete()
    return found


def _write(store: CheckpointStore, kv: SyntheticKV, ids: tuple[int, ...], every: int) -> None:
    row = _Row(kv, ids, prompt_tokens=every)
    for position in (*range(every, len(ids), every), len(ids)):
        store.save(row.at(position))
    store.close()


class _Row:
    """A row that generated the given ids after a short prompt."""

    def __init__(self, kv: SyntheticKV, ids: tuple[int, ...], prompt_tokens: int) -> None:
        self._kv = kv
        self._prompt = ids[:prompt_tokens]
        self._tokens = [Token(t, i, " token", -0.5) for i, t in enumerate(ids[prompt_tokens:], 1)]

    def at(self, position: int) -> LiveCheckpoint:
        return LiveCheckpoint(
            Moment(
                lineage=self,
                origin=None,
                prompt=self._prompt,
                prompt_tokens=len(self._prompt),
                tokens=self._tokens,
                position=position,
                pending=_Pending(),
                caches=self._kv.caches(position),
                seed=1,
            )
        )


class _Pending:
    def read(self) -> Drawn:
        return Drawn(7, -0.5, ())


def _resume(store: CheckpointStore, engine: Engine, found: Resumes) -> None:
    times = [time.perf_counter()]
    newest = store.candidates()[0]
    times.append(time.perf_counter())
    checkpoint = newest.load()
    times.append(time.perf_counter())
    options = GenerationOptions(max_tokens=checkpoint.generated_tokens + 1, ignore_eos=True)
    sequence = engine.add(*resume_options(checkpoint, options))
    times.append(time.perf_counter())
    engine.close(sequence)
    for into, began, ended in zip(
        (found.finds, found.loads, found.rebuilds), times, times[1:], strict=False
    ):
        into.append(ended - began)


def _drop(files: Sequence[Path]) -> bool:
    """Have the system forget the bytes of synced files; False where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return True


def _read(files: Sequence[Path]) -> float:
    buffer = bytearray(_READ_AT_ONCE)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


# -- reading the prompt again ----------------------------------------------------------


def measure_prefill(
    engine: Engine, kv: SyntheticKV, prompt: Sequence[int], chunk: int, most_seconds: float
) -> Prefill:
    """Read `prompt` from its beginning; only samples of it, if all would take too long."""
    at = [int(share * (len(prompt) - 1 - _CHUNKS_A_SAMPLE * chunk)) for share in _SAMPLED]
    borders = sorted({max(0, position // chunk * chunk) for position in at})
    sampled = [(border, _sample(engine, kv, prompt, border, chunk)) for border in borders]
    seconds = integrate(sampled, len(prompt))
    if seconds > most_seconds:
        return Prefill(len(prompt), seconds, len(borders) * _CHUNKS_A_SAMPLE * chunk)
    began = time.perf_counter()
    for _ in _prefill(engine, kv, prompt, 0):
        pass
    return Prefill(len(prompt), time.perf_counter() - began, len(prompt))


def integrate(rates: Sequence[tuple[int, float]], end: int) -> float:
    """The area from 0 to `end` under a line through (position, seconds a token), level outside."""
    known = [(0, rates[0][1]), *rates, (end, rates[-1][1])]
    return sum(
        (later - earlier) * (before + after) / 2
        for (earlier, before), (later, after) in pairwise(known)
    )


def _sample(
    engine: Engine, kv: SyntheticKV, prompt: Sequence[int], border: int, chunk: int
) -> float:
    """Seconds a token of some chunks from `border` on, the caches before it being there."""
    steps = _prefill(engine, kv, prompt, border)
    next(steps)
    began = time.perf_counter()
    for _ in range(_CHUNKS_A_SAMPLE):
        next(steps)
    seconds = time.perf_counter() - began
    steps.close()
    return seconds / (_CHUNKS_A_SAMPLE * chunk)


def _prefill(
    engine: Engine, kv: SyntheticKV, prompt: Sequence[int], border: int
) -> Generator[None, None, None]:
    """Yields once before the first chunk, and after each."""
    warm = kv.caches(border) if border else None
    options = GenerationOptions(max_tokens=1, cache=warm, cached_tokens=border if warm else None)
    sequence = engine.add(prompt, options)
    try:
        yield
        while sequence.state in (SequenceState.WAITING, SequenceState.PREFILL):
            engine.step()
            yield
    finally:
        engine.close(sequence)
