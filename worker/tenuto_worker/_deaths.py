"""Why a child ended: its last words, whether memory was the cause, and what the kernel killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_MOST_WORDS = 2000
# Of MLX on the CPU, CUDA and Metal. One buffer above the device's maximum is not among them: that
# is the job's own trouble, on any device.
_NO_MEMORY: Final = (
    "unable to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "cudaerrormemoryallocation",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that the device or the host has no memory left."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _NO_MEMORY
    )


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has killed for want of memory.

    None where it does not tell: elsewhere than on Linux, or outside a group of version 2.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text("ascii").splitlines()
        (mine,) = (line[3:] for line in groups if line.startswith("0::"))
        events = Path("/sys/fs/cgroup", mine.lstrip("/"), "memory.events").read_text("ascii")
        counts = dict(line.split() for line in events.splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


class LastWords:
    """A pipe on which a child says why it ends; its supervisor reads it afterwards.

    Attributes:
        write_end: the descriptor that the child inherits.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def read(self) -> str:
        """What the child said; "" if it could not. Closes the pipe."""
        self.child_has_it()
        words = b""
        with contextlib.suppress(BlockingIOError):
            words = os.read(self._read_end, _MOST_WORDS)
        os.close(self._read_end)
        return words.decode(errors="replace")

    def child_has_it(self) -> None:
        """Close the end that is the child's."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1


def say_last_words(descriptor: int, words: str) -> None:
    """To the supervisor, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(descriptor, words.encode()[:_MOST_WORDS])
