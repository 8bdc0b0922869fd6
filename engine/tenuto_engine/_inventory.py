"""What stands in the folders: a job's checkpoints and ends, and all jobs."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tenuto_engine._assembly import assemble
from tenuto_engine._budget import bytes_on_disk
from tenuto_engine._chain import StoredCommit, commits
from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._errors import CheckpointCorrupt, CheckpointError, InvalidOption
from tenuto_engine._fs import FileSystem, StrPath
from tenuto_engine._log import Attempt, LogFile, read_end
from tenuto_engine._token import Token

_log = logging.getLogger(__name__)

JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Of format version 1: epoch, number, nonce.
OLD_NAME: Final = re.compile(r"([0-9]{8,10})-([0-9]{8,10})-([A-Za-z0-9_]{1,64})\.ckpt(\.tmp)?")
OLD: Final = "of format version 1, which is not read any more"
_MOST_LISTINGS: Final = 8

OnCorrupt = Callable[[CheckpointCorrupt], None]


@dataclass(frozen=True, slots=True, eq=False)
class StoredCheckpoint:
    """A checkpoint in a job's folder, known by headers alone; or a file that is damaged.

    Attributes:
        path: the log that it is in.
        epoch: the attempt that wrote it.
        nonce: the attempt's own.
        seq: its number in the log.
        nbytes: bytes of its record; of the whole file, if that is damaged.
        cache_length: tokens whose KV it holds; 0 if damaged.
        generated_tokens: generated ones among them; 0 if damaged.
        prompt_tokens: length of the whole prompt; 0 if damaged.
        created_at: seconds since 1970, by the writer's clock; 0 if damaged.
        seed: what the draws derive from; 0 if damaged.
        pending_token: the sampled token whose KV it does not hold, or None.
        meta: the caller's own; None if damaged.
        damage: what is wrong, or None.
    """

    path: Path
    epoch: int
    nonce: str
    seq: int = 0
    nbytes: int = 0
    cache_length: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    created_at: float = 0.0
    seed: int = 0
    pending_token: int | None = None
    meta: Mapping[str, Any] | None = None
    damage: str | None = None
    commit: StoredCommit | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of the prompt, as far as it was known to the writer."""
        return self.commit.prompt if self.commit else ()

    def tokens(self) -> list[Token]:
        """The generated tokens whose KV it holds, in order."""
        return self.commit.tokens() if self.commit else []

    def load(self) -> Checkpoint:
        """Read and check all that it needs.

        Raises:
            CheckpointCorrupt: it is damaged, gone, or cannot be read.
        """
        if self.commit is None:
            # Commits before a damaged end of their log do not need it.
            raise CheckpointCorrupt(self.path, self.damage or "it is damaged", offset=0)
        return assemble(self.commit)

    def needs(self, damage: CheckpointCorrupt) -> bool:
        """Whether what made another one unreadable makes this one so too."""
        return self.commit is not None and self.commit.needs(damage)


@dataclass(frozen=True, slots=True, eq=False)
class StoredEnd:
    """How a job ended, as a file says.

    Attributes:
        path, epoch, nonce: the file, and whose it is.
        end: the caller's own, as it was given to ``finish``; empty if damaged.
        tokens: all of the job.
        prompt, prompt_tokens, seed, meta: as in a checkpoint.
        ended_at: seconds since 1970, by the writer's clock.
        damage: what is wrong, or None.
    """

    path: Path
    epoch: int
    nonce: str
    end: Mapping[str, Any]
    tokens: tuple[Token, ...] = ()
    prompt: tuple[int, ...] = ()
    prompt_tokens: int = 0
    seed: int = 0
    meta: Mapping[str, Any] | None = None
    ended_at: float = 0.0
    damage: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredAttempt:
    """A log in a job's folder: what its attempt started from.

    Attributes:
        path, epoch, nonce: the file, and whose it is.
        nbytes: of the file.
        checkpoints: how many are in it.
        is_torn: it ends in a write that was cut short, which is no damage.
        prompt, prompt_tokens, seed, meta: as in a checkpoint; the meta is None if damaged.
        begun_at: seconds since 1970, by the writer's clock.
        damage: what is wrong, or None.
    """

    path: Path
    epoch: int
    nonce: str
    nbytes: int = 0
    checkpoints: int = 0
    is_torn: bool = False
    prompt: tuple[int, ...] = ()
    prompt_tokens: int = 0
    seed: int = 0
    meta: Mapping[str, Any] | None = None
    begun_at: float = 0.0
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job's folder, for a listing.

    Attributes:
        job_id: the folder's name.
        folder: where it is.
        checkpoints: newest first; damaged files come before them.
        ends: the latest epoch first.
        attempts: the logs, those without a checkpoint too, the latest epoch first.
        nbytes: bytes that all its files take on disk.
    """

    job_id: str
    folder: Path
    checkpoints: tuple[StoredCheckpoint, ...]
    ends: tuple[StoredEnd, ...]
    attempts: tuple[StoredAttempt, ...]
    nbytes: int


# -- one job ---------------------------------------------------------------------------


def stored_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """The checkpoints in a job's folder, newest first: longest cache, then epoch, then number.

    Damaged logs come first, since they may have held the newest. Only headers are read.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    names = listed(folder)
    scans = _Scans(folder)
    found = [_old(folder / name, match) for name in names if (match := OLD_NAME.fullmatch(name))]
    for name in names:
        attempt = Attempt.of_file(name)
        if attempt is not None and name == attempt.log:
            found += _of_log(scans, folder / name, attempt)
    return sorted(found, key=_newest_first, reverse=True)


