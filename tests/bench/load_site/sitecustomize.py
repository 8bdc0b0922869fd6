"""Read by Python at the start of the worker of `load.py`: notes when tokens are made and sent.

`LOAD_STAMPS` is the file for it, one line a token, `<what> <job> <index> <ns>` by the monotonic
clock: *made* is when the decode thread has it, *sent* when Redis has confirmed it. `LOAD_STEP_MS`
is how long a step of the engine takes, as on a device that the host waits for: tokens are carried
while nothing computes, and the model's own work is at the end of the step. `LOAD_WORK_FIRST` puts
it at the begin, where it competes for the cores with whoever carries the tokens.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

_FLUSH_NS = 500_000_000


def _is_worker() -> bool:
    return "LOAD_STAMPS" in os.environ and "tenuto_worker._child" in " ".join(sys.orig_argv)


class _Stamps:
    """Buffered, so that noting costs the worker next to nothing. The worker ends without a word,
    so what is noted must not wait for that."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="ascii", buffering=1 << 20)  # noqa: SIM115, PTH123
        self._flushed = 0

    def note(self, what: str, job: str, first: int, last: int) -> None:
        now = time.monotonic_ns()
        for index in range(first, last + 1):
            self._file.write(f"{what} {job} {index} {now}\n")
        if now - self._flushed > _FLUSH_NS:
            self._flushed = now
            self._file.flush()


def _watch_publisher(stamps: _Stamps) -> None:
    from tenuto_worker._publisher import Publisher

    publisher: Any = Publisher
    appended, take_published = publisher.appended, publisher._take_published

    def note_made(self: Any, run: Any) -> None:
        stamps.note("made", run.job_id, len(run.tokens), len(run.tokens))
        appended(self, run)

    def note_sent(self: Any, run: Any, answer: Any) -> None:
        before = run.sent
        take_published(self, run, answer)
        stamps.note("sent", run.job_id, before + 1, run.sent)

    publisher.appended, publisher._take_published = note_made, note_sent


def _slow_down(seconds: float, *, work_first: bool) -> None:
    from tenuto_engine import Engine

    engine: Any = Engine
    step = engine.step
    ended = work = 0.0

    def paced(self: Any) -> Any:
        nonlocal ended, work
        left = ended + seconds - work - time.monotonic()
        if not work_first:
            time.sleep(min(max(0.0, left), seconds))
        began = time.monotonic()
        events = step(self)
        if work_first:
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        ended = time.monotonic()
        # Of late, so that a step that the machine held up does not hasten those after it.
        work = 0.9 * work + 0.1 * (ended - began)
        return events

    engine.step = paced


if _is_worker():
    _watch_publisher(_Stamps(os.environ["LOAD_STAMPS"]))
    _slow_down(
        float(os.environ["LOAD_STEP_MS"]) / 1000, work_first=bool(os.environ.get("LOAD_WORK_FIRST"))
    )
