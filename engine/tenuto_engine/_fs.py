"""The disk calls that durability rests on, in one place so that a test can fail or drop them."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform == "darwin":
    from fcntl import F_FULLFSYNC, fcntl

StrPath = str | os.PathLike[str]

FILE_MODE = 0o600
FOLDER_MODE = 0o700
# macOS refuses to write 2 GiB or more in one call.
_MOST_AT_ONCE = 2**30


class FileSystem:
    """The real disk. Every method raises ``OSError`` and nothing else."""

    def create(self, path: Path) -> int:
        """Open a file for writing that must not exist yet, readable by its owner only."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, FILE_MODE)

    def open(self, path: Path, *, to_write: bool = True) -> int:
        """Open an existing regular file; its bytes stay as they are."""
        # A pipe in the place of a file must not stop the thread that opens it.
        mode = (os.O_WRONLY if to_write else os.O_RDONLY) | os.O_NONBLOCK
        handle = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return handle

    def sync_file(self, path: Path) -> None:
        """Return once the bytes of an existing regular file survive a loss of power."""
        handle = self.open(path, to_write=False)
        try:
            self.sync(handle)
        finally:
            self.close(handle)

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """Write all of ``data``, one-dimensional bytes, however many calls that takes."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest[:_MOST_AT_ONCE]) :]

    def write_at(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data``, one-dimensional bytes, from ``offset`` in the file."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(handle, rest[:_MOST_AT_ONCE], offset)
            rest = rest[written:]
            offset += written

    def truncate(self, handle: int, length: int) -> None:
        """Cut the file to ``length`` bytes."""
        os.ftruncate(handle, length)

    def links(self, handle: int) -> int:
        """How many names the file has; 0 once it was removed."""
        return os.fstat(handle).st_nlink

    def sync(self, handle: int) -> None:
        """Return once the file's bytes survive a loss of power."""
        _sync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def listdir(self, folder: Path) -> list[str]:
        return os.listdir(folder)  # noqa: PTH208 - names are wanted, not paths

    def sync_folder(self, folder: Path) -> None:
        """Return once the names in ``folder`` survive a loss of power."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(handle)
        finally:
            os.close(handle)

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` and what is missing above it, private to its owner and durable."""
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            missing.mkdir(mode=FOLDER_MODE, exist_ok=True)
            try:
                self.sync_folder(missing.parent)
            except OSError:
                # Or the next call would take it for durable.
                with suppress(OSError):
                    missing.rmdir()
                raise
        if folder.stat().st_mode & 0o777 != FOLDER_MODE:
            folder.chmod(FOLDER_MODE)

    def remove_folder(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()


def _sync(handle: int) -> None:
    if sys.platform == "darwin":
        # fsync on macOS leaves the bytes in the drive's own cache. Some file
        # systems (network ones) do not know the stronger call.
        try:
            fcntl(handle, F_FULLFSYNC)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
            os.fsync(handle)
    else:
        os.fsync(handle)
