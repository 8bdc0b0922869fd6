"""Reading mlx-lm's cache objects, whole or the new positions only, and building equal ones again.

What a class is made of stands in the table of ``_cache_kinds``; nothing here knows one
class from another, except that a ``CacheList`` has others inside.

The rule of all reading is that the live arrays are neither changed, nor looked into by the host,
nor referenced once the copies are evaluated: a reference that is left makes the next step copy
the whole cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np

from tenuto_engine._cache_kinds import (
    CACHE_LIST,
    SEQUENCE_AXIS,
    Contradiction,
    check_meta,
    entry,
    kind_of,
    known_kinds,
    require,
)
from tenuto_engine._cache_tree import (
    HOST_DTYPES,
    CacheState,
    Data,
    HostArray,
    Leaf,
    TypedArray,
    children,
    describe,
    described_leaves,
    kind_name,
    layout_of,
    leaf_caches,
    leaf_of,
    leaf_signature,
    leaves,
    parts,
    signature_of,
)
from tenuto_engine._delta import Bits, Blob, Layout, Member, StateArray
from tenuto_engine._errors import CheckpointError, ResumeMismatch, UnsupportedCache

__all__ = [
    "HOST_DTYPES",
    "Bits",
    "CacheState",
    "HostArray",
    "bytes_per_position",
    "check_supported",
    "layouts",
    "rebuild",
    "settle_after_prefill",
    "signature",
    "snapshot",
    "take",
]


def check_supported(caches: Sequence[Any]) -> None:
    """Raise ``UnsupportedCache``, naming the class, if a cache cannot be saved exactly."""
    for layer, cache in enumerate(caches):
        for part in parts(cache):
            if kind_of(part) is None:
                raise UnsupportedCache(
                    f"layer {layer} keeps its state in a {type(part).__name__}, "
                    "which cannot be checkpointed exactly",
                    hint=f"models whose caches are {', '.join(known_kinds())} can be run",
                )


def layouts(caches: Sequence[Any]) -> tuple[Layout, ...]:
    """What ``caches`` (live ones, or ``CacheState``) are without their data: one a layer.

    Raises:
        CheckpointError: a cache is in a state that could not be restored.
    """
    return tuple(layout_of(cache) for cache in caches)


def signature(caches: Sequence[Any]) -> tuple[object, ...]:
    """What stays the same while ``caches`` grow: the classes, the tree they form, their settings.

    Their layouts may be given instead.

    Once it differs, positions saved before say nothing about the caches of now.
    """
    known = (each if isinstance(each, Layout) else layout_of(each) for each in caches)
    return tuple(signature_of(layout) for layout in known)


def bytes_per_position(caches: Sequence[Any]) -> int:
    """Bytes that one position takes in all positional arrays together; 0 while they are empty."""
    buffers = [array.data for leaf in leaves(caches) for array in leaf.buffers]
    return sum(data.itemsize * _elements_per_position(data) for data in buffers)


def take(
    caches: Sequence[Any],
    start: int,
    stop: int,
    *,
    state: bool,
    described: Sequence[Layout] | None = None,
) -> tuple[tuple[Blob, ...], tuple[StateArray, ...]]:
    """Copy positions ``start..stop``, as far as they are still held, and maybe the state arrays.

    Of live caches the copies are lazy: evaluate their ``data`` on the decode thread, best
    together with what else the step evaluates. Of ``CacheState`` they are made at once. Costs
    follow the positions taken, not those held.

    Args:
        caches: live caches, or ``CacheState``, one a layer.
        start, stop: absolute positions; ``stop`` may lie below the offset.
        state: whether the state arrays are taken too.
        described: their layouts, if they are known already.
    """
    read = list(leaves(caches) if described is None else described_leaves(caches, described))
    groups: dict[tuple[str, object, object], list[tuple[Member, Data]]] = defaultdict(list)
    for number, leaf in enumerate(read):
        # Leaves that forget alike stay together, so that a reader can pass over what a ring
        # holds no more.
        alike = leaf_signature(leaf)
        for member, part in _slices(number, leaf, start, stop):
            dtype = leaf.buffers[member.array].dtype
            groups[dtype, tuple(part.shape), alike].append((member, part))
    blobs = tuple(
        Blob(dtype, tuple(member for member, _ in parts), _stack_bits([part for _, part in parts]))
        for (dtype, *_), parts in groups.items()
    )
    return blobs, _take_state(read) if state else ()


def snapshot(caches: Sequence[Any]) -> list[CacheState]:
    """Copy ``caches`` whole to private host memory; called on the decode thread, between two steps.

    Raises:
        UnsupportedCache: a class that cannot be saved.
        CheckpointError: a cache is in a state that could not be restored.
    """
    described = layouts(caches)
    read = [leaf.trimmed() for leaf in leaves(caches)]
    copies = _copies([array for leaf in read for array in leaf.arrays().values()])
    mx.eval([copy for copy in copies if isinstance(copy, mx.array)])
    # Copied once more, since evaluated arrays may share the memory of a whole group.
    host = iter([np.array(copy, copy=True, order="C") for copy in copies])
    states = iter(
        tuple(HostArray(name, array.dtype, next(host)) for name, array in leaf.arrays().items())
        for leaf in read
    )
    return [_state(layout, states) for layout in described]


def rebuild(states: Sequence[CacheState], make: Callable[[], list[Any]]) -> list[Any]:
    """Build caches that behave, bit for bit, as the ones that ``states`` were read from.

    Args:
        states: one a layer.
        make: gives the model's fresh, empty caches. One whose class can change in
            mid-generation (``to_quantized``) is replaced if that had happened.

    Raises:
        ResumeMismatch: the model has other caches than those saved.
        CheckpointError: a state contradicts itself.
    """
    caches = make()
    if len(states) != len(caches) or not all(map(_fits, states, caches)):
        raise ResumeMismatch(
            f"the checkpoint has caches {describe(states)}, the model {describe(caches)}",
            hint="it was written by another model",
        )
    check_supported(caches)
    return [
        _build(f"layer {layer}", state, cache)
        for layer, (state, cache) in enumerate(zip(states, caches, strict=True))
    ]


def settle_after_prefill(caches: Sequence[Any]) -> None:
    """Lay buffers out row by row in memory, as ``rebuild`` does, and evaluate all arrays.

    A prefill may leave a buffer that holds the projections as they came, transposed.
    """
    for leaf in leaf_caches(caches):
        kind = entry(kind_name(leaf))
        if kind.strided:
            kind.rebind(leaf, [mx.contiguous(buffer) for buffer in kind.buffers(leaf)])
    mx.eval([array.data for leaf in leaves(caches) for array in leaf.arrays().values()])


# -- copies ----------------------------------------------------------------------------


def _slices(number: int, leaf: Leaf, start: int, stop: int) -> Iterator[tuple[Member, Data]]:
    for run in entry(leaf.kind).held(leaf.meta):
        part = run.within(start, stop)
        if part.length and leaf.buffers:
            slots = slice(part.slot, part.slot + part.length)
            for index, array in enumerate(leaf.buffers):
                yield Member(number, index, part.position), array.data[..., slots, :]


def _take_state(read: Sequence[Leaf]) -> tuple[StateArray, ...]:
    named = [
        (number, name, array)
        for number, leaf in enumerate(read)
        for name, array in leaf.state.items()
    ]
    copies = _copies([array for *_, array in named])
    return tuple(
        StateArray(number, name, array.dtype, copy)
        for (number, name, array), copy in zip(named, copies, strict=True)
    )


def _state(layout: Layout, arrays: Iterator[tuple[HostArray, ...]]) -> CacheState:
    own = next(arrays) if layout.kind != CACHE_LIST else ()
    inside = tuple(_state(child, arrays) for child in layout.children)
    return CacheState(layout.kind, layout.meta, own, inside)


def _copies(arrays: Sequence[TypedArray]) -> list[Data]:
    """Copy each array, with one operation for all of a shape and dtype."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for place, (dtype, data) in enumerate(arrays):
        groups[dtype, tuple(data.shape)].append(place)
    copies: dict[int, Data] = {}
    for places in groups.values():
        stacked = _stack_bits([arrays[place].data for place in places])
        copies |= {place: stacked[row] for row, place in enumerate(places)}
    return [copies[place] for place in range(len(arrays))]


