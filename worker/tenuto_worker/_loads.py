"""`Loads`: which model is being loaded, for how long, and in whose load a process died.

A load may end the process without a word: a native abort, the kernel's want of memory, a disk that
hangs. So it is noted on disk before it begins. Whoever finds such a note knows of which model the
last process died, and serves the others first.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Loads:
    """The loads of one worker, one at a time.

    Args:
        path: of the note, which only the holder of this worker's lock writes.

    Attributes:
        deaths: by model, how many processes died in its load since it was last loaded.
        last: in whose load the process before this one died; "" if in none.
        since: when the load under way began, by the monotonic clock; None if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last, self.deaths = _read(path)
        if self.last:
            self.deaths[self.last] = self.deaths.get(self.last, 0) + 1
        self.since: float | None = None
        self._model = ""
        self._sign_at = math.inf
        _write(path, "", self.deaths)

    @contextlib.contextmanager
    def of(self, model: str) -> Iterator[None]:
        """As long as the context lasts, files of the model are looked at and loaded."""
        _write(self._path, model, self.deaths)
        self._model, self._sign_at = model, time.monotonic()
        self.since = self._sign_at
        try:
            yield
        finally:
            self.since, self._sign_at = None, math.inf
            _write(self._path, "", self.deaths)

    def got_on(self) -> None:
        """The load under way has made a step."""
        self._sign_at = time.monotonic()

    def downloads(self) -> None:
        """Until it gets on, the load under way is a download, which may take for ever so long and
        has time limits of its own."""
        self._sign_at = math.inf

    def loaded(self, model: str) -> None:
        """Nobody died of it."""
        self.deaths.pop(model, None)

    def trouble(self, limit: float) -> str:
        """Which load has stood still for more than `limit` seconds; "" if none has."""
        still = time.monotonic() - self._sign_at
        if still <= limit:
            return ""
        return f"the load of model {self._model} has stood still for {still:.0f} s"


def note_of(data_dir: Path, worker: str) -> Path:
    """Where the worker of this name has its note, beside its lock."""
    return data_dir / "workers" / f"{worker.rpartition('-')[2]}.loads"


def was_asked_to_end(path: Path) -> None:
    """No load is to blame: the process was told to end."""
    model, deaths = _read(path)
    if model:
        _write(path, "", deaths)


def _read(path: Path) -> tuple[str, dict[str, int]]:
    """What a note says; nothing if it cannot be read."""
    try:
        note: Any = json.loads(path.read_text("utf-8"))
        deaths = {str(name): int(count) for name, count in note["deaths"].items()}
        return str(note["loading"]), deaths
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "", {}


def _write(path: Path, loading: str, deaths: dict[str, int]) -> None:
    """Where that fails, nobody will know of which load a process died."""
    with contextlib.suppress(OSError):
        if not loading and not deaths:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(exist_ok=True)
        half = path.with_suffix(".loads.tmp")
        half.write_text(json.dumps({"loading": loading, "deaths": deaths}), "utf-8")
        half.replace(path)
