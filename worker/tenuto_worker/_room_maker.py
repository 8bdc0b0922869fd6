"""`RoomMaker`: whose job gets the memory, over all models of a worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from ._answers import Head
from ._calls import Call, provide_call
from ._errors import RedisAway
from ._models import ModelPool
from ._redis import Outage
from ._run import Run, Runs
from ._scripts import JobScripts
from ._settings import WorkerSettings

_MOST_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True)
class _Next:
    """The job for which memory is kept, and whether that is because its turn has come."""

    model: str
    head: Head
    in_turn: bool


class RoomMaker:
    """Knows for which job memory is to be kept or made.

    Of each model the first job counts, if it has too little memory as things are. It is next

    - if it had enough without the runs of a lower priority: of those the least important make way
      as soon as it has waited for as long as a job waits for a slot, and what they must have had
      before is what `preempt.lua` asks of those that make way for a slot;
    - or in its turn, when it has waited for `memory_wait_seconds`: a model of the same priority
      whose jobs follow each other without a pause would never be idle. One that was just loaded has
      as long before another's turn comes, since each turn costs a load.

    What comes behind it is not taken until it has started.

    Args:
        head_of: the call that asks for the head of a model's queue.
    """

    def __init__(
        self,
        scripts: JobScripts,
        runs: Runs,
        settings: WorkerSettings,
        outage: Outage,
        pool: ModelPool,
        head_of: Callable[[str], Call[Head | None]],
    ) -> None:
        self._scripts = scripts
        self._runs = runs
        self._settings = settings
        self._outage = outage
        self._pool = pool
        self._head_of = head_of
        self._heads: Mapping[str, Head] = {}
        self._provided_for = ""

    def look(self) -> None:
        """See which job comes first of each model, where memory may be short."""
        models = list(self._settings.models)
        self._heads = {}
        if self._pool.budget == math.inf or (len(models) == 1 and not self._runs.all()):
            return
        try:
            heads = self._outage.attempt(
                partial(self._scripts.run_all, [self._head_of(model) for model in models])
            )
        except RedisAway:
            return
        self._heads = {model: head for model, head in zip(models, heads, strict=True) if head}

    def first(self, models: Collection[str]) -> str | None:
        """The model to claim for before the others, of those that have a slot and memory; None if
        what they could take comes behind what waits for memory."""
        next_one = self._next()
        free = (each for each in models if next_one is None or not self._is_behind(each, next_one))
        return max(free, key=self._rank, default=None)

    def is_next(self, model: str) -> bool:
        """Whether what comes free is kept for the first job of this model."""
        next_one = self._next()
        return next_one is not None and next_one.model == model

    def make(self) -> tuple[Head, list[Run]] | None:
        """The job that is next, and the runs that are to make way for it now, if there are any."""
        next_one = self._next()
        if next_one is None:
            return None
        head = next_one.head
        if head.provided or head.waited < self._settings.preempt_wait_seconds:
            return None
        chosen = self._choose(next_one.model, head)
        if not chosen:
            return None
        try:
            wanted = self._outage.attempt(partial(self._scripts.run, provide_call(head.job_id)))
        except RedisAway:
            return None
        if not wanted:
            return None
        self._provided_for = head.job_id
        return head, chosen

    # -- which job ---------------------------------------------------------------------

    def _next(self) -> _Next | None:
        runs = self._runs.all()
        for model in sorted(self._heads, key=self._rank, reverse=True):
            head = self._heads[model]
            is_elsewhere = head.provided and head.job_id != self._provided_for
            if is_elsewhere or self._runs.of_model(model) >= self._settings.slots:
                continue
            if self._pool.has_room(model, head.tokens):
                continue
            goers = [run for run in runs if run.stop or run.claim.priority < head.priority]
            if self._pool.has_room(model, head.tokens, without=goers):
                return _Next(model, head, in_turn=False)
            if self._is_late(model) and self._pool.has_room(model, head.tokens, without=runs):
                return _Next(model, head, in_turn=True)
        return None

    def _is_behind(self, model: str, next_one: _Next) -> bool:
        own, other = self._heads.get(model), next_one.head
        if model == next_one.model:
            return False
        if own is None or own.priority != other.priority:
            return own is None or own.priority < other.priority
        return next_one.in_turn or own.waited < other.waited

    def _rank(self, model: str) -> tuple[float, bool, bool, float]:
        head = self._heads.get(model)
        if head is None:
            return (-math.inf, False, False, 0.0)
        return (head.priority, self._is_late(model), self._pool.is_warm(model), head.waited)

    def _is_late(self, model: str) -> bool:
        waited = self._heads[model].waited
        if not self._pool.is_warm(model):
            waited = min(waited, time.monotonic() - self._pool.loaded_at)
        return waited >= self._settings.memory_wait_seconds

    # -- which runs --------------------------------------------------------------------

    def _choose(self, model: str, head: Head) -> list[Run]:
        """As few runs as will do, the least important first, of these the latest."""
        runs = self._runs.all()
        going = [run for run in runs if run.stop]
        ready = [
            run
            for run in runs
            if not run.stop and run.claim.priority < head.priority and self._had_its_time(run)
        ]
        ready.sort(key=lambda run: (run.claim.priority, -run.claimed_at))
        chosen: list[Run] = []
        for run in ready:
            if self._pool.has_room(model, head.tokens, without=[*going, *chosen]):
                break
            chosen.append(run)
        if not self._pool.has_room(model, head.tokens, without=[*going, *chosen]):
            return []
        for run in reversed(list(chosen)):
            others = [each for each in chosen if each is not run]
            if self._pool.has_room(model, head.tokens, without=[*going, *others]):
                chosen = others
        return chosen

    def _had_its_time(self, run: Run) -> bool:
        doublings = min(run.claim.preemptions, _MOST_DOUBLINGS)
        hold = self._settings.preempt_hold_seconds * 2**doublings
        return run.sent > run.claim.tokens and time.monotonic() - run.claimed_at >= hold
