"""`Collector`: what checkpoints take on disk, and what of them may go.

Nothing goes of a job that runs, anywhere, and nothing of a data set that is not the one in Redis:
an empty Redis, or another one, costs nobody the last copy.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import redis

from tenuto_client import Keys
from tenuto_engine import (
    CheckpointError,
    CheckpointStore,
    DiskBudget,
    StoredAttempt,
    StoredEnd,
    job_folder,
    job_ids,
    stored_attempts,
)

from ._errors import RedisAway
from ._logging import get_log
from ._redis import Outage

_UNREADABLE_S = 7 * 24 * 3600.0
_SHARE_OF_FREE = 0.8
_PAUSE_S = 10.0
_STEADY = 0.05


class Worth(IntEnum):
    """What a folder is good for; the lowest goes first."""

    NOTHING = 0
    """Redis says that the job is gone."""
    RESULT = 1
    """The job is completed: only `recover` would want it."""
    RESUME = 2
    """The job can go on from it; without it, it replays from its prompt."""
    EVERYTHING = 3
    """The job runs, or is none of this data set, or nobody can say: it stays."""


_WORTH = {
    None: Worth.NOTHING,
    b"completed": Worth.RESULT,
    b"queued": Worth.RESUME,
    b"failed": Worth.RESUME,
    b"cancelled": Worth.RESUME,
}


@dataclass(frozen=True, slots=True)
class Folder:
    """A job's folder as the disk shows it, without a look into its files.

    Attributes:
        job_id, path: whose it is, and where.
        nbytes: what its files take.
        changed_at: when one of them last changed, Unix seconds.
    """

    job_id: str
    path: Path
    nbytes: int
    changed_at: float


class Judge:
    """Says what folders are worth, by what Redis knows of their jobs.

    Args:
        reach: id of the data dir that the folders are in.
        is_running: whether a job runs on this worker.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        reach: str,
        is_running: Callable[[str], bool] = lambda job: False,
    ) -> None:
        self._client = client
        self._keys = keys
        self._reach = reach
        self._is_running = is_running

    def worth(self, folder: Folder) -> Worth:
        """What it is good for.

        Redis must be the one that the job belonged to, or one in which all jobs of this data dir
        were put back: it must have the namespace id that stands in the newest checkpoint, as its
        own or as `collectable`.
        """
        meta = newest_meta(folder)
        if meta is None:
            return Worth.EVERYTHING
        # All in one step: another server may answer the next call.
        with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.namespace_id())
            pipe.sismember(self._keys.collectable(), f"{meta.get('namespace')}@{self._reach}")
            pipe.hget(self._keys.job(folder.job_id), "state")
            namespace, is_collectable, state = pipe.execute()
        is_ours = namespace is not None and namespace.decode() == meta.get("namespace")
        if not (is_ours or is_collectable) or self._is_running(folder.job_id):
            return Worth.EVERYTHING
        return _WORTH.get(state, Worth.EVERYTHING)

    def is_of_use(self, folder: Folder) -> bool:
        """Whether it has to stay though there is room."""
        # Reading its files costs more than asking whether Redis has the job.
        if self._client.exists(self._keys.job(folder.job_id)) or self._is_running(folder.job_id):
            return True
        if self.worth(folder) is Worth.NOTHING:
            return False
        age = time.time() - folder.changed_at
        return age < _UNREADABLE_S or newest_meta(folder) is not None


