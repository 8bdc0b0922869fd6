"""The worker's Lua scripts as typed calls: what each is given, and what its answer says.

Each is one atomic step in Redis. Those that act for an attempt take its `Fence` and do nothing when
the attempt is no longer the current one. `JobScripts` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from tenuto_client import Token, pack_tokens

from ._meta import RECORDED

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
        preemptions: how often it made way before.
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
    priority: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Aside:
    """A job of the queue with which no step can be taken, its state now (`gone` where only entries
    of it were there), and what is wrong with which field."""

    job_id: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A job that was taken, and that cannot be read: `why` names the field."""

    fence: Fence
    why: str


Taken = Claim | Unreadable | Aside
"""What a claim came upon, where there was something."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What an attempt goes by: the prompt's ids, packed and counted, the geometry, packed, with its
    fingerprint, and the id of the data dir where its checkpoints are (`reach`)."""

    prompt_ids: bytes
    prompt_tokens: int
    fingerprint: str
    geometry: bytes
    reach: str


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


@dataclass(frozen=True, slots=True)
class Head:
    """The queued job that comes first of those that a worker may take, had it the memory.

    Attributes:
        tokens: of its prompt and longest answer; without the prompt while that was not counted.
        waited: seconds in the queue.
        provided: something makes way for it already.
    """

    job_id: str
    priority: int
    tokens: int
    waited: float
    provided: bool


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
class Finished:
    """Answer to a finish: `ok`, `fenced`, `requeued` when a resume overtook the cancel, or `gap`
    when tokens were lost before the end; and how many tokens stand in the stream."""

    status: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to a renewal."""

    fenced: bool
    cancel: bool
    deadline_passed: bool
    runtime_over: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """Answer to a reap: `alive` or the state of the job, the worker that has or had it, and what
    was wrong with the job, if it was put aside."""

    state: str
    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Swept:
    """A job that ended in the queue, as its time was over, or of what was wrong with it."""

    job_id: str
    why: str


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
) -> Call[Taken | list[Left]]:
    """Take the best queued job of a model. Where there is none for this worker, the answer is
    those that it has to leave to others. What is no job any more is put aside, one a call.

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
    room_alone: int | None = None,
    may_empty: bool = True,
) -> Call[Yield | None]:
    """Which attempt of this worker is to make way for a job that waits, if any is.

    Args:
        patience_s: for how long a job waits before anything makes way for it.
        hold_s: for how long an attempt goes on at least; doubled with each time that its job
            made way before.
        max_prompt, max_tokens, room, room_alone: as of a claim.
        may_empty: whether this worker would take a suspect of the model, if it ran nothing.
    """
    own = (holder, fingerprint, reach, exact_wait_s)
    limits = _limits(max_prompt, max_tokens, room)
    apart = (*_limits(room_alone), int(may_empty))
    return Call("preempt", (model, *own, *limits, patience_s, hold_s, *apart), _yield)


def suspect_call(
    model: str,
    *,
    fingerprint: str,
    reach: str,
    exact_wait_s: float,
    max_prompt: int | None = None,
    max_tokens: int | None = None,
    room_alone: int | None = None,
) -> Call[str]:
    """The first suspect that this worker may take when it runs nothing, or ""; the terms as of a
    claim."""
    own = (fingerprint, reach, exact_wait_s)
    return Call("suspect", (model, *own, *_limits(max_prompt, max_tokens, room_alone)), _word)


def head_call(
    model: str,
    *,
    fingerprint: str,
    reach: str,
    exact_wait_s: float,
    max_prompt: int | None = None,
    max_tokens: int | None = None,
    room_alone: int | None = None,
) -> Call[Head | None]:
    """The best queued job that this worker may take, had it the memory; the terms as of a claim."""
    own = (fingerprint, reach, exact_wait_s)
    return Call("head", (model, *own, *_limits(max_prompt, max_tokens, room_alone)), _head)


def provide_call(job_id: str) -> Call[bool]:
    """Note that something makes way for a queued job; False where that is not needed any more."""
    return Call("provide", (job_id,), bool)


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


def bind_call(fence: Fence, bound: Bound, exactness: str, why: str | None) -> Call[str]:
    """Store what an attempt goes by, and the job's label. Answers `ok` or `fenced`."""
    return Call("bind", (*_fence(fence), *astuple(bound), exactness, why or ""), _word)


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
) -> Call[Finished]:
    """End the job, unless Redis has fewer than these `tokens`, which it acknowledged before."""
    end = (state, finish_reason or "", text, error)
    label = (exactness, exactness_reason or "")
    return Call("finish", (*_fence(fence), durable, *end, *label, tokens), _finished)


def release_call(fence: Fence, reason: str, error: str = "", *, durable: int) -> Call[str]:
    """Hand the job back. Answers `fenced` or the state that it is in now."""
    return Call("release", (*_fence(fence), durable, reason, error), _word)


def reap_call(job_id: str | bytes) -> Call[Reaped]:
    """Requeue a running job without a lease; bytes are an id that is none."""
    return Call("reap", (job_id,), _reaped)


