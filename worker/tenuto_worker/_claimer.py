"""`Claimer`: takes jobs whenever a slot is free."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from . import _metrics as metrics
from ._answers import Aside, Head, Left, Taken, Unreadable, Yield
from ._calls import Call, Terms, claim_call, finish_call, head_call, preempt_call, suspect_call
from ._errors import RedisAway
from ._logging import get_log
from ._models import ModelPool
from ._redis import Backoff, Outage
from ._room_maker import RoomMaker
from ._run import Run, Runs
from ._scripts import JobScripts
from ._settings import WorkerSettings
from ._yielding import Yielding

_NO_TIME: Final = ("adapter", "limits", "memory", "suspect")
_WHY_LEFT: Final = {
    "geometry": "its tokens are from another geometry; after that it is recomputed here",
    "checkpoints": "its checkpoints are in another data dir; after that it is replayed here",
    "adapter": "this worker does not have its adapter",
    "limits": "it is over --max-prompt or --max-tokens of this worker",
    "memory": "it needs more memory than is free",
    "suspect": "a worker died on it, so that it has to run apart",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model that this worker serves, as the queue needs to know it.

    Attributes:
        fingerprint: of its geometry; `adapters` has it with each of its adapters.
    """

    name: str
    fingerprint: str
    slots: int
    adapters: Mapping[str, str] = field(default_factory=dict)


