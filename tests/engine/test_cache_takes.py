"""What is taken of caches: the positions asked for, bit for bit, and not a reference more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cache_journal import Journal
from cache_models import SMALL_CACHES, grown_cache, mlx_caches
from tenuto_engine._caches import (
    CacheState,
    bytes_per_position,
    layouts,
    rebuild,
    signature,
    snapshot,
    take,
)
from tenuto_engine._delta import Blob, Layout
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache
from tiny_models import SLIDING_WINDOW as W

# -- what a copy may not do ------------------------------------------------------------


def filled(live: Any, positions: int, heads: int = 8, width: int = 64) -> Any:
    """Update the cache, the last time by one position, and evaluate it."""
    for length in (positions - 1, 1):
        step(live, length, heads, width)
    return live


def step(live: Any, length: int = 1, heads: int = 8, width: int = 64) -> None:
    live.update_and_fetch(*(mx.ones((1, heads, length, width)) for _ in range(2)))
    mx.eval(live.keys, live.values)


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that MLX holds at most while the action runs, above those it held before."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    action()
    return mx.get_peak_memory() - before


LONG: dict[str, Callable[[], Any]] = {
    "KVCache": mlx_caches.KVCache,
    "QuantizedKVCache": mlx_caches.QuantizedKVCache,
    "RotatingKVCache": lambda: mlx_caches.RotatingKVCache(4000),
    "QuantizedRotatingKVCache": lambda: QuantizedRotatingKVCache(4000, group_size=64, bits=8),
}


def evaluated(caches: list[Any], start: int, stop: int) -> list[Blob]:
    blobs, state = take(caches, start, stop, state=True)
    mx.eval([each.data for each in blobs], [each.data for each in state])
    return list(blobs)


@pytest.mark.parametrize("copy", ["take", "snapshot"])
@pytest.mark.parametrize("kind", LONG)
def test_the_step_after_a_copy_does_not_copy_the_cache(kind: str, copy: str) -> None:
    live = filled(LONG[kind](), 4500)
    taken = evaluated([live], 4400, 4500) if copy == "take" else snapshot([live])
    assert peak_of(lambda: step(live)) < live.nbytes / 4
    assert taken


def test_the_measurement_above_sees_a_slice_that_is_held() -> None:
    live = filled(mlx_caches.KVCache(), 4500)
    held_on = live.keys[..., 4400:4500, :]
    mx.eval(held_on)
    assert peak_of(lambda: step(live)) > live.keys.nbytes / 2


def test_what_a_take_costs_does_not_follow_the_context() -> None:
    short, long = (filled(mlx_caches.KVCache(), n) for n in (1_000, 16_000))
    few = peak_of(lambda: evaluated([short], 744, 1_000))
    many = peak_of(lambda: evaluated([long], 15_744, 16_000))
    assert many <= few * 1.1


def address(array: Any) -> int:
    mx.eval(array)
    return int(np.array(array, copy=False).__array_interface__["data"][0])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("start", [0, 156])
def test_nothing_taken_shares_memory_with_a_live_buffer(count: int, start: int) -> None:
    # Keys and values of different widths, so that each is alone in its group.
    live = [mlx_caches.KVCache() for _ in range(count)]
    recurrent = mlx_caches.ArraysCache(1)
    recurrent.cache[0] = mx.ones((1, 5))
    for each in live:
        each.update_and_fetch(mx.ones((1, 1, 256, 4)), mx.ones((1, 1, 256, 8)))
    blobs, state = take([*live, recurrent], start, 256, state=True)
    buffers = [*(b for each in live for b in (each.keys, each.values)), recurrent.cache[0]]
    spans = [(address(b), address(b) + b.nbytes) for b in buffers]
    for data in [*(blob.data for blob in blobs), *(array.data for array in state)]:
        assert not any(begin <= address(data) < end for begin, end in spans)


# -- what is taken ---------------------------------------------------------------------

GROWN = [[5], [W], [W + 9], [W, 1], [3 * W, 1, 1], [5, *[1] * (2 * W)], [W, 1, 1, 9, 4]]


@pytest.mark.parametrize("lengths", GROWN, ids=str)
@pytest.mark.parametrize("kind", SMALL_CACHES)
def test_all_that_is_taken_makes_up_a_whole_snapshot(kind: str, lengths: list[int]) -> None:
    live = grown_cache(kind, lengths)
    journal = Journal()
    journal.take([live], live.offset, live.offset // 3, live.offset - 2)
    assert_equal(journal.states(), snapshot([live]))


@pytest.mark.parametrize("lengths", GROWN, ids=str)
@pytest.mark.parametrize("kind", SMALL_CACHES)
def test_a_saved_state_gives_what_the_live_cache_gives(kind: str, lengths: list[int]) -> None:
    live = grown_cache(kind, lengths)
    states = snapshot([live])
    assert layouts(states) == layouts([live])
    assert signature(states) == signature([live])
    assert bytes_per_position(states) == bytes_per_position([live])
    for start in (0, live.offset - 3):
        of_live, of_states = (take(c, start, live.offset - 1, state=True) for c in ([live], states))
        assert [b.members for b in of_live[0]] == [b.members for b in of_states[0]]
        for one, other in zip(of_live[0], of_states[0], strict=True):
            assert (one.dtype, one.host().tobytes()) == (other.dtype, other.host().tobytes())


def assert_equal(states: list[CacheState], others: list[CacheState]) -> None:
    for one, other in zip(states, others, strict=True):
        assert (one.kind, one.meta) == (other.kind, other.meta)
        for a, b in zip(one.arrays, other.arrays, strict=True):
            assert (a.name, a.dtype, a.data.shape) == (b.name, b.dtype, b.data.shape)
            assert a.data.tobytes() == b.data.tobytes()
        assert_equal(list(one.children), list(other.children))


def test_positions_that_a_ring_has_dropped_are_left_out() -> None:
    live = grown_cache("RotatingKVCache", [5, *[1] * 40])
    blobs, _ = take([live], 0, 45, state=False)
    members = {m for blob in blobs for m in blob.members if m.array == 0}
    lengths = {m.position: b.host().shape[3] for b in blobs for m in b.members if m.array == 0}
    assert len(members) == len(lengths)
    positions = sorted(p for first, n in lengths.items() for p in range(first, first + n))
    assert positions == [0, 1, 2, *range(45 - (W - 3), 45)]


def test_leaves_are_numbered_through_the_lists_depth_first() -> None:
    def one() -> Any:
        return filled(mlx_caches.KVCache(), 4, 1, 8)

    recurrent = mlx_caches.ArraysCache(2)
    recurrent.cache[1] = mx.array(3)
    nested = mlx_caches.CacheList(one(), mlx_caches.CacheList(recurrent, one()))
    blobs, state = take([nested, one()], 2, 4, state=True)
    assert [m[:2] for b in blobs for m in b.members] == [
        (leaf, array) for leaf in (0, 2, 3) for array in (0, 1)
    ]
    assert [(s.leaf, s.name, s.host().shape, s.host().item()) for s in state] == [
        (1, "state.1", (), 3)
    ]
    assert [leaf.kind for top in layouts([nested, one()]) for leaf in top.leaves()] == [
        "KVCache",
        "ArraysCache",
        "KVCache",
        "KVCache",
    ]


def test_state_arrays_are_only_taken_when_asked_for() -> None:
    recurrent = mlx_caches.ArraysCache(1)
    recurrent.cache[0] = mx.ones(3)
    assert take([recurrent], 0, 9, state=False) == ((), ())


def test_the_bytes_of_a_position_are_those_of_all_arrays() -> None:
    assert bytes_per_position([mlx_caches.KVCache()]) == 0
    plain = filled(mlx_caches.KVCache(), 300)
    packed = filled(mlx_caches.QuantizedKVCache(64, 8), 300)
    listed = mlx_caches.CacheList(plain, packed, mlx_caches.ArraysCache(1))
    per_array = 8 * 64 * 4
    packed_array = 8 * (64 + 2 * 4)
    assert bytes_per_position([listed]) == 2 * (per_array + packed_array)


def test_arrays_of_no_width_are_saved() -> None:
    live = mlx_caches.KVCache()
    live.update_and_fetch(mx.ones((1, 1, 6, 4)), mx.zeros((1, 1, 6, 0)))
    journal = Journal()
    journal.take([live], 6)
    assert_equal(journal.states(), snapshot([live]))
    [back] = rebuild(journal.states(), lambda: [mlx_caches.KVCache()])
    assert back.values.shape == live.values.shape


def test_a_layout_of_a_list_gives_its_leaves() -> None:
    inside = Layout("KVCache", {"offset": 0, "capacity": 0})
    assert list(Layout("CacheList", {}, (inside, inside)).leaves()) == [inside, inside]
