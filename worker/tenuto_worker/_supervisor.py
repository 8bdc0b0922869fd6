"""`Supervisor`: the parent process. It holds the worker's name and restarts a child that dies.

It imports nothing heavy, so that it survives what kills its child: a native abort, no memory left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Final

from ._child import MLX_ENVIRONMENT, Brief
from ._deaths import LastWords, oom_kills
from ._errors import EXIT_CONFIG, EXIT_MEMORY, EXIT_REDIS, EXIT_STUCK
from ._identity import Identity
from ._loads import note_of, was_asked_to_end
from ._logging import get_log
from ._settings import WorkerSettings

_HINTS: Final = {
    EXIT_STUCK: "its jobs go on in the next one; --stall-seconds is how long it may stand still",
    EXIT_MEMORY: "a smaller --memory-budget or fewer --slots leave more room",
}
_FIRST_PAUSE_S = 0.5
# A child that lived this long did not die of how it starts.
_HEALTHY_S = 30.0
# Beyond the grace that the child gives itself.
_KILL_AFTER_S = 10.0
# A terminal signals a whole group, and a wrapper passes it on too: that is one stop, not two.
_SAME_STOP_S = 0.5


class Supervisor:
    """Runs the worker as a child until asked to stop.

    Args:
        identity: this worker's name and lock, which the child inherits.
    """

    def __init__(self, settings: WorkerSettings, identity: Identity) -> None:
        self._settings = settings
        self._identity = identity
        self._log = get_log()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped_at: float | None = None
        self._pause = 0.0
        self._crashed = ""
        self._signals = _Signals()

    def run(self) -> int:
        """Until a signal, or an exit of the child that starting again cannot mend."""
        first = True
        with self._signals:
            while True:
                began = time.monotonic()
                kills = oom_kills()
                code, why = self._run_child(first=first)
                if not why and code == -signal.SIGKILL and _rose(kills, oom_kills()):
                    why = "the kernel killed a process for want of memory"
                if self._stopped_at is not None:
                    self._signals.is_over = True
                    was_asked_to_end(note_of(self._settings.data_dir, self._identity.name))
                    return self._code_when_stopped(code)
                if code == EXIT_CONFIG or (code == EXIT_REDIS and first):
                    return code
                first = False
                self._crashed = (
                    "" if code in (0, EXIT_REDIS) else ": ".join(filter(None, (_how(code), why)))
                )
                self._tell_death(code, why)
                if not self._rest(time.monotonic() - began):
                    self._signals.is_over = True
                    return 0

    # -- one child ---------------------------------------------------------------------

    def _run_child(self, *, first: bool) -> tuple[int, str]:
        words = LastWords()
        self._child = child = self._spawn(words.write_end, first=first)
        words.child_has_it()
        self._log.info("child started", pid=child.pid)
        try:
            while (code := child.poll()) is None:
                self._handle(self._signals.wait(self._time_left()))
                self._kill_if_late()
        finally:
            self._child = None
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        return code, words.read()

    def _spawn(self, words: int, *, first: bool) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            # -P: a file of the current folder must not stand in for a module.
            [sys.executable, "-P", "-c", "from tenuto_worker._child import main; main()"],
            stdin=subprocess.PIPE,
            pass_fds=[self._identity.lock, words],
            env=os.environ | MLX_ENVIRONMENT,
            # Ctrl-C is for the supervisor, which passes it on once.
            process_group=0,
        )
        assert child.stdin is not None
        brief = Brief(self._settings.to_json(), self._identity, first, self._crashed, words)
        # Its end, not ours, if it died already.
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(brief.to_json().encode() + b"\n")
            child.stdin.flush()
        return child

    # -- signals -----------------------------------------------------------------------

    def _handle(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            self._log.info("stopping", signal=number.name)
            if self._child is not None:
                self._child.send_signal(signal.SIGTERM)
        elif now - self._stopped_at > _SAME_STOP_S and self._child is not None:
            self._log.warning("stopping at once", signal=number.name)
            self._child.kill()

    def _time_left(self) -> float | None:
        """Seconds until a child that does not end is killed; None without a stop."""
        if self._stopped_at is None:
            return None
        end = self._stopped_at + self._settings.grace_seconds + _KILL_AFTER_S
        return max(0.0, end - time.monotonic())

    def _kill_if_late(self) -> None:
        if self._time_left() == 0.0 and self._child is not None:
            self._log.error("child does not end, killed", pid=self._child.pid)
            self._child.kill()
            self._child.wait()

    # -- its death ---------------------------------------------------------------------

    def _code_when_stopped(self, code: int) -> int:
        # SIGTERM may reach the child before it has a handler; it has no jobs then.
        if code in (0, -signal.SIGTERM):
            return 0
        return 128 - code if code < 0 else code

    def _tell_death(self, code: int, why: str) -> None:
        self._log.error("child died", how=_how(code), why=why or None, hint=_HINTS.get(code))

    def _rest(self, lived: float) -> bool:
        """Wait before the next child, longer each time it dies early; False to stop instead."""
        if lived >= _HEALTHY_S:
            self._pause = 0.0
        end = time.monotonic() + self._pause
        longest = self._settings.restart_pause_max
        self._pause = min(longest, self._pause * 2 or _FIRST_PAUSE_S)
        while self._stopped_at is None and (left := end - time.monotonic()) > 0:
            self._handle(self._signals.wait(left))
        return self._stopped_at is None


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class _Signals:
    """Signals as bytes that can be waited for, with no moment in which one can be missed.

    Attributes:
        is_over: the process has done what they asked for, and is about to end with its own code:
            one more, as of an impatient Ctrl-C, must not have it end with another.
    """

    is_over = False
    _numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __enter__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = {number: signal.signal(number, _note) for number in self._numbers}
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._before.items():
            is_stop = number != signal.SIGCHLD
            signal.signal(number, signal.SIG_IGN if self.is_over and is_stop else handler)
        self._selector.close()
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float | None) -> bytes:
        """The numbers of the signals that came, after at most so many seconds."""
        if not self._selector.select(seconds):
            return b""
        try:
            return os.read(self._read, 512)
        except BlockingIOError:
            return b""


def _note(_number: int, _frame: FrameType | None) -> None:
    """The number is written to the pipe; there is nothing else to do."""
