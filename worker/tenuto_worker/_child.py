"""`Child`: the process that does the work. It builds the rooms, starts and stops them in order.

Run by the supervisor, which calls `main`. Its first line on stdin is a `Brief`;
after that, the end of stdin means that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, Self

from tenuto_client import Keys

from . import _metrics as metrics
from ._deaths import is_out_of_memory, say_last_words
from ._errors import EXIT_BROKEN, EXIT_MEMORY, EXIT_STUCK, StartError
from ._gauges import Gauges
from ._health import Health, Stage
from ._health_http import HealthServer
from ._identity import Identity
from ._loads import note_of, was_asked_to_end
from ._logging import get_log, redacted, set_up_logging, take_over_loggers
from ._redis import Outage, Patience, connect, reach, reviver, weaknesses
from ._served import ServedNote, data_set_ids
from ._settings import WorkerSettings
from ._spans import export_spans, flush_spans
from ._take_back import take_back

if TYPE_CHECKING:
    from ._rooms import Rooms

# MLX's cuDNN attention depends on more than its inputs, so two runs would differ in bits.
MLX_ENVIRONMENT = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}

_WATCH_S = 1.0
_PAUSED_S = 5.0
_RECOVER_S = 30.0

_words_end: int | None = None
# The decode thread hardly ever waits; with Python's own 5 ms a token would wait that long for its
# publisher to have its turn, and again after each call of the system.
_SWITCH_S = 0.001


@dataclass(frozen=True, slots=True)
class Brief:
    """What the supervisor tells its child.

    Attributes:
        settings: as JSON.
        identity: the worker's name, and the lock that the child inherits.
        first: no child of this supervisor has run before, so Redis must be there now.
        crashed: how the one before died by itself; "" if there was none, or it was asked to end.
        words: the pipe for its last words, which the child inherits.
    """

    settings: str
    identity: Identity
    first: bool
    crashed: str = ""
    words: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        values = json.loads(line)
        return cls(**values | {"identity": Identity(**values["identity"])})


class Child:
    """One incarnation of a worker."""

    def __init__(
        self, settings: WorkerSettings, identity: Identity, *, first: bool, crashed: str = ""
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._first = first
        self._crashed = crashed
        self._log = get_log()
        self._outage = Outage(reviver(settings.data_dir) if settings.embedded else None)
        self._patience = Patience(self._outage)
        self._health = Health(self._outage)
        self._gauges = Gauges(settings, self._health, self._outage)
        self._draining = asyncio.Event()
        self._serving = False
        self._tickets: asyncio.Task[None] | None = None

    async def main(self) -> int:
        """Work until asked to stop; returns the exit code.

        Raises:
            StartError: it cannot start, and starting again would not help.
        """
        self._listen_for_the_end()
        self._open_eyes()
        await asyncio.to_thread(self._greet_redis)
        self._health.stage = Stage.LOADING
        rooms = self._gauges.rooms = await asyncio.to_thread(self._build)
        self._health.trouble = rooms.trouble
        watch = asyncio.create_task(self._watch(rooms))
        await self._load(rooms)
        await asyncio.to_thread(rooms.open)
        self._serving = True
        self._health.stage = Stage.SERVING
        for name, body in rooms.threads().items():
            self._start_thread(name, body)
        tickets = self._tickets = asyncio.create_task(rooms.tickets.serve())
        self._log.info("worker ready", models=list(self._settings.models), pid=os.getpid())
        await watch
        tickets.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await tickets
        await asyncio.to_thread(rooms.drain)
        await asyncio.to_thread(flush_spans)
        was_asked_to_end(note_of(self._settings.data_dir, self._identity.name))
        self._log.info("worker ended")
        return 0

    def _open_eyes(self) -> None:
        """Before anything that may take long, so that probes are answered all the while."""
        export_spans()
        metrics.begin_at_zero(self._settings.models)
        metrics.REGISTRY.register(self._gauges)
        if self._settings.metrics_port is not None:
            server = HealthServer(
                self._settings.metrics_host,
                self._settings.metrics_port,
                self._health,
                metrics.REGISTRY,
            )
            server.start(must=self._first)

    def _build(self) -> Rooms:
        # Not before: it takes seconds, in which signals are to be heard.
        from ._rooms import Rooms

        return Rooms(
            self._settings,
            self._identity,
            self._outage,
            self._patience,
            last_death=self._crashed,
        )

    def _greet_redis(self) -> None:
        client = connect(self._settings.redis_url)
        if self._first:
            reach(client, self._settings.redis_url)
        else:
            self._patience(client.ping, until=lambda: False, beat=lambda: None)
        take_back(
            client,
            Keys(self._settings.namespace),
            self._identity.name,
            self._patience,
            crashed=bool(self._crashed),
        )
        # Loading may take minutes, in which others may ask whose the jobs on disk are.
        note = ServedNote(self._settings.data_dir, self._identity.name, self._settings.redis_url)
        keys = Keys(self._settings.namespace)
        ids = self._patience(
            lambda: data_set_ids(client, keys), until=lambda: False, beat=lambda: None
        )
        note.write(ids)
        for weakness in weaknesses(client):
            self._log.warning("redis may lose jobs", setting=weakness)
        client.close()

    async def _load(self, rooms: Rooms) -> None:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()

        def body() -> None:
            # What comes with the engine is imported here, by the one thread that owns the device.
            import_module("tenuto_engine._engine")
            take_over_loggers()
            try:
                rooms.load()
            except StartError as error:
                loop.call_soon_threadsafe(loaded.set_exception, error)
                return
            loop.call_soon_threadsafe(loaded.set_result, None)
            rooms.decoder.run()

        self._start_thread("decode", body)
        await loaded

    async def _watch(self, rooms: Rooms) -> None:
        """From the first load until a drain is asked for. What must not go unnoticed ends the
        process."""
        looked, woken = time.monotonic(), -math.inf
        while not self._draining.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), _WATCH_S)
            now = time.monotonic()
            if now - looked > _PAUSED_S:
                woken = now
            looked = now
            # A process that was paused looks stuck to itself, until its threads had a turn.
            if now - woken > _RECOVER_S and (trouble := rooms.trouble()):
                self._log.critical("worker stuck", why=trouble)
                leave(EXIT_STUCK, trouble)
            if (tickets := self._tickets) is not None and tickets.done():
                self._log.critical("thread died", thread="tickets", exc_info=tickets.exception())
                leave(EXIT_BROKEN, f"thread tickets died: {tickets.exception()!r}")

    # -- the end -----------------------------------------------------------------------

    def _listen_for_the_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not the signal's name: the supervisor, which got another one perhaps, has logged it.
            loop.add_signal_handler(number, self._stop, "asked to stop")

        def wait_for_supervisor() -> None:
            while sys.stdin.readline():
                pass
            loop.call_soon_threadsafe(self._stop, "supervisor gone")

        self._start_thread("supervisor", wait_for_supervisor)

    def _stop(self, why: str) -> None:
        # Only the supervisor cuts a drain short, by SIGKILL: a service manager may signal a whole
        # group, so that the child hears of the same stop twice.
        if self._draining.is_set():
            return
        self._log.info("worker drains", why=why)
        self._health.stage = Stage.DRAINING
        self._draining.set()
        if not self._serving:
            # Nothing was claimed yet, and loading a model cannot be interrupted.
            was_asked_to_end(note_of(self._settings.data_dir, self._identity.name))
            leave(0)

    def _start_thread(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` on a thread; an error that nobody expected ends the process."""

        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - nobody may think we are well
                self._log.critical("thread died", thread=name, exc_info=True)
                why = f"thread {name} died: {type(error).__name__}: {error}"
                leave(EXIT_MEMORY if is_out_of_memory(error) else EXIT_BROKEN, why)

        threading.Thread(target=guarded, name=name, daemon=True).start()


