"""Everything that may go wrong, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from exact_runs import (
    Case,
    Models,
    Past,
    Performance,
    References,
    Scene,
    worker_of,
)
from servers import RealServer
from tenuto_client import JobState
from workers import WorkerProcess, poll_until

MISHAPS = 14


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 7))
def test_a_random_chain_of_mishaps_changes_no_bit(
    seed: int,
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    with Scene(server.url, namespace, cases) as scene:
        chaos = Chaos(seed, models, scene, server, namespace, tmp_path)
        try:
            chaos.begin()
            for _ in range(MISHAPS):
                chaos.strike()
            chaos.calm_down()
            scene.assert_exact(references)
        except BaseException:
            print("\n".join([*chaos.story, *(worker.log() for worker in chaos.all_workers)]))
            raise
        finally:
            chaos.close()


class Chaos:
    """Two workers, of which the second has a data dir of its own now and then."""

    def __init__(
        self,
        seed: int,
        models: Models,
        scene: Scene,
        server: RealServer,
        namespace: str,
        root: Path,
    ) -> None:
        self._chance = random.Random(seed)
        self._models = models
        self._scene = scene
        self._server = server
        self._namespace = namespace
        self._root = root
        self._past = Past(server)
        self._has_past = False
        self._asleep: set[WorkerProcess] = set()
        self._workers: list[WorkerProcess] = []
        self.all_workers: list[WorkerProcess] = []
        self.story: list[str] = []

    def begin(self) -> None:
        self._workers = [self._start(), self._start()]
        self._workers[0].wait_ready()
        self._scene.submit()

    def strike(self) -> None:
        """One more mishap, some tokens after the last one or before anything happened."""
        with suppress(AssertionError):
            # None may come, if nobody is awake.
            self._scene.wait_more(self._chance.choice([0, 1, 20, 60]), timeout=5)
        mishap = self._chance.choice(self._mishaps())
        self.story.append(f"{self._scene.tokens} tokens: {mishap.__name__}")
        mishap()

    def calm_down(self) -> None:
        """Wake who sleeps, have somebody alive, and resume until everything is completed."""
        self._wake()
        self._workers.append(self._start())
        poll_until(self._all_completed, "every job's completion", timeout=120, every=0.2)

    def close(self) -> None:
        for worker in self.all_workers:
            worker.close()

    # -- mishaps -----------------------------------------------------------------------

    def _mishaps(self) -> list[Callable[[], None]]:
        return [
            self._kill_child,
            self._kill_machine,
            self._drain,
            self._sleep,
            self._wake,
            self._restart_server,
            self._take_past,
            self._bring_back_past,
            self._cancel,
            self._resume,
            self._flip_bits,
        ]

    def _kill_child(self) -> None:
        # It may be dead already, and its supervisor about to start another one.
        with suppress(ProcessLookupError):
            self._chance.choice(self._workers).kill_child()

    def _kill_machine(self) -> None:
        self._replace(lambda worker: worker.kill())

    def _drain(self) -> None:
        self._wake()
        self._replace(lambda worker: worker.term())

    def _sleep(self) -> None:
        worker = self._chance.choice(self._workers)
        with suppress(ProcessLookupError):
            worker.stop()
            self._asleep.add(worker)

    def _wake(self) -> None:
        for worker in self._asleep:
            with suppress(ProcessLookupError):
                worker.cont()
        self._asleep.clear()

    def _restart_server(self) -> None:
        self._server.restart()

    def _take_past(self) -> None:
        if not self._has_past:
            self._past.take()
            self._has_past = True

    def _bring_back_past(self) -> None:
        if self._has_past:
            self._past.bring_back()

    def _cancel(self) -> None:
        for performance in self._chance.sample(self._scene.jobs, 3):
            performance.job.cancel()

    def _resume(self) -> None:
        for performance in self._scene.jobs:
            self._go_on(performance)

    def _flip_bits(self) -> None:
        files = sorted(self._root.glob("*/checkpoints/*/*"))
        for path in self._chance.sample(files, len(files) // 2):
            with suppress(FileNotFoundError):
                content = bytearray(path.read_bytes())
                content[self._chance.randrange(len(content))] ^= 16
                path.write_bytes(content)

    # -- helpers -----------------------------------------------------------------------

    def _start(self) -> WorkerProcess:
        data_dir = self._root / self._chance.choice(["here", "here", "there"])
        worker = worker_of(self._models, self._server.url, self._namespace, data_dir, lease=1.0)
        self.all_workers.append(worker)
        worker.wait_for("child started")
        return worker

    def _replace(self, end: Callable[[WorkerProcess], object]) -> None:
        worker = self._workers.pop(self._chance.randrange(len(self._workers)))
        end(worker)
        self._asleep.discard(worker)
        self._workers.append(self._start())

    def _go_on(self, performance: Performance) -> bool:
        """Resume it if it has ended early; whether it is completed."""
        state = performance.job.status().state
        if state in (JobState.CANCELLED, JobState.FAILED):
            performance.job.resume()
        reading = performance.readings[-1]
        if reading.done.is_set() and reading.end.state is not JobState.COMPLETED:
            self._scene.follow(performance)
        return state is JobState.COMPLETED

    def _all_completed(self) -> bool:
        completed = [self._go_on(performance) for performance in self._scene.jobs]
        return all(completed)
