"""`Health`: whether this worker is well, and whether it takes jobs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from ._redis import Outage


class Stage(StrEnum):
    """How far the life of a child is."""

    STARTING = "starting"
    """Redis is asked for; left when the models begin to load."""
    LOADING = "loading"
    """Models load; left when the first job could be claimed."""
    SERVING = "serving"
    """Jobs are claimed and decoded; left at a stop."""
    DRAINING = "draining"
    """Running jobs are handed back; the process ends."""


class Health:
    """What probes are told. Asks nobody: it answers while everything else hangs.

    Attributes:
        stage: set by the child.
        trouble: says which part of the worker is stuck; "" if none is.
    """

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self.stage = Stage.STARTING
        self.trouble: Callable[[], str] = lambda: ""

    def unwell(self) -> str:
        """Why it should be started again; "" if it need not be."""
        return self.trouble()

    def unready(self) -> str:
        """Why it takes no jobs now; "" if it does."""
        if self.stage is not Stage.SERVING:
            return self.trouble() or self.stage.value
        return self.trouble() or self._outage.why
