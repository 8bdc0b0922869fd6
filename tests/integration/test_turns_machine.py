"""A model of turns and of making way, driven against the real scripts on a real server.

A few jobs of two models, several priorities and tenants, are taken by two workers with a few slots
each, which act in any order: take, publish, ask what is to make way, have it make way, finish,
die. `turn_rules` says what each answer must be, and after each move what stands in Redis.
"""

from __future__ import annotations

import math
from collections import Counter
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

from expected_job import OVER
from moves import Moves
from queue_check import QueueCheck
from servers import RealServer
from still_clock import STEP, StillClock
from tenuto_client import (
    Keys,
    ModelInfo,
    Token,
    pack_announcement,
    script_source,
    ticket_payload,
)
from tenuto_worker._answers import Claim, Fence, Yield
from tenuto_worker._calls import claim_call, preempt_call
from turn_rules import HOLD_S, HOME_S, MEMORY_S, PATIENCE_S, Book, Member, Terms

MODELS = ("m", "n")
WORKERS = ("w0", "w1")
MOST_TOKENS = {"w0": None, "w1": 60}
SLOTS = {"w0": 2, "w1": 1}  # of each model
MOST_LIVING = 8

model_names = st.sampled_from([*MODELS, MODELS[0], MODELS[0]])
tenants = st.sampled_from(["a", "b"])
priorities = st.sampled_from([-3, -3, 0, 0, 4])
sizes = st.sampled_from([20, 20, 50, 90])  # max_tokens
limits = (None, None, None, ("queue_ttl", 20), ("deadline", 40))
histories = st.sampled_from([0, 0, 0, 1, 2, 5])  # how often it made way before
kinds = st.tuples(model_names, tenants, priorities, sizes, st.sampled_from(limits), histories)
Kind = tuple[str, str, int, int, tuple[str, int] | None, int]
rivals = st.tuples(
    st.just(MODELS[0]),
    tenants,
    st.sampled_from([0, 4, 4]),
    sizes,
    st.sampled_from([*limits, ("queue_ttl", 5)]),
    histories,
)
begun = st.sampled_from([(1, 1), (1, 1), (0, 1), (1, 0)])
rooms = st.sampled_from([None, None, None, 10, 60])


