"""Logs without a model, whose every element is told by its place, and what must come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tenuto_engine._cache_kinds import array_names, held, stored_length
from tenuto_engine._cache_tree import CacheState, HostArray
from tenuto_engine._chain import StoredCommit, commits
from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._delta import Bits, Blob, Commit, Delta, Layout, Member, StateArray
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._fs import FileSystem
from tenuto_engine._headers import Begin, Continued, StateRef, span_blobs, span_header, type_of
from tenuto_engine._log import Attempt, LogFile
from tenuto_engine._log_writer import LogWriter, Mark, write_state
from tenuto_engine._token import Token

JOB: Final = "j1"
PROMPT: Final = (10, 11, 12)
META: Final = {"spec": {"deep": [1, None, b"\x00"]}, "wörd": 1.5}


class Run(NamedTuple):
    """What decides every bit of a checkpoint.

    Attributes:
        stop: tokens whose KV the caches hold.
        salts: one a position; runs of different salts there have different KV and tokens.
        model: what caches there are: "plain" (one), "rings" (nothing but positions), or "all".
    """

    stop: int
    salts: tuple[int, ...]
    model: str = "all"

    @property
    def generated(self) -> int:
        return max(0, self.stop - len(PROMPT))

    def layouts(self) -> tuple[Layout, ...]:
        plain = Layout("KVCache", {"offset": self.stop, "capacity": 256})
        if self.model == "plain":
            return (plain,)
        if self.model == "rings":
            return plain, ring(self.stop, keep=2), ring(self.stop, keep=0), plain
        inside = Layout("CacheList", {}, (plain, Layout("ArraysCache", {"entries": 1})))
        return (
            plain,
            ring(self.stop, keep=2),
            Layout("ArraysCache", {"entries": 3}),
            Layout("CacheList", {}, (inside, ring(self.stop, keep=0))),
            plain,
        )

    def tokens(self, first: int = 1) -> tuple[Token, ...]:
        """The generated tokens from the one with index `first` on."""
        return tuple(self._token(index) for index in range(first, self.generated + 1))

    def _token(self, index: int) -> Token:
        token = 100 + index + 1000 * self.salts[len(PROMPT) + index - 1]
        top = ((token, -index / 7), (1, -9.5))
        return Token(token, index, f"wörd{index} ", -index / 7, top, jumped=index % 4 == 3)

    def slice(self, leaf: int, array: int, start: int, stop: int) -> Bits:
        """Positions of a positional array, ``[1, 2, stop - start, 3]``."""
        positions = np.arange(start, stop, dtype=np.uint64)
        salts = np.array(self.salts[start:stop], np.uint64)
        place = np.uint64(2 * leaf + array) + 99 * positions + 99_999 * salts
        within = np.arange(6, dtype=np.uint64).reshape(2, 1, 3) << np.uint64(48)
        mixed = (place.reshape(1, -1, 1) + within) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(40)).astype(np.uint16)[np.newaxis]

    def state(self, leaf: int) -> list[StateArray]:
        """The state arrays of an ``ArraysCache``, of odd shapes."""
        drawn = np.random.default_rng((leaf, self.stop, self.salts[self.stop - 1]))
        return [
            StateArray(leaf, "state.0", "float32", drawn.random((1, 5), np.float32)),
            StateArray(leaf, "lengths", "int64", np.array(self.stop)),
        ]

    def blobs(self, start: int, stop: int) -> tuple[Blob, ...]:
        """Positions ``start..stop`` as far as they are held, stacked where they can be."""
        groups: dict[tuple[str, int], list[tuple[Member, Bits]]] = {}
        for leaf, layout in enumerate(leaves(self.layouts())):
            for first, last in _runs(layout, start, stop):
                for array in range(len(array_names(layout.kind))):
                    data = self.slice(leaf, array, first, last)
                    key = (dtype_of(leaf), last - first)
                    groups.setdefault(key, []).append((Member(leaf, array, first), data))
        return tuple(
            Blob(dtype, tuple(member for member, _ in each), np.stack([data for _, data in each]))
            for (dtype, _), each in groups.items()
        )

    def delta(self, start: int, first: int, generation: int = 0) -> Delta:
        """From position `start` and token `first` on."""
        state = [
            array
            for leaf, layout in enumerate(leaves(self.layouts()))
            if layout.kind == "ArraysCache"
            for array in self.state(leaf)
        ]
        pending = None if self.stop < len(PROMPT) else 777 + self.stop
        commit = Commit(
            tokens=self.tokens(first),
            first=first,
            pending_token=pending,
            pending_logprob=None if pending is None else -0.125,
            pending_top_logprobs=() if pending is None else ((777, -0.125), (3, -2.5)),
            divergences=self.stop % 3,
            first_divergence=2 if self.stop % 3 else None,
            layouts=self.layouts(),
            state=tuple(state),
        )
        return Delta(generation, start, self.stop, self.blobs(start, self.stop), commit)

    def caches(self) -> list[CacheState]:
        """The whole caches."""
        numbers = iter(range(99))
        return [self._cache(layout, numbers) for layout in self.layouts()]

    def _cache(self, layout: Layout, numbers: Iterator[int]) -> CacheState:
        if layout.children:
            children = tuple(self._cache(child, numbers) for child in layout.children)
            return CacheState(layout.kind, layout.meta, (), children)
        leaf = next(numbers)
        arrays = [HostArray(a.name, a.dtype, a.host()) for a in self.state(leaf)]
        if layout.kind != "ArraysCache":
            arrays = [
                HostArray(name, dtype_of(leaf), self._buffer(leaf, array, layout))
                for array, name in enumerate(array_names(layout.kind))
            ]
        return CacheState(layout.kind, layout.meta, tuple(arrays))

    def _buffer(self, leaf: int, array: int, layout: Layout) -> Bits:
        length = stored_length(layout.kind, layout.meta)
        buffer = np.zeros((1, 2, length, 3), np.uint16)
        for slot, position, count in held(layout.kind, layout.meta):
            data = self.slice(leaf, array, position, position + count)
            buffer[:, :, slot : slot + count] = data
        return buffer

    def image(self) -> tuple[object, ...]:
        """What ``image`` must give for the checkpoint that comes back."""
        commit = self.delta(0, 1).commit
        assert commit is not None
        tokens = tuple(token.token for token in self.tokens())
        return (
            (PROMPT + tokens)[: self.stop],
            len(PROMPT),
            self.tokens(),
            commit.pending_token,
            commit.pending_logprob,
            commit.pending_top_logprobs,
            2**64 - 1,
            [_cache_image(cache) for cache in self.caches()],
            commit.divergences,
            commit.first_divergence,
            META,
        )


def image(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Everything in a checkpoint but its origin, as something that compares by value."""
    return (
        checkpoint.cache_tokens,
        checkpoint.original_prompt_tokens,
        checkpoint.generated,
        checkpoint.pending_token,
        checkpoint.pending_logprob,
        checkpoint.pending_top_logprobs,
        checkpoint.seed,
        [_cache_image(cache) for cache in checkpoint.caches],
        checkpoint.divergences,
        checkpoint.first_divergence,
        dict(checkpoint.meta),
    )


