"""Real worker processes for tests.

    with WorkerProcess(model_folder, server.url, data_dir) as worker:
        worker.wait_ready()
        os.kill(worker.child_pid, signal.SIGKILL)     # or worker.kill_child()
        worker.term()                                 # drain; returns the exit code

Leases, and the rests of children that keep dying, are short: what waits for them is soon over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

READY = "worker ready"
MODEL = "tiny"


def poll_until(
    condition: Callable[[], T | None], what: str, *, timeout: float = 60, every: float = 0.02
) -> T:
    """The first true value of `condition`.

    Raises:
        AssertionError: there was none in time; it says `what` was waited for.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(every)
    return value


def with_site(folder: Path) -> dict[str, str]:
    """The environment in which Python reads the `sitecustomize.py` of a folder at its start."""
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


class WorkerProcess:
    """`tenuto worker` as its own process: a supervisor with its child.

    Args:
        model: folder of the model, served under `name`.
        url: of Redis. None is the embedded server of the data dir.
        data_dir: may be shared with other workers.
        lease: seconds.
        flags: further flags, such as `("--slots", "2")`.
        environ: added to the environment.
    """

    def __init__(
        self,
        model: Path,
        url: str | None,
        data_dir: Path,
        *,
        name: str = MODEL,
        namespace: str = "tenuto:",
        lease: float = 1.0,
        flags: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._log = data_dir / f"log-{time.monotonic_ns()}"
        command = ["tenuto", "worker", "--model", f"{name}={model}", "--data-dir", str(data_dir)]
        command += ["--namespace", namespace, "--lease-seconds", str(lease)]
        command += [
            "--restart-pause",
            "0.1",
            "--log-format",
            "json",
            *(["--redis", url] if url else []),
            *flags,
        ]
        command[0] = str(Path(sys.executable).with_name("tenuto"))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if kind is not None:
            sys.stderr.write(self.log())

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    @property
    def child_pid(self) -> int:
        """Of the newest child, alive or not."""
        pids = [line["pid"] for line in self.lines("child started")]
        assert pids, "no child was started yet"
        return int(pids[-1])

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The log lines so far, or those of one event; what is not JSON is left out."""
        found = []
        for text in self.log().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if event is None or line["event"] == event:
                found.append(line)
        return found

    def wait_for(self, event: str, *, count: int = 1, timeout: float = 60) -> dict[str, Any]:
        """Wait until the event was logged `count` times, and return that line."""
        poll_until(
            lambda: len(self.lines(event)) >= count or not self.is_running, event, timeout=timeout
        )
        found = self.lines(event)
        assert len(found) >= count, f"the worker ended before {event!r}:\n{self.log()}"
        return found[count - 1]

    def wait_ready(self, *, times: int = 1, timeout: float = 60) -> None:
        """Wait until its child serves, for the n-th time."""
        self.wait_for(READY, count=times, timeout=timeout)

    @property
    def is_running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process.poll() is None

    def wait(self, timeout: float = 60) -> int:
        """Wait for the supervisor's end; its exit code."""
        return self._process.wait(timeout)

    def kill_child(self) -> int:
        """SIGKILL the child only; the supervisor starts another one. Returns the dead one's pid."""
        pid = self.child_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill(self) -> None:
        """SIGKILL supervisor and child, as a machine that loses power, and wait."""
        if self.is_running:
            # The supervisor first, or it would start another child.
            self._process.send_signal(signal.SIGSTOP)
            self._end_child()
            self._process.kill()
        self._process.wait(20)
        self._end_child()

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor only; its child drains by itself."""
        self._process.kill()
        self._process.wait(20)

    def term(self, timeout: float = 60) -> int:
        """SIGTERM, and wait; the exit code."""
        self._process.terminate()
        return self.wait(timeout)

    def stop(self) -> None:
        """SIGSTOP the child: it does nothing, and does not know it."""
        os.kill(self.child_pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Undo `stop()`."""
        os.kill(self.child_pid, signal.SIGCONT)

    def close(self) -> None:
        """End everything, whatever state it is in."""
        self.kill()

    def _end_child(self) -> None:
        for line in self.lines("child started")[-1:]:
            pid = int(line["pid"])
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def child_is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    if sys.platform != "linux":
        return subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