class Turns(RuleBasedStateMachine):
    """Every order of moves keeps the rules."""

    client: Any  # redis-py types every answer as maybe awaitable

    @initialize(
        first=st.lists(kinds, min_size=3, max_size=6),
        workers=st.permutations(WORKERS),
        tokens=begun,
    )
    def begin(self, first: list[Kind], workers: list[str], tokens: tuple[int, int]) -> None:
        self.client.flushall()
        self.keys = Keys("x:")
        self.clock = StillClock(self.client, self.keys)
        self.scripts = Moves(self.client, self.keys)
        for model in MODELS:
            info = pack_announcement(ModelInfo(model, 4096, 400, "f", 0.0))
            self.client.hset(self.keys.models(), model, info)
        self.check = QueueCheck(self.client, self.keys, self.clock, MODELS)
        self.book = Book()
        self.nonces = 0
        self.asked: set[Fence] = set()
        self.emptying: set[str] = set()
        for kind in first:
            self._submit(kind)
        self.fill(workers, tokens)

    def _run(self, name: str, *args: Any) -> Any:
        script = self.client.register_script(script_source("tenuto_client", name))
        return script(args=[self.keys.namespace, ticket_payload(0), *args])

    def _submit(self, kind: Kind) -> None:
        model, tenant, priority, max_tokens, limit, history = kind
        at, place = self.clock.at, len(self.book.jobs)
        job = Member(
            id=f"job{place}",
            model=model,
            tenant=tenant,
            priority=priority,
            place=place,
            max_tokens=max_tokens,
            queued_at=at,
            preemptions=history,
        )
        options = {"preemptions": history} if history else {}
        until = ""
        if limit is not None:
            name, seconds = limit
            if name == "deadline":
                job.deadline = at + seconds
                until = f"{self.clock.in_redis(job.deadline):.3f}"
            else:
                job.queue_until = at + seconds
                options[name] = seconds
        args = [job.id, model, tenant, priority, b"spec", 100, until, "", "", max_tokens, b"", 0]
        args += [part for pair in options.items() for part in pair]
        assert self._run("submit", *args) == [b"created", job.id.encode()]
        self.book.jobs[job.id] = job
        self.book.line_up()

    def _living(self) -> int:
        return len(self.book.queued()) + len(self.book.running())

    @precondition(lambda self: self._living() < MOST_LIVING)
    @rule(kind=kinds)
    def submit(self, kind: Kind) -> None:
        self._submit(kind)

    def _free(self) -> list[tuple[str, str]]:
        """Worker and model of each free slot for which something may be taken."""
        free = []
        for worker in WORKERS:
            runs = self.book.running(worker)
            if worker in self.emptying or any(run.suspect for run in runs):
                continue
            used = Counter(run.model for run in runs)
            free += [(worker, model) for model in MODELS if used[model] < SLOTS[worker]]
        return free

    @precondition(lambda self: self._free())
    @rule(data=st.data(), room=rooms, tokens=st.sampled_from([0, 1, 1, 1]))
    def claim(self, data: st.DataObject, room: int | None, tokens: int) -> None:
        worker, model = data.draw(st.sampled_from(self._free()))
        self._claim(worker, model, room, tokens)

    @rule(workers=st.permutations(WORKERS), tokens=begun)
    def fill(self, workers: list[str], tokens: tuple[int, int]) -> None:
        """Everyone takes all that it can, and publishes so many tokens of each."""
        for worker, new in zip(workers, tokens, strict=True):
            for model in MODELS:
                while (worker, model) in self._free() and self._claim(worker, model, None, new):
                    pass

    def _claim(self, worker: str, model: str, room: int | None, tokens: int) -> bool:
        """Take whose turn it is, and publish so many tokens of it."""
        self.clock.go_on(STEP)  # no two are claimed at the same time
        self.nonces += 1
        alone = not self.book.running(worker)
        call = claim_call(
            model,
            holder=worker,
            nonce=str(self.nonces),
            fingerprint="f",
            reach=worker,
            lease_ms=600_000,
            exact_wait_s=HOME_S,
            max_tokens=MOST_TOKENS[worker],
            room=room,
            alone=alone,
            memory_wait_s=MEMORY_S,
        )
        terms = Terms(worker, MOST_TOKENS[worker], room)
        job, passed = self.book.take_next(model, terms, self.clock.at, alone=alone)
        answer = self.scripts.run(call)
        if isinstance(answer, Claim):
            assert job is not None
            assert answer.fence.job_id == job.id
            assert answer.suspect == job.suspect
            job.claim(answer.fence, worker, self.clock.at)
            if tokens:
                self._publish(job, answer.fence, tokens)
        else:
            assert job is None
            assert isinstance(answer, list)
            assert {(left.job_id, left.why) for left in answer} == passed
        self.book.line_up()
        return job is not None

    def _draw_run(self, data: st.DataObject) -> tuple[Member, Fence]:
        run = data.draw(st.sampled_from(self.book.running()))
        assert run.owner is not None
        return run, run.owner

    @precondition(lambda self: self.book.running())
    @rule(data=st.data(), count=st.sampled_from([1, 1, 2, 40, 130]))
    def publish(self, data: st.DataObject, count: int) -> None:
        self._publish(*self._draw_run(data), count)

    def _publish(self, run: Member, fence: Fence, count: int) -> None:
        if run.home is None:
            run.home = run.holder
            self.scripts.bind(
                fence,
                prompt_ids=b"",
                prompt_tokens=0,
                fingerprint="f",
                geometry=b"",
                reach=str(run.holder),
                exactness="exact",
                exactness_reason=None,
            )
        have = len(run.tokens)
        new = range(have + 1, have + count + 1)
        answer = self.scripts.publish(fence, [Token(1000 + i, i, "x", -1.0) for i in new])
        run.tokens += new
        run.progress()
        assert answer.apart == run.trust(self.clock.at)

    @rule(steps=st.sampled_from([1, 2, 4, 11, 23]), swept=st.booleans())
    def time_passes(self, steps: int, swept: bool) -> None:
        self.clock.go_on(steps * STEP)
        if swept:
            late = [job.id for job in self.book.queued() if job.end_if_late(self.clock.at)]
            assert sorted(self.scripts.sweep()) == sorted(late)
            self.book.line_up()

    @rule(
        steps=st.sampled_from([0, 1, 2, 3, 11]),
        workers=st.permutations(WORKERS),
        for_slot=st.sampled_from([True, True, False]),
        room=rooms,
    )
    def ask(self, steps: int, workers: list[str], for_slot: bool, room: int | None) -> None:
        """Everyone asks what is to make way; who has a slot asks for the suspects only."""
        self.clock.go_on(steps * STEP)
        for worker in workers:
            for model in MODELS:
                self._ask(worker, model, PATIENCE_S if for_slot else math.inf, room)

    @precondition(lambda self: self._living() < MOST_LIVING)
    @rule(
        kind=rivals,
        steps=st.sampled_from([1, 2, 2, 2, 3, 4]),
        workers=st.permutations(WORKERS),
        tokens=begun,
        room=rooms,
    )
    def rush(
        self, kind: Kind, steps: int, workers: list[str], tokens: tuple[int, int], room: int | None
    ) -> None:
        """Something important comes while all are busy, and waits until everyone asks."""
        self.fill(workers, tokens)
        self._submit(kind)
        self.clock.go_on(steps * STEP)
        for worker in workers:
            self._ask(worker, MODELS[0], PATIENCE_S, room)

    def _ask(self, worker: str, model: str, patience: float, room: int | None) -> None:
        room_alone = None if room is None else room + 30
        call = preempt_call(
            model,
            holder=worker,
            fingerprint="f",
            reach=worker,
            exact_wait_s=HOME_S,
            patience_s=patience,
            hold_s=HOLD_S,
            max_tokens=MOST_TOKENS[worker],
            room=room,
            room_alone=room_alone,
        )
        terms, at = Terms(worker, MOST_TOKENS[worker], room), self.clock.at
        expected = self.book.way(model, terms, patience, at, room_alone=room_alone)
        answer = self.scripts.run(call)
        assert answer == expected
        if answer is None:
            return
        self._check_way(worker, answer)
        self.book.jobs[answer.to].room_at = at
        if answer.of is None:
            self.emptying.add(worker)
            self.asked |= {run.owner for run in self.book.running(worker) if run.owner}
            return
        run = self.book.jobs[answer.of]
        assert run.owner is not None
        run.yield_at = at
        self.asked.add(run.owner)

    def _check_way(self, worker: str, answer: Yield) -> None:
        """What holds of each answer by itself."""
        at, to = self.clock.at, self.book.jobs[answer.to]
        assert to.state == "queued"
        assert to.room_at is None or at - to.room_at > 10
        assert to.suspect == (answer.of is None)
        if answer.of is not None:
            of = self.book.jobs[answer.of]
            assert (of.state, of.holder, of.model) == ("running", worker, to.model)
            assert of.priority < to.priority
            assert of.moved
            assert at - of.claimed_at > 4 * 2 ** min(4, of.preemptions)
            assert of.yield_at is None or at - of.yield_at > 10

    def _left(self) -> None:
        self.book.line_up()
        for worker in WORKERS:
            if not self.book.running(worker):
                self.emptying.discard(worker)
        self.asked &= {run.owner for run in self.book.running() if run.owner}

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def make_way(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(sorted(self.asked, key=lambda each: each.job_id)))
        self._release(self.book.jobs[fence.job_id], fence, "preempt")

    @precondition(lambda self: self.book.running())
    @rule(
        data=st.data(),
        how=st.sampled_from(["completed", "failed", "drain", "preempt", "memory", "error"]),
    )
    def leave(self, data: st.DataObject, how: str) -> None:
        """An attempt ends, or hands its job back."""
        run, fence = self._draw_run(data)
        if how not in OVER:
            self._release(run, fence, how)
            return
        assert self.scripts.finish(fence, state=how) == "ok"
        run.end(how, self.clock.at)
        self._left()

    def _release(self, run: Member, fence: Fence, reason: str) -> None:
        at = self.clock.at
        answer = self.scripts.release(fence, reason, "boom")
        if reason == "error":
            run.die(at)
        elif run.cancel:
            run.end("cancelled", at)
        else:
            run.preemptions += reason == "preempt"
            run.queue(at)
        assert answer == run.state
        self._left()

    @rule(data=st.data(), back=st.booleans())
    def cancel(self, data: st.DataObject, back: bool) -> None:
        job = data.draw(st.sampled_from(list(self.book.jobs.values())))
        self._run("cancel", job.id)
        if job.state == "queued":
            job.end("cancelled", self.clock.at)
        elif job.state == "running":
            job.cancel = True
        self.book.line_up()
        if back and self._living() < MOST_LIVING:
            self._run("resume", job.id)
            job.resume(self.clock.at)
            self.book.line_up()

    @precondition(lambda self: self.book.running())
    @rule(
        data=st.data(),
        lost=st.sampled_from(["child", "child", "worker", "lease", "machine"]),
        workers=st.permutations(WORKERS),
    )
    def fail(self, data: st.DataObject, lost: str, workers: list[str]) -> None:
        """A child dies, or its supervisor as well; a lease runs out, and is reaped or, with the
        machine, not seen yet. After a while everyone asks."""
        if lost in ("child", "worker"):
            self._die(data, crashed=lost == "child")
        else:
            self._lapse(data, reaped=lost == "lease")
        self.ask(2, workers, True, None)

    def _die(self, data: st.DataObject, *, crashed: bool) -> None:
        """The next incarnation takes back what ran."""
        holders = sorted({str(run.holder) for run in self.book.running()})
        self._take_back(data.draw(st.sampled_from(holders)), crashed=crashed)

    def _take_back(self, worker: str, *, crashed: bool = True) -> None:
        for run in self.book.running(worker):
            answer = self.scripts.take_back(run.id, worker, crashed=crashed)
            if crashed or not run.moved:
                run.crash()
            run.die(self.clock.at)
            assert answer == run.state
            self._left()

    @precondition(lambda self: self._living() < MOST_LIVING)
    @rule(kind=rivals, workers=st.permutations(WORKERS), steps=st.sampled_from([2, 11, 14]))
    def poison(self, kind: Kind, workers: list[str], steps: int) -> None:
        """The child that took something important dies at once. It waits until everyone asks."""
        self._submit(kind)
        self.fill(workers, (0, 0))
        last = self.book.jobs[f"job{len(self.book.jobs) - 1}"]
        if last.state == "running":
            self._take_back(str(last.holder))
        self.ask(steps, workers, True, None)

    def _lapse(self, data: st.DataObject, *, reaped: bool) -> None:
        run, _ = self._draw_run(data)
        assert self.scripts.reap(run.id) == ("alive" if run.lease else self._reap(run))
        self.client.delete(self.keys.lease(run.id))
        run.lease = False
        if reaped and run.state == "running":
            assert self.scripts.reap(run.id) == self._reap(run)

    def _reap(self, run: Member) -> str:
        if not run.moved:
            run.crash()
        run.die(self.clock.at)
        self._left()
        return run.state

    @invariant()
    def suspects_run_apart(self) -> None:
        if hasattr(self, "book"):
            for worker in WORKERS:
                runs = self.book.running(worker)
                assert len(runs) == 1 or not any(run.suspect for run in runs)

    @invariant()
    def redis_is_what_the_rules_say(self) -> None:
        if hasattr(self, "book"):
            self.clock.go_on()
            self.check.check(self.book)


@pytest.fixture(scope="module")
def machine() -> Any:
    with RealServer(appendfsync="no") as server, server.client() as client:
        Turns.client = client
        yield Turns


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_order_of_moves_keeps_the_rules(machine: Any, examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
