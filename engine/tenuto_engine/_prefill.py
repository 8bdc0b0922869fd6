"""Reading a prompt: chunks with borders at absolute positions, then its last token alone.

The borders are the multiples of the chunk size whatever a warm cache covers, because a
forward of other chunks gives other bits.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Final

import mlx.core as mx

from tenuto_engine._caches import settle_after_prefill
from tenuto_engine._decode import Forward, draw
from tenuto_engine._slots import Row

# Steps behind a chunk are slower than others, as the device's buffers are new.
_OWED: Final = 1.2


def is_border(position: int, prompt_tokens: int, chunk: int) -> bool:
    """Whether a prefill of `prompt_tokens` pauses at `position`."""
    return position % chunk == 0 or position == prompt_tokens - 1


def prefill_step(model: Forward, row: Row, chunk: int) -> None:
    """Read the next chunk; after the last one read the last token and sample the first.

    Args:
        model: gives logits ``[1, L, V]`` for ``[1, L]`` tokens and ``cache=``.
        row: one in prefill.
        chunk: the chunk size C.
    """
    last = len(row.reading) - 1
    if row.position < last:
        _read_chunk(model, row, min((row.position // chunk + 1) * chunk, last))
    if row.position < last:
        row.checkpoint_if_due()
        return
    with row.sequence.trace.span("first_token"):
        logits = _forward(model, row, last + 1)[:, -1, :]
        row.pending = draw(row, logits)
        row.pending.read()
        row.quantize_if_due()
        mx.clear_cache()


def _read_chunk(model: Forward, row: Row, end: int) -> None:
    with row.sequence.trace.span("prefill_chunk", start=row.position, stop=end):
        _forward(model, row, end)
        row.quantize_if_due()
        # Evaluates the caches and nothing else, so a chunk's logits are never computed.
        settle_after_prefill(row.caches)
        if row.offers is not None:
            row.offers.border(row.caches, end)
        mx.clear_cache()


def _forward(model: Forward, row: Row, end: int) -> mx.array:
    row.reserve(end - row.position)
    tokens: list[Any] = list(row.reading[row.position : end])
    logits = model(mx.array(tokens)[None], cache=row.caches)
    row.sequence.stats.prefilled_tokens += end - row.position
    row.position = row.sequence.prefill_done = end
    return logits


class PrefillTurn:
    """Shares a device among the engines that one thread steps in turns, each as often as any other:
    one that has a prompt to read, and is not stepped, keeps the others waiting.

    After a chunk of one row, the rows that decode do so at least as long, whoever's they are. Of
    engines that read prompts each reads a chunk in turn.
    """

    def __init__(self) -> None:
        self._owed = 0.0
        self._decoding: weakref.WeakSet[object] = weakref.WeakSet()
        self._reading: weakref.WeakKeyDictionary[object, None] = weakref.WeakKeyDictionary()

    def note(self, engine: object, *, decodes: bool, reads: bool) -> None:
        """Whether an engine has rows that decode, and rows that read their prompts."""
        if decodes:
            self._decoding.add(engine)
        else:
            self._decoding.discard(engine)
        if reads:
            self._reading.setdefault(engine)
        else:
            self._reading.pop(engine, None)

    def may_prefill(self, engine: object) -> bool:
        """Whether it may read a chunk now."""
        if self._owed > 0 and self._decoding:
            return False
        return next(iter(self._reading.keys()), None) is engine

    def prefilled(self, engine: object, began: float) -> None:
        """It read a chunk from `began` (``perf_counter``) to now."""
        self._owed = (time.perf_counter() - began) * _OWED
        if engine in self._reading:
            del self._reading[engine]
            self._reading[engine] = None

    def decoded(self, began: float) -> None:
        """Rows decoded from `began` to now."""
        self._owed -= time.perf_counter() - began
