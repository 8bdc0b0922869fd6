"""``Journal``: a checkpoint store without files, the plainest that can be.

It keeps every position that was taken by itself, in a dictionary, and puts whole caches
together from those and the newest layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from tenuto_engine._cache_kinds import array_names, check_meta, held, stored_length
from tenuto_engine._caches import CacheState, HostArray, layouts, signature, take
from tenuto_engine._delta import Bits, Blob, Layout, StateArray


class Journal:
    """What was taken of one run's caches."""

    def __init__(self) -> None:
        self.positions: dict[tuple[int, int, int], tuple[str, Bits]] = {}
        self.state: tuple[StateArray, ...] = ()
        self.layouts: tuple[Layout, ...] = ()
        self.signature: tuple[object, ...] | None = None
        self.stop = 0

    def take(self, caches: list[Any], stop: int, *borders: int) -> None:
        """Take what is new up to `stop`; in parts that meet at those of `borders` that are new."""
        now = signature(caches)
        if now != self.signature:
            self.positions.clear()
            self.stop, self.signature = 0, now
        parts = [*sorted(b for b in borders if self.stop < b < stop), stop]
        for border in parts:
            blobs, state = take(caches, self.stop, border, state=border == stop)
            _evaluate(blobs, state)
            for blob in blobs:
                self._note(blob, self.stop, border)
            self.stop = border
        self.state, self.layouts = state, layouts(caches)

    def states(self) -> list[CacheState]:
        """Whole caches, as the newest take left them."""
        numbers = iter(range(sum(1 for layout in self.layouts for _ in layout.leaves())))
        return [self._whole(layout, numbers) for layout in self.layouts]

    def _note(self, blob: Blob, start: int, stop: int) -> None:
        rows = blob.host()
        assert rows.ndim == 5
        assert len(rows) == len(blob.members)
        for member, row in zip(blob.members, rows, strict=True):
            assert start <= member.position <= member.position + row.shape[2] <= stop
            for column in range(row.shape[2]):
                key = (member.leaf, member.array, member.position + column)
                assert key not in self.positions, "taken twice"
                self.positions[key] = blob.dtype, row[:, :, column].copy()

    def _whole(self, layout: Layout, numbers: Iterator[int]) -> CacheState:
        if layout.kind == "CacheList":
            children = tuple(self._whole(child, numbers) for child in layout.children)
            return CacheState(layout.kind, layout.meta, (), children)
        check_meta(layout.kind, layout.meta)
        leaf = next(numbers)
        own = [
            HostArray(each.name, each.dtype, each.host().copy())
            for each in self.state
            if each.leaf == leaf
        ]
        return CacheState(layout.kind, layout.meta, (*self._positional(leaf, layout), *own))

    def _positional(self, leaf: int, layout: Layout) -> Iterator[HostArray]:
        runs = held(layout.kind, layout.meta)
        for index, name in enumerate(array_names(layout.kind) if runs else ()):
            dtype, sample = self.positions[leaf, index, runs[0].position]
            batch, heads, width = sample.shape
            shape = (batch, heads, stored_length(layout.kind, layout.meta), width)
            data = np.zeros(shape, sample.dtype)
            for run in runs:
                for step in range(run.length):
                    _, row = self.positions[leaf, index, run.position + step]
                    data[:, :, run.slot + step] = row
            yield HostArray(name, dtype, data)


def _evaluate(blobs: tuple[Blob, ...], state: tuple[StateArray, ...]) -> None:
    data = [*(blob.data for blob in blobs), *(array.data for array in state)]
    mx.eval([each for each in data if isinstance(each, mx.array)])