def _stack_bits(arrays: Sequence[Data]) -> Data:
    if isinstance(arrays[0], np.ndarray):
        return np.stack(cast("Sequence[Bits]", arrays))
    live = cast("list[mx.array]", list(arrays))
    # A stack of one would be a view of the live buffer, so one is stacked with itself.
    several = live if len(live) > 1 else live * 2
    if live[0].ndim:
        # What mx.stack does, without an operation for each of them.
        stacked = mx.concatenate(several, axis=0).reshape(len(several), *live[0].shape)
    else:
        stacked = mx.stack(several)
    stacked = stacked[: len(live)]
    return stacked.view(mx.uint16) if stacked.dtype == mx.bfloat16 else stacked


def _elements_per_position(data: Data) -> int:
    batch, heads, _, width = data.shape
    return int(batch * heads * width)


# -- building --------------------------------------------------------------------------


def _fits(state: CacheState, cache: Any) -> bool:
    inside = children(cache)
    return (
        type(cache).__name__ in (state.kind, entry(state.kind).replaces)
        and len(state.children) == len(inside)
        and all(map(_fits, state.children, inside))
    )


def _build(where: str, state: CacheState, cache: Any) -> Any:
    check_meta(state.kind, state.meta)
    if state.kind == CACHE_LIST:
        if state.arrays:
            raise CheckpointError(f"{where}: a list of caches has arrays of its own")
        pairs = zip(state.children, cache.caches, strict=True)
        cache.caches = tuple(_build(where, child, live) for child, live in pairs)
        return cache
    kind = entry(state.kind)
    if type(cache).__name__ == kind.replaces:
        cache = kind.make(state.meta)
    _check_settings(where, state, cache)
    try:
        buffers, others = _to_device(state)
        kind.restore(cache, state.meta, buffers, others)
    except Contradiction as error:
        raise CheckpointError(f"{where} ({state.kind}): {error}") from error
    # Layer by layer, so that never more than one is held twice. And evaluated, since
    # attention kernels may be chosen by whether their operands are, and a live cache's are.
    mx.eval([array.data for array in leaf_of(cache).arrays().values()])
    return cache


