"""The stage: one server, three workers on two data dirs, and a way to the server for each."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from exact_runs import Models, Past, worker_of
from proxies import CutProxy
from servers import RealServer
from tenuto_client import Keys
from workers import WorkerProcess, with_site

from .pool import SLOTS

SITE = Path(__file__).parent.parent / "poison_site"
POISON_SEED = 666
LEASE = 1.5


@dataclass
class Place:
    """Where a worker lives: started again there whenever it dies as a whole.

    Attributes:
        past: the processes that there were before.
        busy: something happens to it that takes a while.
    """

    number: int
    data_dir: Path
    proxy: CutProxy
    process: WorkerProcess
    past: list[WorkerProcess] = field(default_factory=list)
    busy: bool = False

    @property
    def sign(self) -> Path:
        """While this file is there, the disk is full."""
        return self.data_dir / "full"

    @property
    def name(self) -> str | None:
        """As Redis knows the worker that runs now; None before it serves."""
        lines = self.process.lines("worker ready")
        return str(lines[-1]["worker"]) if lines else None


class Stage:
    """A context manager; all processes and files end with it.

    Attributes:
        damaged: folders of jobs in which a bit was flipped.
    """

    def __init__(self, models: Models, data_dirs: tuple[str, ...] = ("a", "a", "b")) -> None:
        self._models = models
        self._names = data_dirs
        self.damaged: set[Path] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        with self._stack:
            enter = self._stack.enter_context
            self.root = Path(enter(tempfile.TemporaryDirectory(prefix="tenuto-chaos-")))
            self.server = enter(RealServer())
            self.past = Past(self.server)
            self.namespace = f"t{secrets.token_hex(4)}:"
            self.keys = Keys(self.namespace)
            self.readers = enter(CutProxy(self.server.socket, "readers"))
            self.raw: Any = redis.Redis.from_url(
                self.server.url, decode_responses=True, socket_timeout=0.5
            )
            self._stack.callback(self.raw.close)
            self.places: list[Place] = []
            self._stack.callback(self._close_workers)
            for number, name in enumerate(self._names):
                self._add_place(number, self.root / name)
            self._opened = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def restart(self, place: Place) -> None:
        """Start a worker where one has just died as a whole."""
        place.past.append(place.process)
        place.process = self._start(place.data_dir, place.proxy, place.sign)

    def revive(self) -> None:
        """Start workers again that ended by themselves, as one does that finds no server."""
        for place in self.places:
            if not place.busy and not place.process.is_running:
                self.restart(place)

    def running(self) -> dict[str, list[str]]:
        """The ids of the running jobs by the name of their worker.

        Raises:
            redis.RedisError: the server does not answer just now.
        """
        found: dict[str, list[str]] = {}
        for job_id in self.raw.zrange(self.keys.running(), 0, -1):
            name = self.raw.hget(self.keys.job(job_id), "worker")
            found.setdefault(str(name), []).append(job_id)
        return found

    async def busy_places(self) -> list[Place]:
        """Those with a running job, to which nothing else happens."""
        try:
            running = await asyncio.to_thread(self.running)
        except redis.RedisError:
            return []
        return [place for place in self.places if not place.busy and place.name in running]

    def processes(self) -> list[WorkerProcess]:
        """All that there ever were."""
        return [each for place in self.places for each in (*place.past, place.process)]

    def events(self) -> Counter[str]:
        """How often workers logged each event."""
        return Counter(line["event"] for each in self.processes() for line in each.lines())

    def _add_place(self, number: int, data_dir: Path) -> None:
        proxy = self._stack.enter_context(CutProxy(self.server.socket, f"w{number}"))
        process = self._start(data_dir, proxy, data_dir / "full")
        self.places.append(Place(number, data_dir, proxy, process))

    def _start(self, data_dir: Path, proxy: CutProxy, sign: Path) -> WorkerProcess:
        environ = {
            **with_site(SITE),
            "POISON_SEED": str(POISON_SEED),
            "POISON_TOKEN": "0",
            "DISK_IS_FULL": str(sign),
        }
        return worker_of(
            self._models,
            proxy.url,
            self.namespace,
            data_dir,
            slots=SLOTS,
            lease=LEASE,
            environ=environ,
        )

    def _close_workers(self) -> None:
        for place in self.places:
            place.process.close()
