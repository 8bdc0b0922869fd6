"""A clock that goes on only when a model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tenuto_engine import Engine


class ModelClock:
    """What `time.perf_counter` shows in a test.

    Attributes:
        now: seconds; a test may move it, too.
    """

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patched.setattr("time.perf_counter", lambda: self.now)

    def drive(self, engine: Engine, seconds: Callable[[int], float] = lambda tokens: 1) -> None:
        """Have each forward of an engine's model take so many `seconds`, by its tokens."""
        engine._stepper._model = _Timed(self, engine._stepper._model, seconds)


class _Timed:
    def __init__(self, clock: ModelClock, model: Any, seconds: Callable[[int], float]) -> None:
        self._clock, self._model, self._seconds = clock, model, seconds

    def __call__(self, tokens: Any, **more: Any) -> Any:
        self._clock.now += self._seconds(tokens.shape[1])
        return self._model(tokens, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