def _check_settings(where: str, state: CacheState, cache: Any) -> None:
    kind = entry(state.kind)
    live = kind.meta(cache)
    for name in kind.settings:
        if state.meta[name] != live[name]:
            raise ResumeMismatch(
                f"{where}: the {state.kind} of the checkpoint has {name}={state.meta[name]}, "
                f"the model's {live[name]}"
            )


def _to_device(state: CacheState) -> tuple[list[mx.array], dict[str, mx.array]]:
    """The positional arrays in the order of their kind, and the others by name."""
    arrays = {array.name: array for array in state.arrays}
    require(len(arrays) == len(state.arrays), "two arrays have one name")
    names = entry(state.kind).arrays
    wanted = names if state.meta.get("capacity") else ()
    missing = [name for name in wanted if name not in arrays]
    require(not missing, f"{', '.join(missing)} is missing")
    positional = [arrays.pop(name) for name in wanted]
    _check_shapes(state, positional)
    return [_device_array(a) for a in positional], {n: _device_array(a) for n, a in arrays.items()}


def _check_shapes(state: CacheState, positional: Sequence[HostArray]) -> None:
    shapes = [array.data.shape for array in positional]
    length = entry(state.kind).stored_length(state.meta)
    for array, shape in zip(positional, shapes, strict=True):
        require(len(shape) == 4, f"{array.name} has not four dimensions")
        require(shape[SEQUENCE_AXIS] == length, f"{array.name} has not {length} positions")
    for one, other in pairwise(shapes):
        require(one[:SEQUENCE_AXIS] == other[:SEQUENCE_AXIS], "the arrays differ in their heads")


def _device_array(array: HostArray) -> mx.array:
    require(
        HOST_DTYPES.get(array.dtype) == array.data.dtype.name, f"{array.name} has a wrong dtype"
    )
    if array.dtype == "bfloat16":
        return mx.array(array.data).view(mx.bfloat16)
    dtype = cast(mx.Dtype, getattr(mx, "bool_" if array.dtype == "bool" else array.dtype))
    return mx.array(array.data, dtype=dtype)
