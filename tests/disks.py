"""Disks that are full, that fail, and that lose power, for the tests of whatever writes files."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tenuto_engine._fs import FileSystem

T = TypeVar("T")

_PATIENCE = 20.0


class PowerCut(BaseException):
    """The machine stops here; nothing in the process may catch it."""


class WatchedDisk(FileSystem):
    """The real disk, with one place through which every call that changes anything goes."""

    def around(self, name: str, call: Callable[[], T]) -> T:
        """Make the call of the method `name`."""
        return call()

    def create(self, path: Path) -> int:
        return self.around("create", lambda: super(WatchedDisk, self).create(path))

    def open(self, path: Path, *, to_write: bool = True) -> int:
        return self.around("open", lambda: super(WatchedDisk, self).open(path, to_write=to_write))

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self.around("write", lambda: super(WatchedDisk, self).write(handle, data))

    def write_at(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        self.around("write_at", lambda: super(WatchedDisk, self).write_at(handle, data, offset))

    def truncate(self, handle: int, length: int) -> None:
        self.around("truncate", lambda: super(WatchedDisk, self).truncate(handle, length))

    def sync(self, handle: int) -> None:
        self.around("sync", lambda: super(WatchedDisk, self).sync(handle))

    def close(self, handle: int) -> None:
        self.around("close", lambda: super(WatchedDisk, self).close(handle))

    def rename(self, source: Path, target: Path) -> None:
        self.around("rename", lambda: super(WatchedDisk, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self.around("unlink", lambda: super(WatchedDisk, self).unlink(path))

    def sync_folder(self, folder: Path) -> None:
        self.around("sync_folder", lambda: super(WatchedDisk, self).sync_folder(folder))

    def make_folder(self, folder: Path) -> None:
        self.around("make_folder", lambda: super(WatchedDisk, self).make_folder(folder))

    def remove_folder(self, folder: Path) -> None:
        self.around("remove_folder", lambda: super(WatchedDisk, self).remove_folder(folder))


class Gate(FileSystem):
    """A disk whose writes and syncs hang while it is shut."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.failing = False
        self._opened = threading.Event()

    def open_up(self) -> None:
        self._opened.set()

    def shut(self) -> None:
        self.reached.clear()
        self._opened.clear()

    def write_at(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        self._pass()
        super().write_at(handle, data, offset)

    def sync(self, handle: int) -> None:
        self._pass()
        super().sync(handle)

    def _pass(self) -> None:
        self.reached.set()
        assert self._opened.wait(_PATIENCE)
        if self.failing:
            raise OSError(errno.ENOSPC, "No space left on device")


class FailingDisk(WatchedDisk):
    """Raises an error in the calls named in ``failing``, before or after doing them.

    Attributes:
        failing: names of methods. May be changed at any time.
    """

    def __init__(self, *failing: str, number: int = errno.EIO, after: bool = False) -> None:
        self.failing = set(failing)
        self.number = number
        self.after = after

    def around(self, name: str, call: Callable[[], T]) -> T:
        fails = name in self.failing
        if fails and not self.after:
            raise OSError(self.number, os.strerror(self.number))
        result = call()
        if fails:
            raise OSError(self.number, os.strerror(self.number))
        return result


class FullDisk(FileSystem):
    """Has room for ``room`` more bytes, then none; what is cut off or removed makes room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, handle: int, data: bytes | memoryview) -> None:
        fitting = self._take(data)
        super().write(handle, fitting)
        self._require_all(fitting, data)

    def write_at(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        fitting = self._take(data)
        super().write_at(handle, fitting, offset)
        self._require_all(fitting, data)

    def truncate(self, handle: int, length: int) -> None:
        self.room += max(0, os.fstat(handle).st_size - length)
        super().truncate(handle, length)

    def unlink(self, path: Path) -> None:
        self.room += path.stat().st_size
        super().unlink(path)

    def _take(self, data: bytes | memoryview) -> memoryview:
        fitting = memoryview(data)[: self.room]
        self.room -= len(fitting)
        return fitting

    def _require_all(self, fitting: memoryview, data: bytes | memoryview) -> None:
        if len(fitting) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Write:
    def __init__(self, offset: int, data: bytes) -> None:
        self.offset = offset
        self.data = data

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.offset + len(self.data) - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data

    def apply_in_part(self, content: bytearray, drawn: random.Random) -> None:
        some = drawn.randint(0, len(self.data))
        match drawn.choice(["kept", "kept", "dropped", "cut", "holed", "zeros", "garbage"]):
            case "kept":
                self.apply(content)
            case "cut":
                _Write(self.offset, self.data[:some]).apply(content)
            case "holed":
                _Write(self.offset + some, self.data[some:]).apply(content)
            case "zeros":
                _Write(self.offset, bytes(len(self.data))).apply(content)
            case "garbage":
                _Write(self.offset, drawn.randbytes(len(self.data))).apply(content)


class _Truncate:
    def __init__(self, length: int) -> None:
        self.length = length

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.length - len(content))))
        del content[self.length :]

    def apply_in_part(self, content: bytearray, drawn: random.Random) -> None:
        if drawn.random() < 0.5:
            self.apply(content)


class _File:
    """What survives of a file, and what may.

    Attributes:
        synced: its bytes at the last sync.
        changes: those since.
    """

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = bytearray(synced)
        self.changes: list[_Write | _Truncate] = []

    def sync(self) -> None:
        for change in self.changes:
            change.apply(self.synced)
        self.changes = []

    def after_power_loss(self, drawn: random.Random) -> bytes:
        content = bytearray(self.synced)
        changes = list(self.changes)
        if drawn.random() < 0.5:
            drawn.shuffle(changes)
        for change in changes:
            change.apply_in_part(content, drawn)
        return bytes(content)


# New owners of paths in one folder; None removes a path.
_Names = dict[Path, _File | None]


class CrashingDisk(WatchedDisk):
    """Stops for good before its ``calls``-th call, and can then forget what was never synced.

    The call at which it stops may have happened in part. Folders are never forgotten, only
    what is in them.

    Args:
        calls: how many calls it makes; None for no limit.
        seed: of what it forgets.

    Attributes:
        made: names of the calls made.
    """

    def __init__(self, calls: int | None = None, seed: int = 0) -> None:
        self.calls = calls
        self.made: list[str] = []
        self._drawn = random.Random(seed)
        self._off = False
        self._files: dict[Path, _File] = {}
        self._handles: dict[int, _File] = {}
        self._ends: dict[int, int] = {}
        self._synced_names: _Names = {}
        self._renamings: list[tuple[Path, _Names]] = []

    def lose_power(self) -> None:
        """Leave on disk what a power cut may leave there. The disk cannot be used afterwards.

        Each change of a file since its last sync is kept, dropped, cut short, or replaced by
        zeros or garbage, whatever became of the others; each creation, renaming and removal
        since the last sync of its folder is undone or not.
        """
        self._off = True
        names: _Names = {**self._files, **self._synced_names}
        for _, change in self._renamings:
            if self._drawn.random() < 0.5:
                names.update(change)
        contents = {id(file): file.after_power_loss(self._drawn) for file in names.values() if file}
        for path, file in names.items():
            if file is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents[id(file)])
            else:
                path.unlink(missing_ok=True)

    def around(self, name: str, call: Callable[[], T]) -> T:
        if name != "close":
            self._count(name)
        return call()

    def create(self, path: Path) -> int:
        file = _File()
        handle = self._change_names({path: file}, lambda: super(CrashingDisk, self).create(path))
        self._handles[handle], self._ends[handle] = file, 0
        return handle

    def open(self, path: Path, *, to_write: bool = True) -> int:
        handle = super().open(path, to_write=to_write)
        self._handles[handle], self._ends[handle] = self._file(path), 0
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        self._require_power()
        self._handles[handle].changes.append(_Write(self._ends[handle], bytes(data)))
        super().write(handle, data)
        self._ends[handle] += len(data)

    def write_at(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        self._require_power()
        self._handles[handle].changes.append(_Write(offset, bytes(data)))
        super().write_at(handle, data, offset)

    def truncate(self, handle: int, length: int) -> None:
        self._require_power()
        self._handles[handle].changes.append(_Truncate(length))
        super().truncate(handle, length)

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self._handles[handle].sync()

    def rename(self, source: Path, target: Path) -> None:
        if target.exists():
            self._file(target)
        change: _Names = {target: self._file(source), source: None}
        self._change_names(change, lambda: super(CrashingDisk, self).rename(source, target))

    def unlink(self, path: Path) -> None:
        self._file(path)
        self._change_names({path: None}, lambda: super(CrashingDisk, self).unlink(path))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        for path in [each for each in self._synced_names if each.parent == folder]:
            del self._synced_names[path]
        self._renamings = [each for each in self._renamings if each[0] != folder]

    def _change_names(self, change: _Names, call: Callable[[], T]) -> T:
        self._require_power()
        before = {path: self._files.get(path) for path in change}
        renaming = (next(iter(change)).parent, change)
        self._renamings.append(renaming)
        for path, file in before.items():
            self._synced_names.setdefault(path, file)
        # A power cut at this very call leaves the change pending; an error undoes it.
        try:
            result = call()
        except OSError:
            self._renamings.remove(renaming)
            raise
        for path, file in change.items():
            if file is None:
                self._files.pop(path, None)
            else:
                self._files[path] = file
        return result

    def _file(self, path: Path) -> _File:
        """What was there before this disk was is durable."""
        if path not in self._files:
            self._files[path] = _File(path.read_bytes())
        return self._files[path]

    def _count(self, name: str) -> None:
        self._require_power()
        if self.calls is not None and len(self.made) >= self.calls:
            self._off = True
            raise PowerCut(name)
        self.made.append(name)

    def _require_power(self) -> None:
        if self._off:
            raise PowerCut
