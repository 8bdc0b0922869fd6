"""`DemoWorker`: a real `tenuto worker` as a process of its own, to be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tenuto_client._config import REDIS_URL

_GRACE_S: Final = 20.0
_LOG_LINES: Final = 8


class DemoWorker:
    """A worker that runs as `tenuto worker` does; it also ends when the demo does, however.

    Args:
        name: what the story calls it.
        log: file for what it says, as JSON lines.
        flags: of `tenuto worker`.
        redis_url: None is the embedded server of the data dir.
    """

    def __init__(self, name: str, log: Path, flags: list[str], redis_url: str | None) -> None:
        self.name = name
        self.log = log
        # Settings that the user made for workers of their own are not meant for this one.
        environ = {key: value for key, value in os.environ.items() if not _is_ours(key)}
        if redis_url is not None:
            # Not as a flag: others on this machine can read those, and it may hold a password.
            environ[REDIS_URL] = redis_url
        body = f"from {__name__} import main; main()"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", body, *flags, "--log-format", "json"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environ,
                # Ctrl-C is for the demo, which ends its workers itself.
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor runs."""
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return any(line["event"] == "worker ready" for line in self._lines())

    @property
    def signal(self) -> int:
        """The number of the signal that ended it; 0 if none has."""
        return max(0, -(self._process.poll() or 0))

    def kill(self) -> None:
        """SIGKILL supervisor and child, as when a machine loses power."""
        if not self.is_alive:
            return
        # Stopped first, so that it does not see its child die and start another.
        self._process.send_signal(signal.SIGSTOP)
        self._kill_child()
        self._process.kill()
        self._close()
        # One that was started just before the stop.
        self._kill_child()

    def stop(self) -> None:
        """Drain, and kill if that takes long."""
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def _close(self) -> None:
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _kill_child(self) -> None:
        pids = [line["pid"] for line in self._lines() if line["event"] == "child started"]
        for pid in pids[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for text in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and "event" in line:
                    yield line


def _is_ours(variable: str) -> bool:
    return variable.startswith("TENUTO_")


def main() -> None:
    """The body of the process: `tenuto worker` with the arguments given."""
    from tenuto_client._command import main as tenuto

    threading.Thread(target=_end_with_the_demo, name="demo", daemon=True).start()
    sys.exit(tenuto(["worker", *sys.argv[1:]]))


def _end_with_the_demo() -> None:
    while os.read(0, 512):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
