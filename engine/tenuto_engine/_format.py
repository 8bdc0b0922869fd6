"""The byte layout of a checkpoint file: constants, writer and reader in one place.

engine/DESIGN.md has the specification. This module knows bytes, a header map and
blobs; what the map means is the business of ``_checkpoint`` and ``_store``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import xxhash

from tenuto_engine._caches import HOST_DTYPES, Bits, HostArray
from tenuto_engine._errors import CheckpointCorrupt

MAGIC: Final = b"TENUTOCK"
VERSION: Final = 1
ALIGNMENT: Final = 64
DIGEST_BYTES: Final = 16
# Magic, version, header length, payload length, digest of the header; then the digest
# of these.
_PREAMBLE: Final = struct.Struct("<8sIIQ16s")
PREAMBLE_BYTES: Final = _PREAMBLE.size + DIGEST_BYTES
MAX_HEADER_BYTES: Final = 256 * 2**20
MAX_RANK: Final = 8
BLOBS: Final = "blobs"

Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Blob:
    """Where an array lies in the payload.

    Attributes:
        name: its name within the file.
        dtype: the mlx name of its dtype.
        shape: its lengths.
        offset: bytes from the start of the payload, a multiple of ``ALIGNMENT``.
        length: bytes.
        digest: XXH3-128 of the bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    digest: bytes


def digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


# -- writing ---------------------------------------------------------------------------


def write_file(
    header: Mapping[str, object],
    arrays: Sequence[HostArray],
    write: Callable[[bytes | memoryview], None],
) -> None:
    """Hand the bytes of a checkpoint file to ``write``, from first to last.

    ``header`` is a msgpack map without the key ``BLOBS``, which this adds.

    Raises:
        TypeError, ValueError, OverflowError: msgpack cannot hold the header.
    """
    blobs = _lay_out(arrays)
    packed = _pack({**header, BLOBS: [_blob_to_list(blob) for blob in blobs]})
    payload = blobs[-1].offset + blobs[-1].length if blobs else 0
    fixed = _PREAMBLE.pack(MAGIC, VERSION, len(packed), payload, digest(packed))
    write(fixed + digest(fixed))
    write(packed)
    write(_padding(PREAMBLE_BYTES + len(packed)))
    end = 0
    for blob, array in zip(blobs, arrays, strict=True):
        write(_padding(end))
        write(_bytes_of(array.data))
        end = blob.offset + blob.length


def _lay_out(arrays: Sequence[HostArray]) -> list[Blob]:
    blobs = []
    end = 0
    for array in arrays:
        offset = _aligned(end)
        data = _bytes_of(array.data)
        shape = tuple(array.data.shape)
        blobs.append(Blob(array.name, array.dtype, shape, offset, len(data), digest(data)))
        end = offset + len(data)
    return blobs


def _bytes_of(data: Bits) -> memoryview:
    # The bytes of a strided array are not those of its elements in order.
    assert data.flags.c_contiguous
    return data.reshape(-1).view(np.uint8).data


def _blob_to_list(blob: Blob) -> list[object]:
    return [blob.name, blob.dtype, list(blob.shape), blob.offset, blob.length, blob.digest]


def _pack(header: Header) -> bytes:
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(packed)} bytes, more than {MAX_HEADER_BYTES}")
    return packed


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _padding(position: int) -> bytes:
    return bytes(_aligned(position) - position)


# -- reading ---------------------------------------------------------------------------


