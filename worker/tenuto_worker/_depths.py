"""`QueueDepths`: how many jobs wait for the models of this worker, and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from ._answers import Depth
from ._calls import depth_call
from ._errors import RedisAway
from ._redis import Outage
from ._scripts import JobScripts

_STALE_ROUNDS: Final = 3


class QueueDepths:
    """Looks once in a while, on a thread and a connection of its own, so that whoever asks for
    metrics never waits for Redis.

    Args:
        models: whose queues.
        every: seconds between two looks.
    """

    def __init__(
        self, scripts: JobScripts, models: Iterable[str], outage: Outage, *, every: float
    ) -> None:
        self._scripts = scripts
        self._models = tuple(models)
        self._outage = outage
        self._every = every
        self._found: dict[str, Depth] = {}
        self._found_at = 0.0

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self.look()
            time.sleep(self._every)

    def look(self) -> None:
        """Ask Redis now. While it is away nothing is learned."""
        calls = [depth_call(model) for model in self._models]
        try:
            answers = self._outage.attempt(lambda: self._scripts.run_all(calls))
        except RedisAway:
            return
        self._found = dict(zip(self._models, answers, strict=True))
        self._found_at = time.monotonic()

    def latest(self) -> dict[str, Depth]:
        """By model. Empty where nothing is known, or what is known is too old to tell."""
        age = time.monotonic() - self._found_at
        return self._found if age <= self._every * _STALE_ROUNDS else {}
