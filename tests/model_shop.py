"""`Shop`: three models, each with its queue, and workers that serve all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_worker._hosted import ModelState

NAMES = ("a", "b", "c")
ROW = 64
"""Tokens of the rows of these tests, prompt and answer."""

Budget = Callable[..., float]


class Shop:
    """A queue for each of three models, and workers that serve them."""

    def __init__(
        self, url: str, namespace: str, folders: dict[str, Path], data: Path, stack: ExitStack
    ) -> None:
        self._url, self._namespace, self._data, self._stack = url, namespace, data, stack
        self.folders = folders
        self.queues = {name: JobQueue(url, namespace, name) for name in NAMES}
        for queue in self.queues.values():
            stack.callback(queue.close)

    def worker(self, memory_budget: float = math.inf, **settings: Any) -> StepWorker:
        """One that has all three models, and begins with those that fit."""
        values = {"load_retry_seconds": 0.0} | settings
        return self._stack.enter_context(
            StepWorker(
                self._url,
                self._namespace,
                Path(),
                self._data,
                models=self.folders,
                memory_budget=memory_budget,
                **values,
            )
        )

    def submit(self, model: str, *, prompt: Any = (1, 2, 3, 4), **options: Any) -> str:
        """A job whose row has `ROW` tokens."""
        tokens = {"max_tokens": ROW - 4} | options
        return self.queues[model].submit(prompt=prompt, **tokens)

    def state(self, job_id: str) -> str:
        return self.queues["a"].state(job_id)

    def tokens(self, job_id: str) -> list[int]:
        return [token.token for token in self.queues["a"].tokens(job_id)]


def warm(worker: StepWorker) -> set[str]:
    """The models in memory."""
    states = worker.rooms.pool.states()
    return {name for name, state in states.items() if state is ModelState.WARM}


def run_job(shop: Shop, worker: StepWorker, model: str, **options: Any) -> str:
    """A job from submit to end."""
    job = shop.submit(model, **options)
    assert worker.claim(model)
    worker.finish()
    return job
