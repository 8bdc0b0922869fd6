"""Who this worker is: the lock that makes it the only one of its name, and the data dir's id."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._errors import ConfigError

_MOST_WORKERS = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's stable name, and the proof that nobody else bears it.

    Attributes:
        name: `<host>-<mark of the lock file>-<n>`.
        reach: id of the data dir, whose checkpoints this worker can read. Copies of it have the
            same.
        lock: descriptor of the locked file; whoever inherits it keeps the name taken.
    """

    name: str
    reach: str
    lock: int

    def holds_lock(self) -> bool:
        """Whether the descriptor is the one that the lock belongs to."""
        return _can_lock(self.lock)


@contextlib.contextmanager
def dead_sibling(data_dir: Path, mine: Identity, name: str) -> Iterator[bool]:
    """Whether another worker of this host and data dir is dead, since nobody holds its lock.

    As long as the context lasts, nobody can take its name.
    """
    number = name.rpartition("-")[2]
    if name == mine.name or not number.isdecimal():
        yield False
        return
    try:
        descriptor = os.open(data_dir / "workers" / f"{number}.lock", os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        # A free lock says nothing of a worker that holds another file: that of the data dir of
        # which this one is a copy, or one that was removed.
        yield name == _name(mine.reach, number, descriptor) and _can_lock(descriptor)
    finally:
        os.close(descriptor)


def living_workers(data_dir: Path) -> list[int]:
    """Numbers of the workers of a data dir that live, since somebody holds their locks."""
    folder = data_dir / "workers"
    numbers = [path.stem for path in folder.glob("*.lock") if path.stem.isdecimal()]
    return [number for number in sorted(map(int, numbers)) if _is_held(folder / f"{number}.lock")]


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two who look at once do not take each other for a worker.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def note_of(data_dir: Path, number: int | str) -> Path:
    """Where the worker of that number says which data set it serves (`_owners`)."""
    return data_dir / "workers" / f"{number}.serves"


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def take_identity(data_dir: Path) -> Identity:
    """Take the first free name of the data dir, which is created.

    Raises:
        ConfigError: the data dir cannot be made or written.
    """
    try:
        # By itself, because what `parents` creates gets no mode.
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = data_dir / "workers"
        folder.mkdir(mode=0o700, exist_ok=True)
        (data_dir / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        _check_writable(data_dir / "checkpoints")
        reach = _data_dir_id(data_dir)
        number, lock = _first_free(folder)
        # What whoever had the number before us served.
        note_of(data_dir, number).unlink(missing_ok=True)
    except OSError as error:
        path = error.filename or data_dir
        raise ConfigError(
            f"data dir {path}",
            error.strerror or str(error),
            hint="choose a folder of your own with --data-dir or TENUTO_DATA_DIR",
        ) from error
    return Identity(_name(reach, number, lock), reach, lock)


def reach_of(data_dir: Path) -> str:
    """The id of a data dir that exists, which is drawn where it has none.

    Raises:
        ConfigError: it cannot be read or written.
    """
    try:
        return _data_dir_id(data_dir)
    except OSError as error:
        raise ConfigError(f"data dir {data_dir}", error.strerror or str(error)) from error


def _first_free(folder: Path) -> tuple[int, int]:
    for number in range(_MOST_WORKERS):
        descriptor = os.open(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return number, descriptor
    raise ConfigError(f"data dir {folder}", f"{_MOST_WORKERS} workers run here already")


def _data_dir_id(data_dir: Path) -> str:
    path = data_dir / "id"
    mine = data_dir / f"id.{secrets.token_hex(4)}.tmp"
    if not path.exists():
        mine.write_text(secrets.token_hex(4), "ascii")
        # Linking, unlike renaming, leaves the id of whoever was first.
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
    found = path.read_text("ascii").strip()
    if not re.fullmatch(r"[0-9a-f]{8}", found):
        raise ConfigError(f"data dir {path}", "does not hold an id", hint="remove the file")
    return found


def _check_writable(folder: Path) -> None:
    probe = folder / f".probe-{secrets.token_hex(4)}"
    with probe.open("xb"):
        pass
    probe.unlink()


def _name(reach: str, number: int | str, lock: int) -> str:
    """The name that goes with a lock file. No copy of the file has it, nor one in its place; it is
    the same again whenever the file is. Nobody writes into the file, so it was changed when it was
    made. The number of the device would not do: some systems draw it anew at each start."""
    status = os.fstat(lock)
    place = f"{reach} {status.st_ino} {status.st_ctime_ns}"
    return f"{_host()}-{hashlib.sha256(place.encode()).hexdigest()[:8]}-{number}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().split(".")[0]) or "host"