def leave(code: int, why: str = "") -> NoReturn:
    """End the process now, and tell the supervisor why. Threads may hang in a call, so the
    interpreter's own end might too."""
    if why and _words_end is not None:
        say_last_words(_words_end, why)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """The body of the child process."""
    brief = Brief.from_json(sys.stdin.readline())
    os.environ.update(MLX_ENVIRONMENT)
    sys.setswitchinterval(_SWITCH_S)
    settings = WorkerSettings.from_json(brief.settings)
    set_up_logging(settings.log_format, brief.identity.name)
    log = get_log()
    # Whatever this process starts (the embedded server) must not keep the worker's name taken.
    os.set_inheritable(brief.identity.lock, False)
    if brief.words is not None:
        os.set_inheritable(brief.words, False)
    global _words_end
    _words_end = brief.words
    if not brief.identity.holds_lock():
        log.critical("worker lock not held")
        leave(EXIT_BROKEN, "worker lock not held")
    log.info("worker starting", redis=redacted(settings.redis_url), data_dir=str(settings.data_dir))
    child = Child(settings, brief.identity, first=brief.first, crashed=brief.crashed)
    try:
        leave(asyncio.run(child.main()))
    except StartError as error:
        log.critical("worker cannot start", error=str(error))
        leave(error.exit_code)
    except Exception as error:
        log.critical("worker broke", exc_info=True)
        leave(EXIT_BROKEN, repr(error))
