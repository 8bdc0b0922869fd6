"""The cache classes that can be saved exactly: one entry a class, in one fixed table.

All are mlx-lm's, but for ``QuantizedRotatingKVCache``.

An entry says which integers decide how the cache behaves, which arrays it has, which slot of
a buffer holds which position, and how the cache is put together again. Classes are matched
exactly: a subclass may keep more than its parent's entry knows of. To add a class, write an
entry and name it in ``_KINDS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, cast

import mlx.core as mx

from tenuto_engine._errors import CheckpointError
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache

Meta = Mapping[str, int]

SEQUENCE_AXIS: Final = 2
CACHE_LIST: Final = "CacheList"

# Buffers grow ahead of what they hold, by 256 positions in every class there is.
MOST_SPARE_SLOTS: Final = 2**16
# Shapes and positions are 32-bit integers in MLX.
LARGEST_INTEGER: Final = 2**31 - 1
MOST_ENTRIES: Final = 2**12

_cache_module = cast(Any, importlib.import_module("mlx_lm.models.cache"))


class Held(NamedTuple):
    """A run of consecutive buffer slots that hold consecutive positions.

    Attributes:
        slot: index of the first slot, along the sequence axis.
        position: absolute position that it holds.
        length: number of slots.
    """

    slot: int
    position: int
    length: int

    def within(self, start: int, stop: int) -> Held:
        """The part that holds positions ``start..stop``; its length is 0 if there is none."""
        first = max(start, self.position)
        last = min(stop, self.position + self.length)
        return Held(self.slot + first - self.position, first, max(0, last - first))


class CacheKind:
    """What one cache class is made of.

    Attributes:
        arrays: names of the positional arrays, rank 4 with the sequence along axis 2.
        settings: integers that are set when a cache is made and never change.
        counters: integers that change. Both are attributes of the cache and have the same
            names in a meta, without a leading underscore.
        derived: further integers of a meta, read off the arrays.
        replaces: the class that a model makes and that this one takes the place of, if any.
        strided: whether a prefill may leave buffers that are not laid out row by row.
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()
    counters: ClassVar[tuple[str, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()
    replaces: ClassVar[str | None] = None
    strided: ClassVar[bool] = False

    def meta(self, cache: Any) -> dict[str, int]:
        """The integers that decide how ``cache`` behaves."""
        attributes = (*self.settings, *self.counters)
        return {name.lstrip("_"): int(getattr(cache, name)) for name in attributes}

    def names(self) -> frozenset[str]:
        """Of all integers of a meta."""
        attributes = (*self.settings, *self.counters, *self.derived)
        return frozenset(name.lstrip("_") for name in attributes)

    def buffers(self, cache: Any) -> tuple[mx.array, ...]:
        """The live positional arrays, in the order of ``arrays``; () while the cache is empty."""
        return ()

    def state(self, cache: Any) -> dict[str, mx.array]:
        """The live arrays that change whole."""
        return {}

    def held(self, meta: Meta) -> tuple[Held, ...]:
        """All that the buffers hold and that may be read again, in the order of positions."""
        return ()

    def stored_length(self, meta: Meta) -> int:
        """Positions (slots, for a ring) of the positional arrays of a whole saved state."""
        return 0

    def window(self, cache: Any) -> int | None:
        """The most positions that ``cache`` keeps; None if it keeps them all."""
        return None

    def check(self, meta: Meta) -> None:
        """Raise ``Contradiction`` unless a cache can be in this state; the integers are >= 0."""

    def make(self, meta: Meta) -> Any:
        """A new, empty cache. Only for a kind that replaces another."""
        raise NotImplementedError

    def rebind(self, cache: Any, buffers: Sequence[mx.array]) -> None:
        """Let ``buffers`` (all, or none) be the positional arrays of ``cache``."""

    def restore(
        self, cache: Any, meta: Meta, buffers: Sequence[mx.array], state: dict[str, mx.array]
    ) -> None:
        """Put an empty ``cache`` into the state saved; meta and lengths are checked already.

        Args:
            buffers: the positional arrays, of ``stored_length``; () for an empty cache.
            state: the state arrays by name. A ``Contradiction`` is raised for one unknown.
        """
        require(not state, f"unknown arrays {sorted(state)}")
        for name in self.counters:
            setattr(cache, name, meta[name.lstrip("_")])


class Contradiction(Exception):
    """What was saved of a cache does not fit together."""


def require(holds: bool, otherwise: str) -> None:
    """Raise ``Contradiction`` unless it holds."""
    if not holds:
        raise Contradiction(otherwise)


class _Growing(CacheKind):
    """``KVCache``: slot = position; the buffer grows ahead of the offset."""

    arrays: ClassVar[tuple[str, ...]] = ("keys", "values")
    counters: ClassVar[tuple[str, ...]] = ("offset",)
    derived = ("capacity",)

    def meta(self, cache: Any) -> dict[str, int]:
        buffers = self.buffers(cache)
        capacity = buffers[0].shape[SEQUENCE_AXIS] if buffers else 0
        return super().meta(cache) | {"capacity": capacity}

    def buffers(self, cache: Any) -> tuple[mx.array, ...]:
        return () if cache.keys is None else (cache.keys, cache.values)

    def held(self, meta: Meta) -> tuple[Held, ...]:
        return _runs(Held(0, 0, meta["offset"]))

    def stored_length(self, meta: Meta) -> int:
        return sum(run.length for run in self.held(meta))

    def check(self, meta: Meta) -> None:
        length = sum(run.length for run in self.held(meta))
        require(length <= meta["capacity"], "it holds more positions than its buffer has")
        require(meta["capacity"] - length <= MOST_SPARE_SLOTS, "its buffer is far too long")

    def restore(
        self, cache: Any, meta: Meta, buffers: Sequence[mx.array], state: dict[str, mx.array]
    ) -> None:
        super().restore(cache, meta, buffers, state)
        self.rebind(cache, [_with_capacity(b, meta["capacity"]) for b in buffers])

    def rebind(self, cache: Any, buffers: Sequence[mx.array]) -> None:
        if buffers:
            cache.keys, cache.values = buffers


class _Concatenated(_Growing):
    """``ConcatenateKVCache``: the buffer is as long as what it holds.

    A trim changes its offset only, and what was trimmed comes back with the next update; such
    a cache is in no state that can be saved.
    """

    strided = True

    def check(self, meta: Meta) -> None:
        require(meta["offset"] == meta["capacity"], "it was trimmed, which its class cannot do")


class _Quantized(_Growing):
    """``QuantizedKVCache``: as ``KVCache``, each array as packed values, scales and biases."""

    settings: ClassVar[tuple[str, ...]] = ("group_size", "bits")
    arrays: ClassVar[tuple[str, ...]] = tuple(
        f"{name}.{part}" for name in ("keys", "values") for part in range(3)
    )
    replaces = "KVCache"

    def buffers(self, cache: Any) -> tuple[mx.array, ...]:
        return () if cache.keys is None else (*cache.keys, *cache.values)

    def check(self, meta: Meta) -> None:
        super().check(meta)
        require(meta["bits"] in (2, 3, 4, 5, 6, 8), "no number has that many bits")
        require(meta["group_size"] in (16, 32, 64, 128), "no group has that size")

    def make(self, meta: Meta) -> Any:
        return _cache_module.QuantizedKVCache(group_size=meta["group_size"], bits=meta["bits"])

    def restore(
        self, cache: Any, meta: Meta, buffers: Sequence[mx.array], state: dict[str, mx.array]
    ) -> None:
        for packed, scales, biases in (buffers[:3], buffers[3:]) if buffers else ():
            width = scales.shape[3] * meta["group_size"]
            require(packed.shape[3] * 32 == width * meta["bits"], "scales and values do not match")
            require(scales.shape == biases.shape, "scales and biases do not match")
        super().restore(cache, meta, buffers, state)

    def rebind(self, cache: Any, buffers: Sequence[mx.array]) -> None:
        if buffers:
            cache.keys, cache.values = tuple(buffers[:3]), tuple(buffers[3:])


class _Chunked(_Growing):
    """``ChunkedKVCache``: slot 0 holds ``start_position``; the front is cut off."""

    settings = ("chunk_size",)
    counters = ("offset", "start_position")
    strided = True

    def held(self, meta: Meta) -> tuple[Held, ...]:
        return _runs(Held(0, meta["start_position"], meta["offset"] - meta["start_position"]))

    def window(self, cache: Any) -> int | None:
        return int(cache.chunk_size)

    def check(self, meta: Meta) -> None:
        require(meta["start_position"] <= meta["offset"], "it starts behind its end")
        super().check(meta)


class _Ring(_Growing):
    """``RotatingKVCache``: the first ``keep`` positions, and a window that is written in a circle.

    ``idx`` is the slot after the newest position. Until something was dropped it is the
    offset, and slot = position. Afterwards the slots from ``idx`` on hold the oldest of the
    window. After a prefill of several tokens the buffer is in order, and may be longer than
    ``max_size`` until the next step.
    """

    settings: ClassVar[tuple[str, ...]] = ("keep", "max_size")
    counters = ("offset", "_idx")
    strided = True

    def held(self, meta: Meta) -> tuple[Held, ...]:
        offset, idx, capacity = meta["offset"], meta["idx"], meta["capacity"]
        if idx == offset:
            return _runs(Held(0, 0, offset))
        keep = meta["keep"]
        newest = Held(keep, offset - (idx - keep), idx - keep)
        oldest = Held(idx, newest.position - (capacity - idx), capacity - idx)
        return _runs(Held(0, 0, keep), oldest, newest)

    def stored_length(self, meta: Meta) -> int:
        return meta["capacity"]

    def window(self, cache: Any) -> int | None:
        return int(cache.max_size)

    def check(self, meta: Meta) -> None:
        offset, idx, capacity = meta["offset"], meta["idx"], meta["capacity"]
        keep, max_size = meta["keep"], meta["max_size"]
        require(keep < max_size, "it keeps more than it can hold")
        require(idx <= min(offset, capacity), "the index lies outside the ring")
        if idx < offset:
            require(keep <= idx, "the index lies among the positions that are kept")
            require(capacity <= offset, "the ring dropped positions before it was full")
            require(capacity in (idx, max_size), "the ring turns before it is full")
        super().check(meta)


class _QuantizedRing(_Quantized, _Ring):
    """``QuantizedRotatingKVCache``: the slots of a ring, the arrays of a quantized cache."""

    settings = (*_Ring.settings, *_Quantized.settings)
    replaces = "RotatingKVCache"

    def make(self, meta: Meta) -> Any:
        names = ("max_size", "keep", "group_size", "bits")
        return QuantizedRotatingKVCache(**{name: meta[name] for name in names})


class _Recurrent(CacheKind):
    """``ArraysCache``: a list of arrays, some maybe not there yet, that change whole."""

    settings = ("entries",)

    def meta(self, cache: Any) -> dict[str, int]:
        return {"entries": len(cache.cache)}

    def state(self, cache: Any) -> dict[str, mx.array]:
        arrays = {f"state.{i}": entry for i, entry in enumerate(cache.cache)}
        arrays |= {"left_padding": cache.left_padding, "lengths": cache.lengths}
        return {name: array for name, array in arrays.items() if array is not None}

    def check(self, meta: Meta) -> None:
        require(meta["entries"] <= MOST_ENTRIES, "it has too many entries")

    def restore(
        self, cache: Any, meta: Meta, buffers: Sequence[mx.array], state: dict[str, mx.array]
    ) -> None:
        cache.left_padding = state.pop("left_padding", None)
        cache.lengths = state.pop("lengths", None)
        cache.cache = [state.pop(f"state.{i}", None) for i in range(meta["entries"])]
        super().restore(cache, meta, buffers, state)


_KINDS: Final[Mapping[str, CacheKind]] = {
    "KVCache": _Growing(),
    "ConcatenateKVCache": _Concatenated(),
    "QuantizedKVCache": _Quantized(),
    "ChunkedKVCache": _Chunked(),
    "RotatingKVCache": _Ring(),
    "QuantizedRotatingKVCache": _QuantizedRing(),
    "ArraysCache": _Recurrent(),
    CACHE_LIST: CacheKind(),
}
_NAME_OF_TYPE: Final[Mapping[type, str]] = {
    cast(type, getattr(_cache_module, name)): name
    for name in _KINDS
    if name != QuantizedRotatingKVCache.__name__
} | {QuantizedRotatingKVCache: QuantizedRotatingKVCache.__name__}


def known_kinds() -> tuple[str, ...]:
    """Names of the classes in the table."""
    return tuple(sorted(_KINDS))


def kind_of(cache: Any) -> str | None:
    """The name in the table of the class of ``cache``; None if it is not there."""
    return _NAME_OF_TYPE.get(type(cache))


def entry(kind: str) -> CacheKind:
    """The table's entry.

    Raises:
        CheckpointError: there is none of that name.
    """
    found = _KINDS.get(kind)
    if found is None:
        raise CheckpointError(
            f"no cache class {kind!r} is known", hint="it was written by another version"
        )
    return found


def array_names(kind: str) -> tuple[str, ...]:
    """The positional arrays of a kind, by index; () if it has none."""
    return entry(kind).arrays


def held(kind: str, meta: Meta) -> tuple[Held, ...]:
    """All positions that the buffers hold and that may be read again, in order, none twice.

    What is held after a step was held before it or is new, so that saving new positions once
    is enough. ``meta`` must have passed ``check_meta``.
    """
    return entry(kind).held(meta)


def stored_length(kind: str, meta: Meta) -> int:
    """Length of the sequence axis of the positional arrays of a whole ``CacheState``.

    At most ``MOST_SPARE_SLOTS`` above what ``held`` covers.
    """
    return entry(kind).stored_length(meta)


def check_meta(kind: str, meta: Meta) -> None:
    """Check that a cache of this kind can be in the state that ``meta`` describes.

    Raises:
        CheckpointError: the kind is unknown, an integer is missing, unknown or out of range,
            or they contradict each other.
    """
    known = entry(kind)
    wrong = _first_wrong(meta, known.names())
    if wrong is not None:
        raise CheckpointError(f"{kind}: {wrong}")
    try:
        known.check(meta)
    except Contradiction as error:
        raise CheckpointError(f"{kind}: {error}") from error


def _first_wrong(meta: Meta, wanted: frozenset[str]) -> str | None:
    # Messages are made only when they are needed: this runs for each layer at each checkpoint.
    if meta.keys() != wanted:
        return f"its integers are {sorted(meta)}, not {sorted(wanted)}"
    for name, value in meta.items():
        if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
            return f"{name}={value!r} is no integer that it can have"
    return None


def _runs(*runs: Held) -> tuple[Held, ...]:
    return tuple(run for run in runs if run.length)


def _with_capacity(array: mx.array, capacity: int) -> mx.array:
    batch, heads, length, width = array.shape
    if length == capacity:
        return array
    spare = mx.zeros((batch, heads, capacity - length, width), array.dtype)
    return mx.concatenate([array, spare], axis=SEQUENCE_AXIS)
