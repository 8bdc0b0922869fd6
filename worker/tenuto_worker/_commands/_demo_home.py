"""`DemoHome`: the demo's own folder, and its server. Nothing mixes with the user's jobs.

<data dir>/models/SmolLM2-135M-Instruct     made once, and kept
<data dir>/demo/lock                        held while a demo runs
<data dir>/demo/run/                        server, checkpoints and logs of one run
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from tenuto_client import DataDirError, ServerUnavailable, Settings, TenutoError
from tenuto_worker._errors import RedisUnavailable
from tenuto_worker._logging import redacted

MODEL = "SmolLM2-135M-Instruct"


class DemoHome:
    """Where a demo lives; to be used by one demo at a time.

    Attributes:
        model: where the model is, or is to be.
        folder: data dir of the demo's workers. Empty at first.
        redis_url: of the user's server; None is an embedded one in `folder`.
        namespace: of this run alone.
    """

    def __init__(self, settings: Settings) -> None:
        self.model = settings.data_dir / "models" / MODEL
        self._base = settings.data_dir / "demo"
        self.folder = self._base / "run"
        self.redis_url = settings.redis_url
        self.namespace = f"{settings.namespace}demo-{secrets.token_hex(4)}:"
        self._lock: int | None = None

    def open(self) -> None:
        """Take the folder, and clear it of what a demo left that was killed or had failed.

        Raises:
            DataDirError: it cannot be made or written.
            TenutoError: another demo runs there.
        """
        try:
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._clear()
            self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise DataDirError(
                error.filename or self._base,
                error.strerror or str(error),
                hint="choose a folder of your own with --data-dir or TENUTO_DATA_DIR",
            ) from error

    @property
    def server(self) -> str:
        """Which one it is, for people."""
        if self.redis_url is None:
            return "Valkey, embedded"
        return f"your own Redis, {redacted(self.redis_url)}, namespace {self.namespace}"

    def start_server(self) -> str:
        """Start the embedded server, or find that the user's answers; the URL.

        Raises:
            ServerUnavailable: it does not.
        """
        from tenuto_client._server import ensure_server

        if self.redis_url is None:
            return ensure_server(self.folder)
        from tenuto_worker._redis import connect, reach

        client = connect(self.redis_url)
        try:
            reach(client, self.redis_url)
        except RedisUnavailable as error:
            raise ServerUnavailable(str(error)) from error
        finally:
            client.close()
        return self.redis_url

    def close(self, *, keep: bool) -> None:
        """Stop the server, and remove all but the model; with `keep`, leave the files."""
        if self._lock is None:
            return
        self._forget_keys()
        if keep:
            self._stop_server()
        else:
            self._clear()
        os.close(self._lock)
        self._lock = None

    def _take_lock(self) -> None:
        descriptor = os.open(self._base / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise TenutoError(
                f"another demo is running in {self._base}",
                hint="wait for its end, or give this one a --data-dir of its own",
            ) from None
        self._lock = descriptor

    def _clear(self) -> None:
        self._stop_server()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _stop_server(self) -> None:
        from tenuto_client._server import stop_server

        if self.folder.exists():
            stop_server(self.folder)

    def _forget_keys(self) -> None:
        """Leave nothing on a server that is not ours."""
        if self.redis_url is None:
            return
        import redis

        from tenuto_worker._redis import connect

        client = connect(self.redis_url)
        try:
            for key in client.scan_iter(match=f"{self.namespace}*", count=1000):
                client.unlink(key)
        except redis.RedisError:
            # Gone with the demo's trouble, which is what the user is to hear of.
            return
        finally:
            client.close()


def shorten(path: Path) -> str:
    """A path for people."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
