"""`Collector`: what checkpoints take on disk, and what of them may go.

Nothing goes of a job that runs, anywhere, and nothing of a data set that is not the one in Redis:
an empty Redis, or another one, costs nobody the last copy.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tenuto_client._findings import count, size
from tenuto_engine import CheckpointError, CheckpointStore, DiskBudget, job_folder

from ._errors import RedisAway
from ._judge import Folder, Judge, Worth, folders, sizes_and_times
from ._logging import get_log
from ._owners import Missing, Owners
from ._redis import Outage, is_outage

_SHARE_OF_FREE = 0.8
_PAUSE_S = 10.0
_STEADY = 0.05
_SMALL_RESULT = 64 * 2**10
_MOST_IN_SMALL_RESULTS = 0.5


class Collector:
    """Removes checkpoints: those of no use in time, others when the disk budget asks for it.

    Args:
        limit: bytes that all may take; None is four fifths of what is free.
        judge: has a connection of its own; `make_room` is called on the writer's thread.
        find_owners: looks who else has jobs of the data dir; called where Redis lacks some.
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
        find_owners: Callable[[], Owners],
        note_ends: Callable[[Iterable[Folder]], object] = lambda found: None,
    ) -> None:
        self._root = root
        self._limit = limit
        self._judge = judge
        self._outage = outage
        self._find_owners = find_owners
        self._note_ends = note_ends
        self._busy = threading.Lock()
        self._again_at = 0.0
        self._lost: set[str] = set()
        self._others: set[str] = set()
        self._refused: set[str] = set()
        self._log = get_log()
        self.budget = DiskBudget(root, make_room=self.make_room)
        self.set_limit(limit)

    def set_limit(self, limit: float | None) -> None:
        """Bytes that all may take from now on; None is four fifths of what is free."""
        self._limit = limit
        self.budget.limit = limit_of(limit, self._root, self.budget.used())

    def report_lost(self) -> None:
        """Say so, once, if there are jobs on disk that Redis lost, or that are another's."""
        found = self._judge.lost(list(folders(self._root)))
        missing = Missing.among(found, self._judge, self._find_owners()) if found else Missing()
        lost = {folder.job_id for folder in missing.lost}
        others = {job.job_id: claim for claim, jobs in missing.others.items() for job in jobs}
        for claim in {others[job] for job in others.keys() - self._others}:
            self._log.warning(
                f"jobs on disk {'are' if claim.is_sure else 'may be'} in another redis",
                jobs=len(missing.others[claim]),
                where=claim.who,
                hint="a data dir for each redis keeps them apart",
            )
        self._others = set(others)
        if lost - self._lost:
            self._log.error(
                "redis lost jobs that are on disk",
                jobs=len(lost),
                hint="tenuto checkpoints recover puts them back",
            )
        self._lost = lost

    def collect(self) -> None:
        """Remove what is of no use, and measure what is left."""
        with self._busy:
            try:
                self.report_lost()
                found = collect(self._root, self._judge)
                self._note_ends(folders(self._root))
            except (CheckpointError, OSError) as error:
                if is_outage(error):
                    raise
                self._log.warning("checkpoints not collected", error=str(error))
                return
        removed = [self._discarded(job, refused) for job, refused in found.items()].count(True)
        if removed:
            self._log.info("checkpoints removed", jobs=removed)
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
            except (RedisAway, CheckpointError, OSError) as error:
                self._log.warning("no room made for checkpoints", error=str(error))
                missing = nbytes
            if missing > 0:
                self._again_at = time.monotonic() + _PAUSE_S

    def _remove(self, nbytes: int) -> int:
        before, limit = self.budget.used(), self.budget.limit
        # What was pruned since the last round is not known yet, nor what became free.
        nbytes -= before - self.budget.measure()
        now = limit_of(self._limit, self._root, self.budget.used())
        if limit is not None and now is not None and now - limit > _STEADY * limit:
            self.budget.limit = now
            nbytes -= now - limit
        if nbytes <= 0:
            return nbytes
        for worth, folder in self._chosen(nbytes):
            # Somebody may have claimed it meanwhile.
            if self._judge.worth(folder) is worth:
                nbytes -= self._discard(folder, worth)
        return nbytes

    def _chosen(self, nbytes: int) -> list[tuple[Worth, Folder]]:
        """What goes for so much room. Where it cannot be made, only what nobody wants."""
        guessed = self._judge.guess(list(folders(self._root)))
        chosen: list[tuple[Worth, Folder]] = []
        for worth, folder in removable(guessed, self.budget.limit):
            if nbytes <= 0:
                return chosen
            # Its files may say that it is of another data set.
            if self._judge.worth(folder) is worth:
                chosen.append((worth, folder))
                nbytes -= folder.nbytes
        if nbytes <= 0:
            return chosen
        self.budget.advice = _advice(
            [folder for worth, folder in guessed if worth is Worth.EVERYTHING]
        )
        return [(worth, folder) for worth, folder in chosen if worth is Worth.NOTHING]

    def _discarded(self, job_id: str, refused: str | None) -> bool:
        """Whether it is gone; why not is said once."""
        if refused is not None and job_id not in self._refused:
            get_log(job=job_id).warning("checkpoints not removed", error=refused)
            self._refused.add(job_id)
        return refused is None

    def _discard(self, folder: Folder, worth: Worth) -> int:
        log = get_log(job=folder.job_id)
        facts = {"bytes": folder.nbytes, "budget": self.budget.limit}
        if worth is Worth.RESULT:
            log.warning(
                "checkpoints of a completed job removed: the disk budget is used up",
                what_it_means="its result can no longer be recovered if Redis loses it",
                **facts,
            )
        elif worth is Worth.RESUME:
            log.warning(
                "checkpoints of a job that can go on removed: the disk budget is used up",
                what_it_means="the job replays from its prompt; no token is lost",
                **facts,
            )
        else:
            log.info("checkpoints removed to make room", what_it_means="the job is gone", **facts)
        self._discarded(folder.job_id, discard(self._root, folder.job_id))
        freed = folder.nbytes - _bytes_in(folder.path)
        self.budget.refund(freed)
        return freed


