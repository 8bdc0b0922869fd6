"""A model of the life of a job, driven against the real scripts on a real server.

Two workers, each with every attempt it ever had, act in any order: claim, publish, renew, lose the
lease, reap, take back, make way, release, finish; time passes, and with it that of the job, in the
queue, running, and altogether; a user cancels, resumes and deletes; Redis loses what was written
last. After each move the whole of Redis must be what the model says.
"""

from __future__ import annotations

from copy import deepcopy
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

from expected_job import OVER, Expected
from moves import Moves
from servers import RealServer
from still_clock import MARGIN, STEP, StillClock
from tenuto_client import Keys, Token, script_source, ticket_payload, unpack_entry
from tenuto_client._records import EndEvent, StateEvent
from tenuto_worker._answers import Claim, Fence, PublishStatus
from tenuto_worker._calls import claim_call

MODEL = "m"
JOB = "job"
WORKERS = ("w0", "w1")
PAYLOAD = ticket_payload(0)
RETENTION = 100
counts = st.sampled_from([1, 3, 9, 40, 130, 260])


class Lives(RuleBasedStateMachine):
    """Every order of moves keeps the invariants."""

    client: Any  # redis-py types every answer as maybe awaitable

    @initialize(
        deadline=st.sampled_from([None, None, None, 10, 70]),
        queue_ttl=st.sampled_from([None, 5, 40]),
        max_runtime=st.sampled_from([None, None, 4, 20, 100]),
    )
    def submit(self, deadline: int | None, queue_ttl: int | None, max_runtime: int | None) -> None:
        self.client.flushall()
        self.keys = Keys("x:")
        self.clock = StillClock(self.client, self.keys)
        self.scripts = Moves(self.client, self.keys)
        self.client.hset(self.keys.models(), MODEL, b"")
        self.fences: list[Fence] = []
        self.nonces = 0
        self.job: Expected | None = Expected(deadline, queue_ttl, max_runtime)
        self.job.event()
        until = "" if deadline is None else f"{self.clock.in_redis(deadline):.3f}"
        args = [JOB, MODEL, "default", 0, b"spec", RETENTION, until, "", "", 100, b"", 0]
        for name, value in (("queue_ttl", queue_ttl), ("max_runtime", max_runtime)):
            args += [] if value is None else [name, value]
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
        job, at = self.job, self.clock.at
        if job is None or job.end_if_late(at) or job.state != "queued":
            assert claim is None
            return
        if job.suspect and not alone:
            assert claim is None
            return
        assert claim is not None
        assert claim.suspect == job.suspect
        assert claim.tokens == len(job.tokens)
        job.claim(claim.fence, worker, at)
        self.fences.append(claim.fence)

    @precondition(lambda self: self.job is not None and self.job.state != "completed")
    @rule(
        how=st.sampled_from(["crash", "drain"]),
        counts=st.tuples(counts, counts),
        steps=st.sampled_from([0, 1, 1, 4]),
    )
    def next_attempt(self, how: str, counts: tuple[int, int], steps: int) -> None:
        """The attempt goes, if there is one, and another one gets on for a while."""
        assert self.job is not None
        if self.job.owner is None:
            self.resume()
        elif how == "crash":
            self.take_back(str(self.job.holder), crashed=True)
        else:
            self._release(self.job.owner, how)
        self.claim(WORKERS[0], lost_answer=False, alone=True)
        if not self.fences:
            return
        self._publish(self.fences[-1], 0, counts[0])
        self.clock.go_on(steps * STEP)
        self._renew(self.fences[-1], "decode", 0)
        self._publish(self.fences[-1], 0, counts[1])

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), skip=st.sampled_from([0, 0, 0, -2, -1, 1]), count=counts)
    def publish(self, data: st.DataObject, skip: int, count: int) -> None:
        self._publish(self._fence(data), skip, count)

    def _publish(self, fence: Fence, skip: int, count: int) -> None:
        have = len(self.job.tokens) if self.job else 0
        first = max(1, have + 1 + skip)
        tokens = [Token(1000 + i, i, "x", -1.0) for i in range(first, first + count)]
        answer = self.scripts.publish(fence, tokens)
        if not self._current(fence):
            assert answer.status is PublishStatus.FENCED
            return
        assert self.job is not None
        assert answer.cancel == self.job.cancel
        if first + count - 1 <= have:
            assert answer.status is PublishStatus.REPLAY
        elif first != have + 1:
            assert answer.status is PublishStatus.GAP
        else:
            assert answer.status is PublishStatus.OK
            self.job.tokens += range(have + 1, first + count)
            self.job.progress()
        assert answer.apart == self.job.trust(self.clock.at)

    @precondition(lambda self: self.fences)
    @rule(
        data=st.data(),
        phase=st.sampled_from(["decode", "decode", "prefill"]),
        done=st.integers(0, 3),
    )
    def renew(self, data: st.DataObject, phase: str, done: int) -> None:
        self._renew(self._fence(data), phase, done)

    def _renew(self, fence: Fence, phase: str, done: int) -> None:
        answer = self.scripts.renew(
            fence, holder="w0", lease_ms=600_000, phase=phase, done=done, total=9
        )
        assert answer.fenced == (not self._current(fence))
        if answer.fenced:
            return
        assert self.job is not None
        at = self.clock.at
        assert answer.cancel == self.job.cancel
        is_late = self.job.deadline is not None and self.job.deadline <= at
        assert answer.deadline_passed == is_late
        assert answer.runtime_over == self.job.is_over_time(at)
        self.job.lease = True
        if phase == "prefill" and done > self.job.prefilled:
            self.job.prefilled = done
            self.job.progress()

    @rule(steps=st.sampled_from([1, 1, 2, 3, 8, 30]), seen=st.booleans())
    def time_passes(self, steps: int, seen: bool) -> None:
        """And whoever looks at the time does so."""
        self.clock.go_on(steps * STEP)
        if seen:
            self.sweep()
            if self.fences:
                self._renew(self.fences[-1], "decode", 0)

    @rule()
    def sweep(self) -> None:
        ended = self.scripts.sweep()
        # How long it ran is looked at wherever it goes back to the queue; there that stands still.
        is_late = self.job is not None and self.job.end_if_late(self.clock.at)
        assert ended == ([JOB] if is_late else [])

    @rule()
    def expire(self) -> None:
        at, job = self.clock.at, self.job
        is_old = job and job.finished_at is not None and at - job.finished_at >= RETENTION
        assert self.scripts.expire() == ([JOB] if is_old else [])
        if is_old:
            self.job = None

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
            self.job.die(self.clock.at)

    @rule(worker=st.sampled_from(WORKERS), crashed=st.booleans())
    def take_back(self, worker: str, crashed: bool) -> None:
        self.scripts.take_back(JOB, worker, crashed=crashed)
        if self.job and self.job.state == "running" and self.job.holder == worker:
            if crashed or not self.job.moved:
                self.job.crash()
            self.job.die(self.clock.at)

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), reason=st.sampled_from(["drain", "preempt", "error"]))
    def release(self, data: st.DataObject, reason: str) -> None:
        self._release(self._fence(data), reason)

    def _release(self, fence: Fence, reason: str) -> None:
        answer = self.scripts.release(fence, reason, "boom")
        if not self._current(fence):
            assert answer == "fenced"
            return
        assert self.job is not None
        if reason == "error":
            self.job.die(self.clock.at)
        elif self.job.cancel:
            self.job.end("cancelled", self.clock.at)
        else:
            self.job.preemptions += reason == "preempt"
            self.job.queue(self.clock.at)
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
            self.job.queue(self.clock.at)
        else:
            self.job.end(state, self.clock.at)

    @rule()
    def cancel(self) -> None:
        answer = self._run("cancel", JOB)
        if self.job is None:
            assert answer == b"gone"
        elif self.job.state == "queued":
            self.job.end("cancelled", self.clock.at)
        elif self.job.state == "running":
            self.job.cancel = True

    @rule()
    def resume(self) -> None:
        answer = self._run("resume", JOB)
        if self.job is None:
            assert answer == b"gone"
        else:
            self.job.resume(self.clock.at)

    @precondition(lambda self: len(self.fences) > 8)
    @rule()
    def delete(self) -> None:
        self._run("delete", JOB)
        self.job = None

    @rule()
    def remember(self) -> None:
        keys = self.client.keys()
        dumped = {key: self.client.dump(key) for key in keys}
        self.snapshot = dumped, deepcopy(self.job), self.clock.remember()

    @precondition(lambda self: hasattr(self, "snapshot"))
    @rule()
    def redis_loses_its_tail(self) -> None:
        """As after a failover: everything is as it was, and epochs are given out a second time."""
        dumped, job, then = self.snapshot
        self.client.flushall()
        for key, value in dumped.items():
            self.client.restore(key, 0, value)
        self.job = deepcopy(job)
        self.clock.put_back(then)

    @rule()
    def mend_tickets(self) -> None:
        self.scripts.mend_tickets(MODEL)

    @invariant()
    def redis_is_what_the_model_says(self) -> None:
        if not hasattr(self, "keys"):
            return
        self.clock.go_on()
        if self.job is None:
            left = {k.decode() for k in self.client.scan_iter() if JOB.encode() in k}
            assert left <= {self.keys.removed()}
            assert self.client.zcard(self.keys.jobs()) == 0
            assert not self.client.exists(self.keys.usage(), self.keys.queued(MODEL))
            return
        self._check_hash(self.job)
        self._check_queue(self.job)
        self._check_stream(self.job)

    def _check_hash(self, job: Expected) -> None:
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(self.keys.job(JOB)).hget(self.keys.usage(), "bytes")
        pipe.zscore(self.keys.expiry(), JOB)
        fields, usage, expiry = pipe.execute()
        assert fields[b"state"].decode() == job.state
        assert int(fields[b"epoch"]) == job.epoch
        assert int(fields[b"tokens"]) == len(job.tokens)
        assert (b"cancel" in fields) == job.cancel
        assert int(fields[b"stalls"]) == job.stalls
        assert (b"nonce" in fields) == (job.state == "running")
        assert (b"suspect" in fields) == job.suspect
        assert int(fields.get(b"crashes", 0)) == job.crashes
        assert int(fields.get(b"preemptions", 0)) == job.preemptions
        assert usage == fields[b"held"]
        assert int(fields.get(b"prefilled", 0)) == job.prefilled
        assert self.clock.is_at(fields.get(b"apart_at"), job.apart_at)
        assert int(fields.get(b"calm_at", 0)) == (job.calm_at or 0)
        if job.state == "running":
            assert int(fields[b"moved"]) == job.moved
        assert (job.finished_at is not None) == (job.state in OVER)
        assert self.clock.is_at(fields.get(b"finished_at"), job.finished_at)
        until = None if job.finished_at is None else job.finished_at + RETENTION
        assert self.clock.is_at(expiry, until)
        assert self.clock.is_at(fields.get(b"deadline"), job.deadline)
        assert self.clock.is_at(fields.get(b"queue_until"), job.queue_until)
        assert abs(float(fields.get(b"ran", 0)) - job.ran) < MARGIN
        error = fields.get(b"error", b"").decode()
        assert error.startswith(job.error)
        assert bool(error) == bool(job.error)

    def _check_queue(self, job: Expected) -> None:
        queued = job.state == "queued"
        pipe = self.client.pipeline(transaction=False)
        pipe.zcard(self.keys.lane(MODEL, "0:default")).zcard(self.keys.queue(MODEL))
        pipe.exists(self.keys.lease(JOB)).zcard(self.keys.running())
        pipe.hgetall(self.keys.queued(MODEL)).zcard(self.keys.suspects(MODEL))
        pipe.zscore(self.keys.due(), JOB).zrange(self.keys.tickets(MODEL), 0, -1)
        lane, lanes, lease, running, counts, suspects, due, tickets = pipe.execute()
        assert lane == lanes == int(queued)
        assert lease == int(job.lease)
        assert running == int(job.state == "running")
        assert counts == ({b"*": b"1", b"default": b"1"} if queued else {})
        assert suspects == int(queued and job.suspect)
        assert self.clock.is_at(due, job.due if queued else None)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_order_of_moves_keeps_the_invariants(machine: Any, examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
