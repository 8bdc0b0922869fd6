"""Read by Python at the start of a worker: a job kills the process, and the disk is full at times.

The job of the seed `POISON_SEED` does the first when the decode thread has its token number
`POISON_TOKEN`; 0 is when it gets its row. With `POISON_KILLS_ALL` its supervisor dies with it, as
by a kernel that kills whole groups. While there is a file `DISK_IS_FULL`, no checkpoint
can be written.
Everything else is the real worker.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any


def _is_worker() -> bool:
    return "tenuto_worker._child" in " ".join(sys.orig_argv)


def _poison(seed: int, index: int) -> None:
    from tenuto_worker._decoder import DecodeThread

    thread: Any = DecodeThread
    take, seat = thread._take, thread._seat

    def die(row_seed: int | None) -> None:
        if row_seed == seed:
            if "POISON_KILLS_ALL" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def poisoned_take(self: Any, row: Any, event: Any) -> None:
        if event.token.index == index:
            die(row.sequence.options.seed)
        take(self, row, event)

    def poisoned_seat(self: Any, plan: Any) -> None:
        if index == 0:
            die(plan.roads[0].options.seed)
        seat(self, plan)

    thread._take, thread._seat = poisoned_take, poisoned_seat


def _fill_disk(sign: str) -> None:
    from tenuto_engine._fs import FileSystem

    disk: Any = FileSystem
    for name in ("create", "write", "write_at"):
        setattr(disk, name, _refused_while_full(getattr(disk, name), sign))


def _refused_while_full(call: Any, sign: str) -> Any:
    def refused(*args: Any) -> Any:
        # A test makes and removes the file: nothing else tells this process of it.
        if os.access(sign, os.F_OK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args)

    return refused


if _is_worker() and "POISON_SEED" in os.environ:
    _poison(int(os.environ["POISON_SEED"]), int(os.environ["POISON_TOKEN"]))
if _is_worker() and "DISK_IS_FULL" in os.environ:
    _fill_disk(os.environ["DISK_IS_FULL"])