class Claimer:
    """Claims on a thread of its own: when poked, and once in a while.

    Args:
        served: the models, by name.
        pool: says for which of them there is memory.
        holder, reach: this worker's name, and the id of its data dir.
        on_claim: takes each new run, which stands among the runs already.
        on_stop: called when runs were asked to make way.
    """

    def __init__(
        self,
        scripts: JobScripts,
        runs: Runs,
        settings: WorkerSettings,
        outage: Outage,
        *,
        served: Mapping[str, Served],
        pool: ModelPool,
        holder: str,
        reach: str,
        on_claim: Callable[[Run], object],
        on_stop: Callable[[], object],
    ) -> None:
        self._scripts = scripts
        self._runs = runs
        self._settings = settings
        self._outage = outage
        self._served = served
        self._pool = pool
        self._holder = holder
        self._reach = reach
        self._on_claim = on_claim
        self._yielding = Yielding(runs, on_stop)
        self._room = RoomMaker(scripts, runs, settings, outage, pool, self._head_call)
        self._left: dict[str, list[Left]] = {}
        self._changed = threading.Condition()
        self._poked = False
        self._stopping = False
        self._ended = threading.Event()

    def poke(self) -> None:
        """There may be a job, or a slot."""
        with self._changed:
            self._poked = True
            self._changed.notify()

    def stop(self) -> None:
        """Claim nothing more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def wait_ended(self, timeout: float) -> bool:
        """After `stop`: whether the last claim is settled, so that no run will come any more."""
        return self._ended.wait(timeout)

    def has_slot(self, model: str) -> bool:
        """Whether a job of the model could be taken now."""
        is_free = self._runs.of_model(model) < self._served[model].slots and not self._stopping
        return is_free and self._yielding.may_take() and self._pool.may_claim(model)

    def run(self) -> None:
        """The body of the thread."""
        while not self._stopping:
            self.turn()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._poked or self._stopping, self._settings.poll_seconds
                )
                self._poked = False
        self._ended.set()

    def turn(self) -> None:
        """Take what there is a slot for, and have runs make way for what has none."""
        self._go_apart()
        if (model := self._yielding.emptied_for()) and self.has_slot(model):
            # Before jobs of other models, or it would have emptied itself for nothing.
            self.claim_one(model)
        self._room.look()
        left = list(self._served)
        while best := self._room.first([each for each in left if self.has_slot(each)]):
            if self.claim_one(best):
                self._room.look()
            else:
                left.remove(best)
        for model in self._served:
            while self._runs.all() and self._make_way(model):
                pass
        self._make_room()

    def _go_apart(self) -> None:
        """Where a suspect was trusted again and more of them wait, the next one's turn comes."""
        if not self._yielding.trusted():
            return
        for model in filter(self._may_empty, self._served):
            if self._has_suspect(model):
                self._yielding.empty(model, "suspects wait to run apart")
                return

    def _may_empty(self, model: str) -> bool:
        """Whether a job of the model could be taken if nothing ran here. One that could not be
        loaded is not worth it: it is tried again with other jobs."""
        has_room = self._pool.has_room(model, 0, without=self._runs.all())
        return has_room and model not in self._pool.broken()

    def _has_suspect(self, model: str) -> bool:
        try:
            call = suspect_call(model, **self._terms(model))
            return bool(self._outage.attempt(partial(self._scripts.run, call)))
        except RedisAway:
            return False

    def _make_way(self, model: str) -> bool:
        """Whether a run was asked to make way for a job of the model that waits."""
        if self._stopping or not self._yielding.may_take():
            return False
        is_full = self._runs.of_model(model) >= self._served[model].slots
        may_empty = self._may_empty(model)
        has_suspect = any(job.why == "suspect" for job in self._left.get(model, []))
        may_wait = may_empty and (has_suspect or not self._pool.may_claim(model))
        if not is_full and not may_wait:
            return False
        try:
            call = self._preempt_call(model, for_slot=is_full, may_empty=may_empty)
            asked = self._outage.attempt(partial(self._scripts.run, call))
        except RedisAway:
            return False
        if asked is not None:
            self._yielding.make_way(model, asked)
        return asked is not None

    def _make_room(self) -> None:
        """Have runs make way for a job that waits for memory."""
        if self._stopping or not self._yielding.may_take():
            return
        if asked := self._room.make():
            head, runs = asked
            self._yielding.make_room(runs, head.job_id)

    def _head_call(self, model: str) -> Call[Head | None]:
        return head_call(model, **self._terms(model))

    def _preempt_call(self, model: str, *, for_slot: bool, may_empty: bool) -> Call[Yield | None]:
        return preempt_call(
            model,
            holder=self._holder,
            patience_s=self._settings.preempt_wait_seconds if for_slot else math.inf,
            hold_s=self._settings.preempt_hold_seconds,
            room=self._pool.room(model),
            may_empty=may_empty,
            **self._terms(model),
        )

    def _terms(self, model: str) -> Terms:
        """What this worker takes of the model's jobs."""
        return {
            "fingerprint": self._served[model].fingerprint,
            "reach": self._reach,
            "exact_wait_s": self._settings.exact_wait_seconds,
            "max_prompt": self._settings.max_prompt,
            "max_tokens": self._settings.max_tokens,
            "room_alone": self._pool.max_context(model),
            "adapters": self._served[model].adapters,
        }

    def claim_one(self, model: str) -> bool:
        """Claim the best job of a model and pass it on; whether there was one, or what was none
        was put out of the way."""
        claim = self._claim(model)
        if claim is None:
            return False
        if isinstance(claim, list):
            self._tell_left(model, claim)
            return False
        if isinstance(claim, Aside):
            log = get_log(job=claim.job_id)
            log.warning("job put aside", model=model, state=claim.state, why=claim.why)
            return True
        if isinstance(claim, Unreadable):
            return self._fail(model, claim)
        self._left.pop(model, None)
        run = Run(claim)
        run.log.info("job claimed", model=model, attempt=claim.attempts, tokens=claim.tokens)
        metrics.claimed.labels(model).inc()
        metrics.queue_wait.labels(model).observe(claim.waited)
        self._runs.add(run)
        self._yielding.claimed()
        self._on_claim(run)
        return True

    def _fail(self, model: str, job: Unreadable) -> bool:
        """End a job that cannot be read. Where Redis is away meanwhile, its lease runs out."""
        fail = finish_call(job.fence, durable=0, state="failed", error=job.why)
        try:
            self._outage.attempt(partial(self._scripts.run, fail))
        except RedisAway:
            return False
        log = get_log(job=job.fence.job_id)
        log.warning("job put aside", model=model, state="failed", why=job.why)
        metrics.ended.labels(model, "failed").inc()
        return True

    def _tell_left(self, model: str, left: list[Left]) -> None:
        """Say once of each job why it waits though a slot is free here."""
        known = {job.job_id for job in self._left.get(model, [])}
        self._left[model] = left
        for job in left:
            if job.job_id not in known:
                has_time = job.why not in _NO_TIME
                get_log(job=job.job_id).info(
                    "job waits for its own geometry" if has_time else "job left",
                    model=model,
                    seconds=round(job.seconds, 1) if has_time else None,
                    why=_WHY_LEFT[job.why],
                )

    def _claim(self, model: str) -> Taken | list[Left] | None:
        """Ask until Redis answers; None at a stop. A claim may have happened though its answer
        was lost."""
        nonce = secrets.token_hex(8)
        backoff = Backoff()
        again = False
        while True:
            try:
                return self._outage.attempt(partial(self._ask, model, nonce, again=again))
            except RedisAway:
                if self._stopping:
                    return None
            again = True
            time.sleep(backoff.pause())

    def _ask(self, model: str, nonce: str, *, again: bool) -> Taken | list[Left]:
        call = claim_call(
            model,
            holder=self._holder,
            nonce=nonce,
            lease_ms=self._settings.lease_ms,
            again=again,
            room=self._pool.room(model),
            alone=self._yielding.is_alone(),
            memory_wait_s=0.0 if self._room.is_next(model) else self._settings.memory_wait_seconds,
            **self._terms(model),
        )
        return self._scripts.run(call)
