"""``DiskBudget``: how many bytes the checkpoints of a data dir may take.

Bytes are counted as they are written; the disk itself is asked only by ``measure``, because
others (another worker of the same data dir, a user) add and remove files, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._fs import StrPath

MakeRoom = Callable[[int], object]


class DiskBudget:
    """Bytes that are used of those allowed. Safe to use from any thread.

    Args:
        root: the folder whose files count.
        limit: bytes, or None for no limit. May be changed at any time.
        make_room: called with the bytes that are missing, on the thread that wants them, when
            the limit would be passed; it gives back what it removes with ``refund``.

    Attributes:
        advice: what a refusal adds to what it says itself, such as what the bytes are taken by.
            May be changed at any time.
    """

    def __init__(
        self, root: StrPath, limit: int | None = None, make_room: MakeRoom | None = None
    ) -> None:
        self.root = Path(root)
        self.limit = limit
        self.make_room = make_room
        self.advice = ""
        self._lock = threading.Lock()
        self._used = 0
        # What was charged and refunded while the disk is being asked, which may have seen it.
        self._since = 0
        self.measure()

    def used(self) -> int:
        """Bytes, as far as is known without asking the disk."""
        return self._used

    def measure(self) -> int:
        """Ask the disk what is used. What is written meanwhile may count twice until the next."""
        with self._lock:
            self._since = 0
        found = sum(_sizes(self.root))
        with self._lock:
            self._used = found + max(0, self._since)
            return self._used

    def charge(self, nbytes: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            CheckpointWriteError: they do not fit, and no room could be made.
        """
        missing = self._try(nbytes)
        if missing > 0 and self.make_room is not None:
            self.make_room(missing)
            missing = self._try(nbytes)
        if missing > 0:
            raise CheckpointWriteError(
                self.root,
                # The same each time: it tells one condition from another.
                f"the disk budget of {size(self.limit or 0)} is used up",
                hint="; ".join(filter(None, [self._why(missing), self.advice])),
            )

    def refund(self, nbytes: int) -> None:
        """Count bytes that were removed, or not written after all."""
        with self._lock:
            self._used = max(0, self._used - nbytes)
            self._since -= nbytes

    def _why(self, missing: int) -> str:
        return f"{size(self._used)} are taken, {size(missing)} too little is left"

    def _try(self, nbytes: int) -> int:
        """How many bytes are missing; if none, they are counted."""
        with self._lock:
            if self.limit is not None and self._used + nbytes > self.limit:
                return self._used + nbytes - self.limit
            self._used += nbytes
            self._since += nbytes
            return 0


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    if nbytes >= 1 << 10:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"


def bytes_on_disk(found: os.stat_result) -> int:
    """What a file takes of the disk: of a sparse one less than its length."""
    # With a little more, since a disk may put off to say where fresh bytes are.
    return min(found.st_size, found.st_blocks * 512 + 2**20)


def _sizes(folder: Path) -> Iterator[int]:
    """Of all files below; what is gone or cannot be read takes nothing."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        yield from _sizes(Path(entry.path))
                    else:
                        yield bytes_on_disk(entry.stat(follow_symlinks=False))
                except OSError:
                    continue
    except OSError:
        return
