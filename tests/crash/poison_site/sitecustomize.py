"""Read by Python at the start of a worker of `test_poison.py`: one job kills the process.

The job of the seed `POISON_SEED` does so when the decode thread has its token number
`POISON_TOKEN`; 0 is when it gets its row.
Everything else is the real worker.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def _is_worker() -> bool:
    return "POISON_SEED" in os.environ and "tenuto_worker._child" in " ".join(sys.orig_argv)


def _poison(seed: int, index: int) -> None:
    from tenuto_worker._decoder import DecodeThread

    thread: Any = DecodeThread
    take, seat = thread._take, thread._seat

    def die(row_seed: int | None) -> None:
        if row_seed == seed:
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


if _is_worker():
    _poison(int(os.environ["POISON_SEED"]), int(os.environ["POISON_TOKEN"]))
