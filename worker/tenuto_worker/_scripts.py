"""The worker's Lua scripts as typed functions.

Each is one atomic step in Redis. Those that act for an attempt take its `Fence` and do nothing when
the attempt is no longer the current one. The calls block: the worker's own threads make them.

A script can be run by itself (`JobScripts.publish(...)`), or described by a `Call`, so that the
calls of many jobs share one round trip (`JobScripts.run_all`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

import redis
from redis.exceptions import NoScriptError

from tenuto_client import Keys, Token, pack_tokens, script_source, ticket_payload

from ._meta import RECORDED

_NAMES = (
    "claim",
    "preempt",
    "bind",
    "publish",
    "renew",
    "finish",
    "release",
    "reap",
    "depth",
    "take_back",
    "expire",
    "sweep",
    "mend_tickets",
    "recover",
)

T = TypeVar("T")
Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Fence:
    """What an attempt shows with every write: it counts only while these are the job's own."""

    job_id: str
    epoch: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A job as it was when an attempt took it. Absent values were not known yet.

    Attributes:
        durable: how many of its tokens the last durable checkpoint covered.
        namespace: id of the data set that the job belongs to.
        heirs: ids of the earlier ones whose checkpoints it may go on from.
        record: fields of the job's hash that no attempt changes, or that count attempts.
        waited, age: seconds from when it was queued, and from its submit, to this claim.
        traceparent: the span that it was submitted in, as W3C writes it.
        suspect: a worker may have died of it, so that it has to run apart.
    """

    fence: Fence
    model: str
    spec: bytes
    tokens: int
    prompt_ids: bytes | None
    fingerprint: str | None
    geometry: bytes | None
    exactness: str
    exactness_reason: str | None
    attempts: int
    durable: int
    namespace: str
    heirs: frozenset[str]
    record: Mapping[str, bytes]
    waited: float
    age: float
    traceparent: str | None
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A queued job that this worker has to leave to others for so many `seconds` more.

    `why` is `geometry`, or `checkpoints` where only those are out of reach. No time is set (0
    seconds) for `limits` of this worker, `memory` that it has not now, and `suspect`: the job has
    to run apart, and this worker runs others.
    """

    job_id: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Yield:
    """What is to make way here: the attempt of job `of`, or all (None), for the job `to`, which is
    then a suspect."""

    of: str | None
    to: str


class PublishStatus(StrEnum):
    """What became of a publish."""

    OK = "ok"
    REPLAY = "replay"
    """All of it stood there already."""
    GAP = "gap"
    """Redis has fewer tokens than the attempt thought, or more; nothing was written."""
    FENCED = "fenced"
    """The attempt is over; nothing was written."""


