"""``LogWriter``: appends records to one attempt's log; and the files beside it are written here."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from tenuto_engine._delta import StateArray
from tenuto_engine._fs import FileSystem
from tenuto_engine._headers import Begin, End, begin_header, end_header, state_blobs
from tenuto_engine._log import TEMPORARY
from tenuto_engine._records import (
    HEAD_BYTES,
    NO_DIGEST,
    Header,
    Packed,
    PayloadBlob,
    RecordType,
    pack_head,
    pack_record,
)


class Mark(NamedTuple):
    """A place in a log that can be gone back to: the end of a record.

    Attributes:
        end: byte after the record.
        digest: of its header.
        seq: its number.
    """

    end: int
    digest: bytes
    seq: int


class LogWriter:
    """Appends records to a log of its own. Every method raises ``OSError``, unless said otherwise.

    Attributes:
        path: the file.
        mark: the end of the last record.
    """

    def __init__(self, fs: FileSystem, path: Path, handle: int) -> None:
        self.path = path
        self.mark = Mark(HEAD_BYTES, NO_DIGEST, -1)
        self._fs = fs
        self._handle = handle
        self._named_durably = False

    @classmethod
    def create(cls, fs: FileSystem, path: Path, begin: Begin) -> Self:
        """Create the file, which must not exist, and write its BEGIN.

        Raises:
            TypeError, ValueError, OverflowError: msgpack cannot hold the caller's meta.
        """
        packed = pack_begin(begin)
        writer = cls(fs, path, fs.create(path))
        try:
            writer._write(packed, pack_head())
        except BaseException:
            with suppress(OSError):
                fs.unlink(path)
            with suppress(OSError):
                fs.close(writer._handle)
            raise
        return writer

    @property
    def next_seq(self) -> int:
        """Number of the record that is appended next."""
        return self.mark.seq + 1

    def append(self, type_: RecordType, header: Header, blobs: Sequence[PayloadBlob] = ()) -> Mark:
        """Write a record behind the last one, not yet durable. If this fails, none was added.

        Args:
            header: its map without its number, chain and blobs.

        Raises:
            FileNotFoundError: somebody removed the file.
            TypeError, ValueError, OverflowError: msgpack cannot hold the header.
        """
        self._check_exists()
        packed = pack_record(type_, header, seq=self.next_seq, prev=self.mark.digest, blobs=blobs)
        self._write(packed)
        return self.mark

    def sync(self) -> None:
        """Return once all that was appended survives a loss of power.

        Raises:
            FileNotFoundError: somebody removed the file.
        """
        self._fs.sync(self._handle)
        if not self._named_durably:
            self._fs.sync_folder(self.path.parent)
            self._named_durably = True
        self._check_exists()

    def truncate_to(self, mark: Mark) -> None:
        """Go back to `mark`: what was written after it is cut off, whole or not."""
        self.mark = mark
        self._fs.truncate(self._handle, mark.end)

    def close(self) -> None:
        """Close the file. Nothing is synced."""
        self._fs.close(self._handle)

    def _write(self, packed: Packed, head: bytes = b"") -> None:
        offset = self.mark.end - len(head)
        first, *rest = packed.chunks
        for chunk in (head + bytes(first), *rest):
            self._fs.write_at(self._handle, chunk, offset)
            offset += len(chunk)
        self.mark = Mark(offset, packed.digest, self.next_seq)

    def _check_exists(self) -> None:
        if self._fs.links(self._handle) == 0:
            raise FileNotFoundError(errno.ENOENT, "somebody removed it", str(self.path))


def write_state(
    fs: FileSystem,
    path: Path,
    arrays: Sequence[StateArray],
    *,
    seq: int,
    prev: bytes,
    named: bool = False,
) -> bytes:
    """Replace what is in a state file, in place, and make it durable.

    Args:
        path: need not exist.
        seq, prev: of the commit that is about to be appended: the log's ``next_seq`` and
            ``mark.digest``.
        named: it was written before without an error, so its name is durable.

    Returns:
        The digest of its record's header, which the commit names.

    Raises:
        OSError: what the file holds now is unknown.
        TypeError, ValueError, OverflowError: msgpack cannot hold a name.
    """
    packed = pack_record(RecordType.STATE, {}, seq=seq, prev=prev, blobs=state_blobs(arrays))
    try:
        handle = fs.open(path)
    except FileNotFoundError:
        handle, named = fs.create(path), False
    try:
        _overwrite(fs, handle, [pack_head(), *packed.chunks])
    finally:
        fs.close(handle)
    if not named:
        fs.sync_folder(path.parent)
    return packed.digest


def write_end(fs: FileSystem, path: Path, begin: Begin, end: End) -> None:
    """Write how a job ended, whole or not at all, and make it durable. Replaces an older one.

    Args:
        path: in the job's folder, named as ``Attempt.end``.

    Raises:
        OSError: it is not durable.
        TypeError, ValueError, OverflowError: msgpack cannot hold what the caller gave.
    """
    first = pack_begin(begin)
    last = pack_record(RecordType.END, end_header(end), seq=1, prev=first.digest)
    temporary = path.with_name(path.name + TEMPORARY)
    with suppress(FileNotFoundError):
        fs.unlink(temporary)
    handle = fs.create(temporary)
    try:
        _overwrite(fs, handle, [pack_head(), *first.chunks, *last.chunks])
    finally:
        fs.close(handle)
    fs.rename(temporary, path)
    fs.sync_folder(path.parent)


def pack_begin(begin: Begin) -> Packed:
    """The first record of a log or end file."""
    prev = begin.continues.digest if begin.continues else NO_DIGEST
    return pack_record(RecordType.BEGIN, begin_header(begin), seq=0, prev=prev)


def _overwrite(fs: FileSystem, handle: int, chunks: Sequence[bytes | memoryview]) -> None:
    offset = 0
    for chunk in chunks:
        fs.write_at(handle, chunk, offset)
        offset += len(chunk)
    fs.truncate(handle, offset)
    fs.sync(handle)
