"""``CheckpointStore``: the folder of one job, as one attempt at it writes there.

Two threads meet here. The decode thread takes deltas (``take``), each of what is new since the
last one it took; the writer's thread appends them to the attempt's log (``write``). When an
append fails, what was taken after the last good record is forgotten, and the next delta begins
there again: the row still has it all.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tenuto_engine._appender import Appender, Beginning, Budget, Left
from tenuto_engine._caches import bytes_per_position, layouts, signature
from tenuto_engine._checkpoint import Checkpoint, Origin
from tenuto_engine._delta import Delta
from tenuto_engine._errors import CheckpointWriteError, InvalidOption
from tenuto_engine._fs import FileSystem, StrPath
from tenuto_engine._inventory import (
    OnCorrupt,
    StoredCheckpoint,
    StoredEnd,
    check_job_id,
    delete_folder,
    listed,
    old_epoch,
    stored_checkpoints,
    stored_ends,
)
from tenuto_engine._inventory import newest_valid as newest_valid_of
from tenuto_engine._live import LiveCheckpoint, Moment, as_live, take_delta
from tenuto_engine._log import NONCE, Attempt
from tenuto_engine._token import Token

PART_BYTES: Final = 64 * 2**20
MAX_EPOCH: Final = 10**10
_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Durable:
    """What survives a loss of power.

    Attributes:
        position: tokens whose KV the newest durable checkpoint covers.
        generated: generated ones among them.
        pending: whether it holds the pending token after them, too.
    """

    position: int = 0
    generated: int = 0
    pending: bool = False

    @property
    def tokens(self) -> int:
        """Generated tokens that a resume has without a forward pass."""
        return self.generated + self.pending


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far the deltas of a lineage have come.

    Attributes:
        position: positions of the generation that they have.
        first: index of the first token that their commits lack.
        generation, signature: of the deltas; the signature is None before the first.
    """

    position: int = 0
    first: int = 1
    generation: int = 0
    signature: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A delta on its way to the disk.

    Attributes:
        delta: it.
        turn: deltas of an earlier turn than the store's are void.
        before, after: how far the lineage has come without and with it.
    """

    delta: Delta
    turn: int
    before: _Mark
    after: _Mark

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.delta.nbytes


class CheckpointStore:
    """Writes one attempt's checkpoints, and finds those of all attempts.

    Each process that begins a generation, or goes on with one, makes a store of its own::

        store = CheckpointStore("checkpoints/story-1")
        options = GenerationOptions(max_tokens=2000, seed=7, on_decode_checkpoint=store.save)
        checkpoint = store.newest_valid()  # None at the first start
        prompt, options = resume_options(checkpoint, options, prompt_tokens=prompt)

    ``save`` waits for the disk; with a ``CheckpointWriter`` the decode thread does not. What
    the caller has to keep equal from one process to the next, ``resume_options`` says.

    Args:
        folder: the job's own folder; its name, 1 to 64 of ``[A-Za-z0-9_-]``, is the job's id.
            Created when it is needed.
        epoch: which attempt this is. Each one needs a higher one than those before it, as a
            higher epoch removes files of lower ones that it covers. None: one above the
            highest in the folder, from 0. Processes that begin at the same moment may then
            get the same one: they write files of their own, and remove none of each other.
        nonce: the attempt's own, of ``[A-Za-z0-9_]``; random if None.
        meta: the caller's own, of what msgpack can hold; given back with every checkpoint.
        budget: what all jobs together may take.
        part_bytes: most bytes of positions that one delta holds; what is new beyond that
            follows in further ones.
        retry_seconds: after a failure nothing is taken for so long, and twice as long after
            the next, up to 30 s.
        fs: the disk.

    Raises:
        InvalidOption: an argument cannot be used.
        CheckpointError: the folder cannot be listed.
    """

    def __init__(
        self,
        folder: StrPath,
        *,
        epoch: int | None = None,
        nonce: str | None = None,
        meta: Mapping[str, object] | None = None,
        budget: Budget | None = None,
        part_bytes: int = PART_BYTES,
        retry_seconds: float = _RETRY_S,
        fs: FileSystem | None = None,
    ) -> None:
        folder = Path(folder)
        check_job_id(folder.name, "folder")
        self.folder = folder
        self.epoch = epoch = _next_epoch(folder) if epoch is None else epoch
        self.nonce = secrets.token_hex(4) if nonce is None else nonce
        if not NONCE.fullmatch(self.nonce):
            raise InvalidOption("nonce", f"{self.nonce!r} is not 1 to 64 of [A-Za-z0-9_]")
        if not 0 <= epoch < MAX_EPOCH:
            raise InvalidOption("epoch", f"{epoch} is not from 0 to {MAX_EPOCH - 1}")
        self._fs = fs or FileSystem()
        self._part_bytes = part_bytes
        self._retry_seconds = self._retry_in = retry_seconds
        self._retry_at = 0.0
        self._marks = threading.Lock()
        self._disk = threading.Lock()
        self._appender = Appender(
            self._fs, folder, epoch=epoch, nonce=self.nonce, meta=dict(meta or {}), budget=budget
        )
        self._lineage: object = None
        self._position_bytes: tuple[object, int] = (None, 0)
        self._beginning: Beginning | None = None
        self._turn = 0
        self._accepted = self._written = self._committed = _Mark()
        self._durable = Durable()
        self._closed = False

    @property
    def durable(self) -> Durable:
        """What the newest durable checkpoint covers that this attempt can go on from.

        All zero in a new store, whatever the folder holds: ``candidates`` tells of that. From
        the first ``take`` or ``save`` on, it is the checkpoint of this folder that the row was
        resumed from, if any; after that the last one that this store wrote. It is zero again
        when a row begins here that resumes nothing, or when the files that the log goes on from
        are gone.
        """
        return self._durable

    # -- on the decode thread ----------------------------------------------------------

    def take(self, live: LiveCheckpoint, *, final: bool = False) -> Taken | None:
        """Copy from `live` what no delta has yet, and count on its being written.

        Its cost follows what is new. If there is more than ``part_bytes`` of it, it is a part,
        and ``live.deferred`` is set.

        Args:
            final: there will be no later one: everything is taken, also soon after a failure.

        Returns:
            None if nothing may be taken now.
        """
        with self._marks:
            moment = live.moment
            if self._closed or (not final and time.monotonic() < self._retry_at):
                return None
            if moment.lineage is not self._lineage:
                self._begin(moment)
            described = layouts(moment.caches)
            before, base = self._accepted, self._base(moment, signature(described))
            delta = take_delta(
                moment,
                described,
                generation=base.generation,
                start=base.position,
                first=base.first,
                limit=None if final else self._part_positions(moment, base),
            )
            first = moment.generated + 1 if delta.commit else base.first
            live.deferred = delta.commit is None
            self._accepted = replace(base, position=delta.stop, first=first)
            return Taken(delta, self._turn, before, self._accepted)

    def _begin(self, moment: Moment) -> None:
        """A row that this store has not seen: its log goes on from where the row did."""
        origin = self._own(moment.origin)
        beginning = Beginning(moment.prompt, moment.prompt_tokens, moment.seed, origin)
        mark, self._durable = _Mark(), Durable()
        if origin is not None:
            mark = _Mark(origin.position, origin.generated + 1, origin.generation, origin.signature)
            pending = origin.position >= moment.prompt_tokens
            self._durable = Durable(mark.position, mark.first - 1, pending)
        if beginning == self._beginning:
            # It is written into the log of the row before it, whose records must not mix with its.
            mark = _Mark(generation=self._accepted.generation + 1)
        self._lineage, self._beginning = moment.lineage, beginning
        self._turn += 1
        self._accepted = self._written = self._committed = mark

    def _own(self, origin: Origin | None) -> Origin | None:
        return origin if origin is not None and origin.folder == self.folder else None

    def _part_positions(self, moment: Moment, base: _Mark) -> int | None:
        """How many positions a part may have; None if they take no room."""
        signature, each = self._position_bytes
        if signature != base.signature or not each:
            each = bytes_per_position(moment.caches)
            self._position_bytes = (base.signature, each)
        return self._part_bytes // each if each else None

    def _base(self, moment: Moment, now: tuple[object, ...]) -> _Mark:
        base = self._accepted
        extends = base.signature in (None, now) and base.position <= moment.position
        if extends:
            return replace(base, signature=now)
        # The caches changed their class, or went back: what was saved of them is void.
        first = min(base.first, moment.generated + 1)
        return _Mark(0, first, base.generation + 1, now)

    # -- on the writer's thread --------------------------------------------------------

    def open(self, prompt: Sequence[int], seed: int, origin: Origin | None = None) -> None:
        """Create the log at once, so that the folder knows of the job before its first token.

        Raises:
            CheckpointWriteError: it is not durable; the first ``write`` tries again.
        """
        prompt = tuple(prompt)
        with self._disk:
            try:
                self._appender.open(Beginning(prompt, len(prompt), seed, self._own(origin)))
            except Exception as error:
                self._appender.close()
                raise _write_error(self.folder, error) from error

    def write(self, taken: Taken) -> bool:
        """Append a delta to the log. Blocks for as long as the disk takes.

        Returns:
            Whether it is a checkpoint, durable from now on.

        Raises:
            CheckpointWriteError: it is not in the log; earlier checkpoints are as they were.
        """
        with self._disk:
            beginning = self._beginning_of(taken)
            if beginning is None:
                return False
            try:
                self._appender.open(beginning)
                self._appender.append(taken.delta)
            except Exception as error:
                self._go_back()
                raise _write_error(self.folder, error) from error
            self._advance(taken)
            if taken.delta.commit is None:
                return False
            self._appender.prune(taken.after.position)
            return True

    def save(self, checkpoint: Checkpoint | LiveCheckpoint) -> Durable:
        """Take and write all that is new, and wait for the disk.

        A whole ``Checkpoint`` is written whole.

        Raises:
            CheckpointWriteError: it is not durable.
        """
        live = as_live(checkpoint)
        while True:
            taken = self.take(live)
            if taken is None:
                raise CheckpointWriteError(self.folder, self._why_not())
            if self.write(taken):
                live.deferred = False
                return self._durable

    def finish(
        self, end: Mapping[str, object], tokens: Sequence[Token], *, keep_caches: bool
    ) -> None:
        """Write down how the job ended, with all its tokens; later deltas are void.

        Args:
            end: the caller's own, of what msgpack can hold.
            tokens: all of the job.
            keep_caches: False removes every other file of this and earlier attempts afterwards.

        Raises:
            CheckpointWriteError: it is not durable.
        """
        with self._disk:
            self._closed = True
            try:
                self._appender.finish(end, tokens)
            except Exception as error:
                raise _write_error(self.folder, error) from error
            finally:
                self._appender.close()
            self._appender.prune_finished(keep_caches=keep_caches)

    def close(self) -> None:
        """Write nothing more. Harmless when called again."""
        with self._disk:
            self._closed = True
            self._appender.close()

    def _beginning_of(self, taken: Taken) -> Beginning | None:
        """What the delta's log begins with; None if it may not be written."""
        with self._marks:
            if self._closed or taken.turn != self._turn:
                return None
            if taken.before != self._written:
                # What it adds to was taken, but never came here.
                self._turn += 1
                self._accepted = self._written
                return None
            return self._beginning

    def _advance(self, taken: Taken) -> None:
        with self._marks:
            self._retry_in, self._retry_at = self._retry_seconds, 0.0
            if taken.turn != self._turn:
                return  # another row has begun meanwhile
            self._written = taken.after
            if taken.delta.commit is not None:
                self._committed = taken.after
                pending = taken.delta.commit.pending_token is not None
                self._durable = Durable(taken.after.position, taken.after.first - 1, pending)

    def _go_back(self) -> None:
        # It asks the disk, for which the decode thread must not wait.
        left = self._appender.repair()
        with self._marks:
            self._turn += 1
            self._retry_at = time.monotonic() + self._retry_in
            self._retry_in = min(2 * self._retry_in, _LONGEST_RETRY_S)
            if left is Left.NOTHING and self._beginning is not None:
                self._beginning = replace(self._beginning, origin=None)
                self._committed, self._durable = _Mark(), Durable()
            if left is not Left.ALL:
                self._written = self._committed
            self._accepted = self._written

    def _why_not(self) -> str:
        return "the store is closed" if self._closed else "the last attempt failed a moment ago"

    # -- reading -----------------------------------------------------------------------

    def candidates(self) -> list[StoredCheckpoint]:
        """The job's checkpoints, newest first: longest cache, then epoch, then number.

        Damaged logs come first, since they may have held the newest. Only headers are read.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        return stored_checkpoints(self.folder)

    def newest_valid(self, on_corrupt: OnCorrupt | None = None) -> Checkpoint | None:
        """The newest checkpoint that is wholly undamaged, or None.

        Args:
            on_corrupt: called with each damage that was passed over; they are logged in any case.
        """
        return newest_valid_of(self.folder, on_corrupt)

    def ends(self) -> list[StoredEnd]:
        """What ``finish`` wrote, of all attempts, the latest epoch first."""
        return stored_ends(self.folder)

    def delete(self) -> None:
        """Remove all checkpoints of the job, whoever wrote them, and its folder.

        What is not ours is left alone, and the folder with it.

        Raises:
            CheckpointError: the disk refused.
        """
        self.close()
        delete_folder(self._fs, self.folder)


def _next_epoch(folder: Path) -> int:
    attempts = [(Attempt.of_file(name), old_epoch(name)) for name in listed(folder)]
    epochs = [attempt.epoch if attempt else old for attempt, old in attempts]
    highest = max((epoch for epoch in epochs if epoch is not None), default=-1)
    # A stray name with the last epoch must not keep anyone from reading or deleting.
    return min(highest + 1, MAX_EPOCH - 1)


def _write_error(path: Path, error: Exception) -> CheckpointWriteError:
    if isinstance(error, CheckpointWriteError):
        return error
    if isinstance(error, OSError):
        return CheckpointWriteError(path, error.strerror or type(error).__name__)
    if isinstance(error, TypeError | ValueError | OverflowError):
        return CheckpointWriteError(path, f"cannot be packed: {error}")
    raise error