def _advice(kept: list[Folder]) -> str:
    taken = size(sum(folder.nbytes for folder in kept))
    return (
        f"{taken} by {count(len(kept), 'job')} running or unknown to Redis, of which nothing goes; "
        "jobs go on, but without new checkpoints; a larger --disk-budget brings them back"
    )


def removable(
    guessed: Iterable[tuple[Worth, Folder]], limit: int | None
) -> list[tuple[Worth, Folder]]:
    """What may go, least worth first, then oldest first.

    Small results stay, as they make little room, unless all of them take half of the budget.
    """
    found = [each for each in guessed if each[0] is not Worth.EVERYTHING]
    small = [each for each in found if _is_small_result(*each)]
    taken = sum(folder.nbytes for _, folder in small)
    if limit is None or taken <= _MOST_IN_SMALL_RESULTS * limit:
        found = [each for each in found if not _is_small_result(*each)]
    return sorted(found, key=lambda each: (each[0], each[1].changed_at))


def _is_small_result(worth: Worth, folder: Folder) -> bool:
    return worth is Worth.RESULT and folder.nbytes < _SMALL_RESULT


def limit_of(limit: float | None, root: Path, used: int) -> int | None:
    """The budget in bytes: as it was set, or what is used and four fifths of what is free."""
    if limit is not None:
        return None if limit == float("inf") else int(limit)
    existing = next((each for each in (root, *root.parents) if each.exists()), root)
    try:
        return used + int(_SHARE_OF_FREE * shutil.disk_usage(existing).free)
    except OSError:
        # The disk is gone; then there is nothing to write on either.
        return None


def collect(root: Path, judge: Judge, *, dry_run: bool = False) -> dict[str, str | None]:
    """Remove the checkpoints of jobs that Redis says are gone.

    Folders in which nothing is readable go a week after their last change.

    Returns:
        Their ids, each with why it is not removed, or None.
    """
    useless = (folder.job_id for folder in folders(root) if not judge.is_of_use(folder))
    return {job: None if dry_run else discard(root, job) for job in useless}


def discard(root: Path, job_id: str) -> str | None:
    """Remove a job's checkpoints; returns why not, if something of it is still there."""
    folder = job_folder(root, job_id)
    try:
        CheckpointStore(folder).delete()
    except CheckpointError as error:
        return str(error)
    return f"{folder}: there is something in it that is not ours" if folder.exists() else None


def _bytes_in(path: Path) -> int:
    return sum(nbytes for nbytes, _ in sizes_and_times(path))
