"""`Turns`: two processes at the same work take turns on one machine, a second each.

Whatever else the machine does meanwhile (and it is seldom idle) then slows both alike, which runs
one after the other would not. The one whose turn it is not is stopped (SIGSTOP), and its clock with
it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class Turns:
    """While entered, exactly one of the processes runs; afterwards all do.

    Args:
        pids: of the processes, which are numbered by their place here.
        seconds: how long a turn is.
    """

    def __init__(self, pids: Sequence[int], seconds: float) -> None:
        self._pids = pids
        self._seconds = seconds
        self._turns: list[list[tuple[float, float]]] = [[] for _ in pids]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, name="turns")

    def __enter__(self) -> Self:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def clock(self, number: int, at: float) -> float:
        """How many seconds process `number` had run at a monotonic time; call it afterwards."""
        return sum(min(end, at) - start for start, end in self._turns[number] if start < at)

    def _take_turns(self) -> None:
        while not self._over.is_set():
            for pid, turns in zip(self._pids, self._turns, strict=True):
                os.kill(pid, signal.SIGCONT)
                began = time.monotonic()
                self._over.wait(self._seconds)
                os.kill(pid, signal.SIGSTOP)
                turns.append((began, time.monotonic()))
