"""Saved and rebuilt caches go on as if nothing had happened, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import cache as cache_module

from tenuto_engine._caches import (
    CacheState,
    HostArray,
    _stack_bits,
    check_supported,
    rebuild,
    settle_after_prefill,
    snapshot,
)
from tenuto_engine._errors import CheckpointError, ResumeMismatch, UnsupportedCache
from tiny_models import SLIDING_WINDOW, Kind, tiny_config

# mlx-lm is not annotated.
mlx_caches: Any = cache_module
get_classes: Any = mlx_lm_utils._get_classes

VOCABULARY = 97
STEPS_AFTER = 55
W = SLIDING_WINDOW

MAMBA2 = {
    "model_type": "mamba2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.0, float("inf")),
    "time_step_rank": "auto",
    "layer_norm_epsilon": 1e-5,
}


@cache
def tiny(kind: str, dtype: str) -> Any:
    config = MAMBA2 if kind == "mamba2" else tiny_config(cast(Kind, kind), VOCABULARY, 4096, 0)
    model_class, args_class = get_classes(config)
    mx.random.seed(7)
    model = model_class(args_class.from_dict(config))
    wanted = getattr(mx, dtype)
    model.update(tree_map(lambda p: (p * 3).astype(wanted), model.parameters()))
    mx.eval(model.parameters())
    return model


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
        caches = fresh(model)
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


def fresh(model: Any) -> list[Any]:
    made: list[Any] = mlx_caches.make_prompt_cache(model)
    return made


def integers(caches: list[Any]) -> Iterator[tuple[Any, ...]]:
    for each in caches:
        if isinstance(each, mlx_caches.ArraysCache):
            held = [None if e is None else (e.shape, e.dtype) for e in each.cache]
            yield ("ArraysCache", held, each.left_padding, each.lengths)
        else:
            ring = (getattr(each, "_idx", None), getattr(each, "max_size", None))
            yield (type(each).__name__, each.offset, each.keys.shape, each.keys.dtype, ring)


KV = [([256], 0), ([1], 0), ([100], 154), ([100], 155), ([100], 156), ([128, 256, 300], 30)]
RING = [
    *(([5], steps) for steps in (0, W - 6, W - 5, W - 4, 2 * W, 100)),
    *(([n], steps) for n in (W - 1, W, W + 1, 3 * W + 5) for steps in (0, 1, 2, W, W + 1)),
    *(([32, 64, 70], steps) for steps in (0, 1, 17)),
]
STATES = [([1], 0), ([2], 1), ([40], 0), ([32, 40], 9)]
CASES = [
    *(("llama", dtype, case) for dtype in ("float32", "bfloat16") for case in KV),
    *(("gemma3_text", "float32", case) for case in RING),
    *(("gemma3_text", "bfloat16", case) for case in RING[::4]),
    *((kind, "float32", case) for kind in ("lfm2", "mamba2") for case in STATES),
    *((kind, "bfloat16", STATES[3]) for kind in ("lfm2", "mamba2")),
]


@cache
def uninterrupted(kind: str, dtype: str, borders: tuple[int, ...]) -> list[bytes]:
    longest = max(before for *_, (b, before) in CASES if tuple(b) == borders)
    return Run.start(tiny(kind, dtype), list(borders)).steps(longest + STEPS_AFTER)


@pytest.mark.parametrize(("kind", "dtype", "case"), CASES, ids=lambda value: str(value))
def test_a_rebuilt_cache_gives_the_logits_of_an_uninterrupted_run_to_the_bit(
    kind: str, dtype: str, case: tuple[list[int], int]
) -> None:
    borders, before = case
    model = tiny(kind, dtype)
    reference = uninterrupted(kind, dtype, tuple(borders))

    run = Run.start(model, borders)
    run.steps(before)
    states = snapshot(run.caches)
    resumed = Run(model, rebuild(states, lambda: fresh(model)), run.token)

    assert list(integers(resumed.caches)) == list(integers(run.caches))
    assert resumed.steps(STEPS_AFTER) == reference[before : before + STEPS_AFTER]
    # And the run that was read from is none the worse for it.
    assert run.steps(5) == reference[before : before + 5]


def test_a_chain_of_snapshots_and_rebuilds_goes_on_to_the_bit() -> None:
    model = tiny("gemma3_text", "float32")
    reference = Run.start(model, [40]).steps(60)
    run = Run.start(model, [40])
    got = []
    for _ in range(12):
        got += run.steps(5)
        run = Run(model, rebuild(snapshot(run.caches), lambda: fresh(model)), run.token)
    assert got == reference


def test_a_snapshot_at_a_border_of_a_prefill_is_resumed_to_the_bit() -> None:
    model = tiny("gemma3_text", "float32")
    prompt = [(5 * i) % VOCABULARY for i in range(96)]

    def prefill(caches: list[Any], begin: int, end: int) -> None:
        model(mx.array([prompt[begin:end]]), cache=caches)
        settle_after_prefill(caches)

    straight, stopped = fresh(model), fresh(model)
    for begin, end in ((0, 32), (32, 64), (64, 96)):
        prefill(straight, begin, end)
    prefill(stopped, 0, 32)
    prefill(stopped, 32, 64)
    resumed = rebuild(snapshot(stopped), lambda: fresh(model))
    prefill(resumed, 64, 96)
    assert Run(model, resumed, 1).steps(30) == Run(model, straight, 1).steps(30)


@pytest.mark.parametrize("wrong", ["offset", "idx"])
def test_one_wrong_integer_is_noticed_by_these_tests(wrong: str) -> None:
    model = tiny("gemma3_text", "float32")
    run = Run.start(model, [30])
    run.steps(40)
    states = [
        CacheState(s.kind, {**s.meta, wrong: s.meta[wrong] - 1}, s.arrays)
        if s.kind == "RotatingKVCache"
        else s
        for s in snapshot(run.caches)
    ]
    resumed = Run(model, rebuild(states, lambda: fresh(model)), run.token)
    assert resumed.steps(5) != run.steps(5)


def test_a_snapshot_does_not_change_when_decoding_goes_on() -> None:
    model = tiny("gemma3_text", "bfloat16")
    run = Run.start(model, [30])
    states = snapshot(run.caches)
    kept = [array.data.tobytes() for state in states for array in state.arrays]
    run.steps(60)
    assert [array.data.tobytes() for state in states for array in state.arrays] == kept


def test_a_snapshot_leaves_no_reference_that_makes_the_next_step_copy_the_cache() -> None:
    live = mlx_caches.KVCache()
    live.update_and_fetch(*(mx.ones((1, 8, 4096, 64)) for _ in range(2)))
    live.update_and_fetch(*(mx.ones((1, 8, 1, 64)) for _ in range(2)))
    mx.eval(live.keys, live.values)
    snapshot([live])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    live.update_and_fetch(*(mx.ones((1, 8, 1, 64)) for _ in range(2)))
    mx.eval(live.keys, live.values)
    assert mx.get_peak_memory() - before < live.keys.nbytes / 2


def test_the_host_never_looks_into_a_live_buffer() -> None:
    def address(array: mx.array) -> int:
        mx.eval(array)
        return int(np.array(array, copy=False).__array_interface__["data"][0])

    live = [mx.ones((1, 2, 256, 4)), mx.zeros((1, 2, 256, 4))]
    whole, part = live, [array[..., :100, :] for array in live]
    for read in (whole, part, whole[:1], part[:1]):
        assert address(_stack_bits(read)) not in {address(array) for array in live}


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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2", "mamba2"])
def test_empty_caches_are_saved_and_rebuilt_empty(kind: str) -> None:
    model = tiny(kind, "float32")
    back = rebuild(snapshot(fresh(model)), lambda: fresh(model))
    assert all(each.empty() for each in back)


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
