"""`ServedNote`: which data set a worker serves, written beside its lock for others to read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import redis

from tenuto_client import Keys
from tenuto_client._endpoint import Endpoint

from ._identity import note_of


@dataclass(frozen=True, slots=True)
class Served:
    """Which data set a worker serves, as it stands beside its lock.

    Attributes:
        worker: its name.
        place: of its Redis, as `Endpoint.place` has it: without user and password.
        ids: the data set's id, then those of which jobs were put back into it.
    """

    worker: str
    place: str
    ids: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None where it is not there, or not as it is written."""
        try:
            found = json.loads(path.read_text("utf-8"))
            return cls(str(found["worker"]), str(found["place"]), tuple(map(str, found["ids"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class ServedNote:
    """Keeps the note beside this worker's lock true; it is written when it has changed."""

    def __init__(self, data_dir: Path, worker: str, url: str) -> None:
        self._path = note_of(data_dir, worker.rpartition("-")[2])
        self._worker = worker
        self._place = Endpoint.parse(url).place

    def write(self, ids: Iterable[str]) -> None:
        """A disk that takes nothing costs others the knowledge, not us the work."""
        served = Served(self._worker, self._place, tuple(ids))
        if Served.read(self._path) == served:
            return
        half = self._path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(served), file)
            half.replace(self._path)


def data_set_ids(client: redis.Redis, keys: Keys) -> tuple[str, ...]:
    """The id of what is in Redis, and those of which jobs were put back; none where none is."""
    current: Any = client.get(keys.namespace_id())
    heirs: Any = client.smembers(keys.heirs())
    ids = [each.decode("utf-8", "replace") for each in (current, *sorted(heirs)) if each]
    return tuple(ids) if current else ()
