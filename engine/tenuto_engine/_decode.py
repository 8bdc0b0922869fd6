"""One decode step of a row: forward, logits, sample.

``advance`` is the only place where a generated token is forwarded. The synchronous and the
pipelined loop and the catch-up call it on the same arrays in the same order, so they give
the same bits; they differ only in when the host reads the result.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from tenuto_engine._logits import likeliest, log_softmax
from tenuto_engine._sequence import Drawn
from tenuto_engine._slots import Pending, Row

Forward = Callable[..., mx.array]
"""A model: ``[1, L]`` tokens and ``cache=`` to logits ``[1, L, V]``."""

# As often as mlx-lm returns unused buffers to the device.
_CLEAR_EVERY = 256


def draw(row: Row, logits: mx.array) -> Pending:
    """Sample the token after those in the cache from its logits ``[1, V]``."""
    index = row.generated + 1
    logprobs = log_softmax(row.processors(logits, index))
    token = row.sampler(logprobs, index)
    chosen = mx.take_along_axis(logprobs, token[:, None], axis=-1)
    return Pending(token, chosen, likeliest(logprobs, row.sequence.options.logprobs))


def advance(model: Forward, row: Row) -> None:
    """Dispatch the forward of the pending token; the one sampled after it is the new one."""
    assert row.pending is not None, "a row decodes only after its prompt"
    row.reserve(1)
    token = row.pending.token
    row.processors.see(token)
    logits = model(token[None], cache=row.caches)[:, -1, :]
    row.position += 1
    row.pending = draw(row, logits)
    row.pending.dispatch()
    if row.unquantized is not None:
        row.quantize_if_due()
    if row.generated % _CLEAR_EVERY == 0:
        mx.clear_cache()


def synchronous_step(model: Forward, row: Row) -> None:
    """Forward the pending token and settle the one after it."""
    if row.settled:
        advance(model, row)
    drawn = _read(row)
    row.checkpoint_if_due()
    row.sequence.take(drawn)


def pipelined_step(model: Forward, row: Row) -> None:
    """Dispatch the forward of the unread pending token, then settle that token."""
    if row.settled:
        advance(model, row)
    current = row.pending
    assert current is not None
    if row.position < row.bound:
        advance(model, row)
    row.sequence.take(current.read())
    if row.sequence.finish_reason is None:
        row.checkpoint_if_due()


def catch_up_step(model: Forward, row: Row) -> None:
    """Forward the published token that was taken last, and take the next one."""
    advance(model, row)
    take_published(row)
    if row.sequence.finish_reason is None:
        row.checkpoint_if_due()


def take_published(row: Row) -> None:
    """Put the next published token in the place of the pending one, compared with it."""
    published = row.sequence.next_published
    assert published is not None
    row.sequence.take_published(published, _read(row))
    row.pending = Pending.known(Drawn(published.token, published.logprob, published.top_logprobs))


def _read(row: Row) -> Drawn:
    assert row.pending is not None
    return row.pending.read()