@dataclass(frozen=True, slots=True)
class Published:
    """Answer to a publish: how many tokens stand in the stream, whether a cancel is wanted, and
    whether the job is to run apart still."""

    status: PublishStatus
    tokens: int
    cancel: bool
    apart: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to a renewal."""

    fenced: bool
    cancel: bool
    deadline_passed: bool
    runtime_over: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """Answer to a reap: `alive` or the state of the job, and the worker that has or had it."""

    state: str
    worker: str


@dataclass(frozen=True, slots=True)
class Depth:
    """How many jobs of a model are queued, and how long the one has waited that waits longest."""

    jobs: int
    oldest_seconds: float


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
    fingerprint: str,
    reach: str,
    lease_ms: int,
    exact_wait_s: float,
    again: bool = False,
    max_prompt: int | None = None,
    max_tokens: int | None = None,
    room: int | None = None,
    alone: bool = False,
    room_alone: int | None = None,
    memory_wait_s: float = 30.0,
) -> Call[Claim | list[Left]]:
    """Take the best queued job of a model. Where there is none for this worker, the answer is
    those that it has to leave to others.

    `again` says that a call with this nonce was made before and its answer lost. Jobs that are
    known to have a longer prompt than `max_prompt`, want more than `max_tokens`, or both together
    more than `room`, are left; so are suspects, unless the worker runs nothing (`alone`). What has
    waited for memory for longer than `memory_wait_s`, and is within `room_alone`, which the worker
    has when it runs nothing, keeps what stands behind it from being taken.
    """
    own = (holder, nonce, fingerprint, reach)
    terms = (lease_ms, exact_wait_s, int(again))
    limits = _limits(max_prompt, max_tokens, room)
    patience = (*_limits(room_alone), memory_wait_s)
    return Call("claim", (model, *own, *terms, *limits, int(alone), *patience), _claim)


def preempt_call(
    model: str,
    *,
    holder: str,
    fingerprint: str,
    reach: str,
    exact_wait_s: float,
    patience_s: float,
    hold_s: float,
    max_prompt: int | None = None,
    max_tokens: int | None = None,
    room: int | None = None,
) -> Call[Yield | None]:
    """Which attempt of this worker is to make way for a job that waits, if any is.

    Args:
        patience_s: for how long a job waits before anything makes way for it.
        hold_s: for how long an attempt goes on at least; doubled with each time that its job
            made way before.
        max_prompt, max_tokens, room: as of a claim.
    """
    own = (holder, fingerprint, reach, exact_wait_s)
    limits = _limits(max_prompt, max_tokens, room)
    return Call("preempt", (model, *own, *limits, patience_s, hold_s), _yield)


def publish_call(fence: Fence, tokens: Sequence[Token], *, durable: int) -> Call[Published]:
    """Append tokens of consecutive indexes to the job's stream.

    `durable` is how many of the job's tokens the last durable checkpoint covers, here and below.
    """
    span = (tokens[0].index, tokens[-1].index)
    return Call("publish", (*_fence(fence), durable, *span, pack_tokens(tokens)), _published)


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
    return Call("renew", (*_fence(fence), durable, holder, lease_ms, *progress), _renewed)


def bind_call(
    fence: Fence,
    *,
    prompt_ids: bytes,
    prompt_tokens: int,
    fingerprint: str,
    geometry: bytes,
    reach: str,
    exactness: str,
    exactness_reason: str | None,
) -> Call[str]:
    """Store what the claim settled. Answers `ok` or `fenced`."""
    settled = (prompt_ids, prompt_tokens, fingerprint, geometry, reach)
    label = (exactness, exactness_reason or "")
    return Call("bind", (*_fence(fence), *settled, *label), _word)


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
) -> Call[str]:
    """End the job. Answers `ok`, `fenced`, or `requeued` when a resume overtook the cancel."""
    end = (state, finish_reason or "", text, error)
    label = (exactness, exactness_reason or "")
    return Call("finish", (*_fence(fence), durable, *end, *label), _word)


def release_call(fence: Fence, reason: str, error: str = "", *, durable: int) -> Call[str]:
    """Hand the job back. Answers `fenced` or the state that it is in now."""
    return Call("release", (*_fence(fence), durable, reason, error), _word)


def reap_call(job_id: str) -> Call[Reaped]:
    """Requeue a running job without a lease."""
    return Call("reap", (job_id,), _reaped)


def take_back_call(job_id: str, holder: str, *, crashed: bool = False) -> Call[str]:
    """Requeue a running job of this holder's dead predecessor; `foreign` if it is not its.

    `crashed` says that it died by itself, so that each of its jobs may be the cause.
    """
    return Call("take_back", (job_id, holder, int(crashed)), _word)


def depth_call(model: str) -> Call[Depth]:
    """Look at the queue of a model."""
    return Call("depth", (model,), _depth)


class JobScripts:
    """The scripts over one blocking client and one namespace."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._scripts = {
            name: client.register_script(script_source("tenuto_worker", name)) for name in _NAMES
        }

    def run(self, call: Call[T]) -> T:
        """Run one script."""
        return self.run_all([call])[0]

    def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run scripts in order, in one round trip, and return their answers.

        Raises the first error among the answers, after all were run: each of these scripts may be
        run again when its answer was lost.
        """
        replies: list[Any] = self._send(calls)
        # A server that was restarted, or replaced by another, knows no scripts.
        missing = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:
            self._load({calls[n].script for n in missing})
            for n, reply in zip(missing, self._send([calls[n] for n in missing]), strict=True):
                replies[n] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [call.read(reply) for call, reply in zip(calls, replies, strict=True)]

    def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        payload = ticket_payload(int(time.time() * 1000))
        with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                sha = self._scripts[call.script].sha
                arguments = (self._keys.namespace, payload, *call.arguments)
                pipe.evalsha(sha, 0, *cast(tuple[str, ...], arguments))
            return pipe.execute(raise_on_error=False)

    def _load(self, names: set[str]) -> None:
        for name in names:
            self._client.script_load(self._scripts[name].script)

    def bind(
        self,
        fence: Fence,
        *,
        prompt_ids: bytes,
        prompt_tokens: int,
        fingerprint: str,
        geometry: bytes,
        reach: str,
        exactness: str,
        exactness_reason: str | None,
    ) -> bool:
        """Store what the claim settled. False when the attempt is fenced."""
        call = bind_call(
            fence,
            prompt_ids=prompt_ids,
            prompt_tokens=prompt_tokens,
            fingerprint=fingerprint,
            geometry=geometry,
            reach=reach,
            exactness=exactness,
            exactness_reason=exactness_reason,
        )
        return self.run(call) == "ok"

    def publish(self, fence: Fence, tokens: Sequence[Token], *, durable: int = 0) -> Published:
        """Append tokens of consecutive indexes to the job's stream."""
        return self.run(publish_call(fence, tokens, durable=durable))

    def renew(
        self,
        fence: Fence,
        *,
        durable: int = 0,
        holder: str,
        lease_ms: int,
        phase: str,
        done: int,
        total: int,
        checkpoint_error: str = "",
    ) -> Renewed:
        """Keep the lease of a running attempt and tell how far it is."""
        call = renew_call(
            fence,
            durable=durable,
            holder=holder,
            lease_ms=lease_ms,
            phase=phase,
            done=done,
            total=total,
            checkpoint_error=checkpoint_error,
        )
        return self.run(call)

    def finish(
        self,
        fence: Fence,
        *,
        durable: int = 0,
        state: str,
        finish_reason: str | None = None,
        text: str = "",
        error: str = "",
        exactness: str = "exact",
        exactness_reason: str | None = None,
    ) -> str:
        """End the job. Returns `ok`, `fenced`, or `requeued` when a resume overtook the cancel."""
        call = finish_call(
            fence,
            durable=durable,
            state=state,
            finish_reason=finish_reason,
            text=text,
            error=error,
            exactness=exactness,
            exactness_reason=exactness_reason,
        )
        return self.run(call)

    def release(self, fence: Fence, reason: str, error: str = "", *, durable: int = 0) -> str:
        """Hand the job back. Returns `fenced` or the state that it is in now."""
        return self.run(release_call(fence, reason, error, durable=durable))

    def reap(self, job_id: str) -> str:
        """Requeue a running job without a lease. Returns `alive` or the state it is in now."""
        return self.run(reap_call(job_id)).state

    def take_back(self, job_id: str, holder: str, *, crashed: bool = False) -> str:
        """Requeue a running job of this holder's dead predecessor; `foreign` if it is not its."""
        return self.run(take_back_call(job_id, holder, crashed=crashed))

    def expire(self, limit: int = 100) -> list[str]:
        """Remove ended jobs whose retention is over; returns their ids."""
        return self.run(Call("expire", (limit,), _ids))

    def sweep(self, limit: int = 100) -> list[str]:
        """End queued jobs whose deadline or queue_ttl has passed; returns their ids."""
        return self.run(Call("sweep", (limit,), _ids))

    def recover(self, *arguments: Argument) -> str:
        """Put a job back; what `recover.lua` says. Returns `recovered`, or `there` if it is."""
        return self.run(Call("recover", arguments, _word))

    def suspects(self, model: str) -> int:
        """How many queued jobs of a model have to run apart."""
        return int(cast(int, self._client.zcard(self._keys.suspects(model))))

    def mend_tickets(self, model: str) -> int:
        """Add tickets that are missing, up to 250; returns how many were added."""
        return self.run(Call("mend_tickets", (model,), int))


