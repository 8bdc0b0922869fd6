"""``CheckpointWriter``: the thread that hashes and writes, so that decoding never waits.

What waits takes memory: each store has at most one delta waiting behind the one that is being
written, and all of them together stay below a limit. Beyond that a checkpoint is put off; the
next one then holds what it would have held, and more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._live import LiveCheckpoint, as_live
from tenuto_engine._store import CheckpointStore, Durable
from tenuto_engine._token import Token

_log = logging.getLogger(__name__)

OnSaved = Callable[[CheckpointStore, Durable], None]
OnError = Callable[[CheckpointStore, CheckpointWriteError], None]

MAX_PENDING_BYTES: Final = 256 * 2**20
_MOST_WAITING: Final = 2


@dataclass(slots=True)
class _Job:
    """What the writer knows of one store.

    Attributes:
        accepted: number of the newest item accepted.
        settled: number of the newest one that was written or has failed.
        waiting: items between the two.
        ok: whether the newest settled one is durable.
        reported: the conditions reported since the last success.
    """

    accepted: int = 0
    settled: int = 0
    ok: bool = False
    reported: set[str] = field(default_factory=set)

    @property
    def waiting(self) -> int:
        return self.accepted - self.settled


@dataclass(frozen=True, slots=True)
class _Item:
    """Something to do for a store; `write` says whether a checkpoint became durable."""

    store: CheckpointStore
    number: int
    nbytes: int
    write: Callable[[], bool]


class CheckpointWriter:
    """Writes for many stores on a daemon thread of its own, in the order of submission.

    Both callbacks run on that thread. One that raises is logged and does no harm.

    Args:
        on_saved: called with each store of which a checkpoint became durable.
        on_error: called with a store and its error, once for each distinct condition
            until a checkpoint of that store becomes durable again.
        max_pending_bytes: how much memory may wait; one delta may always.

    Attributes:
        written: deltas written since it began.
        written_bytes: their size in memory.
        written_seconds: how long that took, disk included.
    """

    def __init__(
        self,
        on_saved: OnSaved | None = None,
        on_error: OnError | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._on_saved = on_saved
        self._on_error = on_error
        self._max_pending = max_pending_bytes
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()
        self._jobs: WeakKeyDictionary[CheckpointStore, _Job] = WeakKeyDictionary()
        self._pending = 0
        self.written = 0
        self.written_bytes = 0
        self.written_seconds = 0.0
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Memory that waits to be written, or is being written."""
        return self._pending

    def submit(
        self,
        store: CheckpointStore,
        checkpoint: Checkpoint | LiveCheckpoint,
        *,
        final: bool = False,
    ) -> bool:
        """Take what is new, queue it and return at once; on the thread that owns the caches.

        A whole ``Checkpoint`` is taken whole.

        Args:
            final: there will be no later one, so it is taken whatever waits.

        Returns:
            False if nothing was taken, because too much waits, or the store failed a moment
            ago, or the writer is closed. A live checkpoint is then deferred.
        """
        live = as_live(checkpoint)
        with self._changed:
            if self._closed or not (final or self._has_room(store)):
                live.defer()
                return False
        taken = store.take(live, final=final)
        if taken is None:
            live.defer()
            return False
        trace, last = live.trace, live.generated_tokens

        def write() -> bool:
            with trace.span("checkpoint_write", last=last, bytes=taken.nbytes) as facts:
                durable = store.write(taken)
                facts["durable"] = int(durable)
            return durable

        if not self._put(store, taken.nbytes, write):
            live.defer()
            return False
        return True

    def finish(
        self,
        store: CheckpointStore,
        end: Mapping[str, object],
        tokens: Sequence[Token],
        *,
        keep_caches: bool,
    ) -> bool:
        """Queue the store's ``finish``. Failing is reported as any other error.

        Returns:
            False if the writer is closed.
        """

        def write() -> bool:
            store.finish(end, tokens, keep_caches=keep_caches)
            return True

        return self._put(store, 0, write)

    def wait(self, store: CheckpointStore, timeout: float | None = None) -> bool:
        """Wait until all that was accepted of the store is written or has failed.

        Returns:
            Whether the newest is durable. False if that took longer than ``timeout`` seconds,
            or there is none.
        """
        with self._changed:
            job = self._jobs.get(store)
            if job is None:
                return False
            newest = job.accepted
            done = self._changed.wait_for(lambda: job.settled >= newest, timeout)
            return done and job.ok

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is waiting or being written.

        Returns:
            False if that took longer than ``timeout`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Accept nothing more, write what is waiting, and end the thread.

        Returns:
            False if that took longer than ``timeout`` seconds; the thread then goes on.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, store: CheckpointStore, nbytes: int, write: Callable[[], bool]) -> bool:
        with self._changed:
            if self._closed:
                return False
            job = self._jobs.setdefault(store, _Job())
            job.accepted += 1
            self._items.append(_Item(store, job.accepted, nbytes, write))
            self._pending += nbytes
            self._changed.notify_all()
            return True

    def _has_room(self, store: CheckpointStore) -> bool:
        job = self._jobs.get(store)
        if job is not None and job.waiting >= _MOST_WAITING:
            return False
        return self._pending < self._max_pending

    # -- on the writer's thread --------------------------------------------------------

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            if not self._items:
                return False
            item = self._items.popleft()
            self._busy = True
        ok = False
        try:
            ok = self._write(item)
        finally:
            with self._changed:
                job = self._jobs[item.store]
                job.settled, job.ok = item.number, ok
                self._pending -= item.nbytes
                self._busy = False
                self._changed.notify_all()
        return True

    def _write(self, item: _Item) -> bool:
        store = item.store
        began = time.monotonic()
        try:
            durable = item.write()
        except CheckpointWriteError as error:
            self._report(store, error)
            return False
        except Exception as error:  # noqa: BLE001 - all jobs share this thread
            _log.exception("saving a checkpoint in %s", store.folder)
            self._report(store, CheckpointWriteError(store.folder, f"{error!r}"))
            return False
        if item.nbytes:
            self.written += 1
            self.written_bytes += item.nbytes
            self.written_seconds += time.monotonic() - began
        if durable:
            self._jobs[store].reported.clear()
            if self._on_saved is not None:
                self._guard(self._on_saved, store, store.durable)
        return durable

    def _report(self, store: CheckpointStore, error: CheckpointWriteError) -> None:
        reported = self._jobs[store].reported
        if error.reason in reported:
            return
        reported.add(error.reason)
        if self._on_error is not None:
            self._guard(self._on_error, store, error)

    def _guard(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # noqa: BLE001 - all jobs share this thread
            _log.exception("a callback of the checkpoint writer raised")
