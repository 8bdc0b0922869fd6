"""The file of a checkpoint: it returns what was put in, or refuses; never anything else."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from checkpoint_samples import image, sample_checkpoint
from tenuto_engine._caches import CacheState, HostArray
from tenuto_engine._checkpoint import Checkpoint, from_header, to_header
from tenuto_engine._errors import CheckpointCorrupt, CheckpointError
from tenuto_engine._format import (
    ALIGNMENT,
    BLOBS,
    MAGIC,
    PREAMBLE_BYTES,
    CheckpointFile,
    digest,
    write_file,
)


def encode(checkpoint: Checkpoint) -> bytes:
    parts: list[bytes] = []
    write_file(*to_header(checkpoint), lambda data: parts.append(bytes(data)))
    return b"".join(parts)


def decode(path: Path) -> Checkpoint:
    with CheckpointFile.open(path) as file:
        return from_header(file.header, file.arrays())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt"


def assert_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt) as caught:
        decode(path)
    assert caught.value.path == path
    assert caught.value.reason


@pytest.mark.parametrize("generated", [0, 1, 5, 300])
def test_a_checkpoint_returns_as_it_was(path: Path, generated: int) -> None:
    checkpoint = sample_checkpoint(generated)
    path.write_bytes(encode(checkpoint))
    assert image(decode(path)) == image(checkpoint)


def test_a_checkpoint_at_a_border_of_a_prefill_returns_as_it_was(path: Path) -> None:
    checkpoint = replace(
        sample_checkpoint(0, prompt=32),
        original_prompt_tokens=100,
        pending_token=None,
        pending_logprob=None,
        pending_top_logprobs=(),
    )
    path.write_bytes(encode(checkpoint))
    assert image(decode(path)) == image(checkpoint)


def test_arrays_of_no_elements_and_of_no_rank_return_as_they_were(path: Path) -> None:
    arrays = (
        HostArray("keys", "float16", np.zeros((1, 2, 0, 4), np.float16)),
        HostArray("scalar", "int64", np.array(-7)),
        HostArray("flag", "bool", np.array([True, False])),
    )
    checkpoint = replace(sample_checkpoint(), caches=[CacheState("KVCache", {}, arrays)])
    path.write_bytes(encode(checkpoint))
    assert image(decode(path)) == image(checkpoint)


def test_a_checkpoint_without_caches_returns_as_it_was(path: Path) -> None:
    checkpoint = replace(sample_checkpoint(), caches=[])
    path.write_bytes(encode(checkpoint))
    assert image(decode(path)) == image(checkpoint)


def test_blobs_begin_at_multiples_of_the_alignment(path: Path) -> None:
    content = encode(sample_checkpoint())
    path.write_bytes(content)
    with CheckpointFile.open(path) as file:
        start = file.size - file.blobs[-1].offset - file.blobs[-1].length
        arrays = file.arrays()
        for blob, array in zip(file.blobs, arrays, strict=True):
            assert (start + blob.offset) % ALIGNMENT == 0
            begin = start + blob.offset
            assert content[begin : begin + blob.length] == array.data.tobytes()


def test_every_truncation_is_refused(path: Path) -> None:
    content = encode(sample_checkpoint(1))
    for length in range(len(content)):
        assert_refused(path, content[:length])


def test_every_flipped_byte_is_refused(path: Path) -> None:
    content = bytearray(encode(sample_checkpoint(1)))
    for position in range(len(content)):
        bit = 1 << (position % 8)
        content[position] ^= bit
        assert_refused(path, bytes(content))
        content[position] ^= bit


def test_random_damage_is_refused(path: Path) -> None:
    content = encode(sample_checkpoint(9, width=16))
    drawn = random.Random(3)
    for _ in range(300):
        damaged = bytearray(content)
        begin = drawn.randrange(len(content))
        end = begin + drawn.randrange(1, 200)
        damaged[begin:end] = drawn.choice(
            [b"", drawn.randbytes(end - begin), bytes(end - begin), drawn.randbytes(600)]
        )
        if damaged != content:
            assert_refused(path, bytes(damaged))


@pytest.mark.parametrize("more", [b"\x00", bytes(64), b"more"])
def test_bytes_after_the_end_are_refused(path: Path, more: bytes) -> None:
    assert_refused(path, encode(sample_checkpoint()) + more)


@pytest.mark.parametrize("content", [b"", b"TENUTOCK", b"not ours at all" * 50, bytes(4096)])
def test_foreign_files_are_refused(path: Path, content: bytes) -> None:
    assert_refused(path, content)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(CheckpointCorrupt, match="cannot be read"):
            decode(path)


# -- files whose digests are right and whose content lies -------------------------------


def forge(
    header: object, payload: bytes = b"", *, version: int = 1, sizes: tuple[int, int] | None = None
) -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    header_bytes, payload_bytes = sizes or (len(packed), len(payload))
    fixed = struct.pack("<8sIIQ16s", MAGIC, version, header_bytes, payload_bytes, digest(packed))
    padding = bytes(-(PREAMBLE_BYTES + len(packed)) % ALIGNMENT)
    return fixed + digest(fixed) + packed + padding + payload


def header_of(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    return {**to_header(checkpoint)[0], BLOBS: [], **changes}


def test_a_forged_file_without_a_lie_is_read(path: Path) -> None:
    checkpoint = replace(sample_checkpoint(), caches=[])
    path.write_bytes(forge(header_of(checkpoint)))
    assert image(decode(path)) == image(checkpoint)


def test_another_version_is_refused_by_its_number(path: Path) -> None:
    path.write_bytes(forge(header_of(sample_checkpoint()), version=2))
    with pytest.raises(CheckpointCorrupt, match="version 2"):
        decode(path)


@pytest.mark.parametrize(
    "sizes", [(2**32 - 1, 0), (10, 2**63), (0, 2**64 - 1), (2**32 - 1, 2**64 - 1)]
)
def test_lying_sizes_are_refused_before_anything_is_allocated(
    path: Path, sizes: tuple[int, int]
) -> None:
    path.write_bytes(forge(header_of(sample_checkpoint()), sizes=sizes))
    assert_allocates_little(path)


BIG = 2**40


@pytest.mark.parametrize(
    "blob",
    [
        ["a", "float32", [BIG], 0, 4 * BIG, bytes(16)],
        ["a", "float32", [2**62, 4], 0, 0, bytes(16)],
        ["a", "uint8", [BIG], 0, 16, bytes(16)],
        ["a", "uint8", [16], 64, 16, bytes(16)],
        ["a", "uint8", [-16], 0, 16, bytes(16)],
        ["a", "uint8", [16.0], 0, 16, bytes(16)],
        ["a", "object", [2], 0, 16, bytes(16)],
        ["a", "uint8", [1] * 40 + [16], 0, 16, bytes(16)],
        ["a", "uint8", [16], 0, 16, "text"],
        ["a", "uint8", [16], 0, 16],
        [7, "uint8", [16], 0, 16, bytes(16)],
        "uint8",
        None,
    ],
)
def test_a_lying_blob_is_refused_before_anything_is_allocated(path: Path, blob: object) -> None:
    path.write_bytes(forge(header_of(sample_checkpoint(), **{BLOBS: [blob]}), bytes(16)))
    assert_allocates_little(path)


def test_overlapping_blobs_are_refused(path: Path) -> None:
    one = ["a", "uint8", [64], 0, 64, digest(bytes(64))]
    path.write_bytes(forge(header_of(sample_checkpoint(), **{BLOBS: [one, one]}), bytes(64)))
    assert_allocates_little(path)


def assert_allocates_little(path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt):
            decode(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        [],
        5,
        {},
        {BLOBS: 5},
        {BLOBS: {}},
        {1: 2},
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x81" * 3000,
        b"\x91" * 3000 + b"\x01",
        b"\x80\x80",
    ],
)
def test_a_header_that_is_no_map_of_ours_is_refused(path: Path, header: object) -> None:
    path.write_bytes(forge(header))
    with pytest.raises(CheckpointError):
        decode(path)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("seed"),
        lambda h: h.pop("caches"),
        lambda h: h["cache_tokens"].pop(),
        lambda h: h["generated"].pop(0),
        lambda h: h["generated"][0].pop(),
        lambda h: h["generated"].reverse(),
        lambda h: h.update(original_prompt_tokens=2),
        lambda h: h.update(original_prompt_tokens=None),
        lambda h: h.update(generated=None),
        lambda h: h["caches"].pop(),
        lambda h: h["caches"][0].update(arrays=1),
        lambda h: h["caches"][0].update(arrays=10**15),
        lambda h: h["caches"][0].update(arrays=-1),
        lambda h: h["caches"][0].pop("kind"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: Change) -> None:
    header, arrays = to_header(sample_checkpoint())
    change(header)
    with pytest.raises(CheckpointError):
        from_header(header, arrays)


def test_the_bytes_of_a_strided_array_are_never_taken() -> None:
    strided = HostArray("keys", "float32", np.zeros((4, 6), np.float32).T)
    state = CacheState("KVCache", {}, (strided,))
    with pytest.raises(AssertionError):
        encode(replace(sample_checkpoint(), caches=[state]))
