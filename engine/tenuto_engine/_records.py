"""The bytes of a checkpoint file of format version 2: constants, packing, reading and checking.

A file is a head and records one after the other. This module knows preambles, header maps and
payloads; what the maps mean is the business of ``_headers``. engine/DESIGN.md has the
specification.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgpack
import numpy as np
import xxhash

from tenuto_engine._cache_tree import HOST_DTYPES
from tenuto_engine._delta import Bits

# Of the file: magic, version; then the low 32 bits of XXH3-64 of these.
FILE_MAGIC: Final = b"TENUTOCK"
VERSION: Final = 2
_HEAD: Final = struct.Struct("<8sI")
_HEAD_CHECK: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _HEAD_CHECK.size

# Of a record: magic, type, header length, zero, payload length, XXH3-128 of the header; then
# XXH3-64 of these.
RECORD_MAGIC: Final = b"TREC"
_PREAMBLE: Final = struct.Struct("<4sIIIQ16s")
_PREAMBLE_CHECK: Final = struct.Struct("<Q")
PREAMBLE_BYTES: Final = _PREAMBLE.size + _PREAMBLE_CHECK.size
MAX_HEADER_BYTES: Final = 256 * 2**20
DIGEST_BYTES: Final = 16
NO_DIGEST: Final = bytes(DIGEST_BYTES)
MAX_RANK: Final = 8
MAX_ELEMENTS: Final = 2**48

SEQ: Final = "seq"
PREV: Final = "prev"
BLOBS: Final = "blobs"

# Most headers fit into the first read of their record.
_FIRST_READ: Final = 4096

Header = dict[str, Any]


class RecordType(IntEnum):
    """What a record is."""

    BEGIN = 1
    PART = 2
    COMMIT = 3
    STATE = 4
    END = 5
    BLOCK = 6


class BadRecord(Exception):
    """There is no whole record where one was looked for."""


class Torn(BadRecord):
    """It is cut short or was never written, which is what a crash leaves."""


class Damaged(BadRecord):
    """It is not what was written, or not one of ours."""


class PayloadBlob(NamedTuple):
    """An array to be written.

    Attributes:
        dtype: the mlx name of its dtype, a key of ``HOST_DTYPES``.
        members: what msgpack can hold.
        data: its elements, C-contiguous; a bfloat16 as the uint16 of its bits.
    """

    dtype: str
    members: Sequence[Any]
    data: Bits


class Packed(NamedTuple):
    """A record, ready to be written.

    Attributes:
        digest: XXH3-128 of its header, which the next record names.
        nbytes: its length in the file.
        chunks: its bytes in order. The payload is shared with the arrays given.
    """

    digest: bytes
    nbytes: int
    chunks: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Where an array lies in a file.

    Attributes:
        dtype: a key of ``HOST_DTYPES``.
        shape: its lengths.
        offset: of its first byte, in the file.
        length: bytes.
        digest: XXH3-128 of the bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A record whose header was checked; its payload is as long as it should be.

    Attributes:
        type: what it is.
        seq: its number in its file, from 0.
        prev: digest of the header of the record before.
        digest: XXH3-128 of its own header.
        offset: of its first byte, in the file.
        end: of the first byte after it.
        blobs: what its payload holds.
    """

    type: RecordType
    seq: int
    prev: bytes
    digest: bytes
    offset: int
    end: int
    blobs: tuple[BlobInfo, ...]


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


# -- packing ---------------------------------------------------------------------------


def pack_head() -> bytes:
    """The bytes that every file begins with."""
    fixed = _HEAD.pack(FILE_MAGIC, VERSION)
    return fixed + _HEAD_CHECK.pack(_low_half(fixed))


def pack_record(
    type_: RecordType,
    header: Mapping[str, object],
    *,
    seq: int,
    prev: bytes,
    blobs: Sequence[PayloadBlob] = (),
) -> Packed:
    """Lay out a record; no array is copied.

    Raises:
        TypeError, ValueError, OverflowError: msgpack cannot hold the header, or not give it back.
    """
    payload = [_bytes_of(blob.data) for blob in blobs]
    listed = [
        [blob.dtype, list(blob.data.shape), digest(data), blob.members]
        for blob, data in zip(blobs, payload, strict=True)
    ]
    packed = _pack_map({**header, SEQ: seq, PREV: prev, BLOBS: listed})
    length = sum(len(data) for data in payload)
    known = digest(packed)
    fixed = _PREAMBLE.pack(RECORD_MAGIC, type_, len(packed), 0, length, known)
    start = fixed + _PREAMBLE_CHECK.pack(xxhash.xxh3_64_intdigest(fixed)) + packed
    return Packed(known, len(start) + length, [start, *payload])


def _pack_map(header: Header) -> bytes:
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(packed)} bytes, more than {MAX_HEADER_BYTES}")
    # A caller's own map may have keys that can be written and not read.
    try:
        _unpack_map(packed)
    except Damaged as error:
        raise ValueError(f"it could not be read back: {error}") from error
    return packed


def _bytes_of(data: Bits) -> memoryview:
    # The bytes of a strided array are not those of its elements in order.
    assert data.flags.c_contiguous
    return data.reshape(-1).view(np.uint8).data


# -- reading ---------------------------------------------------------------------------


