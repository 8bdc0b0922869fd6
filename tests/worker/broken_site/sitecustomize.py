"""Read by Python at the start of a worker of `test_deaths.py`: its first child breaks once.

`BROKEN` is how: `hang`, `die` and `memory` befall the decode thread at the fifth token, `preparer`
hangs the preparer. `BROKEN_MARK` is a file that is made then, so that the next child is sound.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any


def _is_due() -> bool:
    is_child = "tenuto_worker._child" in " ".join(sys.orig_argv)
    return is_child and "BROKEN" in os.environ and not _mark().exists()


def _mark() -> Path:
    return Path(os.environ["BROKEN_MARK"])


def _break(how: str) -> None:
    _mark().touch()
    if how == "die":
        raise ZeroDivisionError("a thread broke")
    if how == "memory":
        raise RuntimeError("[malloc] Unable to allocate 1099511627776 bytes.")
    threading.Event().wait()


def _break_decoder(how: str) -> None:
    from tenuto_worker._decoder import DecodeThread

    thread: Any = DecodeThread
    take = thread._take

    def broken(self: Any, row: Any, event: Any) -> None:
        take(self, row, event)
        if event.token.index == 5:
            _break(how)

    thread._take = broken


def _break_preparer() -> None:
    from tenuto_worker._preparer import Preparer

    preparer: Any = Preparer
    preparer._plan = lambda self, run: _break("hang")


if _is_due():
    if os.environ["BROKEN"] == "preparer":
        _break_preparer()
    else:
        _break_decoder(os.environ["BROKEN"])
