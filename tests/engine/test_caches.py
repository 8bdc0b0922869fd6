"""Saved and rebuilt caches go on as if nothing had happened, to the bit.

The chains of takes and crashes, for every class and model, are in test_cache_chains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from cache_models import CacheModel, cache_model, fresh_caches, grown_cache, mlx_caches
from tenuto_engine._cache_kinds import check_meta, held, stored_length
from tenuto_engine._caches import (
    CacheState,
    HostArray,
    check_supported,
    layouts,
    rebuild,
    settle_after_prefill,
    snapshot,
    take,
)
from tenuto_engine._errors import CheckpointError, ResumeMismatch, UnsupportedCache
from tiny_models import SLIDING_WINDOW

VOCABULARY = 97
STEPS_AFTER = 55
W = SLIDING_WINDOW


class Run:
    """One greedy generation of a tiny model, its logits kept as bits."""

    def __init__(self, model: Any, caches: list[Any], token: int) -> None:
        self.model = model
        self.caches = caches
        self.token = token

    @classmethod
    def start(cls, model: Any, borders: list[int]) -> Run:
        """Prefill the prompt in the chunks between ``borders``; its last token is next."""
        prompt = [(13 * i) % VOCABULARY for i in range(borders[-1] + 1)]
        caches = fresh_caches(model)
        for begin, end in pairwise([0, *borders]):
            model(mx.array([prompt[begin:end]]), cache=caches)
            settle_after_prefill(caches)
        return cls(model, caches, prompt[-1])

    def steps(self, count: int) -> list[bytes]:
        return [self._step() for _ in range(count)]

    def _step(self) -> bytes:
        logits = self.model(mx.array([[self.token]]), cache=self.caches)[0, -1]
        bits = np.array(logits.astype(mx.float32)).tobytes()
        self.token = cast(int, mx.argmax(logits).item())
        return bits


KV = [([256], 0), ([1], 0), ([100], 154), ([100], 155), ([100], 156), ([128, 256, 300], 30)]
RING = [
    *(([5], steps) for steps in (0, W - 6, W - 5, W - 4, 2 * W)),
    *(([n], steps) for n in (W, W + 1, 3 * W + 5) for steps in (0, 1, W)),
    ([32, 64, 70], 1),
]
STATES = [([1], 0), ([32, 40], 9)]
CASES: list[tuple[CacheModel, tuple[list[int], int]]] = [
    *(("llama", case) for case in KV),
    *(("gemma3_text", case) for case in RING),
    *(("lfm2", case) for case in STATES),
    *(("mamba2", case) for case in STATES),
]


@cache
def uninterrupted(kind: CacheModel, borders: tuple[int, ...]) -> list[bytes]:
    longest = max(before for _, (b, before) in CASES if tuple(b) == borders)
    return Run.start(cache_model(kind), list(borders)).steps(longest + STEPS_AFTER)


@pytest.mark.parametrize(("kind", "case"), CASES, ids=lambda value: str(value))
def test_a_rebuilt_cache_gives_the_logits_of_an_uninterrupted_run_to_the_bit(
    kind: CacheModel, case: tuple[list[int], int]
) -> None:
    borders, before = case
    model = cache_model(kind)
    reference = uninterrupted(kind, tuple(borders))

    run = Run.start(model, borders)
    run.steps(before)
    states = snapshot(run.caches)
    resumed = Run(model, rebuild(states, lambda: fresh_caches(model)), run.token)

    assert layouts(resumed.caches) == layouts(run.caches)
    assert resumed.steps(STEPS_AFTER) == reference[before : before + STEPS_AFTER]
    # And the run that was read from is none the worse for it.
    assert run.steps(5) == reference[before : before + 5]


def test_a_snapshot_at_a_border_of_a_prefill_is_resumed_to_the_bit() -> None:
    model = cache_model("gemma3_text")
    prompt = [(5 * i) % VOCABULARY for i in range(96)]

    def prefill(caches: list[Any], begin: int, end: int) -> None:
        model(mx.array([prompt[begin:end]]), cache=caches)
        settle_after_prefill(caches)

    straight, stopped = fresh_caches(model), fresh_caches(model)
    for begin, end in ((0, 32), (32, 64), (64, 96)):
        prefill(straight, begin, end)
    prefill(stopped, 0, 32)
    prefill(stopped, 32, 64)
    resumed = rebuild(snapshot(stopped), lambda: fresh_caches(model))
    prefill(resumed, 64, 96)
    assert Run(model, resumed, 1).steps(30) == Run(model, straight, 1).steps(30)


@pytest.mark.parametrize("wrong", ["offset", "idx"])
def test_one_wrong_integer_is_noticed_by_these_tests(wrong: str) -> None:
    model = cache_model("gemma3_text")
    run = Run.start(model, [30])
    run.steps(40)
    states = [
        CacheState(s.kind, {**s.meta, wrong: s.meta[wrong] - 1}, s.arrays)
        if s.kind == "RotatingKVCache"
        else s
        for s in snapshot(run.caches)
    ]
    resumed = Run(model, rebuild(states, lambda: fresh_caches(model)), run.token)
    assert resumed.steps(5) != run.steps(5)


def test_a_snapshot_does_not_change_when_decoding_goes_on() -> None:
    model = cache_model("gemma3_text", "bfloat16")
    run = Run.start(model, [30])
    states = snapshot(run.caches)
    kept = [array.data.tobytes() for state in states for array in state.arrays]
    run.steps(60)
    assert [array.data.tobytes() for state in states for array in state.arrays] == kept


def test_strided_buffers_are_saved_by_their_values_and_settled_in_place() -> None:
    ring = mlx_caches.RotatingKVCache(max_size=8)
    drawn = mx.random.normal((1, 8, 2, 4), key=mx.random.key(1))
    ring.update_and_fetch(drawn.transpose(0, 2, 1, 3), drawn.transpose(0, 2, 1, 3))
    mx.eval(ring.keys, ring.values)
    assert not np.array(ring.keys, copy=False).flags.c_contiguous

    [state] = snapshot([ring])
    settle_after_prefill([ring])

    settled = np.array(ring.keys, copy=False)
    assert settled.flags.c_contiguous
    assert state.arrays[0].data.flags.c_contiguous
    assert np.array_equal(state.arrays[0].data, settled)


@pytest.mark.parametrize(
    "dtype", ["bool_", "uint8", "int32", "uint32", "int64", "float16", "bfloat16", "complex64"]
)
def test_each_dtype_returns_as_it_was(dtype: str) -> None:
    live = mlx_caches.ArraysCache(2)
    live.cache[1] = mx.array([[1, 0], [0, 3]]).astype(getattr(mx, dtype))
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.ArraysCache(2)])
    assert back.cache[0] is None
    assert back.cache[1].dtype == live.cache[1].dtype
    assert mx.array_equal(back.cache[1], live.cache[1])


def test_the_bits_of_nan_and_minus_zero_are_kept() -> None:
    bits = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001], np.uint16)
    live = mlx_caches.ArraysCache(1)
    live.cache[0] = mx.array(bits).view(mx.bfloat16)
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.ArraysCache(1)])
    assert np.array_equal(np.array(back.cache[0].view(mx.uint16)), bits)


def test_padding_and_lengths_of_a_recurrent_cache_are_kept() -> None:
    live = mlx_caches.ArraysCache(1, left_padding=[3])
    live.prepare(lengths=[9])
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.ArraysCache(1)])
    assert (back.left_padding.tolist(), back.lengths.tolist()) == ([3], [9])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2", "llama4", "falcon_h1"])
def test_empty_caches_are_saved_and_rebuilt_empty(kind: CacheModel) -> None:
    model = cache_model(kind)
    back = rebuild(snapshot(fresh_caches(model)), lambda: fresh_caches(model))
    assert all(each.empty() for each in back)


def test_a_view_that_a_chunked_cache_keeps_is_laid_out_anew_even_in_a_list() -> None:
    live = mlx_caches.ChunkedKVCache(8)
    live.update_and_fetch(mx.ones((1, 2, 20, 4)), mx.ones((1, 2, 20, 4)))
    live.maybe_trim_front()
    settle_after_prefill([mlx_caches.CacheList(live)])
    assert np.array(live.keys, copy=False).flags.c_contiguous
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.ChunkedKVCache(8)])
    assert (back.start_position, back.offset, back.keys.shape) == (12, 20, (1, 2, 8, 4))


def test_a_cache_trimmed_to_nothing_is_saved() -> None:
    live = mlx_caches.KVCache()
    live.update_and_fetch(mx.ones((1, 2, 5, 4)), mx.ones((1, 2, 5, 4)))
    live.trim(5)
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.KVCache()])
    assert (back.offset, back.keys.shape) == (0, (1, 2, 256, 4))


@pytest.mark.parametrize("capacity", [300, 512])
def test_a_capacity_that_is_no_multiple_of_the_step_is_kept(capacity: int) -> None:
    live = mlx_caches.KVCache()
    live.keys = live.values = mx.ones((1, 2, capacity, 4))
    live.offset = 290
    [back] = rebuild(snapshot([live]), lambda: [mlx_caches.KVCache()])
    assert back.keys.shape[2] == capacity


def test_an_unknown_class_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedCache, match="BatchKVCache"):
        check_supported([mlx_caches.KVCache(), mlx_caches.BatchKVCache([0])])


def test_a_subclass_is_refused_since_it_may_keep_more() -> None:
    extended = type("Extended", (mlx_caches.KVCache,), {})
    with pytest.raises(UnsupportedCache, match="Extended"):
        snapshot([extended()])


def test_an_unknown_class_inside_a_list_is_refused_by_its_name() -> None:
    nested = mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.BatchKVCache([0]))
    with pytest.raises(UnsupportedCache, match=r"layer 1 .* BatchKVCache"):
        check_supported([mlx_caches.KVCache(), nested])
    with pytest.raises(UnsupportedCache, match="BatchKVCache"):
        take([nested], 0, 1, state=True)


def test_a_trimmed_cache_of_a_class_that_cannot_trim_is_not_saved() -> None:
    live = grown_cache("ConcatenateKVCache", [9])
    live.trim(2)
    with pytest.raises(CheckpointError, match="ConcatenateKVCache"):
        snapshot([live])


def ring_state() -> CacheState:
    live = mlx_caches.RotatingKVCache(max_size=8)
    live.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    return snapshot([live])[0]


@pytest.mark.parametrize(
    "made",
    [
        [],
        [mlx_caches.KVCache()],
        [mlx_caches.RotatingKVCache(8), mlx_caches.RotatingKVCache(8)],
        [mlx_caches.RotatingKVCache(9)],
        [mlx_caches.RotatingKVCache(8, keep=2)],
    ],
)
def test_a_model_with_other_caches_is_refused(made: list[Any]) -> None:
    with pytest.raises(ResumeMismatch):
        rebuild([ring_state()], lambda: made)


def test_a_model_with_other_recurrent_states_is_refused() -> None:
    states = snapshot([mlx_caches.ArraysCache(2)])
    with pytest.raises(ResumeMismatch):
        rebuild(states, lambda: [mlx_caches.ArraysCache(1)])


def test_a_state_that_contradicts_itself_is_refused() -> None:
    state = ring_state()
    data = np.zeros((1, 1, 3, 2), np.float32)
    keys = HostArray("keys", "float32", data)
    contradictions = [
        CacheState(state.kind, {**state.meta, "idx": 4}, state.arrays),
        CacheState(state.kind, {}, state.arrays),
        CacheState(state.kind, state.meta, ()),
        CacheState(state.kind, state.meta, (keys,)),
        CacheState(state.kind, state.meta, (keys, keys)),
        CacheState(state.kind, state.meta, (*state.arrays, HostArray("more", "float32", data))),
    ]
    for wrong in contradictions:
        with pytest.raises(CheckpointError):
            rebuild([wrong], lambda: [mlx_caches.RotatingKVCache(8)])


def test_a_plain_cache_whose_offset_is_not_its_length_is_refused() -> None:
    live = mlx_caches.KVCache()
    live.update_and_fetch(mx.ones((1, 1, 3, 2)), mx.ones((1, 1, 3, 2)))
    [state] = snapshot([live])
    for meta in ({"offset": 2, "capacity": 256}, {"offset": 3, "capacity": 2}):
        with pytest.raises(CheckpointError):
            rebuild([CacheState("KVCache", meta, state.arrays)], lambda: [mlx_caches.KVCache()])


def giving(*caches: Any) -> Callable[[], list[Any]]:
    return lambda: list(caches)


def test_a_quantized_state_takes_the_place_of_a_plain_cache_only() -> None:
    states = snapshot([grown_cache("QuantizedKVCache", [9])])
    [back] = rebuild(states, lambda: [mlx_caches.KVCache()])
    assert (type(back), back.group_size, back.bits) == (mlx_caches.QuantizedKVCache, 32, 4)
    for other in (mlx_caches.RotatingKVCache(8), mlx_caches.QuantizedKVCache(32, 8)):
        with pytest.raises(ResumeMismatch):
            rebuild(states, giving(other))
    with pytest.raises(ResumeMismatch):
        rebuild(snapshot([grown_cache("KVCache", [9])]), giving(mlx_caches.QuantizedKVCache(32, 4)))


def test_lists_of_another_shape_are_refused_and_described() -> None:
    [state] = snapshot([mlx_caches.CacheList(mlx_caches.ArraysCache(1), mlx_caches.KVCache())])
    made = [
        [mlx_caches.CacheList(mlx_caches.ArraysCache(1))],
        [mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.ArraysCache(1))],
        [mlx_caches.ArraysCache(1), mlx_caches.KVCache()],
    ]
    for other in made:
        with pytest.raises(ResumeMismatch, match=r"1 CacheList\(ArraysCache, KVCache\)"):
            rebuild([state], giving(*other))


def test_scales_that_do_not_match_their_values_are_refused() -> None:
    [state] = snapshot([grown_cache("QuantizedKVCache", [9])])
    for meta in ({"bits": 8}, {"group_size": 64}):
        wrong = CacheState(state.kind, {**state.meta, **meta}, state.arrays)
        with pytest.raises(CheckpointError, match="do not match"):
            rebuild([wrong], lambda: [mlx_caches.KVCache()])


def test_an_array_whose_bits_are_not_of_its_dtype_is_refused() -> None:
    wrong = HostArray("state.0", "bfloat16", np.zeros(3, np.float32))
    for array in (wrong, HostArray("state.0", "float128", np.zeros(3))):
        with pytest.raises(CheckpointError, match="dtype"):
            rebuild(
                [CacheState("ArraysCache", {"entries": 1}, (array,))],
                lambda: [mlx_caches.ArraysCache(1)],
            )


RING_META = {"keep": 2, "max_size": 8, "offset": 20, "idx": 4, "capacity": 8}
BAD_METAS: list[tuple[str, dict[str, Any]]] = [
    ("NoSuchCache", {}),
    ("KVCache", {}),
    ("KVCache", {"offset": 3}),
    ("KVCache", {"offset": 3, "capacity": 4, "more": 1}),
    ("KVCache", {"offset": -1, "capacity": 4}),
    ("KVCache", {"offset": True, "capacity": 4}),
    ("KVCache", {"offset": 3.0, "capacity": 4}),
    ("KVCache", {"offset": 3, "capacity": 2}),
    ("KVCache", {"offset": 3, "capacity": 2**31 - 1}),
    ("KVCache", {"offset": 2**40, "capacity": 2**40}),
    ("ConcatenateKVCache", {"offset": 3, "capacity": 4}),
    ("QuantizedKVCache", {"offset": 1, "capacity": 4, "group_size": 0, "bits": 4}),
    ("QuantizedKVCache", {"offset": 1, "capacity": 4, "group_size": 64, "bits": 7}),
    ("ChunkedKVCache", {"offset": 1, "capacity": 4, "chunk_size": 8, "start_position": 2}),
    ("ChunkedKVCache", {"offset": 9, "capacity": 4, "chunk_size": 8, "start_position": 2}),
    ("ArraysCache", {"entries": 2**30}),
    ("CacheList", {"entries": 1}),
    ("RotatingKVCache", RING_META | {"idx": 9}),
    ("RotatingKVCache", RING_META | {"idx": 1}),
    ("RotatingKVCache", RING_META | {"keep": 8}),
    ("RotatingKVCache", RING_META | {"capacity": 9}),
    ("RotatingKVCache", RING_META | {"capacity": 2**30, "idx": 2**30}),
    ("RotatingKVCache", RING_META | {"offset": 7}),
    ("RotatingKVCache", RING_META | {"offset": 4, "capacity": 2**30, "max_size": 2**30}),
    ("QuantizedRotatingKVCache", RING_META),
    ("QuantizedRotatingKVCache", RING_META | {"group_size": 64, "bits": 7}),
    ("QuantizedRotatingKVCache", RING_META | {"group_size": 64, "bits": 8, "idx": 9}),
]


@pytest.mark.parametrize(("kind", "meta"), BAD_METAS, ids=str)
def test_integers_that_no_cache_can_have_are_refused(kind: str, meta: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=kind):
        check_meta(kind, meta)


@pytest.mark.parametrize("offset", [0, 3, 4])
def test_what_is_allocated_is_bounded_by_what_is_held(offset: int) -> None:
    meta = {"keep": 0, "max_size": 2**30, "offset": offset, "idx": offset, "capacity": 2**16}
    check_meta("RotatingKVCache", meta)
    total = sum(run.length for run in held("RotatingKVCache", meta))
    assert stored_length("RotatingKVCache", meta) <= total + 2**16


def test_a_state_with_a_kind_that_is_not_in_the_table_builds_nothing() -> None:
    with pytest.raises(CheckpointError, match="system"):
        rebuild([CacheState("os.system", {}, ())], lambda: [mlx_caches.KVCache()])
