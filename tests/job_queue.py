"""A queue in Redis for tests of the worker: jobs by the client's scripts, and what they became."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import redis

from moves import Moves
from tenuto_client import (
    JobSpec,
    Keys,
    ModelInfo,
    Token,
    pack_announcement,
    pack_spec,
    script_source,
    ticket_payload,
    unpack_entry,
)
from tenuto_client._records import EndEvent, StateEvent
from tenuto_worker._answers import Claim, Left
from tenuto_worker._calls import claim_call

MODEL = "tiny"
HOLDER = "host-dir-0"
DEFAULTS: dict[str, Any] = {
    "prompt": "Tell me.",
    "max_tokens": 20,
    "seed": 7,
    "ignore_eos": True,
}


class JobQueue:
    """Submits, cancels and resumes jobs, claims them, and reads what stands in Redis."""

    def __init__(self, url: str, namespace: str, model: str = MODEL) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=10)
        self.keys = Keys(namespace)
        self.model = model
        self.scripts = Moves(self.client, self.keys)
        info = ModelInfo(model, 4096, 400, "f", 0.0)
        self.client.hset(self.keys.models(), mapping={model: pack_announcement(info)})

    def close(self) -> None:
        self.client.close()

    def _run(self, script: str, *arguments: Any) -> Any:
        source = script_source("tenuto_client", script)
        fixed = (self.keys.namespace, ticket_payload(0))
        execute: Any = self.client.execute_command
        return execute("EVAL", source, 0, *fixed, *arguments)

    def submit(
        self,
        *,
        tenant: str = "default",
        priority: int = 0,
        deadline: str = "",
        retention: str = "100",
        spec: bytes | None = None,
        hash_fields: Mapping[str, str | float] | None = None,
        **options: Any,
    ) -> str:
        """A queued job; its id."""
        job_id = secrets.token_hex(8)
        options = {**DEFAULTS, **options}
        in_hash = {"adapter": options["adapter"]} if options.get("adapter") else {}
        in_hash |= hash_fields or {}
        packed = pack_spec(JobSpec(self.model, **options)) if spec is None else spec
        reply = self._run(
            "submit",
            *(job_id, self.model, tenant, priority, packed, retention, deadline, "", "hash"),
            *(options["max_tokens"], "{}", 0),
            *(part for pair in in_hash.items() for part in pair),
        )
        assert reply[0] == b"created", reply
        return job_id

    def cancel(self, job_id: str) -> str:
        return str(self._run("cancel", job_id).decode())

    def resume(self, job_id: str) -> str:
        return str(self._run("resume", job_id).decode())

    def delete(self, job_id: str) -> str:
        return str(self._run("delete", job_id).decode())

    def claim(self, **terms: Any) -> Claim | None:
        """Claim the best job."""
        answer = self.scripts.run(claim_call(self.model, **(_terms() | terms)))
        return answer if isinstance(answer, Claim) else None

    def leave(self, **terms: Any) -> list[Left]:
        """Claim where there is nothing to claim: the jobs that are left to others."""
        asked: dict[str, Any] = {"model": self.model, "again": False} | _terms() | terms
        call = claim_call(**asked)
        left = self.scripts.run(call)
        assert isinstance(left, list)
        return left

    def take(self, **terms: Any) -> Claim:
        """Claim the best job; there must be one."""
        claim = self.claim(**terms)
        assert claim is not None
        return claim

    def job(self, job_id: str) -> dict[str, str]:
        """The job's hash, what is text of it."""
        found: Any = self.client.hgetall(self.keys.job(job_id))
        return {
            name.decode(): value.decode(errors="replace")
            for name, value in found.items()
            if name not in (b"spec", b"errors", b"prompt_ids", b"geometry")
        }

    def state(self, job_id: str) -> str:
        return self.job(job_id).get("state", "gone")

    def stream(self, job_id: str) -> tuple[list[Token], list[StateEvent | EndEvent]]:
        """All tokens and all events of a job."""
        tokens: list[Token] = []
        events: list[StateEvent | EndEvent] = []
        found: Any = self.client.xrange(self.keys.stream(job_id))
        for entry_id, fields in found:
            entry = unpack_entry(entry_id.decode(), fields)
            if isinstance(entry, list):
                tokens += entry
            else:
                events.append(entry)
        return tokens, events

    def tokens(self, job_id: str) -> list[Token]:
        return self.stream(job_id)[0]

    def field(self, job_id: str, name: str) -> str | None:
        """One field of the job's hash."""
        return self.job(job_id).get(name)

    def backdate(self, job_id: str, name: str, seconds: float) -> None:
        """Have a time of the job be so much earlier."""
        found: Any = self.client.hget(self.keys.job(job_id), name)
        self.client.hset(self.keys.job(job_id), name, f"{float(found) - seconds:.3f}")

    def lose_lease(self, job_id: str) -> None:
        """As if it had run out."""
        self.client.delete(self.keys.lease(job_id))

    def tickets(self) -> list[str]:
        found: Any = self.client.zrange(self.keys.tickets(self.model), 0, -1)
        return [ticket.decode() for ticket in found]


def _terms() -> dict[str, Any]:
    return {
        "holder": HOLDER,
        "nonce": secrets.token_hex(4),
        "fingerprint": "f",
        "reach": "dir",
        "lease_ms": 60_000,
        "exact_wait_s": 30.0,
        "alone": True,
    }


def story(first: int, last: int) -> list[Token]:
    """Tokens first..last, the same for the same indexes."""
    return [Token(100 + i, i, f" w{i}", -i / 8) for i in range(first, last + 1)]
