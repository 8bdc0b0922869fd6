"""``Delta``: what a checkpoint adds to the one before it. No I/O, and no whole state.

A *leaf* is a cache object that has no others inside; leaves are numbered from 0 through
all layers, depth first. Its *positional* arrays (``keys``, ``values``, ...) have rank 4
and the sequence along axis 2, and are saved by absolute position, once. Its *state*
arrays change whole and are saved whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tenuto_engine._token import Token

Bits = npt.NDArray[Any]

BLOB_SEQUENCE_AXIS: Final = 3


class Member(NamedTuple):
    """One slice within a blob.

    Attributes:
        leaf: the leaf's number.
        array: which of the positional arrays of its kind.
        position: absolute position of the slice's first element.
    """

    leaf: int
    array: int
    position: int


@dataclass(frozen=True, slots=True)
class Blob:
    """Equal-shaped slices of positional arrays, stacked.

    Attributes:
        dtype: the mlx name of their dtype, a key of ``HOST_DTYPES``.
        members: whose they are, along axis 0.
        data: ``[members, batch, heads, positions, width]``, shared with nobody; a bfloat16 as
            the uint16 of its bits. Of a live cache it is an mlx array, which must be evaluated
            on the thread that made it before another reads it.
    """

    dtype: str
    members: tuple[Member, ...]
    data: mx.array | Bits

    def host(self) -> Bits:
        """The elements, C-contiguous."""
        return host(self.data)


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array that is saved whole.

    Attributes:
        leaf: the leaf's number.
        name: what it is within the leaf, as ``state.0``.
        dtype: the mlx name of its dtype.
        data: its elements, as in ``Blob``.
    """

    leaf: int
    name: str
    dtype: str
    data: mx.array | Bits

    def host(self) -> Bits:
        """The elements, C-contiguous."""
        return host(self.data)


@dataclass(frozen=True, slots=True)
class Layout:
    """A cache object without its data.

    Attributes:
        kind: the class name, a key of the fixed table.
        meta: the integers that decide how it behaves.
        children: the caches inside, of a ``CacheList``.
    """

    kind: str
    meta: Mapping[str, int] = field(default_factory=dict)
    children: tuple[Layout, ...] = ()

    def leaves(self) -> Iterator[Layout]:
        """Itself, or the leaves inside, depth first."""
        if self.kind != "CacheList":
            yield self
        for child in self.children:
            yield from child.leaves()


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a delta a checkpoint that can be resumed from.

    Attributes:
        tokens: the generated tokens since the commit before it, in order.
        first: index of the first of them (of the next one, if there are none).
        pending_token: the sampled token whose KV is not in the caches; None in a prefill.
        pending_logprob: its logprob, or None.
        pending_top_logprobs: the likeliest ids at its place with their logprobs.
        divergences: published tokens so far that differ from the computed ones.
        first_divergence: index of the first of those, or None.
        layouts: one a layer.
        state: the state arrays of all leaves.
    """

    tokens: tuple[Token, ...]
    first: int
    pending_token: int | None
    pending_logprob: float | None
    pending_top_logprobs: tuple[tuple[int, float], ...]
    divergences: int
    first_divergence: int | None
    layouts: tuple[Layout, ...]
    state: tuple[StateArray, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Positions ``start..stop`` of all leaves, as far as they are still held.

    Attributes:
        generation: deltas of one generation add up; a new one starts from position 0.
        start, stop: absolute positions.
        blobs: their arrays.
        commit: None if this is only a part of what is new.
    """

    generation: int
    start: int
    stop: int
    blobs: tuple[Blob, ...]
    commit: Commit | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        state = () if self.commit is None else self.commit.state
        blobs = sum(blob.data.nbytes for blob in self.blobs)
        return blobs + sum(array.data.nbytes for array in state)


def host(data: mx.array | Bits) -> Bits:
    """`data` on the host, C-contiguous. An evaluated mlx array may be given on any thread."""
    array = np.array(data, copy=False) if isinstance(data, mx.array) else data
    return np.require(array, requirements="C")
