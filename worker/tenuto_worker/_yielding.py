"""`Yielding`: attempts that make way, for what is more important or has to run apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ._answers import Yield
from ._logging import get_log
from ._run import Run, Runs, Stop


class Yielding:
    """Decides what the claimer may take, and asks runs to make way.

    A job on which a worker may have died (a suspect) runs apart: it is claimed by a worker that
    runs nothing, which takes nothing else until the job is trusted again. If another suspect waits
    then, the trusted job makes way, so that the next one runs apart as well.

    Args:
        on_stop: called when runs were asked to stop.
    """

    def __init__(self, runs: Runs, on_stop: Callable[[], object]) -> None:
        self._runs = runs
        self._on_stop = on_stop
        self._emptying_for: str | None = None

    def may_take(self) -> bool:
        """Whether anything may be taken besides what runs: not with a suspect here, nor while the
        worker empties itself for one."""
        runs = self._runs.all()
        if not runs:
            return True
        return self._emptying_for is None and not any(run.apart for run in runs)

    def is_alone(self) -> bool:
        """Whether nothing runs here, so that a suspect may be taken."""
        return not self._runs.all()

    def claimed(self) -> None:
        """Something was taken, whatever the worker made room for."""
        self._emptying_for = None

    def emptied_for(self) -> str | None:
        """The model for whose suspect the worker has emptied itself; told once."""
        if self._runs.all():
            return None
        model, self._emptying_for = self._emptying_for, None
        return model

    def make_way(self, model: str, asked: Yield) -> None:
        """Do what `preempt.lua` answered for a model."""
        if asked.of is None:
            self.empty(model, f"suspect {asked.to} has to run apart")
            return
        run = self._runs.get(asked.of)
        if run is not None:
            self._ask([run], f"job {asked.to} has a higher priority")

    def make_room(self, runs: Iterable[Run], job_id: str) -> None:
        """Have runs make way for a job that waits for memory."""
        self._ask(runs, f"job {job_id} has a higher priority and needs the memory")

    def empty(self, model: str, why: str) -> None:
        """Have all runs make way for a suspect of the model, and take nothing until they did."""
        self._emptying_for = model
        self._ask(self._runs.all(), why)

    def trusted(self) -> bool:
        """Whether all that runs here are jobs that ran apart until they were trusted again."""
        runs = self._runs.all()
        return bool(runs) and all(run.claim.suspect and not run.apart for run in runs)

    def _ask(self, runs: Iterable[Run], why: str) -> None:
        for run in runs:
            if run.ask_to_stop(Stop.PREEMPT):
                get_log(job=run.job_id).info("attempt makes way", why=why)
        self._on_stop()
