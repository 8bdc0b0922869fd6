"""A master, its replica and three sentinels, all real, on ports of this machine.

with Group() as group:
    client = SyncClient(group.url)
    master = group.master
    master.kill()
    group.wait_failover(master)
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import redis

from servers import RealServer, valkey_binary

SERVICE: Final = "jobs"
_HOST: Final = "127.0.0.1"
_DOWN_AFTER_MS: Final = 700


def free_port() -> int:
    """A TCP port that nothing listens on now, and none that outgoing connections are given."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port


class Group:
    """A context manager. `url` leads to whoever is the master.

    Args:
        user: `user:password` of the clients, for the URL.
        sentinel: lines for the sentinels' configuration, beyond those that every group needs.
        settings: of both servers.
    """

    def __init__(self, user: str = "", sentinel: str = "", **settings: str) -> None:
        self._stack = ExitStack()
        self._ports = [free_port(), free_port()]
        self._sentinel_ports = [free_port() for _ in range(3)]
        self._lines = sentinel
        common = {"bind": _HOST, "repl_diskless_sync_delay": "0", **settings}
        self.servers = [
            RealServer(port=str(self._ports[0]), **common),
            RealServer(port=str(self._ports[1]), replicaof=f"{_HOST} {self._ports[0]}", **common),
        ]
        hosts = ",".join(f"{_HOST}:{port}" for port in self._sentinel_ports)
        self.url = f"redis+sentinel://{user}{'@' if user else ''}{hosts}/{SERVICE}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            for port in self._sentinel_ports:
                stack.enter_context(Sentinel(port, self._configuration()))
            self._stack = stack.pop_all()
        try:
            _poll(self._is_whole, "a group in which everybody knows everybody")
        except BaseException:
            print(*(server.log() for server in self.servers), sep="\n")
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def master(self) -> RealServer:
        """Whom most sentinels take for the master."""
        said = [self._master_port(port) for port in self._sentinel_ports]
        port = max(set(said), key=said.count)
        return self.servers[self._ports.index(port)]

    def other(self, server: RealServer) -> RealServer:
        """The other server of the two."""
        (found,) = [each for each in self.servers if each is not server]
        return found

    def fail_over(self) -> None:
        """Ask for a failover as an operator does, with nothing broken, and wait for it."""
        before = self.master
        self._ask(self._sentinel_ports[0], "FAILOVER", SERVICE)
        self.wait_failover(before)

    def wait_failover(self, before: RealServer) -> None:
        """Wait until all sentinels name the other server, and it takes writes."""
        wanted = self._ports[self.servers.index(self.other(before))]

        def is_over() -> bool:
            said = {self._master_port(port) for port in self._sentinel_ports}
            return said == {wanted} and role(self.other(before)) == "master"

        _poll(is_over, "the failover")

    def cut_replication(self) -> None:
        """From now on the replica gets nothing more of what the master acknowledges."""
        replica = self.other(self.master)
        with replica.client() as client:
            client.replicaof(_HOST, free_port())

    def _configuration(self) -> str:
        return (
            f"sentinel monitor {SERVICE} {_HOST} {self._ports[0]} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n{self._lines}"
        )

    def _is_whole(self) -> bool:
        for port in self._sentinel_ports:
            state = _pairs(self._ask(port, "MASTER", SERVICE))
            if state.get("num-slaves") != "1" or state.get("num-other-sentinels") != "2":
                return False
        with self.servers[1].client() as client:
            info: Any = client.info("replication")
        return bool(info.get("master_link_status") == "up")

    def _master_port(self, sentinel: int) -> int:
        return int(self._ask(sentinel, "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def _ask(self, sentinel: int, *command: str) -> Any:
        with redis.Redis(host=_HOST, port=sentinel, socket_timeout=5) as client:
            # By another name: redis-py reads answers of SENTINEL in a way of its own.
            client.set_response_callback("SENTINEL", lambda reply, **_: reply)
            return client.execute_command("SENTINEL", *command)


class Sentinel:
    """One sentinel process; a context manager. `lines` are the rest of its configuration."""

    def __init__(self, port: int, lines: str) -> None:
        self._port = port
        self._folder = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
        # It writes into this file what it learns.
        self._config = self._folder / "sentinel.conf"
        self._config.write_text(f"{lines}\nport {port}\nbind {_HOST}\ndir {self._folder}\n")

    def __enter__(self) -> Self:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(valkey_binary()), str(self._config), "--sentinel"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _poll(self._answers, f"sentinel at {self._port}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((_HOST, self._port)) == 0


def role(server: RealServer) -> str:
    """`master` or `slave`, as the server itself says."""
    with server.client() as client:
        said: Any = client.execute_command("ROLE")
    return bytes(said[0]).decode()


def _pairs(reply: Any) -> dict[str, str]:
    texts = [each.decode() if isinstance(each, bytes) else str(each) for each in _flat(reply)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _flat(reply: Any) -> list[Any]:
    # A list or a map, by the version of the protocol.
    return [each for pair in reply.items() for each in pair] if isinstance(reply, dict) else reply


def _poll(condition: Callable[[], bool], what: str, *, within: float = 30) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"waited {within:g} s for {what}"
        time.sleep(0.05)
