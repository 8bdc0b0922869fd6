"""``QuantizedRotatingKVCache``: a sliding window of quantized KV, which mlx-lm lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

Six = list[mx.array]
"""Packed values, scales and biases of the keys, then of the values; each of rank 4."""


class QuantizedRotatingKVCache(RotatingKVCache):
    """``RotatingKVCache`` whose keys and values are each packed values, scales and biases.

    Each position of each head is quantized once, as it is written, along the head dimension, so
    which slot it stands in, and when it moves, changes no bit. The slots are those of
    ``RotatingKVCache``, and masks are its own. mlx-lm's attention finds by ``bits`` that it is
    quantized.

    Attributes:
        keys, values: tuples of three arrays ``[batch, heads, slots, width]``, or None.
        group_size, bits: as of ``mx.quantize``.
    """

    # mlx-lm is not annotated.
    keys: Any
    values: Any
    _temporal_order: Callable[[mx.array], mx.array]
    _trim: Callable[..., mx.array]

    def __init__(self, max_size: int, keep: int = 0, *, group_size: int, bits: int) -> None:
        cast(Any, super()).__init__(max_size, keep)
        self.group_size = group_size
        self.bits = bits

    @classmethod
    def of(cls, ring: Any, *, group_size: int, bits: int) -> Self:
        """What ``ring`` holds, quantized slot by slot."""
        made = cls(ring.max_size, ring.keep, group_size=group_size, bits=bits)
        made.offset, made._idx = ring.offset, ring._idx
        if ring.keys is not None:
            made._hold(made._quantize(ring.keys, ring.values))
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write new positions ``[batch, heads, positions, head dim]``; give all that is held, for
        several positions also what they push out, as the first of them may still see it."""
        new = self._quantize(keys, values)
        if keys.shape[2] == 1:
            self._write(new)
            return self.keys_and_values()
        self._append(new)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[Any, Any]:
        """The tuples that attention reads, without slots that nothing was written to."""
        held = self._held()
        if self.offset >= held[0].shape[2]:
            return self.keys, self.values
        used = [array[..., : self.offset, :] for array in held]
        return tuple(used[:3]), tuple(used[3:])

    @property
    def nbytes(self) -> int:
        """Bytes of all six arrays."""
        return sum(array.nbytes for array in self._held())

    def _held(self) -> Six:
        return [] if self.keys is None else [*self.keys, *self.values]

    def _hold(self, arrays: Six) -> None:
        self.keys, self.values = tuple(arrays[:3]), tuple(arrays[3:])

    def _quantize(self, keys: mx.array, values: mx.array) -> Six:
        how: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
        return [*mx.quantize(keys, **how), *mx.quantize(values, **how)]

    def _append(self, new: Six) -> None:
        """Put the window in order, drop what not even the first new position sees, and append."""
        held, length = self._held(), new[0].shape[2]
        if held:
            ordered = [self._temporal_order(array) for array in held]
            dropped = ordered[0].shape[2] - self.max_size + 1
            new = [self._trim(dropped, old, added) for old, added in zip(ordered, new, strict=True)]
        self._hold(new)
        self.offset += length
        self._idx = new[0].shape[2]

    def _write(self, new: Six) -> None:
        """Overwrite the oldest position, or grow while the window is not full."""
        held = self._held()
        capacity = held[0].shape[2] if held else 0
        if not held or (self.offset >= capacity and capacity < self.max_size):
            held = self._grown(held, new, min(self.step, self.max_size - self.offset))
            self._idx = self.offset
        elif capacity > self.max_size:
            held = [self._trim(capacity - self.max_size, array) for array in held]
            self._idx = self.max_size
        if self._idx == self.max_size:
            self._idx = self.keep
        for array, added in zip(held, new, strict=True):
            array[..., self._idx : self._idx + 1, :] = added
        self._hold(held)
        self.offset += 1
        self._idx += 1

    @staticmethod
    def _grown(held: Six, new: Six, slots: int) -> Six:
        spare = [mx.zeros((*each.shape[:2], slots, each.shape[3]), each.dtype) for each in new]
        if not held:
            return spare
        return [mx.concatenate(list(pair), axis=2) for pair in zip(held, spare, strict=True)]
