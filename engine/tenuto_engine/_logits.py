"""From logits to logprobs: bias, penalties, fewest tokens, log-softmax, the likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors
from numpy.typing import NDArray

from tenuto_engine._options import GenerationOptions

Processor = Callable[[mx.array, mx.array], mx.array]


class TokenMask:
    """A set of token ids as the device wants it."""

    def __init__(self, ids: Collection[int]) -> None:
        self._ids = sorted(ids)
        self._mask: mx.array | None = None

    def of_size(self, size: int) -> mx.array:
        """Boolean `[size]`, true at the ids; made once. Ids from `size` on are left out."""
        if self._mask is None:
            self._mask = mx.zeros((size,), dtype=mx.bool_)
            # What is written beyond an array's end lands in somebody else's.
            if inside := [token for token in self._ids if token < size]:
                self._mask[mx.array(inside)] = True
        return self._mask


class LogitsProcessors:
    """Bias, penalties and ``min_tokens`` of one generation; the first two as mlx-lm applies them.

    They see the last tokens, prompt included, as a device array, so that a token which the
    host has not read yet can already be in it.

    Args:
        tokens: the prompt, and the generated tokens so far.
        end_tokens: those that ``min_tokens`` keeps from being drawn.
    """

    def __init__(
        self,
        options: GenerationOptions,
        tokens: Sequence[int],
        end_tokens: Collection[int] = (),
    ) -> None:
        self._processors = _processors(options)
        self._min_tokens = options.min_tokens if end_tokens else 0
        self._ends = TokenMask(end_tokens)
        self._reach = _reach(options)
        recent = list(tokens[-self._reach :]) if self._reach else []
        self._recent = mx.array(recent, dtype=mx.uint32)

    def see(self, token: mx.array) -> None:
        """Note `token`, uint32 `[1]`, as the newest of the sequence; or several, in order."""
        if self._reach:
            self._recent = mx.concatenate([self._recent, token])[-self._reach :]

    def __call__(self, logits: mx.array, index: int) -> mx.array:
        """Apply all to the `[1, V]` logits of token `index`, from 1."""
        for processor in self._processors:
            logits = processor(self._recent, logits)
        if index <= self._min_tokens:
            never = mx.array(-math.inf, logits.dtype)
            logits = mx.where(self._ends.of_size(logits.shape[-1]), never, logits)
        return logits


def _processors(options: GenerationOptions) -> list[Processor]:
    repetition = options.repetition_penalty
    made: list[Processor] = make_logits_processors(
        logit_bias=dict(options.logit_bias) or None,
        repetition_penalty=None if repetition == 1 else repetition,
        repetition_context_size=options.repetition_context_size,
        presence_penalty=options.presence_penalty or None,
        presence_context_size=options.presence_context_size,
        frequency_penalty=options.frequency_penalty or None,
        frequency_context_size=options.frequency_context_size,
    )
    return made


def _reach(options: GenerationOptions) -> int:
    """How many last tokens a penalty looks at."""
    sizes = (
        (options.repetition_context_size, options.repetition_penalty != 1),
        (options.presence_context_size, options.presence_penalty != 0),
        (options.frequency_context_size, options.frequency_penalty != 0),
    )
    return max((size for size, on in sizes if on), default=0)


def only_allowed(logits: mx.array, allowed: NDArray[np.bool_]) -> mx.array:
    """`[1, V]` logits, those of tokens that are not `allowed` (bool `[V]`) being -inf."""
    return mx.where(mx.array(allowed), logits, mx.array(-math.inf, logits.dtype))


def log_softmax(logits: mx.array) -> mx.array:
    """Logprobs `[1, V]` in the logits' own dtype, with mlx-lm's arithmetic."""
    return logits - mx.logsumexp(logits, keepdims=True)


class Likeliest(NamedTuple):
    """The likeliest tokens of a step, unordered: ids and logprobs, each `[k]`."""

    ids: mx.array
    logprobs: mx.array


def likeliest(logprobs: mx.array, count: int) -> Likeliest | None:
    """The `count` likeliest tokens of `[1, V]` logprobs; None for none."""
    count = min(count, logprobs.shape[-1])
    if count == 0:
        return None
    flat = logprobs[0]
    ids = mx.argpartition(-flat, kth=count - 1)[:count] if count < flat.size else mx.arange(count)
    return Likeliest(ids, flat[ids])


def in_order(found: Likeliest | None) -> tuple[tuple[int, float], ...]:
    """Read the likeliest tokens, likeliest first; among equals the lower id first.

    One that cannot be drawn is not among them, however few there are.
    """
    if found is None:
        return ()
    ids = cast(list[int], found.ids.tolist())
    logprobs = cast(list[float], found.logprobs.tolist())
    pairs = [pair for pair in zip(ids, logprobs, strict=True) if pair[1] != -math.inf]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
