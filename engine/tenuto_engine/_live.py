"""``LiveCheckpoint``: a checkpoint of a running row, of which only what is asked for is copied."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import mlx.core as mx

from tenuto_engine._caches import CacheState, snapshot, take
from tenuto_engine._checkpoint import Checkpoint, Origin
from tenuto_engine._delta import Commit, Delta, Layout
from tenuto_engine._errors import CheckpointError
from tenuto_engine._sequence import Drawn
from tenuto_engine._token import Token
from tenuto_engine._trace import Trace


class PendingToken(Protocol):
    """The token after those in the cache."""

    def read(self) -> Drawn:
        """It; may wait for the device."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A row between two steps.

    Attributes:
        lineage: one object for all moments of a row, and for no other's.
        origin: the place in a log that the row went on from, or None.
        prompt: ids of the prompt, at least as far as it is read.
        prompt_tokens: how many the whole prompt has.
        tokens: the settled tokens, to which the row appends later.
        position: tokens whose KV is in ``caches``.
        pending: the token after them, or None in a prefill.
        caches: the row's own, live; or the host states of a whole checkpoint.
        seed, divergences, first_divergence: as in ``Checkpoint``.
        trace: gets the spans of what becomes of it.
    """

    lineage: object
    origin: Origin | None
    prompt: tuple[int, ...]
    prompt_tokens: int
    tokens: list[Token]
    position: int
    pending: PendingToken | None
    caches: Ids[Any]
    seed: int
    divergences: int = 0
    first_divergence: int | None = None
    trace: Trace = field(default_factory=lambda: Trace(None))

    @property
    def generated(self) -> int:
        """Generated tokens whose KV is in the caches."""
        return max(self.position - self.prompt_tokens, 0)


class LiveCheckpoint:
    """What ``on_decode_checkpoint`` is called with. It has the attributes of ``Checkpoint``.

    A store takes from it what is new to the store, at a cost that does not follow the context.
    Any other callback may keep it: it becomes whole when the callback returns. If a store took
    from it, its ``caches`` are readable during the callback only.

    Attributes:
        deferred: whoever was called with it wants to be called again at the next step, as it
            had no room for all of it or for any.
        trace: gets the spans of what becomes of it.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment: Moment | None = moment
        self._position = moment.position
        self._generated = moment.generated
        self._prompt, self._tokens, self._pending = moment.prompt, moment.tokens, moment.pending
        self._caches: list[CacheState] | None = None
        self._taken = False
        self.deferred = False
        self.original_prompt_tokens = moment.prompt_tokens
        self.seed = moment.seed
        self.divergences = moment.divergences
        self.first_divergence = moment.first_divergence
        self.trace = moment.trace
        self.origin: Origin | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """The same as a live one, to be written whole."""
        drawn = _drawn(checkpoint)
        return cls(
            Moment(
                lineage=object(),
                origin=None,
                prompt=checkpoint.cache_tokens[: checkpoint.original_prompt_tokens],
                prompt_tokens=checkpoint.original_prompt_tokens,
                tokens=list(checkpoint.generated),
                position=len(checkpoint.cache_tokens),
                pending=None if drawn is None else _Known(drawn),
                caches=checkpoint.caches,
                seed=checkpoint.seed,
                divergences=checkpoint.divergences,
                first_divergence=checkpoint.first_divergence,
            )
        )

    # -- what a Checkpoint has ---------------------------------------------------------

    @property
    def cache_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens whose KV is in the caches."""
        return self._prompt[: self._position] + tuple(token.token for token in self.generated)

    @property
    def generated(self) -> tuple[Token, ...]:
        """The generated tokens among them."""
        return tuple(self._tokens[: self._generated])

    @property
    def generated_tokens(self) -> int:
        """How many those are."""
        return self._generated

    @property
    def pending_token(self) -> int | None:
        """The sampled token whose KV is not in the caches; None in a prefill."""
        return self._pending.read().token if self._pending else None

    @property
    def pending_logprob(self) -> float | None:
        """Its logprob, or None."""
        return self._pending.read().logprob if self._pending else None

    @property
    def pending_top_logprobs(self) -> tuple[tuple[int, float], ...]:
        """The likeliest ids at its place with their logprobs."""
        return self._pending.read().top_logprobs if self._pending else ()

    @property
    def caches(self) -> list[CacheState]:
        """One state a layer, copied to private host memory.

        Raises:
            CheckpointError: the callback has returned, and a store took from it.
        """
        if self._caches is None:
            self._caches = snapshot(self._open.caches)
        return self._caches

    def whole(self) -> Checkpoint:
        """A copy that depends on nothing."""
        return Checkpoint(
            cache_tokens=self.cache_tokens,
            original_prompt_tokens=self.original_prompt_tokens,
            generated=self.generated,
            pending_token=self.pending_token,
            pending_logprob=self.pending_logprob,
            pending_top_logprobs=self.pending_top_logprobs,
            seed=self.seed,
            caches=self.caches,
            divergences=self.divergences,
            first_divergence=self.first_divergence,
        )

    # -- for stores --------------------------------------------------------------------

    @property
    def moment(self) -> Moment:
        """The row as it is. Whoever reads it is a store, and takes or defers."""
        self._taken = True
        return self._open

    def defer(self) -> None:
        """Ask to be called again at the next step."""
        self._taken = self.deferred = True

    @property
    def is_closed(self) -> bool:
        """Whether the callback has returned."""
        return self._moment is None

    def close(self) -> None:
        """The callback has returned, and the row goes on."""
        if not self._taken and self._moment is not None:
            self.pending_token  # noqa: B018 - read now, while it is the pending one
            _ = self.caches
        self._moment = None

    @property
    def _open(self) -> Moment:
        if self._moment is None:
            raise CheckpointError(
                "the row has gone on, so the caches of this checkpoint are gone",
                hint="call whole() while the callback runs",
            )
        return self._moment


def take_delta(
    moment: Moment,
    described: tuple[Layout, ...],
    *,
    generation: int,
    start: int,
    first: int,
    limit: int | None,
) -> Delta:
    """Copy what is new at `moment` into private memory; on the thread that owns the caches.

    Args:
        described: the layouts of its caches.
        generation: what to call it.
        start: the position after those that earlier deltas of the generation have.
        first: index of the first token that earlier commits of the lineage lack.
        limit: most positions to copy. If there are more it is a part, not a commit.
    """
    stop = moment.position
    if limit is not None:
        stop = min(stop, start + max(1, limit))
    is_commit = stop == moment.position
    blobs, state = take(moment.caches, start, stop, state=is_commit, described=described)
    pending = None
    data = [*(blob.data for blob in blobs), *(array.data for array in state)]
    mx.eval([each for each in data if isinstance(each, mx.array)])
    if is_commit and moment.pending is not None:
        pending = moment.pending.read()
    commit = None
    if is_commit:
        commit = Commit(
            tokens=tuple(moment.tokens[first - 1 : moment.generated]),
            first=first,
            pending_token=pending.token if pending else None,
            pending_logprob=pending.logprob if pending else None,
            pending_top_logprobs=pending.top_logprobs if pending else (),
            divergences=moment.divergences,
            first_divergence=moment.first_divergence,
            layouts=described,
            state=state,
        )
    return Delta(generation, start, stop, blobs, commit)


def as_live(checkpoint: Checkpoint | LiveCheckpoint) -> LiveCheckpoint:
    """`checkpoint`, or the same as a live one that is to be written whole."""
    if isinstance(checkpoint, LiveCheckpoint):
        # One that somebody kept beyond the callback is whole by now.
        return LiveCheckpoint.of(checkpoint.whole()) if checkpoint.is_closed else checkpoint
    return LiveCheckpoint.of(checkpoint)


@dataclass(frozen=True, slots=True)
class _Known:
    drawn: Drawn

    def read(self) -> Drawn:
        return self.drawn


def _drawn(checkpoint: Checkpoint) -> Drawn | None:
    if checkpoint.pending_token is None:
        return None
    logprob = checkpoint.pending_logprob
    return Drawn(
        checkpoint.pending_token,
        float("nan") if logprob is None else logprob,
        checkpoint.pending_top_logprobs,
    )
