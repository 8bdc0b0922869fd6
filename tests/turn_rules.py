"""Whose turn it is in the queue, and what makes way for what: the rules, over plain Python objects.

A model that knows nothing of how Redis keeps the queue. Times are those of a `StillClock`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from expected_job import Expected
from tenuto_worker._answers import Fence, Yield

PATIENCE_S = 4.5
"""So long a job waits before anything makes way for it."""
ABSENT_S = 3
"""So much longer, before a worker that is not the next to give something up does so."""
HOLD_S = 4
"""So long an attempt goes on at least; twice as long each time that its job made way before."""
MOST_DOUBLINGS = 4
SETTLE_S = 10
"""So long nothing else makes way for one job, and what was asked is not asked for another."""
HOME_S = 31
"""So long a job that has begun is left to the worker with its checkpoints, and a suspect to one
that runs nothing anyway."""
MEMORY_S = 32
"""So long a job waits for memory before nothing behind it is taken."""


@dataclass(frozen=True)
class Terms:
    """What a worker takes: of at most so many tokens, and with memory for so many now."""

    worker: str
    max_tokens: int | None = None
    room: int | None = None

    def with_room_of(self, job: Member) -> Terms:
        room = None if self.room is None else self.room + job.max_tokens
        return Terms(self.worker, self.max_tokens, room)


@dataclass(kw_only=True)
class Member(Expected):
    """A job among others."""

    id: str
    model: str
    tenant: str
    priority: int
    place: int
    max_tokens: int
    queued_at: int
    home: str | None = None
    """The worker that has its checkpoints."""
    yield_at: int | None = None
    room_at: int | None = None

    def claim(self, fence: Fence, worker: str, at: int) -> None:
        super().claim(fence, worker, at)
        self.room_at = None

    def queue(self, at: int) -> None:
        super().queue(at)
        self.queued_at, self.yield_at = at, None

    def end(self, state: str, at: int, error: str = "") -> None:
        super().end(state, at, error)
        self.yield_at = self.room_at = None

    def waited(self, at: int) -> int:
        return at - self.queued_at

    def unfit(self, terms: Terms, at: int) -> str:
        """Why this worker may not take it now; "" when it may."""
        if terms.max_tokens is not None and self.max_tokens > terms.max_tokens:
            return "limits"
        if self.tokens and self.home != terms.worker and self.waited(at) < HOME_S:
            return "checkpoints"
        if terms.room is not None and self.max_tokens > terms.room:
            return "memory"
        return ""

    def is_provided_for(self, at: int) -> bool:
        return self.room_at is not None and at - self.room_at < SETTLE_S

    def is_asked(self, at: int) -> bool:
        return self.yield_at is not None and at - self.yield_at < SETTLE_S

    def may_make_way(self, at: int) -> bool:
        if self.state != "running" or not self.lease or not self.moved:
            return False
        if self.is_asked(at):
            return False
        hold: int = HOLD_S * 2 ** min(self.preemptions, MOST_DOUBLINGS)
        return at - self.claimed_at >= hold


def by_place(jobs: Iterable[Member]) -> list[Member]:
    return sorted(jobs, key=lambda job: job.place)


@dataclass
class Book:
    """All jobs, and for each model and priority the tenants in the order of their turns."""

    jobs: dict[str, Member] = field(default_factory=dict)
    turns: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def queued(self, model: str | None = None) -> list[Member]:
        found = (job for job in self.jobs.values() if job.state == "queued")
        return [job for job in found if model in (None, job.model)]

    def running(self, worker: str | None = None) -> list[Member]:
        found = (job for job in self.jobs.values() if job.state == "running")
        return [job for job in found if worker in (None, job.holder)]

    def suspects(self, model: str) -> list[Member]:
        """Those that wait, the oldest first."""
        return by_place(job for job in self.queued(model) if job.suspect)

    def line_up(self) -> None:
        """A tenant whose first job came is the last in turn; one without a job has no turn."""
        waiting = {(job.model, job.priority, job.tenant) for job in self.queued()}
        for model, priority, tenant in sorted(waiting):
            turn = self.turns.setdefault((model, priority), [])
            if tenant not in turn:
                turn.append(tenant)
        for (model, priority), turn in self.turns.items():
            turn[:] = [tenant for tenant in turn if (model, priority, tenant) in waiting]

    def lanes(self, model: str) -> list[tuple[int, str]]:
        """Priority and tenant, in the order in which they are served."""
        of_model = [(priority, turn) for (of, priority), turn in self.turns.items() if of == model]
        highest_first = sorted(of_model, reverse=True)
        return [(priority, tenant) for priority, turn in highest_first for tenant in turn]

    def lane(self, model: str, priority: int, tenant: str) -> list[Member]:
        """The queued jobs of a tenant, each in its place."""
        jobs = self.queued(model)
        return by_place(job for job in jobs if (job.priority, job.tenant) == (priority, tenant))

    def in_turn(self, model: str) -> list[Member]:
        return [job for lane in self.lanes(model) for job in self.lane(model, *lane)]

    def take_next(
        self, model: str, terms: Terms, at: int, *, alone: bool
    ) -> tuple[Member | None, set[tuple[str, str]]]:
        """Whose turn it is, and what was passed over and why. The tenant's next turn is the last.

        What is looked at and is too late ends.
        """
        passed: set[tuple[str, str]] = set()
        for job in (self.suspects(model) if alone else []) + self.in_turn(model):
            if job.state != "queued" or job.end_if_late(at):
                continue
            why = job.unfit(terms, at)
            if why == "memory" and not alone and job.waited(at) > MEMORY_S:
                return None, passed | {(job.id, why)}
            if not why and job.suspect and not alone:
                why = "suspect"
            if not why:
                turn = self.turns[model, job.priority]
                turn.remove(job.tenant)
                turn.append(job.tenant)
                return job, passed
            passed.add((job.id, why))
        return None, passed

    def victim(self, waiting: Member, terms: Terms, patience: float, at: int) -> Member | None:
        """The one of this worker's that makes way for this job."""
        able = [
            job for job in self.running() if job.model == waiting.model and job.may_make_way(at)
        ]
        lower = [job for job in able if job.priority < waiting.priority]
        lower.sort(key=lambda job: (job.priority, -job.claimed_at))
        # The first only, whoever has it; that worker did nothing after a while: the first of ours.
        if waiting.waited(at) < patience + ABSENT_S:
            lower = lower[:1]
        mine = [job for job in lower if job.holder == terms.worker]
        if mine and not waiting.unfit(terms.with_room_of(mine[0]), at):
            return mine[0]
        return None

    def way(
        self, model: str, terms: Terms, patience: float, at: int, *, room_alone: int | None
    ) -> Yield | None:
        """What this worker is told to do."""
        mine = [run for run in self.running(terms.worker) if run.lease and not run.is_asked(at)]
        is_held = not all(run.may_make_way(at) for run in mine)
        apart_wait = HOME_S + (HOLD_S * 2**MOST_DOUBLINGS if is_held else 0)
        anything = Terms(terms.worker, terms.max_tokens, room_alone)
        for job in self.suspects(model):
            is_long = job.waited(at) > apart_wait and not job.is_provided_for(at)
            if is_long and not job.late(at) and not job.unfit(anything, at):
                return Yield(None, job.id)
        for job in self.in_turn(model):
            if job.waited(at) < patience or job.is_provided_for(at) or job.suspect or job.late(at):
                continue
            if victim := self.victim(job, terms, patience, at):
                return Yield(victim.id, job.id)
        return None
