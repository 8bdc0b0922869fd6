"""``PrefixFolder``: blocks of prefixes on disk, the least recently used of which go first.

Several processes may share a folder: a file appears whole or not at all, is never changed, and
may be removed by anybody at any time. Nothing is synced, since every byte is under a digest and a
lost block only costs time.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tenuto_engine._blocks import NAME_BYTES, Block, pack_block, read_block
from tenuto_engine._fs import FileSystem, StrPath
from tenuto_engine._log import TEMPORARY
from tenuto_engine._records import BadRecord, Damaged

_ENDING: Final = ".block"
_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}{re.escape(_ENDING)}")
# What a process that died was writing.
_STALE_S: Final = 3600.0
# After a failure the disk is left alone for so long.
_PAUSE_S: Final = 30.0
# When the limit is passed, so much room is made that it is not passed again at once.
_KEPT: Final = 0.9

_log = logging.getLogger(__name__)


class _File(NamedTuple):
    used_at: int
    nbytes: int
    path: Path


class PrefixFolder:
    """The files of one folder.

    Args:
        root: made when it is first written to.
        limit: bytes that all files together may take.
    """

    def __init__(self, root: StrPath, limit: int, fs: FileSystem | None = None) -> None:
        self.root = Path(root)
        self._limit = limit
        self._fs = fs or FileSystem()
        self._paused_until = 0.0
        # As of the last look; others write here, too.
        self._used: int | None = None

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self._path(name).exists()

    def read(self, name: str) -> Block | None:
        """A block; None if it is not there, or damaged, which removes it."""
        path = self._path(name)
        try:
            return read_block(path, name)
        except FileNotFoundError:
            return None
        except (BadRecord, OSError) as error:
            _log.warning("a block of a prefix cannot be read: %s: %s", path, error)
            if isinstance(error, Damaged):
                with suppress(OSError):
                    self._fs.unlink(path)
            return None

    def touch(self, names: Sequence[str]) -> None:
        """Note that a chain of blocks was used. Its end goes before its beginning, without which
        it is of no use."""
        now = time.time_ns()
        for behind, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._path(name), ns=(now - behind, now - behind))

    def write(self, block: Block, above: Sequence[str]) -> bool:
        """Keep a block behind those ``above`` it; whether it is there now."""
        if time.monotonic() < self._paused_until:
            return False
        path = self._path(block.name)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        chunks = pack_block(block)
        nbytes = sum(len(chunk) for chunk in chunks)
        if nbytes > self._limit * _KEPT:
            return False
        try:
            self._make_room(nbytes)
            self._write(temporary, chunks)
            self._fs.rename(temporary, path)
        except OSError as error:
            with suppress(OSError):
                self._fs.unlink(temporary)
            self._paused_until = time.monotonic() + _PAUSE_S
            _log.warning("a block of a prefix cannot be kept on disk: %s", error)
            return False
        self.touch([*above, block.name])
        return True

    def _write(self, path: Path, chunks: Sequence[bytes | memoryview]) -> None:
        handle = self._fs.create(path)
        try:
            for chunk in chunks:
                self._fs.write(handle, chunk)
        finally:
            self._fs.close(handle)

    def _make_room(self, nbytes: int) -> None:
        if self._used is None:
            self._fs.make_folder(self.root)
            self._used = self._look()[1]
        if self._used + nbytes > self._limit:
            files, self._used = self._look()
            # A chain's beginning is newer than its end.
            for file in sorted(files):
                if self._used + nbytes <= self._limit * _KEPT:
                    break
                with suppress(FileNotFoundError):
                    self._fs.unlink(file.path)
                self._used -= file.nbytes
        self._used += nbytes

    def _look(self) -> tuple[list[_File], int]:
        files = []
        for name in self._fs.listdir(self.root):
            path = self.root / name
            with suppress(OSError):
                found = path.lstat()
                if _NAME.fullmatch(name):
                    files.append(_File(found.st_mtime_ns, found.st_size, path))
                elif name.endswith(TEMPORARY) and time.time() - found.st_mtime > _STALE_S:
                    self._fs.unlink(path)
        return files, sum(file.nbytes for file in files)

    def _path(self, name: str) -> Path:
        return self.root / f"{name}{_ENDING}"
