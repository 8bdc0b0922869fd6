"""The worker's Lua scripts as typed calls: what each is given, and how its answer is read.

Each is one atomic step in Redis. Those that act for an attempt take its `Fence` and do nothing when
the attempt is no longer the current one. `JobScripts` runs them; `_answers` has what comes back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, Unpack

from tenuto_client import Token, pack_tokens

from ._answers import (
    Depth,
    Fence,
    Finished,
    Head,
    Left,
    Published,
    Reaped,
    Renewed,
    Swept,
    Taken,
    Yield,
    read_claim,
    read_depth,
    read_finished,
    read_head,
    read_ids,
    read_published,
    read_reaped,
    read_renewed,
    read_swept,
    read_word,
    read_yield,
)

T = TypeVar("T")
Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Bound:
    """What an attempt goes by: the prompt's ids, packed and counted, the geometry, packed, with its
    fingerprint, and the id of the data dir where its checkpoints are (`reach`)."""

    prompt_ids: bytes
    prompt_tokens: int
    fingerprint: str
    geometry: bytes
    reach: str


class Terms(TypedDict):
    """What a worker takes of a model's jobs.

    Attributes:
        fingerprint, reach: its geometry's, and the id of its data dir; a job that has begun is left
            for `exact_wait_s` to workers that have the same.
        max_prompt, max_tokens: the longest prompt and answer; None is no limit.
        room_alone: tokens of both together for which it has memory when it runs nothing.
        adapters: the fingerprint of the geometry with each adapter that it has; others' jobs are
            left.
    """

    fingerprint: str
    reach: str
    exact_wait_s: float
    max_prompt: NotRequired[int | None]
    max_tokens: NotRequired[int | None]
    room_alone: NotRequired[int | None]
    adapters: NotRequired[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One run of a script that is still to be made."""

    script: str
    arguments: tuple[Argument, ...]
    read: Callable[[Any], T]


def claim_call(
    model: str,
    *,
    holder: str,
    nonce: str,
    lease_ms: int,
    again: bool = False,
    room: int | None = None,
    alone: bool = False,
    memory_wait_s: float = 30.0,
    **terms: Unpack[Terms],
) -> Call[Taken | list[Left]]:
    """Take the best queued job of a model. Where there is none for this worker, the answer is
    those that it has to leave to others. What is no job any more is put aside, one a call.

    `again` says that a call with this nonce was made before and its answer lost. Jobs that want
    more than the terms, or prompt and answer together more than `room`, are left; so are suspects,
    unless the worker runs nothing (`alone`). What has waited for memory for longer than
    `memory_wait_s`, and is within `room_alone`, keeps what stands behind it from being taken.
    """
    own = (holder, nonce, terms["fingerprint"], terms["reach"])
    attempt = (lease_ms, terms["exact_wait_s"], int(again))
    limits = _limits(terms.get("max_prompt"), terms.get("max_tokens"), room)
    patience: tuple[Argument, ...] = (
        *_limits(terms.get("room_alone")),
        memory_wait_s,
        _adapters(terms),
    )
    return Call("claim", (model, *own, *attempt, *limits, int(alone), *patience), read_claim)


def preempt_call(
    model: str,
    *,
    holder: str,
    patience_s: float,
    hold_s: float,
    room: int | None = None,
    may_empty: bool = True,
    **terms: Unpack[Terms],
) -> Call[Yield | None]:
    """Which attempt of this worker is to make way for a job that waits, if any is.

    Args:
        patience_s: for how long a job waits before anything makes way for it.
        hold_s: for how long an attempt goes on at least; doubled with each time that its job
            made way before.
        room: as of a claim.
        may_empty: whether this worker would take a suspect of the model, if it ran nothing.
    """
    own = (holder, *_place(terms))
    limits = _limits(terms.get("max_prompt"), terms.get("max_tokens"), room)
    apart: tuple[Argument, ...] = (
        *_limits(terms.get("room_alone")),
        int(may_empty),
        _adapters(terms),
    )
    return Call("preempt", (model, *own, *limits, patience_s, hold_s, *apart), read_yield)


def suspect_call(model: str, **terms: Unpack[Terms]) -> Call[str]:
    """The first suspect that this worker may take when it runs nothing, or ""."""
    return Call("suspect", _when_alone(model, terms), read_word)


def head_call(model: str, **terms: Unpack[Terms]) -> Call[Head | None]:
    """The best queued job that this worker may take, had it the memory."""
    return Call("head", _when_alone(model, terms), read_head)