def take_back_call(job_id: str, holder: str, *, crashed: bool = False) -> Call[str]:
    """Requeue a running job of this holder's dead predecessor; `foreign` if it is not its.

    `crashed` says that its child died by itself, so that each of its jobs may be the cause; else
    that is so of those that had got nowhere.
    """
    return Call("take_back", (job_id, holder, int(crashed)), _word)


def depth_call(model: str) -> Call[Depth]:
    """Look at the queue of a model."""
    return Call("depth", (model,), _depth)


def expire_call(limit: int = 100) -> Call[list[str]]:
    """Remove ended jobs whose retention is over; answers their ids."""
    return Call("expire", (limit,), _ids)


def sweep_call(limit: int = 100) -> Call[list[Swept]]:
    """End queued jobs whose deadline or queue_ttl has passed."""
    return Call("sweep", (limit,), _swept)


def recover_call(*arguments: Argument) -> Call[str]:
    """Put a job back; what `recover.lua` says. Answers `recovered`, or `there` if it is."""
    return Call("recover", arguments, _word)


def mend_tickets_call(model: str) -> Call[int]:
    """Add tickets that are missing, up to 250; answers how many were added."""
    return Call("mend_tickets", (model,), int)


def _fence(fence: Fence) -> tuple[str, int, str]:
    return fence.job_id, fence.epoch, fence.nonce


def _word(reply: bytes) -> str:
    return reply.decode()


def _shown(text: bytes) -> str:
    """What somebody else may have written: it may be anything, and is only shown or compared."""
    return text.decode(errors="backslashreplace")


def _ids(reply: list[bytes]) -> list[str]:
    return [_shown(each) for each in reply]


def _swept(reply: list[bytes]) -> list[Swept]:
    return [Swept(*map(_shown, each)) for each in zip(reply[::2], reply[1::2], strict=True)]


def _head(reply: list[Any]) -> Head | None:
    if not reply:
        return None
    job, priority, tokens, waited, provided = reply
    return Head(job.decode(), priority, tokens, float(waited), bool(provided))


def _published(reply: list[Any]) -> Published:
    status, count, cancel, apart = reply
    return Published(PublishStatus(status.decode()), count, bool(cancel), bool(apart))


def _finished(reply: list[Any]) -> Finished:
    status, count = reply
    return Finished(status.decode(), count)


def _renewed(reply: list[Any]) -> Renewed:
    word, cancel, late, over = reply
    return Renewed(word == b"fenced", bool(cancel), bool(late), bool(over))


def _depth(reply: list[Any]) -> Depth:
    jobs, oldest = reply
    return Depth(jobs, float(oldest))


def _reaped(reply: list[bytes]) -> Reaped:
    state, worker, why = map(_shown, reply)
    return Reaped(state, worker, why)


def _claim(reply: list[Any]) -> Taken | list[Left]:
    word, *rest = reply or [b"left"]
    if word == b"left":
        triples = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        return [Left(_shown(job), float(wait), why.decode()) for job, wait, why in triples]
    if word == b"aside":
        return Aside(*map(_shown, rest))
    namespace, heirs, values = rest
    fields = dict(zip(values[::2], values[1::2], strict=True))
    # What the fence is made of, and all numbers, the script has looked at.
    fence = Fence(fields[b"id"].decode(), int(fields[b"epoch"]), fields[b"nonce"].decode())

    def needed(name: str) -> bytes:
        value: bytes | None = fields.get(name.encode())
        if value is None:
            raise _BadField(f"{name}: is missing in the job's hash")
        return value

    def text(name: str) -> str | None:
        try:
            return needed(name).decode() if name.encode() in fields else None
        except UnicodeDecodeError:
            raise _BadField(f"{name}: is not UTF-8 in the job's hash") from None

    def before_claim(name: bytes) -> float:
        return max(0.0, float(fields[b"claimed_at"]) - float(fields[name]))

    try:
        for name in ("spec", "exactness", "model", "metadata", "v"):
            needed(name)
        return Claim(
            fence=fence,
            model=text("model") or "",
            spec=fields[b"spec"],
            tokens=int(fields[b"tokens"]),
            prompt_ids=fields.get(b"prompt_ids"),
            fingerprint=text("fingerprint"),
            geometry=fields.get(b"geometry"),
            exactness=text("exactness") or "",
            exactness_reason=text("exactness_reason"),
            attempts=int(fields[b"attempts"]),
            durable=int(fields[b"durable"]),
            namespace=_shown(namespace),
            heirs=frozenset(map(_shown, heirs)),
            record={name: fields[name.encode()] for name in RECORDED if name.encode() in fields},
            waited=before_claim(b"queued_at"),
            age=before_claim(b"created_at"),
            traceparent=text("traceparent"),
            suspect=b"suspect" in fields,
            priority=int(fields[b"priority"]),
            preemptions=int(fields.get(b"preemptions", 0)),
        )
    except _BadField as error:
        return Unreadable(fence, str(error))


class _BadField(Exception):
    """A field of a job's hash cannot be read; the message names it."""


def _limits(*most: int | None) -> tuple[int, ...]:
    return tuple(-1 if each is None else each for each in most)


def _yield(reply: list[bytes]) -> Yield | None:
    if not reply:
        return None
    kind, *ids = (each.decode() for each in reply)
    return Yield(ids[0], ids[1]) if kind == "yield" else Yield(None, ids[0])