def _cache_image(cache: CacheState) -> tuple[object, ...]:
    arrays = [
        (a.name, a.dtype, a.data.dtype.str, a.data.shape, a.data.tobytes()) for a in cache.arrays
    ]
    assert all(array.data.flags.c_contiguous for array in cache.arrays)
    return (cache.kind, dict(cache.meta), arrays, [_cache_image(each) for each in cache.children])


def dtype_of(leaf: int) -> str:
    """Neighbours differ, so that not all can be stacked."""
    return "bfloat16" if leaf == 1 else "uint16"


def ring(offset: int, *, keep: int, max_size: int = 6) -> Layout:
    """A ``RotatingKVCache`` after so many positions, one at a time."""
    turns = max_size - keep
    idx = offset if offset <= max_size else keep + (offset - max_size - 1) % turns + 1
    meta = {"offset": offset, "idx": idx, "keep": keep, "max_size": max_size, "capacity": max_size}
    return Layout("RotatingKVCache", meta)


def leaves(layouts: Sequence[Layout]) -> list[Layout]:
    """Of all layers, in order."""
    return [leaf for layout in layouts for leaf in layout.leaves()]


def _runs(layout: Layout, start: int, stop: int) -> list[tuple[int, int]]:
    """The held positions among ``start..stop``, in as few runs as can be."""
    runs: list[tuple[int, int]] = []
    for each in held(layout.kind, layout.meta):
        _, first, length = each.within(start, stop)
        if length and runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], first + length)
        elif length:
            runs.append((first, first + length))
    return runs