class CheckpointFile:
    """A file opened for reading, its header checked, its payload untouched.

    Attributes:
        path: the file.
        header: the map, without its blobs.
        blobs: what the payload holds, checked against the file's size.
        size: bytes of the whole file.
    """

    def __init__(self, path: Path, stream: BufferedReader) -> None:
        self.path = path
        self.size = os.fstat(stream.fileno()).st_size
        self._stream = stream
        header_bytes, payload = self._read_preamble()
        self._payload_start = _aligned(PREAMBLE_BYTES + header_bytes)
        self._require(self.size == self._payload_start + payload, "the file's size is wrong")
        self.header = self._read_header(header_bytes)
        self.blobs = self._read_blobs(payload)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[CheckpointFile]:
        """Open ``path`` and check its header.

        Raises:
            CheckpointCorrupt: it cannot be read, or is damaged, or not one of ours.
        """
        try:
            with path.open("rb") as stream:
                yield cls(path, stream)
        except OSError as error:
            raise CheckpointCorrupt(path, f"cannot be read: {error.strerror}") from error

    def arrays(self) -> list[HostArray]:
        """Read and check the payload.

        Raises:
            CheckpointCorrupt: a digest differs, or bytes between the blobs are not zero.
        """
        end = 0
        arrays = []
        for blob in self.blobs:
            self._read_padding(blob.offset - end)
            arrays.append(self._read_array(blob))
            end = blob.offset + blob.length
        return arrays

    def _read_preamble(self) -> tuple[int, int]:
        fixed = self._read(_PREAMBLE.size)
        magic, version, header_bytes, payload, self._header_digest = _PREAMBLE.unpack(fixed)
        self._require(magic == MAGIC, "not a checkpoint file")
        self._require(self._read(DIGEST_BYTES) == digest(fixed), "the preamble is damaged")
        self._require(version == VERSION, f"format version {version} is not known")
        self._require(header_bytes <= MAX_HEADER_BYTES, "the header is too long")
        return header_bytes, payload

    def _read_header(self, header_bytes: int) -> Header:
        packed = self._read(header_bytes)
        self._require(digest(packed) == self._header_digest, "the header is damaged")
        self._read_padding(self._payload_start - PREAMBLE_BYTES - header_bytes)
        try:
            header = msgpack.unpackb(packed, raw=False, strict_map_key=True)
        except ValueError as error:
            raise CheckpointCorrupt(self.path, f"the header is not msgpack: {error}") from error
        self._require(isinstance(header, dict), "the header is not a map")
        return dict(header)

    def _read_blobs(self, payload: int) -> tuple[Blob, ...]:
        listed = self.header.pop(BLOBS, None)
        self._require(isinstance(listed, list), "the header lists no blobs")
        end = 0
        blobs = []
        for entry in listed or ():
            blob = self._blob_of(entry)
            self._require(blob.offset == _aligned(end), f"blob {blob.name} is out of place")
            end = blob.offset + blob.length
            blobs.append(blob)
        self._require(end == payload, "the blobs do not fill the payload")
        return tuple(blobs)

    def _blob_of(self, entry: object) -> Blob:
        match entry:
            case [str(name), str(dtype), list(shape), int(offset), int(length), bytes(known)]:
                pass
            case _:
                raise CheckpointCorrupt(self.path, "a blob is described wrongly")
        plain = len(shape) <= MAX_RANK and all(isinstance(n, int) and n >= 0 for n in shape)
        self._require(plain and dtype in HOST_DTYPES, f"blob {name} has no shape or dtype of ours")
        elements = 1
        for n in shape:
            elements *= n
        expected = elements * np.dtype(HOST_DTYPES[dtype]).itemsize
        self._require(length == expected, f"blob {name} has a length other than its shape's")
        return Blob(name, dtype, tuple(shape), offset, length, known)

    def _read_array(self, blob: Blob) -> HostArray:
        data = np.empty(blob.length, np.uint8)
        got = self._stream.readinto(data.data)
        self._require(got == blob.length, "the file ends early")
        self._require(digest(data.data) == blob.digest, f"blob {blob.name} is damaged")
        return HostArray(
            blob.name, blob.dtype, data.view(HOST_DTYPES[blob.dtype]).reshape(blob.shape)
        )

    def _read_padding(self, length: int) -> None:
        self._require(not any(self._read(length)), "the padding is damaged")

    def _read(self, length: int) -> bytes:
        data = self._stream.read(length)
        self._require(len(data) == length, "the file ends early")
        return data

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise CheckpointCorrupt(self.path, otherwise)
