"""`Progress`: the line that `watch` keeps on stderr when that is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Final, TextIO

from ._records import ProgressEvent

_WINDOW_S: Final = 10.0
_REPAINT_S: Final = 0.2
_ERASE_LINE: Final = "\r\x1b[K"
_ERASE_BELOW: Final = "\x1b[J"
# Down and up once, so that there is a line below; remember the place; paint below; come back.
_BELOW: Final = "\x1bD\x1bM\x1b7\x1b[B\r{line}\x1b[K\x1b8"


class Progress:
    """Tokens, tokens a second, the time that is left, and the attempt.

    Where text and progress share a terminal, the line is painted below the text and erased before
    more text comes.

    Args:
        total: max_tokens of the job, 0 where it is not known.
        index: tokens there were before; they say nothing about the speed.
    """

    def __init__(self, total: int, index: int, *, text: TextIO, line: TextIO) -> None:
        self._total = total
        self._index = index
        self._attempt = 0
        self._phase = ""
        self._waiting = ""
        self._text = text
        self._line = line
        self._shared = text.isatty()
        self._on = line.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._painted_at = 0.0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), index)])

    @classmethod
    def on_stderr(cls, total: int, index: int) -> Progress:
        """For text on stdout."""
        return cls(total, index, text=sys.stdout, line=sys.stderr)

    @property
    def is_on(self) -> bool:
        """Whether there is such a line at all."""
        return self._on

    def write(self, text: str) -> None:
        """Write text to its place."""
        if text:
            if self._on and self._shared:
                self._text.write(_ERASE_BELOW)
            self._text.write(text)
            self._text.flush()

    def token(self, index: int) -> None:
        """Token `index` came."""
        self._phase = self._waiting = ""
        if index > self._index:
            self._index = index
            now = time.monotonic()
            self._samples.append((now, index))
            while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
                self._samples.popleft()
        self._paint()

    def attempt(self, number: int) -> None:
        """The job's attempt is this one now, counted from 1."""
        self._attempt = number
        self._paint(now=True)

    def phase(self, event: ProgressEvent) -> None:
        """There is work that yields no tokens."""
        self._phase = f"{event.phase} {event.done}/{event.total}"
        self._paint(now=True)

    def wait(self, line: str | None) -> None:
        """Nobody works on the job, for the reason that the line gives; None is that somebody does.

        A rate would belong to the past then.
        """
        if line or self._waiting:
            self._waiting = line or ""
            self._samples = deque([(time.monotonic(), self._index)])
            self._paint(now=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._on:
            self._line.write(_ERASE_BELOW if self._shared else _ERASE_LINE)
            self._line.flush()

    def describe(self) -> str:
        """The line's text."""
        of_total = f"/{self._total}" if self._total else ""
        parts = [f"{self._index}{of_total} tokens"]
        rate = self._rate()
        if rate > 0:
            parts.append(f"{rate:.1f} tokens/s")
            if self._total > self._index:
                parts.append(f"{_duration((self._total - self._index) / rate)} left at most")
        if self._phase and not self._waiting:
            parts.append(self._phase)
        if self._attempt > 1:
            parts.append(f"attempt {self._attempt}")
        if self._waiting:
            parts.append(self._waiting)
        return " | ".join(parts)

    def _rate(self) -> float:
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at - first_at >= 0.5 else 0.0

    def _paint(self, *, now: bool = False) -> None:
        at = time.monotonic()
        if not self._on or (not now and not self._shared and at - self._painted_at < _REPAINT_S):
            return
        self._painted_at = at
        line = self.describe()[: _columns(self._line) - 1]
        self._line.write(_BELOW.format(line=line) if self._shared else _ERASE_LINE + line)
        self._line.flush()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