def newest_valid(folder: Path, on_corrupt: OnCorrupt | None = None) -> Checkpoint | None:
    """The newest checkpoint that is wholly undamaged, or None.

    Args:
        on_corrupt: called with each damage that was passed over; they are logged in any case.
    """
    damages: list[CheckpointCorrupt] = []
    for _ in range(_MOST_LISTINGS):
        for stored in stored_checkpoints(folder):
            if any(stored.path == d.path and stored.damage for d in damages):
                continue
            if any(map(stored.needs, damages)):
                continue
            try:
                return stored.load()
            except CheckpointCorrupt as error:
                # An attempt that is still alive may have removed it meanwhile.
                if not stored.path.exists():
                    break
                damages.append(error)
                _report(error, on_corrupt)
        else:
            return None
    return None


def stored_ends(folder: Path) -> list[StoredEnd]:
    """What the attempts said of the job's end, the latest epoch first.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    attempts = [(name, Attempt.of_file(name)) for name in listed(folder)]
    ends = [
        _end(folder / name, attempt)
        for name, attempt in attempts
        if attempt is not None and name == attempt.end
    ]
    return sorted(ends, key=lambda each: (each.epoch, each.ended_at), reverse=True)


def stored_attempts(folder: StrPath) -> list[StoredAttempt]:
    """The logs in a job's folder, the latest epoch first. Only headers are read.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    folder = Path(folder)
    named = [(name, Attempt.of_file(name)) for name in listed(folder)]
    found = [
        _attempt(folder / name, attempt)
        for name, attempt in named
        if attempt is not None and name == attempt.log
    ]
    return sorted(found, key=lambda each: (each.epoch, each.begun_at), reverse=True)


