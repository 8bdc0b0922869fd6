"""Drawing a token, without any random state.

The key of a draw is a hash of (seed, index, purpose), so token *i* of a generation is the
same whoever draws it, whenever, on whatever thread. mlx-lm's own samplers are compiled
around a global, thread-local state; the filters here do the same arithmetic without it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final

import mlx.core as mx

from tenuto_engine._options import GenerationOptions

# 1/temperature must stay finite, or every logprob becomes infinite and the draw noise.
_STEEPEST: Final = 1e30

Filter = Callable[[mx.array], mx.array]


class Purpose(IntEnum):
    """What a random number is for; each has its own keys."""

    DRAW = 0


def sampling_key(seed: int, index: int, purpose: Purpose = Purpose.DRAW) -> mx.array:
    """The PRNG key of token `index` (from 1): uint32 `[2]`."""
    packed = struct.pack("<QQQ", seed, index, purpose)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


class Sampler:
    """Chooses a token from logprobs, by the options of one generation and its seed."""

    def __init__(self, options: GenerationOptions, seed: int) -> None:
        self._seed = seed
        self._temperature = options.temperature
        self._steepness = min(1 / options.temperature, _STEEPEST) if options.temperature else 0.0
        self._filters = _filters(options)

    def __call__(self, logprobs: mx.array, index: int) -> mx.array:
        """Choose token `index` from `[1, V]` logprobs; uint32 `[1]`."""
        if self._temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        for keep in self._filters:
            logprobs = keep(logprobs)
        # In half precision a low temperature would overflow.
        steep = logprobs.astype(mx.float32) * self._steepness
        return mx.random.categorical(steep, key=sampling_key(self._seed, index))


def _filters(options: GenerationOptions) -> list[Filter]:
    filters: list[Filter] = []
    if options.top_p < 1:
        filters.append(partial(keep_top_p, top_p=options.top_p))
    if options.min_p > 0:
        filters.append(partial(keep_min_p, min_p=options.min_p))
    if options.top_k > 0:
        filters.append(partial(keep_top_k, top_k=options.top_k))
    return filters


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


def _drop(logprobs: mx.array, condition: mx.array) -> mx.array:
    return mx.where(condition, mx.array(-math.inf, logprobs.dtype), logprobs)
