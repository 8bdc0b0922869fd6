"""A model of the life of a job, driven against the real scripts on a real server.

Two workers, each with every attempt it ever had, act in any order: claim, publish, renew, lose the
lease, reap, take back, make way, release, finish; time passes; a user cancels, resumes and deletes;
Redis loses what was written last. After each move the whole of Redis must be what the model says.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from servers import RealServer
from tenuto_client import Keys, Token, script_source, ticket_payload, unpack_entry
from tenuto_client._records import EndEvent, StateEvent
from tenuto_worker._scripts import Claim, Fence, JobScripts, PublishStatus, claim_call

MODEL = "m"
JOB = "job"
WORKERS = ("w0", "w1")
PAYLOAD = ticket_payload(0)


@dataclass
class Expected:
    """What the job must look like."""

    state: str = "queued"
    epoch: int = 1
    owner: Fence | None = None
    holder: str | None = None
    lease: bool = False
    cancel: bool = False
    moved: bool = False
    stalls: int = 0
    suspect: bool = False
    new: int = 0
    crashes: int = 0
    preemptions: int = 0
    tokens: list[int] = field(default_factory=list)
    events: list[tuple[int, str, int]] = field(default_factory=list)

    def event(self) -> None:
        self.events.append((len(self.tokens), self.state, self.epoch))

    def queue(self) -> None:
        self.state, self.owner, self.lease = "queued", None, False
        self.epoch += 1
        self.event()

    def end(self, state: str) -> None:
        self.state, self.owner, self.lease, self.cancel = state, None, False, False
        self.event()

    def crash(self) -> None:
        self.suspect, self.new = True, 0
        self.crashes += 1

    def die(self) -> None:
        if self.cancel:
            self.end("cancelled")
        elif self.moved:
            self.queue()
        else:
            self.stalls += 1
            if self.stalls >= 3:
                self.end("failed")
            else:
                self.queue()


class Lives(RuleBasedStateMachine):
    """Every order of moves keeps the invariants."""

    client: Any  # redis-py types every answer as maybe awaitable

    @initialize()
    def submit(self) -> None:
        self.client.flushall()
        self.keys = Keys("x:")
        self.scripts = JobScripts(self.client, self.keys)
        self.client.hset(self.keys.models(), MODEL, b"")
        self.fences: list[Fence] = []
        self.nonces = 0
        self.job: Expected | None = Expected()
        self.job.event()
        args = [JOB, MODEL, "default", 0, b"spec", "3600", "", "", "", 100, b""]
        assert self._run("submit", *args) == [b"created", JOB.encode()]

    def _run(self, name: str, *args: Any) -> Any:
        script = self.client.register_script(script_source("tenuto_client", name))
        return script(args=[self.keys.namespace, PAYLOAD, *args])

    def _current(self, fence: Fence) -> bool:
        return self.job is not None and self.job.owner == fence

    def _fence(self, data: st.DataObject) -> Fence:
        if data.draw(st.booleans()):
            return self.fences[-1]
        return data.draw(st.sampled_from(self.fences))

    def _claim(self, worker: str, nonce: str, *, again: bool, alone: bool) -> Claim | None:
        call = claim_call(
            MODEL,
            holder=worker,
            nonce=nonce,
            fingerprint="f",
            reach="r",
            lease_ms=600_000,
            exact_wait_s=30,
            again=again,
            alone=alone,
        )
        answer = self.scripts.run(call)
        return answer if isinstance(answer, Claim) else None

    @rule(worker=st.sampled_from(WORKERS), lost_answer=st.booleans(), alone=st.booleans())
    def claim(self, worker: str, lost_answer: bool, alone: bool) -> None:
        self.nonces += 1
        claim = self._claim(worker, str(self.nonces), again=False, alone=alone)
        if lost_answer:
            again = self._claim(worker, str(self.nonces), again=True, alone=alone)
            assert again == claim
        if self.job is None or self.job.state != "queued" or (self.job.suspect and not alone):
            assert claim is None
            return
        assert claim is not None
        assert claim.suspect == self.job.suspect
        assert claim.tokens == len(self.job.tokens)
        self.job.state, self.job.owner, self.job.holder = "running", claim.fence, worker
        self.job.lease, self.job.moved = True, False
        self.job.event()
        self.fences.append(claim.fence)

    @precondition(lambda self: self.fences)
    @rule(
        data=st.data(),
        skip=st.sampled_from([0, 0, 0, -2, -1, 1]),
        count=st.sampled_from([1, 2, 3, 40]),
    )
    def publish(self, data: st.DataObject, skip: int, count: int) -> None:
        fence = self._fence(data)
        have = len(self.job.tokens) if self.job else 0
        first = max(1, have + 1 + skip)
        tokens = [Token(1000 + i, i, "x", -1.0) for i in range(first, first + count)]
        answer = self.scripts.publish(fence, tokens)
        if not self._current(fence):
            assert answer.status is PublishStatus.FENCED
            return
        assert self.job is not None
        assert answer.cancel == self.job.cancel
        got_on = answer.status is PublishStatus.OK
        self._trust(self.job, count if got_on else 0, apart=answer.apart)
        if first + count - 1 <= have:
            assert answer.status is PublishStatus.REPLAY
        elif first != have + 1:
            assert answer.status is PublishStatus.GAP
        else:
            assert answer.status is PublishStatus.OK
            self.job.tokens += range(have + 1, first + count)
            self.job.moved, self.job.stalls = True, 0

    def _trust(self, job: Expected, new: int, *, apart: bool) -> None:
        if not job.suspect:
            assert not apart
            return
        job.new += new
        if job.new == 0:
            assert apart
        elif job.new >= (32 if job.crashes == 1 else 128):
            assert not apart
        # In between time decides.
        job.suspect = apart

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), done=st.integers(0, 3))
    def renew(self, data: st.DataObject, done: int) -> None:
        fence = self._fence(data)
        answer = self.scripts.renew(
            fence, holder="w0", lease_ms=600_000, phase="decode", done=done, total=9
        )
        assert answer.fenced == (not self._current(fence))
        if self._current(fence):
            assert self.job is not None
            assert answer.cancel == self.job.cancel
            self.job.lease = True

    @rule()
    def lease_runs_out(self) -> None:
        self.client.delete(self.keys.lease(JOB))
        if self.job:
            self.job.lease = False

    @rule()
    def reap(self) -> None:
        self.scripts.reap(JOB)
        if self.job and self.job.state == "running" and not self.job.lease:
            if not self.job.moved:
                self.job.crash()
            self.job.die()

    @rule(worker=st.sampled_from(WORKERS), crashed=st.booleans())
    def take_back(self, worker: str, crashed: bool) -> None:
        self.scripts.take_back(JOB, worker, crashed=crashed)
        if self.job and self.job.state == "running" and self.job.holder == worker:
            if crashed:
                self.job.crash()
            self.job.die()

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), reason=st.sampled_from(["drain", "preempt", "error"]))
    def release(self, data: st.DataObject, reason: str) -> None:
        fence = self._fence(data)
        answer = self.scripts.release(fence, reason, "boom")
        if not self._current(fence):
            assert answer == "fenced"
            return
        assert self.job is not None
        if reason == "error":
            self.job.die()
        elif self.job.cancel:
            self.job.end("cancelled")
        else:
            self.job.preemptions += reason == "preempt"
            self.job.queue()
        assert answer == self.job.state

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), state=st.sampled_from(["completed", "failed", "cancelled"]))
    def finish(self, data: st.DataObject, state: str) -> None:
        fence = self._fence(data)
        answer = self.scripts.finish(fence, state=state)
        if not self._current(fence):
            assert answer == "fenced"
            return
        assert self.job is not None
        if state == "cancelled" and not self.job.cancel:
            assert answer == "requeued"
            self.job.queue()
        else:
            self.job.end(state)
            if state == "completed":
                self.job.suspect, self.job.crashes = False, 0

    @rule()
    def cancel(self) -> None:
        answer = self._run("cancel", JOB)
        if self.job is None:
            assert answer == b"gone"
        elif self.job.state == "queued":
            self.job.end("cancelled")
        elif self.job.state == "running":
            self.job.cancel = True

    @rule()
    def resume(self) -> None:
        answer = self._run("resume", JOB)
        if self.job is None:
            assert answer == b"gone"
        elif self.job.state in ("failed", "cancelled"):
            self.job.stalls = 0
            self.job.queue()
        elif self.job.state != "completed":
            self.job.cancel = False

    @precondition(lambda self: len(self.fences) > 3)
    @rule()
    def delete(self) -> None:
        self._run("delete", JOB)
        self.job = None

    @rule()
    def remember(self) -> None:
        keys = self.client.keys()
        self.snapshot = {key: self.client.dump(key) for key in keys}, deepcopy(self.job)

    @precondition(lambda self: hasattr(self, "snapshot"))
    @rule()
    def redis_loses_its_tail(self) -> None:
        """As after a failover: everything is as it was, and epochs are given out a second time."""
        dumped, job = self.snapshot
        self.client.flushall()
        for key, value in dumped.items():
            self.client.restore(key, 0, value)
        self.job = deepcopy(job)

    @rule()
    def mend_tickets(self) -> None:
        self.scripts.mend_tickets(MODEL)

    @invariant()
    def redis_is_what_the_model_says(self) -> None:
        if not hasattr(self, "keys"):
            return
        if self.job is None:
            left = {k.decode() for k in self.client.scan_iter() if JOB.encode() in k}
            assert left == set()
            assert self.client.zcard(self.keys.jobs()) == 0
            assert not self.client.exists(self.keys.usage(), self.keys.queued(MODEL))
            return
        self._check_hash(self.job)
        self._check_queue(self.job)
        self._check_stream(self.job)

    def _check_hash(self, job: Expected) -> None:
        fields = self.client.hgetall(self.keys.job(JOB))
        assert fields[b"state"].decode() == job.state
        assert int(fields[b"epoch"]) == job.epoch
        assert int(fields[b"tokens"]) == len(job.tokens)
        assert (b"cancel" in fields) == job.cancel
        assert int(fields[b"stalls"]) == job.stalls
        assert (b"nonce" in fields) == (job.state == "running")
        assert (b"suspect" in fields) == job.suspect
        assert int(fields.get(b"preemptions", 0)) == job.preemptions
        assert self.client.hget(self.keys.usage(), "bytes") == fields[b"held"]
        over = job.state in ("completed", "failed", "cancelled")
        assert (b"finished_at" in fields) == over
        assert (self.client.zscore(self.keys.expiry(), JOB) is not None) == over

    def _check_queue(self, job: Expected) -> None:
        queued = job.state == "queued"
        assert self.client.zcard(self.keys.lane(MODEL, "0:default")) == int(queued)
        assert self.client.zcard(self.keys.queue(MODEL)) == int(queued)
        assert self.client.exists(self.keys.lease(JOB)) == int(job.lease)
        assert self.client.zcard(self.keys.running()) == int(job.state == "running")
        counts = {b"*": b"1", b"default": b"1"} if queued else {}
        assert self.client.hgetall(self.keys.queued(MODEL)) == counts
        apart = queued and job.suspect
        assert self.client.zcard(self.keys.suspects(MODEL)) == int(apart)
        tickets = self.client.zrange(self.keys.tickets(MODEL), 0, -1)
        if queued:
            assert tickets
        for ticket in tickets:
            assert self.client.exists(self.keys.ticket_payload(ticket.decode()))

    def _check_stream(self, job: Expected) -> None:
        tokens: list[int] = []
        events: list[tuple[int, str, int]] = []
        for entry_id, fields in self.client.xrange(self.keys.stream(JOB)):
            entry = unpack_entry(entry_id.decode(), fields)
            if isinstance(entry, list):
                tokens += [t.index for t in entry]
                assert entry_id.decode() == f"{tokens[-1]}-0"
            else:
                assert isinstance(entry, StateEvent | EndEvent)
                since = sum(index == entry.index for index, _, _ in events)
                assert entry_id.decode() == f"{len(tokens)}-{since + 1}"
                events.append((entry.index, entry.state.value, entry.epoch))
        assert tokens == job.tokens == list(range(1, len(tokens) + 1))
        assert events == job.events


@pytest.fixture(scope="module")
def machine() -> Any:
    with RealServer(appendfsync="no") as server, server.client() as client:
        Lives.client = client
        yield Lives


@pytest.mark.timeout(300)
def test_every_order_of_moves_keeps_the_invariants(machine: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