def _fence(fence: Fence) -> tuple[str, int, str]:
    return fence.job_id, fence.epoch, fence.nonce


def _word(reply: bytes) -> str:
    return reply.decode()


def _ids(reply: list[bytes]) -> list[str]:
    return [each.decode() for each in reply]


def _published(reply: list[Any]) -> Published:
    status, count, cancel, apart = reply
    return Published(PublishStatus(status.decode()), count, bool(cancel), bool(apart))


def _renewed(reply: list[Any]) -> Renewed:
    word, cancel, late, over = reply
    return Renewed(word == b"fenced", bool(cancel), bool(late), bool(over))


def _depth(reply: list[Any]) -> Depth:
    jobs, oldest = reply
    return Depth(jobs, float(oldest))


def _reaped(reply: list[bytes]) -> Reaped:
    state, worker = reply
    return Reaped(state.decode(), worker.decode())


def _claim(reply: list[Any]) -> Claim | list[Left]:
    word, *rest = reply or [b"left"]
    if word == b"left":
        triples = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        return [Left(job.decode(), float(wait), why.decode()) for job, wait, why in triples]
    namespace, heirs, values = rest
    fields = dict(zip(values[::2], values[1::2], strict=True))

    def text(name: bytes) -> str | None:
        value = fields.get(name)
        return None if value is None else value.decode()

    def before_claim(name: bytes) -> float:
        return max(0.0, float(fields[b"claimed_at"]) - float(fields[name]))

    return Claim(
        fence=Fence(fields[b"id"].decode(), int(fields[b"epoch"]), fields[b"nonce"].decode()),
        model=fields[b"model"].decode(),
        spec=fields[b"spec"],
        tokens=int(fields[b"tokens"]),
        prompt_ids=fields.get(b"prompt_ids"),
        fingerprint=text(b"fingerprint"),
        geometry=fields.get(b"geometry"),
        exactness=fields[b"exactness"].decode(),
        exactness_reason=text(b"exactness_reason"),
        attempts=int(fields[b"attempts"]),
        durable=int(fields[b"durable"]),
        namespace=namespace.decode(),
        heirs=frozenset(heir.decode() for heir in heirs),
        record={name: fields[name.encode()] for name in RECORDED if name.encode() in fields},
        waited=before_claim(b"queued_at"),
        age=before_claim(b"created_at"),
        traceparent=text(b"traceparent"),
        suspect=b"suspect" in fields,
    )


def _limits(*most: int | None) -> tuple[int, ...]:
    return tuple(-1 if each is None else each for each in most)


def _yield(reply: list[bytes]) -> Yield | None:
    if not reply:
        return None
    kind, *ids = (each.decode() for each in reply)
    return Yield(ids[0], ids[1]) if kind == "yield" else Yield(None, ids[0])