class SampleLog:
    """Writes the log of one attempt, as the store does.

    Args:
        folder: named ``JOB``.
        continues: the commit that it goes on from, and what that was.
    """

    def __init__(
        self,
        folder: Path,
        attempt: Attempt | None = None,
        *,
        continues: tuple[Continued, Run] | None = None,
        fs: FileSystem | None = None,
        **changes: Any,
    ) -> None:
        self.fs = fs or FileSystem()
        self.fs.make_folder(folder)
        self.attempt = attempt = attempt or Attempt(1, "a")
        self.path = folder / attempt.log
        self.runs: list[Run] = []
        self.position, self.first, self.generation = 0, 1, 0
        base = None
        if continues is not None:
            base, run = continues
            self.position, self.first = run.stop, run.generated + 1
            self.generation = base.generation
        self.begin = begin_of(attempt, base, **changes)
        self.writer = LogWriter.create(self.fs, self.path, self.begin)
        self._state_file = 0

    def commit(self, run: Run, *, cuts: Sequence[int] = ()) -> Mark:
        """Append what is new in `run`, in parts that end at `cuts`; not synced."""
        for cut in cuts:
            part = Delta(self.generation, self.position, cut, run.blobs(self.position, cut), None)
            self.append(part)
            self.position = cut
        delta = run.delta(self.position, self.first, self.generation)
        mark = self.append(delta)
        self.runs.append(run)
        self.position, self.first = run.stop, run.generated + 1
        return mark

    def append(self, delta: Delta) -> Mark:
        """Write the state arrays, if there are any, and the record."""
        state = None
        if delta.commit is not None and delta.commit.state:
            path = self.path.with_name(self.attempt.state(self._state_file))
            after = self.writer.mark
            digest = write_state(
                self.fs, path, delta.commit.state, seq=self.writer.next_seq, prev=after.digest
            )
            state = StateRef(self._state_file, digest)
            self._state_file ^= 1
        at = 5.5 if delta.commit else 0.0
        return self.writer.append(type_of(delta), span_header(delta, at, state), span_blobs(delta))

    def new_generation(self) -> None:
        """All positions are written again."""
        self.generation += 1
        self.position = 0

    def continued(self) -> tuple[Continued, Run]:
        """For a log that goes on from the last commit."""
        mark = self.writer.mark
        base = Continued(self.path.name, mark.end, mark.digest, self.generation, self.position)
        return base, self.runs[-1]


def begin_of(attempt: Attempt, continues: Continued | None = None, **changes: Any) -> Begin:
    """What a sample log begins with."""
    values: dict[str, Any] = {
        "job": JOB,
        "epoch": attempt.epoch,
        "nonce": attempt.nonce,
        "prompt": PROMPT,
        "prompt_tokens": len(PROMPT),
        "seed": 2**64 - 1,
        "meta": META,
        "created_at": 1.0,
        "continues": continues,
    }
    return Begin(**(values | changes))


def run_of(stop: int, model: str = "all", *, salt: int = 0) -> Run:
    """A run of one salt."""
    return Run(stop, (salt,) * stop, model)


def find_in(folder: Path, name: str) -> LogFile | None:
    """As a store finds the log of that name."""
    try:
        return LogFile.scan(folder / name)
    except CheckpointCorrupt:
        return None


def stored(path: Path) -> list[StoredCommit]:
    """The commits of the log at `path`, oldest first."""
    return commits(LogFile.scan(path), lambda name: find_in(path.parent, name))
