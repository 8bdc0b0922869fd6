"""``CompiledForward``: the forward of one decoded token as a compiled function of arrays.

A step of mlx-lm's models is built in Python anew for each token. As a function of the token, its
position and the K and V of each layer it is traced once (``mx.compile``) for every 256 tokens, and
then only run. That saves the building, and on a GPU fuses small kernels.

What attention sees is the whole buffer behind a mask. So that this depends on nothing but the row's
own length, a buffer has just the capacity that the length asks for, rounded up to 256.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from tenuto_engine._cache_tree import kind_name
from tenuto_engine._errors import InvalidOption, ModelLoadError
from tenuto_engine._kv_scheme import KVScheme

_STEP: Final = 256
_HINT: Final = "load it without `compiled`"

Arrays = list[mx.array]
Forward = Callable[..., mx.array]
_Step = Callable[[mx.array, mx.array, Arrays, Arrays], tuple[mx.array, Arrays, Arrays]]


class CompiledForward:
    """Called as the model is. One token goes through the compiled function, several through the
    model itself.

    Args:
        model: one that ``check_compiles`` has passed.
    """

    def __init__(self, model: Forward) -> None:
        self._model = model
        compiled = cast(Callable[[_Step], _Step], mx.compile)
        self._step = compiled(_step_of(model))

    def __call__(self, tokens: mx.array, *, cache: Sequence[Any]) -> mx.array:
        """Logits ``[1, L, V]`` of tokens ``[1, L]``, whose KV is in the caches then."""
        if tokens.shape[1] != 1 or not cache[0].offset:
            return self._model(tokens, cache=cache)
        position: int = cache[0].offset
        for each in cache:
            _fit(each, position + 1)
        keys, values = [each.keys for each in cache], [each.values for each in cache]
        logits, keys, values = self._step(tokens, mx.array([position]), keys, values)
        for each, key, value in zip(cache, keys, values, strict=True):
            each.keys, each.values, each.offset = key, value, position + 1
        return logits


def check_plain(scheme: KVScheme | None, *, compiled: bool) -> None:
    """Check that what is compiled is not quantized, too.

    Raises:
        InvalidOption: it is.
    """
    if compiled and scheme is not None:
        raise InvalidOption("compiled", f"cannot be with quantized KV, and kv_scheme is {scheme}")


def check_compiles(model: Forward, make_caches: Callable[[], list[Any]]) -> None:
    """Trace a step of a model; nothing is evaluated.

    Raises:
        ModelLoadError: it cannot be compiled, and why.
    """
    caches = make_caches()
    others = sorted({kind_name(each) for each in caches} - {"KVCache"})
    if others:
        raise ModelLoadError(
            f"compiled: its caches are not all plain ones: {', '.join(others)}", hint=_HINT
        )
    try:
        model(mx.zeros((1, 2), mx.int32), cache=caches)
        CompiledForward(model)(mx.zeros((1, 1), mx.int32), cache=caches)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"compiled: a step cannot be traced: {reason}", hint=_HINT) from error


class _Traced:
    """A ``KVCache`` whose position is an array, so that it is no part of the trace."""

    def __init__(self, keys: mx.array, values: mx.array, position: mx.array) -> None:
        self.keys, self.values, self.offset = keys, values, position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self.offset, axes=(2,))
        self.values = mx.slice_update(self.values, values, self.offset, axes=(2,))
        return self.keys, self.values

    def make_mask(self, tokens: int, *, return_array: bool, window_size: int | None) -> mx.array:
        assert tokens == 1, "one token is traced"
        positions = mx.arange(self.keys.shape[2])
        mask = positions <= self.offset
        if window_size is not None:
            mask &= positions > self.offset - window_size
        return mask[None]


def _step_of(model: Forward) -> _Step:
    def step(
        tokens: mx.array, position: mx.array, keys: Arrays, values: Arrays
    ) -> tuple[mx.array, Arrays, Arrays]:
        caches = [_Traced(key, value, position) for key, value in zip(keys, values, strict=True)]
        logits = model(tokens, cache=caches)
        return logits, [each.keys for each in caches], [each.values for each in caches]

    return step


def _fit(cache: KVCache, length: int) -> None:
    """Have the buffers of a cache the capacity of a row of `length` tokens, and no other."""
    capacity = -(-length // _STEP) * _STEP
    assert cache.keys is not None, "a row decodes only after its prompt"
    assert cache.values is not None, "K and V come together"
    cache.keys, cache.values = _fitted(cache.keys, capacity), _fitted(cache.values, capacity)


def _fitted(buffer: mx.array, capacity: int) -> mx.array:
    held = buffer.shape[2]
    if held == capacity:
        return buffer
    if held > capacity:
        return mx.contiguous(buffer[:, :, :capacity])
    shape = (*buffer.shape[:2], capacity - held, buffer.shape[3])
    return mx.concatenate([buffer, mx.zeros(shape, buffer.dtype)], axis=2)
