"""The worker's Lua scripts as typed functions.

Each is one atomic step in Redis. Those that act for an attempt take its `Fence` and do nothing when
the attempt is no longer the current one. The calls block: the worker's own threads make them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import redis
from redis.commands.core import Script

from tenuto_client import Keys, Token, pack_tokens, script_source, ticket_payload

_NAMES = (
    "claim",
    "bind",
    "publish",
    "renew",
    "finish",
    "release",
    "reap",
    "take_back",
    "expire",
    "mend_tickets",
)


@dataclass(frozen=True, slots=True)
class Fence:
    """What an attempt shows with every write: it counts only while these are the job's own."""

    job_id: str
    epoch: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A job as it was when an attempt took it. Absent values were not known yet."""

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


class PublishStatus(StrEnum):
    """What became of a publish."""

    OK = "ok"
    REPLAY = "replay"
    """All of it stood there already."""
    GAP = "gap"
    """Redis has fewer tokens than the attempt thought; nothing was written."""
    FENCED = "fenced"
    """The attempt is over; nothing was written."""


@dataclass(frozen=True, slots=True)
class Published:
    """Answer to a publish: how many tokens stand in the stream, and whether a cancel is wanted."""

    status: PublishStatus
    tokens: int
    cancel: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to a renewal."""

    fenced: bool
    cancel: bool
    deadline_passed: bool


class JobScripts:
    """The scripts over one blocking connection pool and one namespace."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._keys = keys
        self._scripts: dict[str, Script] = {
            name: client.register_script(script_source("tenuto_worker", name)) for name in _NAMES
        }

    def _call(self, name: str, *args: str | bytes | int | float) -> Any:
        payload = ticket_payload(int(time.time() * 1000))
        return self._scripts[name](args=[self._keys.namespace, payload, *args])

    def _word(self, name: str, *args: str | bytes | int | float) -> str:
        return cast(bytes, self._call(name, *args)).decode()

    def claim(
        self,
        model: str,
        *,
        holder: str,
        nonce: str,
        fingerprint: str,
        reach: str,
        lease_ms: int,
        exact_wait_s: float,
        again: bool = False,
    ) -> Claim | None:
        """Take the best queued job of a model, or None when there is none for this worker.

        `again` says that a call with this nonce was made before and its answer lost.
        """
        reply = self._call(
            "claim",
            model,
            holder,
            nonce,
            fingerprint,
            reach,
            lease_ms,
            exact_wait_s,
            int(again),
        )
        return _claim(dict(zip(reply[::2], reply[1::2], strict=True))) if reply else None

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
        return (
            self._word(
                "bind",
                *_fence(fence),
                prompt_ids,
                prompt_tokens,
                fingerprint,
                geometry,
                reach,
                exactness,
                exactness_reason or "",
            )
            == "ok"
        )

    def publish(self, fence: Fence, tokens: Sequence[Token]) -> Published:
        """Append tokens of consecutive indexes to the job's stream."""
        first, last = tokens[0].index, tokens[-1].index
        status, count, cancel = self._call(
            "publish", *_fence(fence), first, last, pack_tokens(tokens)
        )
        return Published(PublishStatus(status.decode()), count, bool(cancel))

    def renew(
        self, fence: Fence, *, holder: str, lease_ms: int, phase: str, done: int, total: int
    ) -> Renewed:
        """Keep the lease of a running attempt and tell how far it is."""
        word, cancel, late = self._call(
            "renew", *_fence(fence), holder, lease_ms, phase, done, total
        )
        return Renewed(word == b"fenced", bool(cancel), bool(late))

    def finish(
        self,
        fence: Fence,
        *,
        state: str,
        finish_reason: str | None = None,
        text: str = "",
        error: str = "",
        exactness: str = "exact",
        exactness_reason: str | None = None,
    ) -> str:
        """End the job. Returns `ok`, `fenced`, or `requeued` when a resume overtook the cancel."""
        return self._word(
            "finish",
            *_fence(fence),
            state,
            finish_reason or "",
            text,
            error,
            exactness,
            exactness_reason or "",
        )

    def release(self, fence: Fence, reason: str, error: str = "") -> str:
        """Hand the job back. Returns `fenced` or the state that it is in now."""
        return self._word("release", *_fence(fence), reason, error)

    def reap(self, job_id: str) -> str:
        """Requeue a running job without a lease. Returns `alive` or the state it is in now."""
        return self._word("reap", job_id)

    def take_back(self, job_id: str, holder: str) -> str:
        """Requeue a running job of this holder's dead predecessor; `foreign` if it is not its."""
        return self._word("take_back", job_id, holder)

    def expire(self, limit: int = 100) -> list[str]:
        """Remove ended jobs whose retention is over; returns their ids."""
        return [job.decode() for job in self._call("expire", limit)]

    def mend_tickets(self, model: str) -> int:
        """Give every queued job a ticket again; returns how many were missing."""
        return int(self._call("mend_tickets", model))


def _fence(fence: Fence) -> tuple[str, int, str]:
    return fence.job_id, fence.epoch, fence.nonce


def _claim(fields: dict[bytes, bytes]) -> Claim:
    def text(name: bytes) -> str | None:
        value = fields.get(name)
        return None if value is None else value.decode()

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
    )