def provide_call(job_id: str) -> Call[bool]:
    """Note that something makes way for a queued job; False where that is not needed any more."""
    return Call("provide", (job_id,), bool)


def publish_call(fence: Fence, tokens: Sequence[Token], *, durable: int) -> Call[Published]:
    """Append tokens of consecutive indexes to the job's stream.

    `durable` is how many of the job's tokens the last durable checkpoint covers, here and below.
    """
    span = (tokens[0].index, tokens[-1].index)
    return Call("publish", (*_fence(fence), durable, *span, pack_tokens(tokens)), read_published)


def renew_call(
    fence: Fence,
    *,
    durable: int,
    holder: str,
    lease_ms: int,
    phase: str,
    done: int,
    total: int,
    checkpoint_error: str = "",
) -> Call[Renewed]:
    """Keep the lease of a running attempt and tell how far it is.

    `checkpoint_error` is why its last checkpoint could not be saved; "" if it was.
    """
    progress = (phase, done, total, checkpoint_error)
    return Call("renew", (*_fence(fence), durable, holder, lease_ms, *progress), read_renewed)


def bind_call(fence: Fence, bound: Bound, exactness: str, why: str | None) -> Call[str]:
    """Store what an attempt goes by, and the job's label. Answers `ok` or `fenced`."""
    return Call("bind", (*_fence(fence), *astuple(bound), exactness, why or ""), read_word)


def finish_call(
    fence: Fence,
    *,
    durable: int,
    state: str,
    finish_reason: str | None = None,
    text: str = "",
    error: str = "",
    exactness: str = "exact",
    exactness_reason: str | None = None,
    tokens: int = 0,
    stats: str = "",
) -> Call[Finished]:
    """End the job, unless Redis has fewer than these `tokens`, which it acknowledged before.

    `stats` is what the attempt tells of itself, as JSON.
    """
    end = (state, finish_reason or "", text, error)
    label = (exactness, exactness_reason or "")
    return Call("finish", (*_fence(fence), durable, *end, *label, tokens, stats), read_finished)


def release_call(fence: Fence, reason: str, error: str = "", *, durable: int) -> Call[str]:
    """Hand the job back. Answers `fenced` or the state that it is in now."""
    return Call("release", (*_fence(fence), durable, reason, error), read_word)


def reap_call(job_id: str | bytes) -> Call[Reaped]:
    """Requeue a running job without a lease; bytes are an id that is none."""
    return Call("reap", (job_id,), read_reaped)


def take_back_call(job_id: str, holder: str, *, crashed: bool = False) -> Call[str]:
    """Requeue a running job of this holder's dead predecessor; `foreign` if it is not its.

    `crashed` says that its child died by itself, so that each of its jobs may be the cause; else
    that is so of those that had got nowhere.
    """
    return Call("take_back", (job_id, holder, int(crashed)), read_word)


def depth_call(model: str) -> Call[Depth]:
    """Look at the queue of a model."""
    return Call("depth", (model,), read_depth)


def expire_call(limit: int = 100) -> Call[list[str]]:
    """Remove ended jobs whose retention is over; answers their ids."""
    return Call("expire", (limit,), read_ids)


def sweep_call(limit: int = 100) -> Call[list[Swept]]:
    """End queued jobs whose deadline or queue_ttl has passed."""
    return Call("sweep", (limit,), read_swept)


def recover_call(*arguments: Argument) -> Call[str]:
    """Put a job back; what `recover.lua` says. Answers `recovered`, or `there` if it is."""
    return Call("recover", arguments, read_word)


def mend_tickets_call(model: str) -> Call[int]:
    """Add tickets that are missing, up to 250; answers how many were added."""
    return Call("mend_tickets", (model,), int)


def _fence(fence: Fence) -> tuple[str, int, str]:
    return fence.job_id, fence.epoch, fence.nonce


def _place(terms: Terms) -> tuple[str, str, float]:
    return terms["fingerprint"], terms["reach"], terms["exact_wait_s"]


def _when_alone(model: str, terms: Terms) -> tuple[Argument, ...]:
    limits = (terms.get("max_prompt"), terms.get("max_tokens"), terms.get("room_alone"))
    return (model, *_place(terms), *_limits(*limits), _adapters(terms))


def _adapters(terms: Terms) -> str:
    adapters = terms.get("adapters")
    return json.dumps(adapters) if adapters else ""


def _limits(*most: int | None) -> tuple[int, ...]:
    return tuple(-1 if each is None else each for each in most)
