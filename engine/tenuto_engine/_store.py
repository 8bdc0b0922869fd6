"""``CheckpointStore``: the folder of one job; saving, finding the newest valid, pruning.

The rename is the commit: a file under its final name is whole and synced. Every attempt
(epoch and nonce) has names of its own, so nobody ever writes into another's file, and
an attempt that sees a higher epoch removes nothing but its own.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tenuto_engine._checkpoint import Checkpoint, from_header, to_header
from tenuto_engine._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointWriteError,
    InvalidOption,
)
from tenuto_engine._format import CheckpointFile, write_file
from tenuto_engine._fs import FileSystem

_log = logging.getLogger(__name__)

TEMPORARY: Final = ".tmp"
_JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NONCE: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
_NAME: Final = re.compile(rf"(\d{{8,10}})-(\d{{8,10}})-({_NONCE.pattern})\.ckpt({TEMPORARY})?")

OnCorrupt = Callable[[CheckpointCorrupt], None]


class _Name(NamedTuple):
    """A file's name. Ordered as the files were written."""

    epoch: int
    seq: int
    nonce: str
    temporary: bool = False

    @classmethod
    def parse(cls, name: str) -> Self | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        epoch, seq, nonce, temporary = match.groups()
        return cls(int(epoch), int(seq), nonce, temporary is not None)

    def __str__(self) -> str:
        end = TEMPORARY if self.temporary else ""
        return f"{self.epoch:08d}-{self.seq:08d}-{self.nonce}.ckpt{end}"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A file in a job's folder, known by its header alone.

    Attributes:
        path: the file.
        epoch: the attempt that wrote it.
        seq: its number among all files of the job.
        nonce: the attempt's own.
        nbytes: bytes on disk.
        cache_length: tokens whose KV it holds; 0 if damaged.
        generated_tokens: generated ones among them; 0 if damaged.
        prompt_tokens: length of the whole prompt; 0 if damaged.
        created_at: seconds since 1970, by the writer's clock; 0 if damaged.
        meta: the caller's own, as it was saved.
        damage: what is wrong with the header, or None.
    """

    path: Path
    epoch: int
    seq: int
    nonce: str
    nbytes: int = 0
    cache_length: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    created_at: float = 0.0
    meta: Mapping[str, Any] | None = None
    damage: str | None = None

    def load(self) -> Checkpoint:
        """Read and check the whole file.

        Raises:
            CheckpointCorrupt: it is damaged, gone, or cannot be read.
        """
        with CheckpointFile.open(self.path) as file:
            return _checkpoint_of(file)


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job's folder, for a listing.

    Attributes:
        job_id: the folder's name.
        folder: where it is.
        checkpoints: newest first; damaged ones are among them.
        nbytes: bytes that they take on disk.
    """

    job_id: str
    folder: Path
    checkpoints: tuple[StoredCheckpoint, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: the file.
        ok: every byte of it was checked and is as it was written.
        reason: what is wrong, or None.
        cache_length: tokens whose KV it holds; 0 if not ok.
        generated_tokens: generated ones among them; 0 if not ok.
    """

    path: Path
    ok: bool
    reason: str | None = None
    cache_length: int = 0
    generated_tokens: int = 0


class CheckpointStore:
    """The checkpoints of one job, as one attempt at it sees them.

    Args:
        folder: the job's own folder; its name is the job's id. Created by the first save.
        epoch: which attempt this is.
        nonce: the attempt's own, of ``[A-Za-z0-9_]``; random if None.
        meta: added to the meta of every checkpoint saved.
        keep: how many checkpoints to keep, at least 1.
        fs: the disk.

    Raises:
        InvalidOption: an argument cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int = 0,
        nonce: str | None = None,
        meta: Mapping[str, object] | None = None,
        keep: int = 2,
        fs: FileSystem | None = None,
    ) -> None:
        check_job_id(folder.name)
        self.folder = folder
        self.epoch = epoch
        self.nonce = secrets.token_hex(4) if nonce is None else nonce
        if not _NONCE.fullmatch(self.nonce):
            raise InvalidOption("nonce", f"{self.nonce!r} is not 1 to 64 of [A-Za-z0-9_]")
        if not 0 <= epoch < 10**10:
            raise InvalidOption("epoch", f"{epoch} is not from 0 to 9999999999")
        if keep < 1:
            raise InvalidOption("keep", f"{keep} is less than 1")
        self._meta = dict(meta or {})
        self._keep = keep
        self._fs = fs or FileSystem()
        self._seq = 0
        self._opened = False

    def save(self, checkpoint: Checkpoint) -> Path:
        """Make ``checkpoint`` durable, then remove those it supersedes.

        Blocks for as long as the disk takes. Whatever fails, earlier checkpoints are as
        they were, and the next save starts afresh.

        Returns:
            The file, which survives a loss of power from now on.

        Raises:
            CheckpointWriteError: it is not durable.
        """
        self._open()
        self._seq += 1
        name = _Name(self.epoch, self._seq, self.nonce)
        target = self.folder / str(name)
        self._commit(checkpoint, self.folder / str(name._replace(temporary=True)), target)
        # Failing to tidy up does not undo what is durable.
        with suppress(OSError):
            self._prune()
        return target

    def candidates(self) -> Iterator[StoredCheckpoint]:
        """The job's checkpoints, newest first: longest cache, then epoch, then number.

        Damaged headers come first, since they may have been the newest. Only headers
        are read.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        found = [_stat(self.folder / str(name), name) for name in self._names_or_error()]
        found.sort(key=_newest_first, reverse=True)
        yield from found

    def newest_valid(self, on_corrupt: OnCorrupt | None = None) -> Checkpoint | None:
        """The newest checkpoint that is wholly undamaged, or None.

        Args:
            on_corrupt: called with each that was skipped; they are logged in any case.
        """
        skipped: set[Path] = set()
        while True:
            try:
                stored = next(each for each in self.candidates() if each.path not in skipped)
            except StopIteration:
                return None
            try:
                return stored.load()
            except CheckpointCorrupt as error:
                skipped.add(stored.path)
                # An earlier attempt that is still alive may have put a newer one in its
                # place, so the folder is listed anew each time.
                if stored.path.exists():
                    _report(error, on_corrupt)

    def delete(self) -> None:
        """Remove all checkpoints of the job, whoever wrote them, and its folder.

        What is not ours is left alone, and the folder with it.

        Raises:
            CheckpointError: the disk refused.
        """
        try:
            for entry in self._fs.listdir(self.folder):
                if _Name.parse(entry) is not None:
                    self._unlink(entry)
            self._fs.remove_folder(self.folder)
            self._fs.sync_folder(self.folder.parent)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise CheckpointError(f"{self.folder}: cannot be deleted: {error.strerror}") from error

    def _open(self) -> None:
        """Create the folder, once: one that somebody deleted later stays deleted."""
        if self._opened:
            return
        try:
            self._fs.make_folder(self.folder)
            names = self._names()
        except OSError as error:
            raise _write_error(self.folder, error) from error
        self._seq = max([name.seq for name in names if name.epoch <= self.epoch], default=0)
        self._opened = True

    def _commit(self, checkpoint: Checkpoint, temporary: Path, target: Path) -> None:
        written = temporary
        try:
            self._write(checkpoint, temporary)
            self._fs.rename(temporary, target)
            written = target
            self._fs.sync_folder(self.folder)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            # What is not known to be durable must not count among those kept.
            with suppress(OSError):
                self._fs.unlink(written)
            raise _write_error(target, error) from error

    def _write(self, checkpoint: Checkpoint, temporary: Path) -> None:
        header, arrays = to_header(checkpoint.with_meta(self._meta))
        header["created_at"] = time.time()
        handle = self._fs.create(temporary)
        try:
            write_file(header, arrays, lambda data: self._fs.write(handle, data))
            self._fs.sync(handle)
        finally:
            self._fs.close(handle)

    def _prune(self) -> None:
        names = self._names()
        mine = [name for name in names if (name.epoch, name.nonce) == (self.epoch, self.nonce)]
        if any(name.epoch > self.epoch for name in names):
            superseded = []
        else:
            superseded = [name for name in names if name.epoch < self.epoch]
        # By order of writing, not by length: an attempt that had to begin anew, because
        # what it found was damaged, must not lose its files to the longer damaged ones.
        whole = sorted(name for name in mine + superseded if not name.temporary)
        stale = [name for name in superseded if name.temporary]
        for name in whole[: -self._keep] + stale:
            self._unlink(str(name))

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self.folder / name)

    def _names(self) -> list[_Name]:
        parsed = (_Name.parse(entry) for entry in self._fs.listdir(self.folder))
        return [name for name in parsed if name is not None]

    def _names_or_error(self) -> list[_Name]:
        try:
            return [name for name in self._names() if not name.temporary]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be listed: {error.strerror}") from error


# -- the folder of all jobs ------------------------------------------------------------


def check_job_id(job_id: str) -> None:
    """Raise ``InvalidOption`` unless ``job_id`` is 1 to 64 of ``[A-Za-z0-9_-]``."""
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidOption("job_id", f"{job_id!r} is not 1 to 64 of [A-Za-z0-9_-]")


def job_folder(root: Path, job_id: str) -> Path:
    """Where the job's checkpoints are.

    Raises:
        InvalidOption: the id is not one of ours, and might lead out of ``root``.
    """
    check_job_id(job_id)
    return root / job_id


def list_jobs(root: Path) -> list[StoredJob]:
    """The jobs that have a folder under ``root``, by id. Foreign names are left out.

    Raises:
        CheckpointError: a folder cannot be listed.
    """
    try:
        folders = sorted(entry for entry in root.iterdir() if _is_job_folder(entry))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed: {error.strerror}") from error
    return [_list_job(folder) for folder in folders]


def verify(path: Path) -> VerifyReport:
    """Check every byte of one file. Raises nothing."""
    try:
        with CheckpointFile.open(path) as file:
            checkpoint = _checkpoint_of(file)
    except CheckpointCorrupt as error:
        return VerifyReport(path, ok=False, reason=error.reason)
    return VerifyReport(
        path,
        ok=True,
        cache_length=len(checkpoint.cache_tokens),
        generated_tokens=checkpoint.generated_tokens,
    )


def _is_job_folder(entry: Path) -> bool:
    return bool(_JOB_ID.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()


def _list_job(folder: Path) -> StoredJob:
    found = tuple(CheckpointStore(folder).candidates())
    return StoredJob(folder.name, folder, found, sum(stored.nbytes for stored in found))


# -- helpers ---------------------------------------------------------------------------


def _stat(path: Path, name: _Name) -> StoredCheckpoint:
    bare = StoredCheckpoint(path, name.epoch, name.seq, name.nonce)
    try:
        with CheckpointFile.open(path) as file:
            header = file.header
            return replace(
                bare,
                nbytes=file.size,
                cache_length=len(header["cache_tokens"]),
                generated_tokens=len(header["generated"]),
                prompt_tokens=int(header["original_prompt_tokens"]),
                created_at=float(header["created_at"]),
                meta=dict(header["meta"]),
            )
    except CheckpointCorrupt as error:
        reason = error.reason
    except (KeyError, TypeError, ValueError) as error:
        reason = f"the header is incomplete: {error!r}"
    nbytes = path.stat().st_size if path.exists() else 0
    return replace(bare, nbytes=nbytes, damage=reason)


def _report(error: CheckpointCorrupt, on_corrupt: OnCorrupt | None) -> None:
    _log.warning("skipped a checkpoint: %s", error)
    if on_corrupt is not None:
        on_corrupt(error)


def _newest_first(stored: StoredCheckpoint) -> tuple[bool, int, int, int]:
    return (stored.damage is not None, stored.cache_length, stored.epoch, stored.seq)


def _checkpoint_of(file: CheckpointFile) -> Checkpoint:
    try:
        return from_header(file.header, file.arrays())
    except CheckpointCorrupt:
        raise
    except CheckpointError as error:
        raise CheckpointCorrupt(file.path, str(error)) from error


def _write_error(path: Path, error: Exception) -> CheckpointWriteError:
    if isinstance(error, OSError):
        return CheckpointWriteError(path, error.strerror or type(error).__name__)
    return CheckpointWriteError(path, f"cannot be packed: {error}")
