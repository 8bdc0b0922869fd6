"""A row of the engine without a model: real caches of a chosen shape, filled with random numbers.

A step writes one position into every layer and waits for it, and does nothing else. It is so quick
that a copy of the whole caches, which a reference left to them would cause, cannot be overlooked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx

from tenuto_engine import Token
from tenuto_engine._cache_tree import leaves
from tenuto_engine._caches import settle_after_prefill
from tenuto_engine._live import LiveCheckpoint, Moment
from tenuto_engine._sequence import Drawn

mlx_caches = cast(Any, importlib.import_module("mlx_lm.models.cache"))

WINDOW: Final = 1024
# As the engine reads a prompt on a GPU.
_CHUNK: Final = 512

KINDS: Final[Mapping[str, Callable[[], Any]]] = {
    "KVCache": lambda: mlx_caches.KVCache(),
    "QuantizedKVCache, 8 bits": lambda: mlx_caches.QuantizedKVCache(group_size=64, bits=8),
    f"RotatingKVCache of {WINDOW}": lambda: mlx_caches.RotatingKVCache(WINDOW),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the caches: what a model of 1 to 3 billion parameters has, if not said otherwise."""

    layers: int = 16
    heads: int = 4
    width: int = 64
    dtype: mx.Dtype = mx.bfloat16

    def random(self, length: int) -> mx.array:
        """Keys or values of one layer for so many positions."""
        return mx.random.normal((1, self.heads, length, self.width)).astype(self.dtype)


class SyntheticRow:
    """What a row is to a store.

    Args:
        kind: a key of ``KINDS``.
        prompt: how many positions it begins with.
    """

    def __init__(self, kind: str, shape: Shape, prompt: int) -> None:
        mx.random.seed(1)
        self.caches = [KINDS[kind]() for _ in range(shape.layers)]
        self.prompt = tuple(range(prompt))
        self.tokens: list[Token] = []
        block = shape.random(prompt)
        for layer, cache in enumerate(self.caches):
            _fill(cache, block * (1 + layer / 64))
        self._next = shape.random(1)
        mx.eval(self._next)

    @property
    def position(self) -> int:
        """How many positions the caches cover."""
        return len(self.prompt) + len(self.tokens)

    def step(self) -> None:
        """Write one more position, and wait until it is written."""
        for cache in self.caches:
            cache.update_and_fetch(self._next, self._next)
        mx.eval(self.buffers())
        index = len(self.tokens) + 1
        self.tokens.append(Token(1000 + index, index, " token", -0.5))

    def buffers(self) -> list[mx.array]:
        """The live arrays. Whoever keeps them makes the next step copy them."""
        return [cast(mx.array, a.data) for leaf in leaves(self.caches) for a in leaf.buffers]

    def live(self) -> LiveCheckpoint:
        """What the engine hands to a callback."""
        return LiveCheckpoint(
            Moment(
                lineage=self,
                origin=None,
                prompt=self.prompt,
                prompt_tokens=len(self.prompt),
                tokens=self.tokens,
                position=self.position,
                pending=_Pending(),
                caches=self.caches,
                seed=1,
            )
        )


class _Pending:
    def read(self) -> Drawn:
        return Drawn(7, -0.5, ())


def _fill(cache: Any, block: mx.array) -> None:
    # A ring is what a prefill in chunks leaves; the others take everything at once.
    length = block.shape[2]
    chunk = _CHUNK if isinstance(cache, mlx_caches.RotatingKVCache) else length
    for start in range(0, length, chunk):
        part = block[:, :, start : start + chunk]
        cache.update_and_fetch(part, -part)
    settle_after_prefill([cache])
