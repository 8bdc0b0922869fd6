"""`Judge`: what the folders of jobs are worth, by what Redis knows of the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import redis

from tenuto_client import Keys
from tenuto_engine import (
    CheckpointStore,
    StoredAttempt,
    StoredEnd,
    bytes_on_disk,
    job_folder,
    job_ids,
    stored_attempts,
)

_UNREADABLE_S = 7 * 24 * 3600.0
_MOST_REMEMBERED = 100_000


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


# For so long a job that Redis does not have, and did not remove, can be put back.
_LOST_S = 24 * 3600.0
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
        # (when its files last changed, what they say) by job; reading them again takes time.
        self._data_sets: dict[str, tuple[float, tuple[str | None, str | None]]] = {}

    @property
    def prefix(self) -> str:
        """What all keys of the data set in Redis begin with."""
        return self._keys.namespace

    def guess(self, found: Sequence[Folder]) -> list[tuple[Worth, Folder]]:
        """What folders are worth if they are of the data set in Redis; their files are not read."""
        return [
            (_worth_of(folder, state, removed), folder)
            for folder, state, removed in self._known(found)
        ]

    def lost(self, found: Sequence[Folder]) -> list[Folder]:
        """Those whose jobs are not in Redis and were not removed from it."""
        return [
            folder
            for folder, state, removed in self._known(found)
            if state is None and removed is None and folder.nbytes
        ]

    def worth(self, folder: Folder) -> Worth:
        """What it is good for.

        Redis must be the one that the job belonged to, or one in which all jobs of this data dir
        were put back: it must have the namespace id that stands in the newest checkpoint, as its
        own or as `collectable`.
        """
        namespace = self.namespace(folder)
        if namespace is None:
            # Nothing in it says whose it is, but Redis may remember that it removed the job.
            when = self._client.zscore(self._keys.removed(), folder.job_id)
            return Worth.EVERYTHING if when is None else Worth.NOTHING
        # All in one step: another server may answer the next call.
        with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._keys.namespace_id())
            pipe.sismember(self._keys.collectable(), f"{namespace}@{self._reach}")
            self._ask(pipe, folder)
            current, is_collectable, state, removed = pipe.execute()
        is_ours = current is not None and current == namespace.encode()
        if not (is_ours or is_collectable) or self._is_running(folder.job_id):
            return Worth.EVERYTHING
        return _worth_of(folder, state, removed)

    def _known(
        self, found: Sequence[Folder]
    ) -> Iterator[tuple[Folder, bytes | None, float | None]]:
        """Each with its job's state, and when that was removed, as far as Redis has them."""
        with self._client.pipeline(transaction=False) as pipe:
            for folder in found:
                self._ask(pipe, folder)
            answers = pipe.execute()
        return zip(found, answers[::2], answers[1::2], strict=True)

    def _ask(self, pipe: redis.client.Pipeline, folder: Folder) -> None:
        pipe.hget(self._keys.job(folder.job_id), "state")
        pipe.zscore(self._keys.removed(), folder.job_id)

    def is_of_use(self, folder: Folder) -> bool:
        """Whether it has to stay though there is room."""
        # Reading its files costs more than asking whether Redis has the job.
        if self._client.exists(self._keys.job(folder.job_id)) or self._is_running(folder.job_id):
            return True
        if self.worth(folder) is Worth.NOTHING:
            return False
        age = time.time() - folder.changed_at
        return age < _UNREADABLE_S or self.namespace(folder) is not None

    def namespace(self, folder: Folder) -> str | None:
        """The data set that the newest file of it that can be read belongs to."""
        return self.data_set(folder)[1]

    def data_set(self, folder: Folder) -> tuple[str | None, str | None]:
        """The same: the prefix of its keys, and its id."""
        changed_at, known = self._data_sets.get(folder.job_id, (None, (None, None)))
        if changed_at != folder.changed_at:
            known = _newest_data_set(folder)
            if len(self._data_sets) >= _MOST_REMEMBERED:
                self._data_sets.clear()
            self._data_sets[folder.job_id] = (folder.changed_at, known)
        return known


def _worth_of(folder: Folder, state: bytes | None, removed: float | None) -> Worth:
    # A server that was put back to an earlier state has lost jobs under the same id.
    if state is None and removed is None and time.time() - folder.changed_at < _LOST_S:
        return Worth.EVERYTHING
    return _WORTH.get(state, Worth.EVERYTHING)


def folders(root: Path) -> Iterator[Folder]:
    """The jobs' folders; foreign names are left out.

    Raises:
        CheckpointError: they cannot be listed.
    """
    for name in job_ids(root):
        path = job_folder(root, name)
        stats = list(sizes_and_times(path))
        changed_at = max([path.stat().st_mtime if path.exists() else 0.0, *(at for _, at in stats)])
        yield Folder(name, path, sum(nbytes for nbytes, _ in stats), changed_at)


def _newest_data_set(folder: Folder) -> tuple[str | None, str | None]:
    """That of the newest file that can be read: prefix and id; None if there is none."""
    found: list[StoredAttempt | StoredEnd] = [
        *stored_attempts(folder.path),
        *CheckpointStore(folder.path).ends(),
    ]
    readable = [each for each in found if each.meta is not None]
    if not readable:
        return None, None
    meta = max(readable, key=lambda each: each.epoch).meta or {}
    return meta.get("prefix"), str(meta.get("namespace"))


def sizes_and_times(path: Path) -> Iterator[tuple[int, float]]:
    """Of all files in a folder: bytes, and when it last changed."""
    try:
        files = list(path.iterdir())
    except OSError:
        return
    for file in files:
        try:
            found = file.lstat()
        except OSError:
            continue
        yield bytes_on_disk(found), found.st_mtime