class Collector:
    """Removes checkpoints: those of no use in time, others when the disk budget asks for it.

    Args:
        limit: bytes that all may take; None is four fifths of what is free.
        judge: has a connection of its own; `make_room` is called on the writer's thread.
        note_ends: called with all folders that are left, in each round.

    Attributes:
        budget: what the stores charge.
    """

    def __init__(
        self,
        root: Path,
        limit: float | None,
        judge: Judge,
        outage: Outage,
        note_ends: Callable[[Iterable[Folder]], object] = lambda found: None,
    ) -> None:
        self._root = root
        self._limit = limit
        self._judge = judge
        self._outage = outage
        self._note_ends = note_ends
        self._busy = threading.Lock()
        self._again_at = 0.0
        self._log = get_log()
        self.budget = DiskBudget(root, make_room=self.make_room)
        self.budget.limit = limit_of(limit, root, self.budget.used())

    def collect(self) -> None:
        """Remove what is of no use, and measure what is left."""
        with self._busy:
            try:
                removed = collect(self._root, self._judge)
                self._note_ends(folders(self._root))
            except CheckpointError as error:
                self._log.warning("checkpoints not collected", error=str(error))
                return
        if removed:
            self._log.info("checkpoints removed", jobs=len(removed))
        used = self.budget.measure()
        limit = limit_of(self._limit, self._root, used)
        before = self.budget.limit
        # A limit that follows each change of the disk would make each refusal another one.
        if limit is None or before is None or abs(limit - before) > _STEADY * before:
            self.budget.limit = limit

    def make_room(self, nbytes: int) -> None:
        """Remove so much, if that is possible: what is of least worth first, then the oldest."""
        with self._busy:
            if time.monotonic() < self._again_at:
                return
            try:
                missing = self._outage.attempt(lambda: self._remove(nbytes))
            except (RedisAway, CheckpointError) as error:
                self._log.warning("no room made for checkpoints", error=str(error))
                missing = nbytes
            if missing > 0:
                self._again_at = time.monotonic() + _PAUSE_S

    def _remove(self, nbytes: int) -> int:
        before = self.budget.used()
        # What was pruned since the last round is not known yet.
        nbytes -= before - self.budget.measure()
        if nbytes <= 0:
            return nbytes
        judged = [(self._judge.worth(folder), folder) for folder in folders(self._root)]
        judged.sort(key=lambda each: (each[0], each[1].changed_at))
        for worth, folder in judged:
            if nbytes <= 0 or worth is Worth.EVERYTHING:
                break
            # Somebody may have claimed it since.
            if self._judge.worth(folder) is worth:
                nbytes -= self._discard(folder, worth)
        return nbytes

    def _discard(self, folder: Folder, worth: Worth) -> int:
        log = get_log(job=folder.job_id)
        facts = {"bytes": folder.nbytes, "budget": self.budget.limit}
        if worth is Worth.RESUME:
            log.warning(
                "checkpoints of a job that can go on removed: the disk budget is used up",
                what_it_means="the job replays from its prompt; no token is lost",
                **facts,
            )
        else:
            log.info("checkpoints removed to make room", state=worth.name.lower(), **facts)
        discard(self._root, folder.job_id)
        freed = folder.nbytes - sum(_sizes(folder.path))
        self.budget.refund(freed)
        return freed


def limit_of(limit: float | None, root: Path, used: int) -> int | None:
    """The budget in bytes: as it was set, or what is used and four fifths of what is free."""
    if limit is not None:
        return None if limit == float("inf") else int(limit)
    try:
        return used + int(_SHARE_OF_FREE * shutil.disk_usage(root).free)
    except OSError:
        # No folder yet, or the disk is gone; then there is nothing to write on either.
        return None


def collect(root: Path, judge: Judge, *, dry_run: bool = False) -> list[str]:
    """Remove the checkpoints of jobs that Redis says are gone; returns their ids.

    Folders in which nothing is readable go a week after their last change.
    """
    removed = []
    for folder in folders(root):
        if judge.is_of_use(folder):
            continue
        removed.append(folder.job_id)
        if not dry_run:
            discard(root, folder.job_id)
    return removed


def folders(root: Path) -> Iterator[Folder]:
    """The jobs' folders; foreign names are left out.

    Raises:
        CheckpointError: they cannot be listed.
    """
    for name in job_ids(root):
        path = job_folder(root, name)
        stats = list(_stats(path))
        changed_at = max([path.stat().st_mtime if path.exists() else 0.0, *(at for _, at in stats)])
        yield Folder(name, path, sum(nbytes for nbytes, _ in stats), changed_at)


def newest_meta(folder: Folder) -> Mapping[str, Any] | None:
    """What the newest file that can be read says of its job; None if there is none."""
    found: list[StoredAttempt | StoredEnd] = [
        *stored_attempts(folder.path),
        *CheckpointStore(folder.path).ends(),
    ]
    readable = [each for each in found if each.meta is not None]
    return max(readable, key=lambda each: each.epoch).meta if readable else None


def discard(root: Path, job_id: str) -> None:
    """Remove a job's checkpoints. What the disk refuses is logged; the next round tries again."""
    try:
        CheckpointStore(job_folder(root, job_id)).delete()
    except CheckpointError as error:
        get_log(job=job_id).warning("checkpoints not removed", error=str(error))


def _stats(path: Path) -> Iterator[tuple[int, float]]:
    try:
        files = list(path.iterdir())
    except OSError:
        return
    for file in files:
        try:
            stat = file.lstat()
        except OSError:
            continue
        yield stat.st_size, stat.st_mtime


def _sizes(path: Path) -> Iterable[int]:
    return (nbytes for nbytes, _ in _stats(path))
