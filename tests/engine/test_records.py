"""The bytes of a record: they give back what was put in, or nothing; never anything else."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from forged import forge
from tenuto_engine._cache_tree import HOST_DTYPES
from tenuto_engine._delta import Bits
from tenuto_engine._records import (
    BLOBS,
    HEAD_BYTES,
    NO_DIGEST,
    PREAMBLE_BYTES,
    BadRecord,
    Damaged,
    PayloadBlob,
    Reader,
    RecordType,
    Torn,
    check_head,
    digest,
    pack_head,
    pack_record,
    read_blob,
    read_record,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def pack(header: dict[str, Any], *blobs: PayloadBlob) -> bytes:
    packed = pack_record(RecordType.STATE, header, seq=3, prev=bytes(range(16)), blobs=blobs)
    assert packed.nbytes == sum(map(len, packed.chunks))
    return b"".join(packed.chunks)


def header_with(blobs: object, **changes: object) -> dict[str, object]:
    return {"seq": 0, "prev": NO_DIGEST, BLOBS: blobs} | changes


def test_a_record_returns_as_it_was(path: Path) -> None:
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    header = {"a": [1, -2, 2**64 - 1, 0.5, None, True, b"\xff", "wörd"], "b": {"deep": {}}}
    content = pack(header, PayloadBlob("float32", [[1, 2]], data))
    path.write_bytes(b"before" + content + b"after")
    with Reader(path) as reader:
        record, found = read_record(reader, 6)
        array = read_blob(reader, record.blobs[0])
    assert (record.type, record.seq, record.prev) == (RecordType.STATE, 3, bytes(range(16)))
    assert (record.offset, record.end) == (6, 6 + len(content))
    listed = found.pop(BLOBS)
    assert found == header
    assert listed == [["float32", [2, 3, 4], digest(data.tobytes()), [[1, 2]]]]
    np.testing.assert_array_equal(array, data)


def test_the_bytes_are_those_of_the_specification(path: Path) -> None:
    data = np.array([[1, 2]], np.uint8)
    listed = [["uint8", [1, 2], xxhash.xxh3_128_digest(b"\x01\x02"), [7]]]
    expected = forge({"key": 1, "seq": 3, "prev": bytes(range(16)), BLOBS: listed}, b"\x01\x02")
    assert pack({"key": 1}, PayloadBlob("uint8", [7], data)) == expected
    head = b"TENUTOCK\x02\x00\x00\x00"
    check = (xxhash.xxh3_64_intdigest(head) % 2**32).to_bytes(4, "little")
    assert pack_head() == head + check
    assert (HEAD_BYTES, PREAMBLE_BYTES) == (16, 48)


@pytest.mark.parametrize("dtype", sorted(HOST_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 5)])
def test_arrays_of_every_dtype_and_of_no_elements_return(
    path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    size = int(np.prod(shape)) * np.dtype(HOST_DTYPES[dtype]).itemsize
    data: Bits = np.frombuffer(os.urandom(size), HOST_DTYPES[dtype]).reshape(shape)
    path.write_bytes(pack({}, PayloadBlob(dtype, [], data)))
    with Reader(path) as reader:
        record, _ = read_record(reader, 0)
        scratch = np.full(1000, 7, np.uint8)
        for array in (
            read_blob(reader, record.blobs[0]),
            read_blob(reader, record.blobs[0], scratch),
        ):
            assert (array.shape, array.dtype, array.tobytes()) == (
                shape,
                data.dtype,
                data.tobytes(),
            )


def test_a_header_longer_than_the_first_read_returns(path: Path) -> None:
    header = {"tokens": list(range(100_000))}
    path.write_bytes(pack(header))
    with Reader(path) as reader:
        assert read_record(reader, 0)[1]["tokens"] == header["tokens"]


def test_a_payload_is_not_copied() -> None:
    data = np.arange(1000, dtype=np.uint16)
    blob = PayloadBlob("uint16", [], data)
    packed = pack_record(RecordType.STATE, {}, seq=0, prev=NO_DIGEST, blobs=[blob])
    assert np.shares_memory(np.frombuffer(packed.chunks[1], np.uint8), data)


def test_the_bytes_of_a_strided_array_are_never_taken() -> None:
    with pytest.raises(AssertionError):
        pack({}, PayloadBlob("float32", [], np.zeros((4, 6), np.float32).T))


@pytest.mark.parametrize("header", [{"a": {1: 2}}, {"a": "\ud800"}, {"a": 2**64}, {"a": object()}])
def test_a_header_that_could_not_be_read_back_is_not_packed(header: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        pack(header)


@pytest.mark.parametrize("length", [0, 1, 15])
def test_a_file_without_a_whole_head_is_torn(path: Path, length: int) -> None:
    path.write_bytes(pack_head()[:length])
    with Reader(path) as reader, pytest.raises(Torn):
        check_head(reader)


def test_every_flipped_bit_of_a_head_is_seen(path: Path) -> None:
    for bit in range(8 * HEAD_BYTES):
        path.write_bytes(flipped(pack_head(), bit))
        with Reader(path) as reader, pytest.raises(Damaged):
            check_head(reader)


@pytest.mark.parametrize("version", [0, 1, 3, 2**32 - 1])
def test_another_version_is_refused_by_its_number(path: Path, version: int) -> None:
    fixed = b"TENUTOCK" + version.to_bytes(4, "little")
    check = b"1234" if version == 1 else xxhash.xxh3_64_intdigest(fixed).to_bytes(8, "little")[:4]
    path.write_bytes(fixed + check + bytes(64))
    with Reader(path) as reader, pytest.raises(Damaged, match=f"version {version} "):
        check_head(reader)


def test_every_truncation_of_a_record_is_torn(path: Path) -> None:
    content = pack({"a": 1}, PayloadBlob("uint8", [], np.ones(9, np.uint8)))
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with Reader(path) as reader, pytest.raises(Torn):
            read_record(reader, 0)


def test_every_flipped_bit_of_a_record_is_seen(path: Path) -> None:
    content = pack({"a": 1}, PayloadBlob("uint8", [], np.ones(9, np.uint8)))
    for bit in range(8 * len(content)):
        path.write_bytes(flipped(content, bit))
        with Reader(path) as reader, pytest.raises(BadRecord):
            read_blob(reader, read_record(reader, 0)[0].blobs[0])


@pytest.mark.parametrize("begin", [0, PREAMBLE_BYTES, -9])
def test_zeros_where_bytes_should_be_are_torn(path: Path, begin: int) -> None:
    content = pack({"a": 1}, PayloadBlob("uint8", [], np.ones(9, np.uint8)))
    end = {0: len(content), PREAMBLE_BYTES: len(content) - 9, -9: len(content)}[begin]
    begin %= len(content)
    path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])
    with Reader(path) as reader, pytest.raises(Torn):
        read_blob(reader, read_record(reader, 0)[0].blobs[0])


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


# -- records whose digests are right and whose content lies -----------------------------


def assert_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with Reader(path) as reader, pytest.raises(BadRecord):
            read_record(reader, 0)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_forged_record_without_a_lie_is_read(path: Path) -> None:
    path.write_bytes(forge(header_with([["uint8", [2], digest(b"ab"), []]]), b"ab"))
    with Reader(path) as reader:
        assert read_blob(reader, read_record(reader, 0)[0].blobs[0]).tobytes() == b"ab"


@pytest.mark.parametrize(
    "numbers",
    [
        {"kind": 0},
        {"kind": 7},
        {"zero": 1},
        {"header_bytes": 2**32 - 1},
        {"header_bytes": 2**28 + 1},
        {"header_bytes": 0},
        {"payload_bytes": 2**64 - 1},
        {"payload_bytes": 2**63},
        {"payload_bytes": 1},
    ],
)
def test_a_lying_preamble_is_refused_before_anything_is_allocated(
    path: Path, numbers: dict[str, int]
) -> None:
    assert_refused(path, forge(header_with([]), b"", **numbers))


BIG = 2**40


@pytest.mark.parametrize(
    "blob",
    [
        ["float32", [BIG], bytes(16), []],
        ["float32", [2**62, 4], bytes(16), []],
        ["uint8", [0, 2**63, 2**63], bytes(16), []],
        ["uint8", [15], bytes(16), []],
        ["uint8", [17], bytes(16), []],
        ["uint8", [-16], bytes(16), []],
        ["uint8", [-4, -4], bytes(16), []],
        ["uint8", [16.0], bytes(16), []],
        ["uint8", [True, 16], bytes(16), []],
        ["object", [2], bytes(16), []],
        ["uint8", [1] * 8 + [16], bytes(16), []],
        ["uint8", [16], "text", []],
        ["uint8", [16], bytes(15), []],
        ["uint8", [16], bytes(16)],
        ["uint8", [16], bytes(16), None],
        [7, [16], bytes(16), []],
        "uint8",
        None,
    ],
)
def test_a_lying_blob_is_refused_before_anything_is_allocated(path: Path, blob: object) -> None:
    assert_refused(path, forge(header_with([blob]), bytes(16)))


def test_an_empty_blob_of_absurd_lengths_is_refused(path: Path) -> None:
    for shape in ([0, 2**63], [2**40, 0, 2**40], [2**48 + 1, 0]):
        assert_refused(path, forge(header_with([["uint8", shape, digest(b""), []]])))


@pytest.mark.parametrize(
    "header",
    [
        [],
        5,
        {},
        header_with(5),
        header_with({}),
        header_with([], seq=-1),
        header_with([], seq=1.0),
        header_with([], seq=None),
        header_with([], prev=b"short"),
        header_with([], prev="sixteen letters."),
        {1: 2},
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81" * 3000,
        b"\x91" * 100_000 + b"\x01",
        b"\x80\x80",
        b"",
    ],
)
def test_a_header_that_is_no_map_of_ours_is_refused(path: Path, header: object) -> None:
    assert_refused(path, forge(header))


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "link", "gone", "."):
        with pytest.raises(OSError):  # noqa: PT011 - each has its own
            Reader(tmp_path / name)
