"""Small checkpoints without a model, and disks that fail, for the tests of store and writer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tenuto_engine._caches import CacheState, HostArray
from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._fs import FileSystem
from tenuto_engine._token import Token

RING = 6


def sample_checkpoint(generated: int = 5, *, prompt: int = 3, width: int = 4) -> Checkpoint:
    """A checkpoint with all cache kinds, whose every value depends on ``generated``."""
    length = prompt + generated
    drawn = np.random.default_rng(generated)
    tokens = tuple(
        Token(100 + i, i, f"wörd{i} ", -i / 7, ((100 + i, -i / 7), (1, -9.5)))
        for i in range(1, generated + 1)
    )

    def kv(name: str, positions: int) -> HostArray:
        return HostArray(name, "float32", normal(drawn, (1, 2, positions, width)))

    plain = CacheState(
        "KVCache", {"offset": length, "capacity": 256}, (kv("keys", length), kv("values", length))
    )
    index = (length - 1) % RING + 1
    ring = CacheState(
        "RotatingKVCache",
        {"offset": length, "idx": index, "keep": 0, "max_size": RING, "capacity": RING},
        (kv("keys", RING), kv("values", RING)),
    )
    for array in ring.arrays:
        array.data[:, :, length:] = 0
    half = HostArray("state.1", "bfloat16", drawn.integers(0, 2**16, (1, 5), np.uint16))
    recurrent = CacheState("ArraysCache", {"entries": 2}, (half,))
    return Checkpoint(
        cache_tokens=(*range(10, 10 + prompt), *(token.token for token in tokens)),
        original_prompt_tokens=prompt,
        generated=tokens,
        pending_token=777,
        pending_logprob=-0.125,
        pending_top_logprobs=((777, -0.125), (3, -2.5)),
        seed=2**64 - 1,
        caches=[plain, ring, recurrent],
        meta={"job": "j1", "list": [1, 2, {"deep": None}], "bytes": b"\x00\xff"},
    )


def normal(drawn: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return drawn.standard_normal(shape).astype(np.float32)


def image(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Everything in a checkpoint, as something that compares by value."""
    caches = [
        (
            state.kind,
            dict(state.meta),
            [(a.name, a.dtype, a.data.dtype.str, a.data.shape, a.data.tobytes()) for a in s],
        )
        for state in checkpoint.caches
        for s in [state.arrays]
    ]
    return (
        checkpoint.cache_tokens,
        checkpoint.original_prompt_tokens,
        checkpoint.generated,
        checkpoint.pending_token,
        checkpoint.pending_logprob,
        checkpoint.pending_top_logprobs,
        checkpoint.seed,
        caches,
        dict(checkpoint.meta),
    )


class FullDisk(FileSystem):
    """Has room for ``room`` more bytes, then none."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, handle: int, data: bytes | memoryview) -> None:
        fitting = memoryview(data)[: self.room]
        super().write(handle, fitting)
        self.room -= len(fitting)
        if len(fitting) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FailingDisk(FileSystem):
    """Raises an error in the calls named in ``failing``, before or after doing them."""

    def __init__(self, *failing: str, number: int = errno.EIO, after: bool = False) -> None:
        self.failing = set(failing)
        self.number = number
        self.after = after

    def _maybe(self, name: str, call: Callable[[], Any]) -> Any:
        if name in self.failing and not self.after:
            raise OSError(self.number, os.strerror(self.number))
        result = call()
        if name in self.failing:
            raise OSError(self.number, os.strerror(self.number))
        return result

    def create(self, path: Path) -> int:
        return int(self._maybe("create", lambda: super(FailingDisk, self).create(path)))

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self._maybe("write", lambda: super(FailingDisk, self).write(handle, data))

    def sync(self, handle: int) -> None:
        self._maybe("sync", lambda: super(FailingDisk, self).sync(handle))

    def close(self, handle: int) -> None:
        self._maybe("close", lambda: super(FailingDisk, self).close(handle))

    def rename(self, source: Path, target: Path) -> None:
        self._maybe("rename", lambda: super(FailingDisk, self).rename(source, target))

    def sync_folder(self, folder: Path) -> None:
        self._maybe("sync_folder", lambda: super(FailingDisk, self).sync_folder(folder))

    def make_folder(self, folder: Path) -> None:
        self._maybe("make_folder", lambda: super(FailingDisk, self).make_folder(folder))

    def unlink(self, path: Path) -> None:
        self._maybe("unlink", lambda: super(FailingDisk, self).unlink(path))


class PowerCut(BaseException):
    """The machine stops here; nothing in the process may catch it."""


class CrashingDisk(FileSystem):
    """Stops for good before its ``calls``-th call, and can then drop what was never synced.

    Folders are not dropped: a rename that was not followed by ``sync_folder`` is undone, an
    unlink too, and bytes of a file that was not synced are replaced by zeros.
    """

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self._unsynced: dict[int, Path] = {}
        self._undo: list[tuple[Path, Callable[[], None]]] = []

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise PowerCut

    def lose_power(self) -> None:
        """Leave on disk what a power cut may leave there."""
        for path in self._unsynced.values():
            if path.exists():
                path.write_bytes(bytes(path.stat().st_size))
        for _, undo in reversed(self._undo):
            undo()

    def create(self, path: Path) -> int:
        self._count()
        handle = super().create(path)
        self._unsynced[handle] = path
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self._count()
        super().write(handle, data)

    def sync(self, handle: int) -> None:
        self._count()
        super().sync(handle)
        self._unsynced.pop(handle, None)

    def close(self, handle: int) -> None:
        super().close(handle)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        for handle, path in self._unsynced.items():
            if path == source:
                self._unsynced[handle] = target
        super().rename(source, target)
        self._undo.append((target.parent, lambda: os.replace(target, source)))  # noqa: PTH105

    def unlink(self, path: Path) -> None:
        self._count()
        content = path.read_bytes()
        super().unlink(path)
        self._undo.append((path.parent, lambda: _write(path, content)))

    def sync_folder(self, folder: Path) -> None:
        self._count()
        super().sync_folder(folder)
        self._undo = [(where, undo) for where, undo in self._undo if where != folder]


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
