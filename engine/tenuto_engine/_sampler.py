"""Drawing a token, without any random state.

The key of a draw is a hash of (seed, index, purpose), so token *i* of a generation is the
same whoever draws it, whenever, on whatever thread. mlx-lm's own samplers are compiled
around a global, thread-local state; the filters here do the same arithmetic without it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Final

import mlx.core as mx

from tenuto_engine._logits import TokenMask
from tenuto_engine._options import GenerationOptions

# 1/temperature must stay finite, or every logprob becomes infinite and the draw noise.
_STEEPEST: Final = 1e30

Filter = Callable[[mx.array, int], mx.array]


class Purpose(IntEnum):
    """What a random number is for; each has its own keys.

    The values are part of every draw: one that is in use never changes.
    """

    DRAW = 0
    XTC = 1


def sampling_key(seed: int, index: int, purpose: Purpose = Purpose.DRAW) -> mx.array:
    """The PRNG key of token `index` (from 1): uint32 `[2]`."""
    packed = struct.pack("<QQQ", seed, index, purpose)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


class Sampler:
    """Chooses a token from logprobs, by the options of one generation and its seed.

    Args:
        exempt: tokens that XTC never excludes.
    """

    def __init__(self, options: GenerationOptions, seed: int, exempt: Collection[int] = ()) -> None:
        self._seed = seed
        self._temperature = options.temperature
        self._steepness = min(1 / options.temperature, _STEEPEST) if options.temperature else 0.0
        self._filters = _filters(options, seed, exempt)

    def __call__(self, logprobs: mx.array, index: int) -> mx.array:
        """Choose token `index` from `[1, V]` logprobs; uint32 `[1]`."""
        if self._temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        # In half precision a low temperature would overflow.
        steep = self.filtered(logprobs, index).astype(mx.float32) * self._steepness
        return mx.random.categorical(steep, key=sampling_key(self._seed, index))

    def filtered(self, logprobs: mx.array, index: int) -> mx.array:
        """The `[1, V]` logprobs from which token `index` is drawn; -inf where it cannot be."""
        for keep in self._filters:
            logprobs = keep(logprobs, index)
        return logprobs


def _filters(options: GenerationOptions, seed: int, exempt: Collection[int]) -> list[Filter]:
    """Those that are on, in the order of mlx-lm's ``make_sampler``.

    They keep numbers, not the options, which may hold the caches of a checkpoint.
    """
    top_p, min_p, top_k = options.top_p, options.min_p, options.top_k
    filters: list[Filter] = []
    if top_p < 1:
        filters.append(lambda row, _: keep_top_p(row, top_p=top_p))
    if min_p > 0:
        filters.append(lambda row, _: keep_min_p(row, min_p=min_p))
    if options.xtc_probability > 0:
        filters.append(_xtc(options.xtc_probability, options.xtc_threshold, seed, exempt))
    if top_k > 0:
        filters.append(lambda row, _: keep_top_k(row, top_k=top_k))
    return filters


def _xtc(probability: float, threshold: float, seed: int, exempt: Collection[int]) -> Filter:
    spared = TokenMask(exempt)

    def exclude_now_and_then(logprobs: mx.array, index: int) -> mx.array:
        coin = mx.random.uniform(key=sampling_key(seed, index, Purpose.XTC))
        excluded = exclude_top_choices(logprobs, threshold=threshold, exempt=spared)
        return mx.where(coin > probability, logprobs, excluded)

    return exclude_now_and_then


def keep_top_p(logprobs: mx.array, *, top_p: float) -> mx.array:
    """Keep the likeliest tokens until they hold `top_p` of the probability."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    dropped = mx.sum(above >= top_p * total, axis=-1, keepdims=True)
    # The likeliest is never dropped, also when `top_p` is 0 in single precision.
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    least = mx.take_along_axis(ascending, dropped, axis=-1)
    return _drop(logprobs, logprobs < least)


def keep_min_p(logprobs: mx.array, *, min_p: float) -> mx.array:
    """Keep the tokens that are at least `min_p` times as likely as the likeliest."""
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    return _drop(logprobs, logprobs < least)


def keep_top_k(logprobs: mx.array, *, top_k: int) -> mx.array:
    """Keep the `top_k` likeliest tokens; all of them if there are no more."""
    if top_k >= logprobs.shape[-1]:
        return logprobs
    order = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)
    nothing = mx.array(-math.inf, logprobs.dtype)
    return mx.put_along_axis(logprobs, order[..., top_k:], nothing, axis=-1)


def exclude_top_choices(logprobs: mx.array, *, threshold: float, exempt: TokenMask) -> mx.array:
    """Keep, of the tokens that are likelier than `threshold`, the least likely and the exempt
    ones; all others stay."""
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.min(mx.where(probs > threshold, probs, math.inf), axis=-1, keepdims=True)
    return _drop(logprobs, (probs > least) & ~exempt.of_size(logprobs.shape[-1]))


def _drop(logprobs: mx.array, condition: mx.array) -> mx.array:
    return mx.where(condition, mx.array(-math.inf, logprobs.dtype), logprobs)
