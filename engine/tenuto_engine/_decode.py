"""One decode step of a row: forward, logits, sample.

A generated token is forwarded by ``advance`` alone. The synchronous and the pipelined loop and the
catch-up call it on the same arrays in the same order, so they give the same bits; they differ only
in when the host reads the result. A row that jumps over forced tokens takes another step,
``jump_step``, which is the same one in both loops and in a catch-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from tenuto_engine._logits import likeliest, log_softmax, only_allowed
from tenuto_engine._sequence import Drawn
from tenuto_engine._slots import Pending, Row, async_eval

Forward = Callable[..., mx.array]
"""A model: ``[1, L]`` tokens and ``cache=`` to logits ``[1, L, V]``."""

# As often as mlx-lm returns unused buffers to the device.
_CLEAR_EVERY = 256

MOST_JUMPED: Final = 31
"""Tokens that one forward takes along behind the one that was drawn: no more than a chunk, whose
memory a row counts. It is part of what decides the bits of a job that jumps."""


def draw(row: Row, logits: mx.array) -> Pending:
    """Sample the token after those in the cache from its logits ``[1, V]``."""
    index = row.generated + 1
    logits = row.processors(logits, index)
    sequence = row.sequence
    if sequence.grammar is not None:
        # The device works while the host looks for what may follow.
        async_eval(logits)
        width = logits.shape[-1]
        allowed = sequence.grammar.allowed(sequence.tokens, row.generated, width)
        logits = only_allowed(logits, allowed)
    logprobs = log_softmax(logits)
    token = row.sampler(logprobs, index)
    chosen = mx.take_along_axis(logprobs, token[:, None], axis=-1)
    return Pending(token, chosen, likeliest(logprobs, sequence.options.logprobs))


def advance(model: Forward, row: Row) -> None:
    """Dispatch the forward of the pending token; the one sampled after it is the new one."""
    _sample(row, _forward(model, row), 1)


def _forward(model: Forward, row: Row) -> mx.array:
    """The logits ``[1, V]`` after the pending token, whose KV is in the caches then."""
    assert row.pending is not None, "a row decodes only after its prompt"
    row.reserve(1)
    token = row.pending.token
    row.processors.see(token)
    logits = model(token[None], cache=row.caches)[:, -1, :]
    row.position += 1
    return logits


def _sample(row: Row, logits: mx.array, forwarded: int) -> None:
    row.pending = draw(row, logits)
    row.pending.dispatch()
    if row.unquantized is not None:
        row.quantize_if_due()
    if row.generated % _CLEAR_EVERY < forwarded:
        mx.clear_cache()


def synchronous_step(model: Forward, row: Row) -> None:
    """Forward the pending token and settle the one after it."""
    if row.settled:
        advance(model, row)
    drawn = _read(row)
    row.checkpoint_if_due()
    row.sequence.take(drawn)


def pipelined_step(model: Forward, row: Row) -> None:
    """Dispatch the forward of the unread pending token, then settle that token.

    With a grammar the one after it is drawn only then: what may follow it is found on the host,
    while the device forwards it.
    """
    if row.settled:
        advance(model, row)
    if row.sequence.grammar is not None:
        _settle_and_draw(model, row)
        return
    current = row.pending
    assert current is not None
    if row.position < row.bound:
        advance(model, row)
    row.sequence.take(current.read())
    if row.sequence.finish_reason is None:
        row.checkpoint_if_due()


def _settle_and_draw(model: Forward, row: Row) -> None:
    sequence, current = row.sequence, row.pending
    assert current is not None
    if row.position == row.bound:
        sequence.take(current.read())
        return
    logits = _forward(model, row)
    async_eval(logits)
    sequence.take(current.read())
    if sequence.finish_reason is None:
        _sample(row, logits, 1)
        row.checkpoint_if_due()


def catch_up_step(model: Forward, row: Row) -> None:
    """Forward the published token that was taken last, and take the next one."""
    advance(model, row)
    take_published(row)
    if row.sequence.finish_reason is None:
        row.checkpoint_if_due()


def jump_step(model: Forward, row: Row) -> None:
    """Forward the pending token together with those that the grammar forces after it, and settle
    the one drawn after them; of a catch-up, all of them as they were published.

    It reads each token before the next forward, so it is the same step in both loops.
    """
    sequence, agrees = row.sequence, True
    if row.settled:
        agrees = _settle_forced(row)
        if sequence.finish_reason:
            return
        _advance_span(model, row)
    if sequence.next_published:
        take_published(row, drawn_like_it=agrees)
        if sequence.finish_reason is None:
            row.checkpoint_if_due()
        return
    drawn = _read(row)
    row.checkpoint_if_due()
    sequence.take(drawn)


def _settle_forced(row: Row) -> bool:
    """Settle the tokens that go through the model together with the pending one.

    Where a reader has some of them they are what was published, and if that goes on behind them
    they are just those, whatever the grammar would have here. Otherwise it has the rest.

    Returns:
        False if the next published token was drawn where the grammar forces one.
    """
    sequence = row.sequence
    forced = _forced(row)
    for place, published in enumerate(sequence.published_span()):
        computed = Drawn.forced(forced[place]) if place < len(forced) else None
        agrees = sequence.take_published(published, computed)
        if sequence.finish_reason:
            return True
        if not agrees:
            # Its own span, that goes on differently, says nothing about the rest of this one.
            forced = forced[: place + 1]
    settled = len(sequence.tokens) - row.generated - 1
    if sequence.next_published:
        return settled >= len(forced)
    for token in forced[settled:]:
        sequence.take(Drawn.forced(token))
        if sequence.finish_reason:
            break
    return True


def _forced(row: Row) -> list[int]:
    """The tokens that have to follow the pending one, which is settled; an end is drawn."""
    sequence = row.sequence
    assert sequence.grammar is not None, "nothing else forces tokens"
    forced = sequence.grammar.forced(sequence.tokens, row.generated + 1)[:MOST_JUMPED]
    ends = (place for place, token in enumerate(forced) if token in sequence.end_tokens)
    return forced[: next(ends, len(forced))]


def _advance_span(model: Forward, row: Row) -> None:
    """Dispatch one forward of all settled tokens that are not in the caches; as `advance`."""
    ids = [token.token for token in row.sequence.tokens[row.generated :]]
    row.reserve(len(ids))
    span = mx.array(ids, dtype=mx.uint32)
    row.processors.see(span)
    logits = model(span[None], cache=row.caches)[:, -1, :]
    row.position += len(ids)
    _sample(row, logits, len(ids))


def take_published(row: Row, *, drawn_like_it: bool = True) -> None:
    """Put the next published token in the place of the pending one, compared with it.

    Args:
        drawn_like_it: False if it is known to differ in how it came about.
    """
    published = row.sequence.next_published
    assert published is not None
    row.sequence.take_published(published, _read(row) if drawn_like_it else None)
    row.pending = Pending.known(Drawn(published.token, published.logprob, published.top_logprobs))


def _read(row: Row) -> Drawn:
    assert row.pending is not None
    return row.pending.read()
