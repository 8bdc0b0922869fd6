"""``RowCost``: how much memory a row of a model may need, by its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from tenuto_engine._cache_kinds import LARGEST_INTEGER, SEQUENCE_AXIS, entry
from tenuto_engine._cache_tree import kind_name, leaf_caches
from tenuto_engine._kv_quantizer import check_possible, probe
from tenuto_engine._kv_scheme import KVScheme

# Every class grows its buffers by so many positions, so they may be longer than what they hold.
_GROWTH: Final = 256


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes of a row's caches.

    Attributes:
        fixed: whatever its length.
        per_token: of each position, in all layers that keep every position.
        windows: of layers that keep only the newest positions: the most that they keep, and
            the bytes of each.
        plain: of a row that is not quantized yet, where the caches are quantized on the way; a row
            needs whichever is more.
        plain_tokens: the most tokens that such a row holds.
    """

    fixed: int
    per_token: int
    windows: tuple[tuple[int, int], ...] = ()
    plain: RowCost | None = None
    plain_tokens: int = 0

    def of(self, tokens: int) -> int:
        """Bytes of a row that holds up to so many tokens; 0 of one that never holds any."""
        if tokens <= 0:
            return 0
        positions = tokens + _GROWTH - 1
        ended = sum(min(positions, most + _GROWTH) * each for most, each in self.windows)
        before = self.plain.of(min(tokens, self.plain_tokens)) if self.plain else 0
        return max(self.fixed + self.per_token * positions + ended, before)

    def tokens_in(self, size: float) -> int | None:
        """The most tokens for which a row fits into ``size`` bytes; None if any number does."""
        if self.of(LARGEST_INTEGER) <= size:
            return None
        fits, too_many = 0, LARGEST_INTEGER
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.of(middle) <= size:
                fits = middle
            else:
                too_many = middle
        return fits


def row_cost(
    model: Callable[..., mx.array],
    make_caches: Callable[[], list[Any]],
    chunk: int,
    scheme: KVScheme | None = None,
) -> RowCost:
    """What a row of ``model`` needs, by the shapes that its caches take.

    Args:
        chunk: tokens of a prefill chunk; a window is longer by that while it reads one.
        scheme: by which its caches are quantized.

    Raises:
        UnsupportedScheme: the model cannot have the scheme.
    """
    caches = make_caches()
    # Never evaluated: building it gives the arrays their shapes, and costs no memory.
    model(mx.array([[0]]), cache=caches)
    plain = _cost_of(caches, chunk)
    if scheme is None:
        return plain
    check_possible(model, caches, scheme)
    probe(model, caches, scheme)
    # The forward that comes to the start may be a chunk that begins one position before it.
    until = max(scheme.start - 1, 0) + chunk
    return replace(_cost_of(caches, chunk), plain=plain, plain_tokens=until)


def _cost_of(caches: Sequence[Any], chunk: int) -> RowCost:
    fixed = per_token = 0
    windows: dict[int, int] = {}
    for leaf in leaf_caches(caches):
        known = entry(kind_name(leaf))
        fixed += sum(array.nbytes for array in known.state(leaf).values())
        each = sum(array.nbytes // array.shape[SEQUENCE_AXIS] for array in known.buffers(leaf))
        window = known.window(leaf)
        if window is None:
            per_token += each
        else:
            windows[window + chunk] = windows.get(window + chunk, 0) + each
    return RowCost(fixed, per_token, tuple(sorted(windows.items())))
