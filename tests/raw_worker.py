"""A worker without an engine, for the client's tests: it says what it is told to.

It uses the worker's scripts, read from the repository, so that the client's tests run where only
the client is installed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import redis

from tenuto_client import (
    Keys,
    ModelInfo,
    Token,
    WorkerInfo,
    pack_announcement,
    pack_tokens,
    ticket_payload,
)
from tenuto_client._scripts import assemble

_LUA = Path(__file__).parents[1] / "worker" / "tenuto_worker" / "lua"
_T = TypeVar("_T")


@cache
def _source(name: str) -> str:
    return assemble((_LUA / f"{name}.lua").read_text("utf-8"))


def poll(look: Callable[[], _T | None], *, within: float = 20) -> _T:
    """The first true thing that `look` returns."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
    return found


def story(first: int, last: int) -> list[Token]:
    """Tokens first..last: the same ones for the same indexes."""
    return [
        Token(1000 + i, i, f" w{i}", -i / 8, ((1000 + i, -i / 8), (7, -9.5)))
        for i in range(first, last + 1)
    ]


class Attempt:
    """A claimed job."""

    def __init__(self, worker: RawWorker, job_id: str, epoch: int, nonce: str) -> None:
        self.worker = worker
        self.job_id = job_id
        self.epoch = epoch
        self.nonce = nonce

    def call(self, script: str, *args: Any) -> Any:
        """Run a script of the worker with this attempt's fence."""
        return self.worker.run(script, self.job_id, self.epoch, self.nonce, *args)

    def publish(self, first: int, last: int, durable: int = 0) -> Any:
        """Publish the story's tokens first..last as one entry."""
        return self.call("publish", durable, first, last, pack_tokens(story(first, last)))

    def finish(
        self,
        state: str = "completed",
        reason: str = "stop",
        text: str = "",
        error: str = "",
        stats: str = "",
    ) -> None:
        """End the job."""
        reply = self.call("finish", 0, state, reason, text, error, "exact", "", 0, stats)
        assert reply[0] in (b"ok", b"requeued"), reply

    def wants_cancel(self) -> bool:
        """Renew, and say whether a cancel is wanted."""
        return bool(self.renew("decode", 0, 0)[1])

    def renew(self, phase: str, done: int, total: int, unsaved: str = "") -> Any:
        """Keep the lease and tell the progress."""
        return self.call("renew", 0, self.worker.name, 10_000, phase, done, total, unsaved)


class RawWorker:
    """Announces a model, claims its jobs and publishes what the test says."""

    def __init__(self, client: redis.Redis, namespace: str, model: str = "m") -> None:
        # Any: redis-py's own types change from version to version.
        self._execute: Any = client.execute_command
        self._keys = Keys(namespace)
        self.name = "raw-1"
        self.model = model

    def announce(self, *, context_length: int | None = None, vocab_size: int | None = None) -> None:
        """Say which model there is, and that this worker lives."""
        now = float(self._execute("TIME")[0])
        model = ModelInfo(self.model, context_length, vocab_size, "f" * 16, now)
        worker = WorkerInfo(self.name, (self.model,), 1, 0, started_at=now, seen_at=now)
        self._execute("HSET", self._keys.models(), self.model, pack_announcement(model))
        self._execute("HSET", self._keys.workers(), self.name, pack_announcement(worker))

    def run(self, script: str, *args: Any) -> Any:
        """Run one of the worker's scripts."""
        payload = ticket_payload(int(time.time() * 1000))
        return self._execute("EVAL", _source(script), 0, self._keys.namespace, payload, *args)

    def write(self, job_id: str, field: str, value: str) -> None:
        """Put something into a job's hash."""
        self._execute("HSET", self._keys.job(job_id), field, value)

    def try_claim(self) -> Attempt | None:
        """Claim the best queued job, if there is one."""
        nonce = secrets.token_hex(4)
        answer = self.run("claim", self.model, self.name, nonce, "f", "reach", 10_000, 0, 0)
        if not answer:
            return None
        *_, fields = answer
        job = dict(zip(fields[::2], fields[1::2], strict=True))
        attempt = Attempt(self, job[b"id"].decode(), int(job[b"epoch"]), nonce)
        attempt.call("bind", b"\x93\x01\x02\x03", 3, "f", b"g", "reach", "exact", "")
        return attempt

    def claim(self) -> Attempt:
        """Claim the best queued job; there will be one."""
        return poll(self.try_claim)

    def tell(self, texts: Sequence[str]) -> None:
        """Claim a job and run it to its end with these texts."""
        attempt = self.claim()
        tokens = [Token(i, i, text, -0.5) for i, text in enumerate(texts, 1)]
        for token in tokens:
            attempt.call("publish", 0, token.index, token.index, pack_tokens([token]))
        attempt.finish()
