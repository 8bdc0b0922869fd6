"""``CacheState``: one cache as host data; and walking a tree of caches, live or saved.

A *leaf* is a cache that has no others inside. Everything here takes live mlx-lm caches and
``CacheState`` alike, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx

from tenuto_engine._cache_kinds import CACHE_LIST, check_meta, entry, kind_of
from tenuto_engine._delta import Bits, Layout
from tenuto_engine._errors import UnsupportedCache

# How an element of each mlx dtype travels in numpy. Only bfloat16 has no numpy
# twin; its bits travel as uint16.
HOST_DTYPES: Final[Mapping[str, str]] = {
    "bool": "bool",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "uint16",
    "complex64": "complex64",
}


@dataclass(frozen=True, slots=True)
class HostArray:
    """One array of a cache, in memory that nothing else holds.

    Attributes:
        name: what the array is within its cache, as ``keys`` or ``state.0``.
        dtype: the mlx name of its dtype, a key of ``HOST_DTYPES``.
        data: its elements, C-contiguous; a bfloat16 as the uint16 of its bits.
    """

    name: str
    dtype: str
    data: Bits


@dataclass(frozen=True, slots=True)
class CacheState:
    """One mlx-lm cache object as host data.

    Attributes:
        kind: the class name, a key of the fixed table.
        meta: the integers that decide how the cache behaves.
        arrays: its arrays: the positional ones, ``[batch, heads, positions, width]`` without the
            spare slots of the live buffer (a ring's as it is), in the order of their kind, then
            the state arrays.
        children: the caches inside, of a ``CacheList``.
    """

    kind: str
    meta: Mapping[str, int]
    arrays: tuple[HostArray, ...]
    children: tuple[CacheState, ...] = ()

    @property
    def nbytes(self) -> int:
        own = sum(array.data.nbytes for array in self.arrays)
        return own + sum(child.nbytes for child in self.children)


def children(cache: Any) -> Sequence[Any]:
    """The caches inside; none unless it is a ``CacheList``."""
    if isinstance(cache, CacheState):
        return cache.children
    return cast("Sequence[Any]", cache.caches) if kind_of(cache) == CACHE_LIST else ()


def parts(cache: Any) -> Iterator[Any]:
    """Itself and all caches inside, depth first."""
    yield cache
    for child in children(cache):
        yield from parts(child)


def leaf_caches(caches: Sequence[Any]) -> Iterator[Any]:
    """The leaves, in the order in which they are numbered."""
    for cache in caches:
        for part in parts(cache):
            if kind_name(part) != CACHE_LIST:
                yield part


def kind_name(cache: Any) -> str:
    """Its key in the fixed table; an ``UnsupportedCache`` is raised if it has none."""
    if isinstance(cache, CacheState):
        return cache.kind
    kind = kind_of(cache)
    if kind is None:
        raise UnsupportedCache(f"a {type(cache).__name__} cannot be checkpointed exactly")
    return kind


def layout_of(cache: Any) -> Layout:
    """The cache without its data.

    Raises:
        CheckpointError: it is in a state that could not be restored.
    """
    kind = kind_name(cache)
    meta = cache.meta if isinstance(cache, CacheState) else entry(kind).meta(cache)
    check_meta(kind, meta)
    return Layout(kind, meta, tuple(layout_of(child) for child in children(cache)))


def signature_of(layout: Layout) -> tuple[object, ...]:
    """What stays the same while the cache grows: class, settings, and those of what is inside."""
    settings = tuple(layout.meta[name] for name in entry(layout.kind).settings)
    return (layout.kind, settings, tuple(signature_of(child) for child in layout.children))


Data = mx.array | Bits


class TypedArray(NamedTuple):
    """An array with the mlx name of its dtype, which a numpy array of bits does not tell."""

    dtype: str
    data: Data


class Leaf(NamedTuple):
    """A cache without others inside, live or saved."""

    kind: str
    meta: Mapping[str, int]
    buffers: tuple[TypedArray, ...]
    state: Mapping[str, TypedArray]

    def arrays(self) -> dict[str, TypedArray]:
        """All of them by name, the positional ones first."""
        names = entry(self.kind).arrays if self.buffers else ()
        return dict(zip(names, self.buffers, strict=True)) | dict(self.state)

    def trimmed(self) -> Leaf:
        """Without the spare slots of the buffers."""
        used = slice(0, entry(self.kind).stored_length(self.meta))
        return self._replace(
            buffers=tuple(TypedArray(dtype, data[..., used, :]) for dtype, data in self.buffers)
        )


def leaves(caches: Sequence[Any]) -> Iterator[Leaf]:
    """What there is to read of each leaf."""
    for cache in leaf_caches(caches):
        yield leaf_of(cache)


def described_leaves(caches: Sequence[Any], described: Sequence[Layout]) -> Iterator[Leaf]:
    """The same of caches whose layouts are known."""
    metas = (leaf.meta for layout in described for leaf in layout.leaves())
    for cache, meta in zip(leaf_caches(caches), metas, strict=True):
        yield leaf_of(cache, meta)


def leaf_of(cache: Any, meta: Mapping[str, int] | None = None) -> Leaf:
    """What there is to read of a cache that has no others inside."""
    return _saved_leaf(cache) if isinstance(cache, CacheState) else _live_leaf(cache, meta)


def _live_leaf(cache: Any, meta: Mapping[str, int] | None) -> Leaf:
    kind = kind_name(cache)
    read = entry(kind)
    buffers = tuple(TypedArray(dtype_name(array), array) for array in read.buffers(cache))
    state = {name: TypedArray(dtype_name(a), a) for name, a in read.state(cache).items()}
    return Leaf(kind, read.meta(cache) if meta is None else meta, buffers, state)


def _saved_leaf(saved: CacheState) -> Leaf:
    state = {array.name: TypedArray(array.dtype, array.data) for array in saved.arrays}
    buffers = tuple(state.pop(name) for name in entry(saved.kind).arrays if name in state)
    return Leaf(saved.kind, saved.meta, buffers, state)


def leaf_signature(leaf: Leaf) -> tuple[object, ...]:
    """Class and settings."""
    return (leaf.kind, *(leaf.meta[name] for name in entry(leaf.kind).settings))


def describe(caches: Sequence[Any]) -> str:
    """Their classes, for a message: as ``3 KVCache, 1 CacheList(ArraysCache, KVCache)``."""
    kinds = [_class(cache) for cache in caches]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _class(cache: Any) -> str:
    name = cache.kind if isinstance(cache, CacheState) else type(cache).__name__
    inside = ", ".join(map(_class, children(cache)))
    return f"{name}({inside})" if inside else name


def dtype_name(array: mx.array) -> str:
    """The mlx name of its dtype, a key of ``HOST_DTYPES``."""
    known = _DTYPE_NAMES.get(array.dtype)
    return str(array.dtype).removeprefix("mlx.core.") if known is None else known


_DTYPE_NAMES: Final[Mapping[mx.Dtype, str]] = {
    cast(mx.Dtype, getattr(mx, "bool_" if name == "bool" else name)): name for name in HOST_DTYPES
}
