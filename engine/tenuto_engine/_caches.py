"""Reading mlx-lm's cache objects into private host memory, and building equal ones again.

One reader and one builder a class, in the fixed table at the end. A class that is
not in the table is refused by name; nothing is looked up dynamically.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tenuto_engine._errors import CheckpointError, ResumeMismatch, UnsupportedCache

Bits = npt.NDArray[Any]

SEQUENCE_AXIS: Final = 2

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
        arrays: its arrays, in the order in which its reader names them.
    """

    kind: str
    meta: Mapping[str, int]
    arrays: tuple[HostArray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.data.nbytes for array in self.arrays)


def check_supported(caches: Sequence[Any]) -> None:
    """Raise ``UnsupportedCache``, naming the class, if a cache cannot be saved exactly."""
    for layer, cache in enumerate(caches):
        if type(cache) not in _KIND_OF_TYPE:
            raise UnsupportedCache(
                f"layer {layer} keeps its state in a {type(cache).__name__}, "
                "which cannot be checkpointed exactly",
                hint=f"models whose caches are {', '.join(sorted(_KINDS))} can be run",
            )


def snapshot(caches: Sequence[Any]) -> list[CacheState]:
    """Copy ``caches`` to private host memory; called on the decode thread, between two steps.

    The live arrays are neither changed nor referenced afterwards: a held reference
    would make the next step copy the whole cache.
    """
    check_supported(caches)
    reads = [_KINDS[_KIND_OF_TYPE[type(cache)]].read(cache) for cache in caches]
    copies = iter(_to_host([array for read in reads for array in read.arrays.values()]))
    return [
        CacheState(
            _KIND_OF_TYPE[type(cache)],
            read.meta,
            tuple(
                HostArray(name, _dtype_name(array), next(copies))
                for name, array in read.arrays.items()
            ),
        )
        for cache, read in zip(caches, reads, strict=True)
    ]


def rebuild(states: Sequence[CacheState], make: Callable[[], list[Any]]) -> list[Any]:
    """Build caches that behave, bit for bit, as the ones that ``states`` were read from.

    Args:
        states: one a layer.
        make: gives the model's fresh, empty caches.

    Raises:
        ResumeMismatch: the model has other caches than those saved.
        CheckpointError: a state contradicts itself.
    """
    caches = make()
    saved = [state.kind for state in states]
    wanted = [type(cache).__name__ for cache in caches]
    if saved != wanted:
        raise ResumeMismatch(
            f"the checkpoint has caches {_summary(saved)}, the model {_summary(wanted)}",
            hint="it was written by another model",
        )
    check_supported(caches)
    for layer, (state, cache) in enumerate(zip(states, caches, strict=True)):
        _build_one(layer, state, cache)
    # Attention kernels may be chosen by whether their operands are evaluated, and a
    # live cache's are.
    mx.eval([array for cache in caches for array in _live_arrays(cache)])
    return caches


def settle_after_prefill(caches: Sequence[Any]) -> None:
    """Lay ring buffers out row by row in memory, as ``rebuild`` does.

    A prefill leaves a ring holding the projections as they came, which may be transposed.
    """
    for cache in caches:
        if type(cache).__name__ == "RotatingKVCache" and cache.keys is not None:
            cache.keys = mx.contiguous(cache.keys)
            cache.values = mx.contiguous(cache.values)
    mx.eval([array for cache in caches for array in _live_arrays(cache)])


# -- one reader and one builder a class ------------------------------------------------


class _Read(NamedTuple):
    meta: dict[str, int]
    arrays: dict[str, mx.array]


class _Kind(NamedTuple):
    read: Callable[[Any], _Read]
    build: Callable[[CacheState, Any, dict[str, mx.array]], None]


def _read_kv(cache: Any) -> _Read:
    if cache.keys is None:
        return _Read({"offset": cache.offset, "capacity": 0}, {})
    meta = {"offset": cache.offset, "capacity": cache.keys.shape[SEQUENCE_AXIS]}
    used = slice(0, cache.offset)
    return _Read(meta, {"keys": cache.keys[..., used, :], "values": cache.values[..., used, :]})


def _build_kv(state: CacheState, cache: Any, arrays: dict[str, mx.array]) -> None:
    offset, capacity = state.meta["offset"], state.meta["capacity"]
    cache.offset = offset
    if not capacity:
        _require(offset == 0 and not arrays, "an empty cache has positions")
        return
    for array in _keys_and_values(arrays):
        _require(array.shape[SEQUENCE_AXIS] == offset <= capacity, "offset is not the length")
    cache.keys, cache.values = (
        _with_capacity(array, capacity) for array in _keys_and_values(arrays)
    )


def _read_ring(cache: Any) -> _Read:
    meta = {
        "offset": cache.offset,
        "index": cache._idx,
        "keep": cache.keep,
        "max_size": cache.max_size,
    }
    if cache.keys is None:
        return _Read(meta, {})
    return _Read(meta, {"keys": cache.keys, "values": cache.values})


