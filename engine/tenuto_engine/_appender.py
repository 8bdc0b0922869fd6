"""``Appender``: the files of one attempt: its logs, its state files, its end, and what it removes.

An attempt writes into one log until that cannot be trusted any more, because a sync failed
or somebody removed it. Then it goes on in a new one (nonce ``n``, then ``n_2``, ``n_3``, ...)
that continues the last durable commit. Everything here runs under the store's disk lock.
"""

from __future__ import annotations

import errno
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tenuto_engine._checkpoint import Origin
from tenuto_engine._delta import Delta
from tenuto_engine._errors import CheckpointCorrupt, CheckpointWriteError
from tenuto_engine._fs import FileSystem
from tenuto_engine._headers import (
    STATE_FILES,
    Begin,
    Continued,
    End,
    StateRef,
    span_blobs,
    span_header,
    type_of,
)
from tenuto_engine._inventory import old_epoch
from tenuto_engine._log import Attempt, LogFile, read_end
from tenuto_engine._log_writer import LogWriter, Mark, write_end, write_state
from tenuto_engine._token import Token

# About what a record takes beside its arrays.
_HEADER_BYTES: Final = 4096
_NEVER: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a row starts from.

    Attributes:
        prompt: ids of the prompt, at least as far as it is read.
        prompt_tokens: how many the whole prompt has.
        seed: what its draws derive from.
        origin: the place in a log that it goes on from, or None.
    """

    prompt: tuple[int, ...]
    prompt_tokens: int
    seed: int
    origin: Origin | None


class Left(Enum):
    """What a failure left of what was appended."""

    ALL = "all"
    """The log goes on."""
    COMMITS = "commits"
    """The durable ones; the next log continues the last of them."""
    NOTHING = "nothing"
    """No commit that a log could continue; the next one begins from position 0."""


class Budget(Protocol):
    """What all jobs together may take of a disk."""

    def charge(self, nbytes: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            CheckpointWriteError: there is no room for them.
        """


class _Superseded(NamedTuple):
    """Files that are of no use any more.

    Attributes:
        length: from when on: this attempt covers so many tokens,
        commits: and its log has so many checkpoints.
        names: the files.
    """

    length: int
    commits: int
    names: tuple[str, ...]


