"""``CheckpointWriter``: the thread that hashes and writes, so that decoding never waits.

A waiting checkpoint is a whole copy of a cache in host memory. So each job has at most
one waiting, the newest, and all jobs together ``max_pending``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._store import CheckpointStore

_log = logging.getLogger(__name__)

OnSaved = Callable[[CheckpointStore, Checkpoint, Path], None]
OnError = Callable[[CheckpointStore, CheckpointWriteError], None]


@dataclass(slots=True)
class _Job:
    """What the writer knows of one store.

    Attributes:
        submitted: number of the newest checkpoint accepted.
        settled: number of the newest one that is durable or has failed.
        saved: the file of ``settled``, or None if that failed.
        reported: the conditions reported since the last success.
    """

    submitted: int = 0
    settled: int = 0
    saved: Path | None = None
    reported: set[str] = field(default_factory=set)


class CheckpointWriter:
    """Saves checkpoints on a daemon thread of its own.

    Both callbacks run on that thread. One that raises is logged and does no harm.

    Args:
        on_saved: called with each store, checkpoint and file that became durable.
        on_error: called with a store and its error, once for each distinct condition
            until a save of that store succeeds again.
        max_pending: how many jobs may have a checkpoint waiting, at least 1.
    """

    def __init__(
        self,
        on_saved: OnSaved | None = None,
        on_error: OnError | None = None,
        max_pending: int = 2,
    ) -> None:
        self._on_saved = on_saved
        self._on_error = on_error
        self._max_pending = max(1, max_pending)
        self._changed = threading.Condition()
        # In order of submission; a replaced checkpoint keeps its turn.
        self._waiting: dict[CheckpointStore, tuple[int, Checkpoint]] = {}
        self._jobs: WeakKeyDictionary[CheckpointStore, _Job] = WeakKeyDictionary()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, store: CheckpointStore, checkpoint: Checkpoint) -> bool:
        """Queue a checkpoint and return at once.

        Returns:
            False if it was not accepted, because too many jobs wait or the writer is closed.
        """
        with self._changed:
            return self._accept(store, checkpoint)

    def save(
        self, store: CheckpointStore, checkpoint: Checkpoint, timeout: float | None = None
    ) -> Path | None:
        """Queue a checkpoint, waiting for room, and wait until it is durable.

        For the last checkpoint of a row that is cancelled or drained.

        Returns:
            The file, or None if saving failed or took longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(store), timeout)
            if not self._accept(store, checkpoint):
                return None
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self.wait(store, left)

    def wait(self, store: CheckpointStore, timeout: float | None = None) -> Path | None:
        """Wait until the store's newest accepted checkpoint is durable or has failed.

        Returns:
            Its file; None if it failed, took longer than ``timeout`` seconds, or there is none.
        """
        with self._changed:
            job = self._jobs.get(store)
            if job is None:
                return None
            newest = job.submitted
            done = self._changed.wait_for(lambda: job.settled >= newest, timeout)
            return job.saved if done else None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is waiting or being written.

        Returns:
            False if that took longer than ``timeout`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

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

    # -- with the lock held ------------------------------------------------------------

    def _accept(self, store: CheckpointStore, checkpoint: Checkpoint) -> bool:
        if self._closed or not self._has_room(store):
            return False
        job = self._jobs.setdefault(store, _Job())
        job.submitted += 1
        self._waiting[store] = (job.submitted, checkpoint)
        self._changed.notify_all()
        return True

    def _has_room(self, store: CheckpointStore) -> bool:
        return self._closed or store in self._waiting or len(self._waiting) < self._max_pending

    # -- on the writer's thread --------------------------------------------------------

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            store = next(iter(self._waiting))
            number, checkpoint = self._waiting.pop(store)
            self._busy = True
            self._changed.notify_all()
        saved: Path | None = None
        try:
            saved = self._save(store, checkpoint)
        finally:
            with self._changed:
                job = self._jobs[store]
                job.settled, job.saved = number, saved
                self._busy = False
                self._changed.notify_all()
        return True

    def _save(self, store: CheckpointStore, checkpoint: Checkpoint) -> Path | None:
        try:
            path = store.save(checkpoint)
        except CheckpointWriteError as error:
            self._report(store, error)
            return None
        except Exception as error:  # noqa: BLE001 - all jobs share this thread
            _log.exception("saving a checkpoint in %s", store.folder)
            self._report(store, CheckpointWriteError(store.folder, f"{error!r}"))
            return None
        self._jobs[store].reported.clear()
        if self._on_saved is not None:
            self._guard(self._on_saved, store, checkpoint, path)
        return path

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
