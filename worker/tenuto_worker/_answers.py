"""What the worker's Lua scripts answer, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ._meta import RECORDED


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
class Left:
    """A queued job that this worker has to leave to others for so many `seconds` more.

    `why` is `geometry`, or `checkpoints` where only those are out of reach. No time is set (0
    seconds) for `limits` of this worker, an `adapter` or `memory` that it has not, and `suspect`:
    the job has to run apart, and this worker runs others.
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


def read_word(reply: bytes) -> str:
    """A word."""
    return reply.decode()


def _shown(text: bytes) -> str:
    """What somebody else may have written: it may be anything, and is only shown or compared."""
    return text.decode(errors="backslashreplace")


def read_ids(reply: list[bytes]) -> list[str]:
    """Ids of jobs."""
    return [_shown(each) for each in reply]


def read_swept(reply: list[bytes]) -> list[Swept]:
    """Answer of `sweep.lua`."""
    return [Swept(*map(_shown, each)) for each in zip(reply[::2], reply[1::2], strict=True)]


def read_head(reply: list[Any]) -> Head | None:
    """Answer of `head.lua`."""
    if not reply:
        return None
    job, priority, tokens, waited, provided = reply
    return Head(job.decode(), priority, tokens, float(waited), bool(provided))


def read_published(reply: list[Any]) -> Published:
    """Answer of `publish.lua`."""
    status, count, cancel, apart = reply
    return Published(PublishStatus(status.decode()), count, bool(cancel), bool(apart))


def read_finished(reply: list[Any]) -> Finished:
    """Answer of `finish.lua`."""
    status, count = reply
    return Finished(status.decode(), count)


def read_renewed(reply: list[Any]) -> Renewed:
    """Answer of `renew.lua`."""
    word, cancel, late, over = reply
    return Renewed(word == b"fenced", bool(cancel), bool(late), bool(over))


def read_depth(reply: list[Any]) -> Depth:
    """Answer of `depth.lua`."""
    jobs, oldest = reply
    return Depth(jobs, float(oldest))


def read_reaped(reply: list[bytes]) -> Reaped:
    """Answer of `reap.lua`."""
    state, worker, why = map(_shown, reply)
    return Reaped(state, worker, why)


def read_claim(reply: list[Any]) -> Taken | list[Left]:
    """Answer of `claim.lua`."""
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


def read_yield(reply: list[bytes]) -> Yield | None:
    """Answer of `preempt.lua`."""
    if not reply:
        return None
    kind, *ids = (each.decode() for each in reply)
    return Yield(ids[0], ids[1]) if kind == "yield" else Yield(None, ids[0])
