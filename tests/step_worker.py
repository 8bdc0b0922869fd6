"""A worker whose threads are the test: its rooms do one turn when they are told to.

    worker = StepWorker(url, namespace, model, data_dir)
    worker.claim()              # and prepare
    worker.decode(10)           # ten tokens of each row
    worker.publish()            # what waits is sent

A worker that is not told anything any more is one that died or hangs, as far as others can see.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tenuto_engine import Engine
from tenuto_worker import Identity, WorkerSettings
from tenuto_worker._hosted import ModelState
from tenuto_worker._redis import Outage, Patience
from tenuto_worker._rooms import Rooms
from tenuto_worker._run import Run

MODEL = "tiny"


class StepWorker:
    """Everything of a worker but its threads.

    Args:
        name: who it is; another name is another worker.
        reach: id of the data dir.
        models: name -> folder, instead of the one `model` that is served as `MODEL`.
        settings: of `WorkerSettings`, over the defaults of these tests.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        model: Path,
        data_dir: Path,
        *,
        name: str = "host-dir-0",
        reach: str = "dir",
        models: Mapping[str, Path] | None = None,
        **settings: Any,
    ) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        values = {
            "publish_seconds": 0.0,
            "checkpoint_every_tokens": 8,
            "slots": 2,
            "widest_seconds": 0.0,
        } | settings
        self.settings = WorkerSettings(
            models={name: str(path) for name, path in (models or {MODEL: model}).items()},
            redis_url=url,
            data_dir=data_dir,
            namespace=namespace,
            **values,
        )
        identity = Identity(name, reach, os.dup(0))
        outage = Outage()
        self.rooms = Rooms(self.settings, identity, outage, Patience(outage))
        os.close(identity.lock)
        self.rooms.load()
        self.rooms.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rooms.writer.close(10)

    @property
    def engine(self) -> Engine:
        """Of `MODEL`."""
        return self.engine_of(MODEL)

    def engine_of(self, model: str) -> Engine:
        """Of a model that is in memory."""
        return self.rooms.pool.engine(model)

    @property
    def runs(self) -> list[Run]:
        return self.rooms.runs.all()

    @property
    def run(self) -> Run:
        """The only run there is."""
        (run,) = self.runs
        return run

    def claim(self, model: str = MODEL) -> bool:
        """Claim and prepare one job, with its model loaded; whether there was one."""
        if not self.rooms.pool.may_claim(model) or not self.rooms.claimer.claim_one(model):
            return False
        if self.rooms.pool.states()[model] is not ModelState.WARM:
            self.rooms.pool.turn()
        self.rooms.preparer.turn()
        return True

    def decode(self, tokens: int) -> None:
        """Steps until the first run has so many more tokens, or has ended."""
        run = self.runs[0]
        goal = len(run.tokens) + tokens
        while len(run.tokens) < goal and run.end is None:
            self.rooms.decoder.turn()

    def publish(self) -> None:
        """Send all tokens and ends that wait."""
        while any((run.unsent and not run.fenced) or run.end for run in self.runs):
            self.rooms.publisher.turn()

    def settle(self) -> None:
        """Obey stops, wait for final checkpoints, send what waits."""
        self.rooms.decoder.wake()
        self.rooms.decoder.turn()
        self.wait_final()
        self.publish()

    def wait_final(self) -> None:
        """Wait for final checkpoints, after which ends wait to be sent."""
        for thread in threading.enumerate():
            if thread.name == "final-checkpoint":
                thread.join(20)

    def finish(self) -> None:
        """Work until no run is left."""
        while self.runs:
            self.rooms.decoder.wake()
            self.rooms.decoder.turn()
            self.publish()

    def save(self) -> None:
        """Wait until all checkpoints taken so far are durable."""
        assert self.rooms.writer.flush(20)
