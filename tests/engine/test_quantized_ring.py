"""A sliding window of quantized KV: what a plain window of the rounded values is."""

from __future__ import annotations

from typing import Any, Final, cast

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from cache_models import mlx_caches
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache

WINDOW: Final = 24
HEADS, QUERIES, WIDTH = 2, 4, 64
SCALE: Final = WIDTH**-0.5

attend = cast(Any, scaled_dot_product_attention)
mask_of = cast(Any, create_attention_mask)

updates = st.lists(st.sampled_from([1, 1, 1, 1, 2, 7, 23, 24, 25, 40]), min_size=1, max_size=40)
hows = st.sampled_from([(32, 4), (64, 8), (32, 8), (64, 4)])


def normal(heads: int, length: int, seed: int) -> mx.array:
    return mx.random.normal((1, heads, length, WIDTH), key=mx.random.key(seed))


def rounded(array: mx.array, group_size: int, bits: int) -> mx.array:
    """What is left of it once it was quantized."""
    values, scales, biases = mx.quantize(array, group_size=group_size, bits=bits)
    return mx.dequantize(values, scales, biases, group_size=group_size, bits=bits)


class Window:
    """All positions ever written, each rounded once, of which each query sees the last few."""

    def __init__(self, group_size: int, bits: int, keep: int) -> None:
        self.how = (group_size, bits)
        self.keep = keep
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        for position in range(keys.shape[2]):
            at = slice(position, position + 1)
            self.keys.append(rounded(keys[:, :, at], *self.how))
            self.values.append(rounded(values[:, :, at], *self.how))
        outputs = []
        begin = len(self.keys) - queries.shape[2]
        for number in range(queries.shape[2]):
            position = begin + number
            seen = [
                *range(min(self.keep, position + 1)),
                *range(max(self.keep, position + 1 - WINDOW + self.keep), position + 1),
            ]
            k, v = (mx.concatenate([each[i] for i in seen], 2) for each in (self.keys, self.values))
            query = queries[:, :, number : number + 1]
            outputs.append(mx.fast.scaled_dot_product_attention(query, k, v, scale=SCALE))
        return mx.concatenate(outputs, axis=2)


def through_the_ring(cache: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """As a model with sliding windows does it."""
    hidden = mx.zeros((1, queries.shape[2], 1))
    mask = mask_of(hidden, cache, window_size=WINDOW)
    held = cache.update_and_fetch(keys, values)
    return cast(mx.array, attend(queries, *held, cache=cache, scale=SCALE, mask=mask))


def assert_same(
    window: Window, ring: Any, queries: mx.array, keys: mx.array, values: mx.array
) -> None:
    wanted = window.attend(queries, keys, values)
    # mlx-lm scales the queries in place.
    assert mx.allclose(through_the_ring(ring, mx.array(queries), keys, values), wanted, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(updates, hows)
def test_attention_over_the_ring_is_that_over_the_rounded_window(
    lengths: list[int], how: tuple[int, int]
) -> None:
    ring = QuantizedRotatingKVCache(WINDOW, group_size=how[0], bits=how[1])
    window = Window(*how, keep=0)
    for number, length in enumerate(lengths):
        given = (
            normal(QUERIES, length, 3 * number),
            normal(HEADS, length, 3 * number + 1),
            normal(HEADS, length, 3 * number + 2),
        )
        assert_same(window, ring, *given)
    assert ring.offset == sum(lengths)


def test_positions_that_are_kept_stay_in_sight() -> None:
    ring = QuantizedRotatingKVCache(WINDOW, keep=3, group_size=32, bits=8)
    window = Window(32, 8, keep=3)
    for number in range(3 * WINDOW):
        assert_same(
            window,
            ring,
            normal(QUERIES, 1, number),
            normal(HEADS, 1, number + 1000),
            normal(HEADS, 1, number + 2000),
        )


@settings(max_examples=25, deadline=None)
@given(updates, hows, st.integers(0, 40), st.sampled_from([0, 3]))
def test_slots_and_bits_do_not_depend_on_when_the_ring_was_quantized(
    lengths: list[int], how: tuple[int, int], at: int, keep: int
) -> None:
    """And they are those of mlx-lm's plain ring."""
    always = QuantizedRotatingKVCache(WINDOW, keep, group_size=how[0], bits=how[1])
    plain = mlx_caches.RotatingKVCache(WINDOW, keep=keep)
    late = mlx_caches.RotatingKVCache(WINDOW, keep=keep)
    for number, length in enumerate(lengths):
        if number == at:
            late = QuantizedRotatingKVCache.of(late, group_size=how[0], bits=how[1])
        given = normal(HEADS, length, 2 * number), normal(HEADS, length, 2 * number + 1)
        for cache in (always, plain, late):
            cache.update_and_fetch(*given)
    if not isinstance(late, QuantizedRotatingKVCache):
        late = QuantizedRotatingKVCache.of(late, group_size=how[0], bits=how[1])
    now = QuantizedRotatingKVCache.of(plain, group_size=how[0], bits=how[1])
    for other in (late, now):
        assert (other.offset, other._idx, other.keep) == (always.offset, always._idx, keep)
        for ours, theirs in zip(read(always), read(other), strict=True):
            assert mx.array_equal(ours, theirs)


def read(cache: Any) -> list[mx.array]:
    keys, values = cache.keys_and_values()
    return [*keys, *values]


def test_an_empty_ring_becomes_an_empty_one() -> None:
    made: Any = QuantizedRotatingKVCache.of(
        mlx_caches.RotatingKVCache(WINDOW, keep=2), group_size=32, bits=8
    )
    assert made.empty()
    assert (made.nbytes, made.size(), made.keep, made.max_size) == (0, 0, 2, WINDOW)


def test_bytes_are_those_of_the_arrays() -> None:
    ring = QuantizedRotatingKVCache(WINDOW, group_size=64, bits=8)
    ring.update_and_fetch(normal(HEADS, WINDOW, 1), normal(HEADS, WINDOW, 2))
    # Values of a byte, and a scale and a bias of four bytes for each 64 of them.
    assert ring.nbytes == 2 * HEADS * WINDOW * (WIDTH + 2 * 4)