class Reader:
    """A regular file opened for reading.

    Attributes:
        path: the file.
        size: its length when it was opened.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe in the place of a file must not stop us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags), "rb", buffering=0)
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self._file.close()
            raise OSError(0, "not a regular file")
        self.size = found.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end of the file."""
        data = os.pread(self._file.fileno(), length, offset)
        while 0 < len(data) < length:
            more = os.pread(self._file.fileno(), length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`.

        Raises:
            Torn: the file ends before.
        """
        self._file.seek(offset)
        while buffer:
            got = self._file.readinto(buffer)
            if not got:
                raise Torn("the file ends early")
            buffer = buffer[got:]


def check_head(reader: Reader) -> None:
    """Raise ``BadRecord`` unless the file is of this format and version."""
    head = reader.read(0, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        raise Torn("the file ends before its first record")
    magic, version = _HEAD.unpack_from(head)
    _require(magic == FILE_MAGIC, "not a checkpoint file")
    # Version 1 had no check of its own here.
    known = version == 1 or head[_HEAD.size :] == _HEAD_CHECK.pack(_low_half(head[: _HEAD.size]))
    _require(known, "the head of the file is damaged")
    _require(version == VERSION, f"format version {version} is not known")


def read_record(reader: Reader, offset: int) -> tuple[Record, Header]:
    """Read and check the record at `offset`, all but its payload.

    Returns:
        The record, and its header without ``SEQ`` and ``PREV``. In the header's list of
        ``BLOBS`` each entry is checked but for its members.

    Raises:
        BadRecord: there is none.
        OSError: the disk refused.
    """
    start = reader.read(offset, _FIRST_READ)
    type_, header_bytes, payload_bytes, known = _read_preamble(start)
    payload = offset + PREAMBLE_BYTES + header_bytes
    if payload + payload_bytes > reader.size:
        raise Torn("the record is cut short")
    packed = start[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes]
    if len(packed) < header_bytes:
        packed += reader.read(offset + len(start), header_bytes - len(packed))
    _check_digest(packed, known, "header")
    header = _unpack_map(packed)
    seq, prev = header.pop(SEQ, None), header.pop(PREV, None)
    _require(type(seq) is int and seq >= 0, "the record has no number")
    _require(type(prev) is bytes and len(prev) == DIGEST_BYTES, "the record is not chained")
    blobs = _locate(header.get(BLOBS), payload, payload + payload_bytes)
    end = payload + payload_bytes
    return Record(type_, seq, prev, known, offset, end, blobs), header


def read_blob(reader: Reader, info: BlobInfo, scratch: Bits | None = None) -> Bits:
    """Read and check an array.

    Args:
        scratch: uint8, at least as long as the array; the result then lies in it.

    Raises:
        BadRecord: its digest differs, or the file is shorter by now.
        OSError: the disk refused.
    """
    room = np.empty(info.length, np.uint8) if scratch is None else scratch[: info.length]
    reader.read_into(info.offset, room.data)
    _check_digest(room.data, info.digest, "payload")
    array: Bits = room.view(HOST_DTYPES[info.dtype]).reshape(info.shape)
    return array


def _read_preamble(start: bytes) -> tuple[RecordType, int, int, bytes]:
    if len(start) < PREAMBLE_BYTES or not any(start[:PREAMBLE_BYTES]):
        raise Torn("the record is cut short")
    fixed, check = start[: _PREAMBLE.size], start[_PREAMBLE.size : PREAMBLE_BYTES]
    magic, type_, header_bytes, zero, payload_bytes, known = _PREAMBLE.unpack(fixed)
    _require(magic == RECORD_MAGIC, "no record begins here")
    whole = check == _PREAMBLE_CHECK.pack(xxhash.xxh3_64_intdigest(fixed))
    _require(whole, "the preamble is damaged")
    _require(zero == 0 and type_ in _TYPES, f"record type {type_} is not known")
    _require(header_bytes <= MAX_HEADER_BYTES, "the header is too long")
    return _TYPES[type_], header_bytes, payload_bytes, known


_TYPES: Final[Mapping[int, RecordType]] = {int(each): each for each in RecordType}


def _unpack_map(packed: bytes) -> Header:
    try:
        header = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Damaged(f"the header is not msgpack: {error}") from error
    if not isinstance(header, dict):
        raise Damaged("the header is not a map")
    return header


def _locate(listed: object, start: int, end: int) -> tuple[BlobInfo, ...]:
    if not isinstance(listed, list):
        raise Damaged("the header lists no blobs")
    blobs = []
    for entry in listed:
        blobs.append(_locate_one(entry, start))
        start += blobs[-1].length
        _require(start <= end, "a blob lies outside the payload")
    _require(start == end, "the blobs do not fill the payload")
    return tuple(blobs)


def _locate_one(entry: object, offset: int) -> BlobInfo:
    match entry:
        case [str(dtype), list(shape), bytes(known), list(_)]:
            pass
        case _:
            raise Damaged("a blob is described wrongly")
    plain = len(shape) <= MAX_RANK and all(type(n) is int and n >= 0 for n in shape)
    _require(plain and dtype in HOST_DTYPES, "a blob has no shape or dtype of ours")
    _require(len(known) == DIGEST_BYTES, "a blob has no digest")
    # An empty array can have lengths beyond what numpy can hold.
    _require(math.prod(n or 1 for n in shape) <= MAX_ELEMENTS, "a blob has an absurd shape")
    return BlobInfo(dtype, tuple(shape), offset, math.prod(shape) * _ITEM_BYTES[dtype], known)


_ITEM_BYTES: Final = {name: np.dtype(host).itemsize for name, host in HOST_DTYPES.items()}


def _check_digest(data: bytes | memoryview, known: bytes, what: str) -> None:
    if digest(data) == known:
        return
    if not any(data):
        raise Torn(f"the {what} was never written")
    raise Damaged(f"the {what} is damaged")


def _low_half(fixed: bytes) -> int:
    return xxhash.xxh3_64_intdigest(fixed) & 0xFFFFFFFF


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(otherwise)