def _build_ring(state: CacheState, cache: Any, arrays: dict[str, mx.array]) -> None:
    meta = state.meta
    for name, live in (("keep", cache.keep), ("max_size", cache.max_size)):
        if meta[name] != live:
            raise ResumeMismatch(
                f"the checkpoint's sliding window has {name}={meta[name]}, the model's {live}"
            )
    cache.offset, cache._idx = meta["offset"], meta["index"]
    if not arrays:
        _require(cache.offset == 0, "an empty ring has positions")
        return
    keys, values = _keys_and_values(arrays)
    length = keys.shape[SEQUENCE_AXIS]
    _require(length == values.shape[SEQUENCE_AXIS], "keys and values differ in length")
    _require(0 <= cache._idx <= length, "the index lies outside the ring")
    cache.keys, cache.values = keys, values


def _read_arrays(cache: Any) -> _Read:
    arrays = {f"state.{i}": entry for i, entry in enumerate(cache.cache) if entry is not None}
    for name in ("left_padding", "lengths"):
        if getattr(cache, name) is not None:
            arrays[name] = getattr(cache, name)
    return _Read({"entries": len(cache.cache)}, arrays)


def _build_arrays(state: CacheState, cache: Any, arrays: dict[str, mx.array]) -> None:
    entries = state.meta["entries"]
    if entries != len(cache.cache):
        raise ResumeMismatch(
            f"the checkpoint has {entries} recurrent states a layer, the model {len(cache.cache)}"
        )
    cache.left_padding = arrays.pop("left_padding", None)
    cache.lengths = arrays.pop("lengths", None)
    cache.cache = [arrays.pop(f"state.{i}", None) for i in range(entries)]
    _require(not arrays, f"unknown arrays {sorted(arrays)}")


_cache_module = cast(Any, importlib.import_module("mlx_lm.models.cache"))

_KINDS: Final[Mapping[str, _Kind]] = {
    "KVCache": _Kind(_read_kv, _build_kv),
    "RotatingKVCache": _Kind(_read_ring, _build_ring),
    "ArraysCache": _Kind(_read_arrays, _build_arrays),
}
# By exact class: a subclass may keep more state than its parent's reader sees.
_KIND_OF_TYPE: Final[Mapping[type, str]] = {getattr(_cache_module, k): k for k in _KINDS}


# -- helpers ---------------------------------------------------------------------------


def _build_one(layer: int, state: CacheState, cache: Any) -> None:
    arrays = {array.name: _to_device(array) for array in state.arrays}
    try:
        _require(len(arrays) == len(state.arrays), "two arrays have one name")
        _KINDS[state.kind].build(state, cache, arrays)
    except KeyError as missing:
        raise CheckpointError(f"layer {layer} ({state.kind}): {missing} is missing") from missing
    except _Contradiction as error:
        raise CheckpointError(f"layer {layer} ({state.kind}): {error}") from error


class _Contradiction(Exception):
    pass


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Contradiction(otherwise)


def _keys_and_values(arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
    keys, values = arrays["keys"], arrays["values"]
    _require(keys.ndim == values.ndim == 4 and len(arrays) == 2, "not keys and values of rank 4")
    return keys, values


def _with_capacity(array: mx.array, capacity: int) -> mx.array:
    batch, heads, length, width = array.shape
    if length == capacity:
        return array
    spare = mx.zeros((batch, heads, capacity - length, width), array.dtype)
    return mx.concatenate([array, spare], axis=SEQUENCE_AXIS)


def _live_arrays(cache: Any) -> list[mx.array]:
    if type(cache).__name__ == "ArraysCache":
        held = [*cache.cache, cache.left_padding, cache.lengths]
    else:
        held = [cache.keys, cache.values]
    return [array for array in held if array is not None]


def _to_host(arrays: Sequence[mx.array]) -> list[Bits]:
    """Copy ``arrays`` into private device buffers with one evaluation, and from there to the host.

    The host never looks into a live buffer: CUDA would move it to managed memory.
    """
    groups: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for position, array in enumerate(arrays):
        groups[tuple(array.shape), _dtype_name(array)].append(position)
    blobs = [_stack_bits([arrays[p] for p in members]) for members in groups.values()]
    mx.eval(blobs)
    copies: dict[int, Bits] = {}
    for ((shape, dtype), members), blob in zip(groups.items(), blobs, strict=True):
        rows = np.array(blob, copy=True, order="C")
        assert rows.shape[1:] == shape
        assert rows.dtype == HOST_DTYPES[dtype]
        for row, position in enumerate(members):
            copies[position] = rows[row]
    return [copies[position] for position in range(len(arrays))]


def _stack_bits(arrays: list[mx.array]) -> mx.array:
    # A stack of one would be a view of the live buffer, so one is stacked with itself.
    stacked = mx.stack(arrays) if len(arrays) > 1 else mx.stack(arrays * 2)[:1]
    return stacked.view(mx.uint16) if stacked.dtype == mx.bfloat16 else stacked


def _to_device(array: HostArray) -> mx.array:
    dtype = cast(mx.Dtype, getattr(mx, "bool_" if array.dtype == "bool" else array.dtype))
    if array.dtype == "bfloat16":
        return mx.array(array.data).view(mx.bfloat16)
    return mx.array(array.data, dtype=dtype)


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _summary(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none"