class Appender:
    """Writes for one attempt.

    Methods raise ``OSError``, or what msgpack raises, unless they say otherwise.

    Args:
        meta: the caller's own, for every log.
        budget: what all jobs together may take; its ``CheckpointWriteError`` comes through.
    """

    def __init__(
        self,
        fs: FileSystem,
        folder: Path,
        *,
        epoch: int,
        nonce: str,
        meta: Mapping[str, object],
        budget: Budget | None,
    ) -> None:
        self._fs = fs
        self._folder = folder
        self._own = Attempt(epoch, nonce)
        self._meta = meta
        self._budget = budget
        self._beginning: Beginning | None = None
        self._logs: list[Attempt] = []
        self._log: LogWriter | None = None
        self._good: Mark | None = None
        self._trusted = True
        self._base_fails = False
        self._base: Continued | None = None
        self._needed: set[str] = set()
        self._state_file = 0
        self._named: set[Path] = set()
        self._commits = 0
        self._superseded: list[_Superseded] | None = None

    def open(self, beginning: Beginning) -> None:
        """Have a log to append to: a new one if this beginning is, or the last was closed."""
        if beginning != self._beginning:
            self.close()
            self._beginning = beginning
            self._base = _continued(beginning.origin)
            self._needed = {self._base.file} if self._base else set()
        if self._log is None:
            self._create(beginning)

    def append(self, delta: Delta) -> None:
        """Write a delta; a commit is durable when this returns. Call ``repair`` if it raises."""
        log = self._log
        assert log is not None, "open comes first"
        self._good = log.mark
        self._check_needed()
        if self._budget is not None:
            self._budget.charge(delta.nbytes + _HEADER_BYTES)
        state = self._write_state(log, delta)
        at = time.time() if delta.commit else 0.0
        mark = log.append(type_of(delta), span_header(delta, at, state), span_blobs(delta))
        if delta.commit is None:
            return
        # What the disk has after a sync that failed is unknown, also of what was there before.
        self._trusted = False
        log.sync()
        self._trusted = True
        self._base = Continued(log.path.name, mark.end, mark.digest, delta.generation, delta.stop)
        self._needed.add(log.path.name)
        self._state_file = (self._state_file + (state is not None)) % STATE_FILES
        self._commits += 1

    def repair(self) -> Left:
        """Make the log good again after a failure. Raises nothing.

        Returns:
            What is left of all that was appended before the failure.
        """
        with suppress(OSError):
            self._check_needed()
            if self._log is not None and self._trusted and self._good is not None:
                self._log.truncate_to(self._good)
                if self._log.path.exists():
                    return Left.ALL
        self.close()
        with suppress(OSError):
            self._check_needed()
            # A base that cannot be synced once would fail each further log the same way.
            if self._base is not None and not self._base_fails:
                return Left.COMMITS
        self._base_fails = False
        self._base, self._needed = None, set()
        return Left.NOTHING

    def close(self) -> None:
        """Close the log. Raises nothing."""
        log, self._log, self._good, self._trusted = self._log, None, None, True
        if log is not None:
            with suppress(OSError):
                log.close()

    def finish(self, end: Mapping[str, object], tokens: Sequence[Token]) -> None:
        """Write down how the job ended."""
        beginning = self._beginning
        if beginning is None:
            raise CheckpointWriteError(self._folder, "the attempt has not begun")
        self._fs.make_folder(self._folder)
        said = End(dict(end), tuple(tokens), time.time())
        write_end(self._fs, self._folder / self._own.end, self._begin(self._own, beginning), said)

    # -- writing -----------------------------------------------------------------------

    def _create(self, beginning: Beginning) -> None:
        self._check_needed()
        self._fs.make_folder(self._folder)
        self._sync_base()
        attempt = self._next_attempt()
        self._logs.append(attempt)
        begin = self._begin(attempt, beginning, self._base)
        self._log = LogWriter.create(self._fs, self._folder / attempt.log, begin)
        self._state_file = self._commits = 0
        self._superseded = None
        self._trusted = False
        self._log.sync()
        self._trusted = True

    def _sync_base(self) -> None:
        """Make what the new log continues durable: who wrote it may not have lived to do so."""
        base = Attempt.of_file(self._base.file) if self._base else None
        if base is None:
            return
        self._base_fails = True
        self._fs.sync_file(self._folder / base.log)
        for number in range(STATE_FILES):
            # What cannot be synced cannot be read either, and an older checkpoint serves.
            with suppress(OSError):
                self._fs.sync_file(self._folder / base.state(number))
        self._fs.sync_folder(self._folder)
        self._base_fails = False

    def _check_needed(self) -> None:
        """Raise ``FileNotFoundError`` if somebody removed a log that the commits build on."""
        for name in self._needed:
            if not (self._folder / name).exists():
                raise FileNotFoundError(errno.ENOENT, f"somebody removed {name}")

    def _next_attempt(self) -> Attempt:
        taken = {attempt for _, attempt in self._files()}
        for number in itertools.count(len(self._logs) + 1):
            nonce = self._own.nonce if number == 1 else f"{self._own.nonce}_{number}"
            attempt = Attempt(self._own.epoch, nonce)
            if attempt not in taken:
                return attempt
        raise AssertionError("there are infinitely many")

    def _begin(
        self, attempt: Attempt, beginning: Beginning, continues: Continued | None = None
    ) -> Begin:
        return Begin(
            job=self._folder.name,
            epoch=attempt.epoch,
            nonce=attempt.nonce,
            prompt=beginning.prompt,
            prompt_tokens=beginning.prompt_tokens,
            seed=beginning.seed,
            meta=self._meta,
            created_at=time.time(),
            continues=continues,
        )

    def _write_state(self, log: LogWriter, delta: Delta) -> StateRef | None:
        if delta.commit is None or not delta.commit.state:
            return None
        path = self._folder / self._logs[-1].state(self._state_file)
        digest = write_state(
            self._fs,
            path,
            delta.commit.state,
            seq=log.next_seq,
            prev=log.mark.digest,
            named=path in self._named,
        )
        self._named.add(path)
        return StateRef(self._state_file, digest)

    # -- removing ----------------------------------------------------------------------

    def prune(self, position: int) -> None:
        """Remove what this attempt supersedes, now that it durably covers so many tokens.

        Files of lower epochs that cover no more, unless this attempt's log goes on from them;
        of its own former logs all but the last. Nothing at all if there is a higher epoch.
        Raises nothing: failing to tidy up does not undo what is durable.
        """
        with suppress(OSError, CheckpointCorrupt):
            if self._superseded is None:
                self._superseded = self._find_superseded()
            due = [
                each
                for each in self._superseded
                if each.length <= position and each.commits <= self._commits
            ]
            if due and self._is_newest():
                for name in (name for each in due for name in each.names):
                    self._unlink(name)
                self._superseded = [each for each in self._superseded if each not in due]

    def prune_finished(self, *, keep_caches: bool) -> None:
        """Remove what the end makes useless. Raises nothing."""
        with suppress(OSError):
            newest = self._is_newest()
            for name, attempt in self._files():
                own = self._is_own(attempt)
                is_end = name.endswith(".end")
                useless = is_end if keep_caches else True
                if name != self._own.end and useless and (own or newest):
                    self._unlink(name)
            if newest and not keep_caches:
                for name in self._old_files():
                    self._unlink(name)

    def _find_superseded(self) -> list[_Superseded]:
        files: dict[Attempt, list[str]] = {}
        for name, attempt in self._files():
            files.setdefault(attempt, []).append(name)
        logs = _Logs(self._folder)
        current, former = self._logs[-1], self._logs[-2:-1]
        chain = logs.chain(current)
        self._needed |= {attempt.log for attempt in chain}
        lengths = {each: self._length(each, names, logs) for each, names in files.items()}
        for each in files:
            for before in logs.chain(each):
                lengths[before] = max(lengths.get(before, 0), lengths[each])
        old = self._old_files()
        superseded = [_Superseded(0, 1, old)] if old else []
        for each, names in files.items():
            if each == current or each in former or not self._may_remove(each):
                continue
            if each in chain:
                # Two checkpoints of its own are fallback enough, without the states of others.
                superseded.append(_Superseded(0, 2, _ending(names, ".state")))
            useless = _ending(names, ".end") if each in chain else tuple(names)
            superseded.append(_Superseded(lengths[each], 1, useless))
        return superseded

    def _length(self, attempt: Attempt, names: Sequence[str], logs: _Logs) -> int:
        """How far this attempt must have come to remove the files of that one."""
        if not self._may_remove(attempt):
            return _NEVER
        length = logs.length(attempt)
        for name in _ending(names, ".end"):
            with suppress(CheckpointCorrupt):
                begin, end = read_end(self._folder / name)
                length = max(length, begin.prompt_tokens + len(end.tokens))
        return length

    def _old_files(self) -> tuple[str, ...]:
        """Those of format version 1, unless of a higher epoch."""
        names = self._fs.listdir(self._folder)
        return tuple(
            name
            for name in names
            if (epoch := old_epoch(name)) is not None and epoch <= self._own.epoch
        )

    def _files(self) -> list[tuple[str, Attempt]]:
        named = ((name, Attempt.of_file(name)) for name in self._fs.listdir(self._folder))
        return [(name, attempt) for name, attempt in named if attempt is not None]

    def _is_newest(self) -> bool:
        return all(attempt.epoch <= self._own.epoch for _, attempt in self._files())

    def _may_remove(self, attempt: Attempt) -> bool:
        return attempt.epoch < self._own.epoch or self._is_own(attempt)

    def _is_own(self, attempt: Attempt) -> bool:
        return attempt == self._own or attempt in self._logs

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._folder / name)


class _Logs:
    """The logs of a folder, each scanned once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Attempt, LogFile | None] = {}

    def chain(self, attempt: Attempt) -> list[Attempt]:
        """The attempt and those whose logs its log builds on, as far as they can be read."""
        chain: list[Attempt] = []
        each: Attempt | None = attempt
        while each is not None and each not in chain:
            chain.append(each)
            log = self._scan(each)
            continues = log.begin.continues if log else None
            each = Attempt.of_file(continues.file) if continues else None
        return chain

    def length(self, attempt: Attempt) -> int:
        """Tokens that its checkpoints cover; 0 if they can't be read."""
        log = self._scan(attempt)
        return max((s.span.stop for s in log.spans if s.span.commit), default=0) if log else 0

    def _scan(self, attempt: Attempt) -> LogFile | None:
        if attempt not in self._known:
            self._known[attempt] = None
            with suppress(CheckpointCorrupt):
                self._known[attempt] = LogFile.scan(self._folder / attempt.log)
        return self._known[attempt]


def _ending(names: Sequence[str], ending: str) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(ending))


def _continued(origin: Origin | None) -> Continued | None:
    if origin is None:
        return None
    return Continued(origin.file, origin.offset, origin.digest, origin.generation, origin.position)
