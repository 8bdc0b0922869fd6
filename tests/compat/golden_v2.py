"""What the golden files of format version 2 hold, and how they were written.

    python tests/compat/golden_v2.py

writes them anew into tests/compat/checkpoint-v2, a data dir with one job: a first attempt, killed
in the middle of a write, and a second one that went on from it and was cancelled. Nothing here
depends on a random generator or on what a device computes, and the clock stands still, so
that every machine writes the same bytes.

What a slot of a cache holds is worked out here by simulation, apart from the tables of the engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from tenuto_engine import CacheState, CheckpointStore, Token
from tenuto_engine._cache_tree import HostArray
from tenuto_engine._checkpoint import Origin
from tenuto_engine._live import LiveCheckpoint, Moment
from tenuto_engine._sequence import Drawn

Bits = npt.NDArray[Any]

GOLDEN: Final = Path(__file__).with_name("checkpoint-v2")
JOB: Final = "golden-Job_1"
NOW: Final = 1_800_000_000.25
PROMPT: Final = (3, 70_000, 5, 0, 9)
SEED: Final = 2**64 - 1
META: Final = {"spec": {"deep": [1, None, b"\x00\xff"]}, "wörd": 1.5}
END: Final = {"state": "cancelled", "usage": [5, 9]}
CUT_OFF: Final = 50
"""Bytes that the last write of the first attempt lacks."""

RING_KEEP, RING_SIZE = 2, 6
CHUNK = 8
HEADS = 2


def token(index: int) -> Token:
    """A generated one. All its numbers are exact in binary."""
    top = ((100 + index, -index / 8), (1, -9.5))
    return Token(100 + index, index, f"wörd{index} ", -index / 8, top)


def pending(generated: int) -> Drawn:
    """What was sampled after so many tokens and is not in the caches."""
    return Drawn(900 + generated, -0.125, ((900 + generated, -0.125), (2, -3.0)))


# -- caches ----------------------------------------------------------------------------


class Positional(NamedTuple):
    """The arrays of a leaf that are saved by position.

    Attributes:
        leaf: its number.
        arrays: name, dtype and width of each.
    """

    leaf: int
    arrays: tuple[tuple[str, str, int], ...]

    def fill(self, slots: Sequence[int | None]) -> tuple[HostArray, ...]:
        """Buffers whose slots hold these positions; None is a slot that holds nothing."""
        return tuple(
            HostArray(name, dtype, self._buffer(array, dtype, width, slots))
            for array, (name, dtype, width) in enumerate(self.arrays)
        )

    def _buffer(self, array: int, dtype: str, width: int, slots: Sequence[int | None]) -> Bits:
        rows = [
            elements((self.leaf, array, position), dtype, (1, HEADS, width))
            if position is not None
            else np.zeros((1, HEADS, width), elements((), dtype, (1,)).dtype)
            for position in slots
        ]
        return np.stack(rows, axis=2)


def elements(place: tuple[int, ...], dtype: str, shape: tuple[int, ...]) -> Bits:
    """Numbers that are told by their place alone."""
    count = int(np.prod(shape))
    drawn = np.frombuffer(hashlib.shake_256(repr(place).encode()).digest(4 * count), np.uint32)
    if dtype == "uint32":
        return drawn.astype("<u4").reshape(shape)
    # Sixteenths from -8 to 8: exact in every floating-point format.
    numbers = ((drawn % 256).astype(np.float32) - 128) / 16
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).reshape(shape)
    return numbers.astype(dtype).reshape(shape)


def _pair(leaf: int, dtype: str, width: int) -> Positional:
    return Positional(leaf, (("keys", dtype, width), ("values", dtype, width)))


PLAIN = _pair(0, "float32", 3)
RING = _pair(1, "bfloat16", 3)
NOT_YET_QUANTIZED = _pair(2, "float16", 32)
QUANTIZED = Positional(
    2,
    tuple(
        (f"{name}.{part}", dtype, width)
        for name in ("keys", "values")
        for part, (dtype, width) in enumerate([("uint32", 4), ("float16", 1), ("float16", 1)])
    ),
)
NESTED = _pair(4, "bfloat16", 1)
CHUNKED = _pair(6, "float16", 3)
CONCATENATED = _pair(7, "float32", 2)


def caches(length: int, *, is_quantized: bool) -> list[CacheState]:
    """All of a job whose caches cover so many tokens; its third layer is quantized midway."""
    slots = range(length)
    growing = {"offset": length, "capacity": 256}
    third = CacheState("KVCache", growing, NOT_YET_QUANTIZED.fill(slots))
    if is_quantized:
        meta = {**growing, "group_size": 32, "bits": 4}
        third = CacheState("QuantizedKVCache", meta, QUANTIZED.fill(slots))
    start = max(0, length - CHUNK)
    chunked = {"offset": length, "start_position": start, "chunk_size": CHUNK, "capacity": 16}
    inside = CacheState("CacheList", {}, (), (_recurrent(5, length),))
    nested = CacheState("KVCache", growing, NESTED.fill(slots))
    return [
        CacheState("KVCache", growing, PLAIN.fill(slots)),
        _ring(length),
        third,
        _recurrent(3, length),
        CacheState("CacheList", {}, (), (nested, inside)),
        CacheState("ChunkedKVCache", chunked, CHUNKED.fill(range(start, length))),
        CacheState(
            "ConcatenateKVCache",
            {"offset": length, "capacity": length},
            CONCATENATED.fill(slots),
        ),
    ]


def _ring(length: int) -> CacheState:
    """One position after the other is written, in a circle behind those that are kept."""
    slots: list[int | None] = [None] * RING_SIZE
    idx = 0
    for position in range(length):
        idx = RING_KEEP if idx == RING_SIZE else idx
        slots[idx] = position
        idx += 1
    meta = {"keep": RING_KEEP, "max_size": RING_SIZE, "offset": length, "idx": idx}
    return CacheState("RotatingKVCache", meta | {"capacity": RING_SIZE}, RING.fill(slots))


def _recurrent(leaf: int, length: int) -> CacheState:
    """The second of three entries is not there yet."""
    arrays = (
        HostArray("state.0", "float32", elements((leaf, 0, length), "float32", (1, 2, 5))),
        HostArray("state.2", "bfloat16", elements((leaf, 2, length), "bfloat16", (1, 3))),
        HostArray("lengths", "uint32", np.array([length], "<u4")),
    )
    return CacheState("ArraysCache", {"entries": 3}, arrays)


# -- attempts --------------------------------------------------------------------------


class Row:
    """What a row of the engine is to a store, from one end of an attempt to the other.

    Args:
        origin: what it goes on from.
    """

    def __init__(self, origin: Origin | None = None) -> None:
        self._origin = origin

    def at(self, length: int, *, is_quantized: bool) -> LiveCheckpoint:
        """The row when its caches cover so many tokens."""
        generated = max(0, length - len(PROMPT))
        in_prefill = length < len(PROMPT)
        return LiveCheckpoint(
            Moment(
                lineage=self,
                origin=self._origin,
                prompt=PROMPT,
                prompt_tokens=len(PROMPT),
                tokens=[token(index) for index in range(1, generated + 1)],
                position=length,
                pending=None if in_prefill else _Pending(generated),
                caches=caches(length, is_quantized=is_quantized),
                seed=SEED,
                divergences=generated // 4,
                first_divergence=4 if generated >= 4 else None,
            )
        )


class _Pending:
    def __init__(self, generated: int) -> None:
        self._generated = generated

    def read(self) -> Drawn:
        return pending(self._generated)


def write(data_dir: Path) -> None:
    """Write the data dir, which must not exist, as the store does it."""
    folder = data_dir / "checkpoints" / JOB
    clock = SimpleNamespace(time=lambda: NOW)
    with mock.patch("tenuto_engine._appender.time", clock):
        _first_attempt(folder)
        _second_attempt(folder)


def _first_attempt(folder: Path) -> None:
    store = CheckpointStore(folder, epoch=1, nonce="first", meta=META, part_bytes=1000)
    store.open(PROMPT, SEED)
    row = Row()
    store.save(row.at(3, is_quantized=False))
    store.save(row.at(7, is_quantized=False))
    store.save(row.at(9, is_quantized=True))
    store.save(row.at(11, is_quantized=True))
    store.save(row.at(13, is_quantized=True))
    store.close()
    log = folder / "00000001-first.log"
    os.truncate(log, log.stat().st_size - CUT_OFF)


def _second_attempt(folder: Path) -> None:
    store = CheckpointStore(folder, epoch=2, nonce="second", meta=META)
    checkpoint = store.newest_valid()
    assert checkpoint is not None
    row = Row(checkpoint.origin)
    store.save(row.at(14, is_quantized=True))
    store.finish(END, [token(index) for index in range(1, 10)], keep_caches=True)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    write(GOLDEN)
