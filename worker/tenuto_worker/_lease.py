"""`LeaseKeeper`: renews the lease of each run that makes progress; brings cancels and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from . import _metrics as metrics
from ._answers import Renewed
from ._calls import Call, renew_call
from ._errors import RedisAway
from ._redis import Outage
from ._run import Run, Runs, Stop
from ._scripts import JobScripts
from ._settings import WorkerSettings

# Shorter than any renewal: owners must be back before reapers may act.
_AWAY_PAUSE_S = 0.5


class LeaseKeeper:
    """Renews on a thread and a connection of its own, so that nothing else delays it.

    Args:
        holder: name of this worker.
        on_stop: called with a run that learned that it is to stop.
    """

    def __init__(
        self,
        scripts: JobScripts,
        runs: Runs,
        settings: WorkerSettings,
        outage: Outage,
        *,
        holder: str,
        on_stop: Callable[[Run], object],
    ) -> None:
        self._scripts = scripts
        self._runs = runs
        self._settings = settings
        self._outage = outage
        self._holder = holder
        self._on_stop = on_stop
        self._poked = threading.Event()
        self._stuck: set[Run] = set()

    def poke(self) -> None:
        """Ask Redis now: a cancel may be waiting."""
        self._poked.set()

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self._poked.clear()
            answered = self.renew()
            pause = self._settings.renew_every
            self._poked.wait(pause if answered else min(pause, _AWAY_PAUSE_S))

    def renew(self) -> bool:
        """Renew all leases that deserve it. Whether Redis answered, or nothing was to be asked."""
        now = time.monotonic()
        runs = [run for run in self._runs.all() if not run.fenced and self._moves(run, now)]
        if not runs:
            return True
        try:
            answers = self._outage.attempt(
                lambda: self._scripts.run_each([self._call(run) for run in runs])
            )
        except RedisAway:
            return False
        for run, answer in zip(runs, answers, strict=True):
            self._take(run, answer)
        return True

    def _moves(self, run: Run, now: float) -> bool:
        limit = self._settings.limit(run.phase.value)
        if now - run.beat <= limit:
            self._stuck.discard(run)
            return True
        if run not in self._stuck:
            metrics.stuck.inc()
            self._stuck = {each for each in self._runs.all() if each in self._stuck} | {run}
            run.log.error(
                "attempt stuck, lease not renewed", phase=run.phase.value, limit_seconds=limit
            )
        return False

    def _call(self, run: Run) -> Call[Renewed]:
        return renew_call(
            run.fence,
            durable=run.durable,
            holder=self._holder,
            lease_ms=self._settings.lease_ms,
            phase=run.phase.value,
            done=run.done,
            total=run.total,
            checkpoint_error=run.checkpoint_error,
        )

    def _take(self, run: Run, answer: Renewed | Exception) -> None:
        if isinstance(answer, Exception):
            run.log.error("job cannot be renewed", error=str(answer))
            why = Stop.FENCED
        elif answer.fenced:
            why = Stop.FENCED
        elif answer.deadline_passed:
            why = Stop.DEADLINE
        elif answer.runtime_over:
            why = Stop.RUNTIME
        elif answer.cancel:
            why = Stop.CANCEL
        else:
            return
        if run.ask_to_stop(why):
            self._on_stop(run)