def delete_folder(fs: FileSystem, folder: Path) -> None:
    """Remove all files of ours and the folder. What is not ours stays, and the folder with it.

    Raises:
        CheckpointError: the disk refused.
    """
    refused: OSError | None = None
    try:
        for name in fs.listdir(folder):
            try:
                if is_ours(name):
                    _unlink(fs, folder / name)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused
        fs.remove_folder(folder)
        fs.sync_folder(folder.parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return
        raise CheckpointError(f"{folder}: cannot be deleted: {error.strerror}") from error


def is_ours(name: str) -> bool:
    """Whether a file of this name is one of a job's checkpoint files."""
    return Attempt.of_file(name) is not None or OLD_NAME.fullmatch(name) is not None


def old_epoch(name: str) -> int | None:
    """The epoch of a file of format version 1; None if it is not one."""
    match = OLD_NAME.fullmatch(name)
    return int(match[1]) if match else None


class _Scans:
    """The logs of a folder, each scanned once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, LogFile | CheckpointCorrupt] = {}

    def scan(self, name: str) -> LogFile:
        if name not in self._known:
            try:
                self._known[name] = LogFile.scan(self._folder / name)
            except CheckpointCorrupt as error:
                self._known[name] = error
        known = self._known[name]
        if isinstance(known, CheckpointCorrupt):
            raise known
        return known

    def find(self, name: str) -> LogFile | None:
        try:
            return self.scan(name)
        except CheckpointCorrupt:
            return None


def _of_log(scans: _Scans, path: Path, attempt: Attempt) -> list[StoredCheckpoint]:
    try:
        log = scans.scan(path.name)
        found = [_stored(commit) for commit in commits(log, scans.find)]
    except CheckpointCorrupt as error:
        return [_damaged(path, attempt, error.reason)]
    if log.tail not in (None, "torn"):
        found.append(_damaged(path, attempt, f"{log.tail}, at byte {log.end_of_valid}"))
    return found


def _stored(commit: StoredCommit) -> StoredCheckpoint:
    return StoredCheckpoint(
        path=commit.path,
        epoch=commit.epoch,
        nonce=commit.nonce,
        seq=commit.seq,
        nbytes=commit.nbytes,
        cache_length=commit.cache_length,
        generated_tokens=commit.generated_tokens,
        prompt_tokens=commit.prompt_tokens,
        created_at=commit.created_at,
        seed=commit.seed,
        pending_token=commit.pending_token,
        meta=commit.meta,
        commit=commit,
    )


def _attempt(path: Path, attempt: Attempt) -> StoredAttempt:
    bare = StoredAttempt(path, attempt.epoch, attempt.nonce, nbytes=_size(path))
    try:
        log = LogFile.scan(path)
    except CheckpointCorrupt as error:
        return replace(bare, damage=error.reason)
    begin = log.begin
    return replace(
        bare,
        checkpoints=sum(entry.span.commit is not None for entry in log.spans),
        is_torn=log.tail == "torn",
        prompt=begin.prompt,
        prompt_tokens=begin.prompt_tokens,
        seed=begin.seed,
        meta=begin.meta,
        begun_at=begin.created_at,
        damage=None if log.tail in (None, "torn") else f"{log.tail}, at byte {log.end_of_valid}",
    )


def _damaged(path: Path, attempt: Attempt, reason: str) -> StoredCheckpoint:
    return StoredCheckpoint(path, attempt.epoch, attempt.nonce, nbytes=_size(path), damage=reason)


def _old(path: Path, match: re.Match[str]) -> StoredCheckpoint:
    epoch, seq, nonce, _ = match.groups()
    return StoredCheckpoint(path, int(epoch), nonce, seq=int(seq), nbytes=_size(path), damage=OLD)


def _end(path: Path, attempt: Attempt) -> StoredEnd:
    try:
        begin, end = read_end(path)
    except CheckpointCorrupt as error:
        return StoredEnd(path, attempt.epoch, attempt.nonce, {}, damage=error.reason)
    return StoredEnd(
        path=path,
        epoch=attempt.epoch,
        nonce=attempt.nonce,
        end=end.end,
        tokens=end.tokens,
        prompt=begin.prompt,
        prompt_tokens=begin.prompt_tokens,
        seed=begin.seed,
        meta=begin.meta,
        ended_at=end.at,
    )


def _newest_first(stored: StoredCheckpoint) -> tuple[bool, int, int, int]:
    return (stored.damage is not None, stored.cache_length, stored.epoch, stored.seq)


def _report(error: CheckpointCorrupt, on_corrupt: OnCorrupt | None) -> None:
    _log.warning("skipped a checkpoint: %s", error)
    if on_corrupt is not None:
        on_corrupt(error)


# -- all jobs --------------------------------------------------------------------------


def check_job_id(job_id: str, field: str = "job_id") -> None:
    """Raise ``InvalidOption`` of `field` unless the id is 1 to 64 of ``[A-Za-z0-9_-]``."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidOption(field, f"the name {job_id!r} is not 1 to 64 of [A-Za-z0-9_-]")


def job_folder(root: StrPath, job_id: str) -> Path:
    """Where the job's checkpoints are.

    Raises:
        InvalidOption: the id is not one of ours, and might lead out of ``root``.
    """
    check_job_id(job_id)
    return Path(root) / job_id


def job_ids(root: StrPath) -> list[str]:
    """The jobs that have a folder under ``root``, in order. Foreign names are left out.

    Raises:
        CheckpointError: ``root`` cannot be listed.
    """
    root = Path(root)
    return sorted(name for name in listed(root) if _is_job_folder(root / name))


def read_job(folder: StrPath) -> StoredJob:
    """What a job's folder holds.

    Raises:
        CheckpointError: it cannot be listed.
    """
    folder = Path(folder)
    return StoredJob(
        folder.name,
        folder,
        tuple(stored_checkpoints(folder)),
        tuple(stored_ends(folder)),
        tuple(stored_attempts(folder)),
        sum(_size(folder / name) for name in listed(folder) if is_ours(name)),
    )


def list_jobs(root: StrPath) -> list[StoredJob]:
    """The jobs that have a folder under ``root``, by id. Foreign names are left out.

    Raises:
        CheckpointError: a folder cannot be listed.
    """
    return [read_job(Path(root) / job_id) for job_id in job_ids(root)]


def _is_job_folder(entry: Path) -> bool:
    return bool(JOB_ID.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()


# -- helpers ---------------------------------------------------------------------------


def listed(folder: Path) -> list[str]:
    """The names in a folder; [] if it does not exist.

    Raises:
        CheckpointError: it cannot be listed.
    """
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror}") from error


def _size(path: Path) -> int:
    try:
        return bytes_on_disk(path.lstat())
    except OSError:
        return 0


def _unlink(fs: FileSystem, path: Path) -> None:
    with suppress(FileNotFoundError):
        fs.unlink(path)
