"""`Screen`: the story as it is told. Plain lines, and on a terminal a little more."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import time
from enum import StrEnum
from typing import TextIO

from tenuto_client._progress import Progress

_MARGIN = " " * 11
_WIDEST = 96
_QUIET_S = 10.0
_PIECES = re.compile(r"\S+|\n|[^\S\n]+")
_ERASE_LINE = "\r\x1b[K"


class Style(StrEnum):
    """How something looks on a terminal."""

    PLAIN = ""
    BOLD = "1"
    DIM = "2"
    GOOD = "1;32"
    BAD = "1;31"


class Screen:
    """Writes lines with the time since it was made, text as it streams, and a line that waits.

    Colour and the line that changes appear on a terminal only; `NO_COLOR` is obeyed.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._colours = self._live and not os.environ.get("NO_COLOR")
        self._width = max(40, min(shutil.get_terminal_size().columns, _WIDEST))
        self._began = time.monotonic()
        self._spoke = self._began
        self._is_waiting = False
        self._paragraph: Paragraph | None = None

    def line(self, text: str = "", style: Style = Style.PLAIN) -> None:
        """A line as it is."""
        self.pause()
        self._write(self.styled(text, style) + "\n")

    def fact(self, name: str, value: str) -> None:
        """A name and what it is."""
        self.line(f"  {self.styled(f'{name:<9}', Style.DIM)}{value}")

    def say(self, text: str, style: Style = Style.PLAIN) -> None:
        """A sentence of the story, with the time."""
        self.pause()
        first, *rest = textwrap.wrap(text, self._width - len(_MARGIN)) or [""]
        clock = self.styled(f"{time.monotonic() - self._began:6.1f} s", Style.DIM)
        for start, part in [(f"{clock}   ", first), *((_MARGIN, part) for part in rest)]:
            self._write(f"{start}{self.styled(part, style)}\n")

    def wait(self, what: str, since: float) -> None:
        """On a terminal: say what is waited for, and for how long, until something else is said.
        Elsewhere: say it after ten seconds in which nothing was.

        While text streams there is a line of its own for that.
        """
        if self._paragraph is not None:
            return
        now = time.monotonic()
        line = f"{_MARGIN}{what}, {now - since:.0f} s"
        if not self._live:
            if now - self._spoke >= _QUIET_S:
                self._write(line + "\n")
            return
        self._write(_ERASE_LINE + self.styled(line[: self._width], Style.DIM))
        self._is_waiting = True

    def stream(self, total: int, index: int) -> Paragraph:
        """Begin a piece of streaming text, after token `index` of `total`."""
        self.pause()
        self._write("\n")
        self._paragraph = Paragraph(self, Progress(total, index, text=self._out, line=self._out))
        return self._paragraph

    def pause(self) -> None:
        """End what is not a whole line yet."""
        if self._is_waiting:
            self._is_waiting = False
            self._write(_ERASE_LINE)
        self._end_paragraph()

    def styled(self, text: str, style: Style) -> str:
        """The text as a terminal shows it so."""
        return f"\x1b[{style}m{text}\x1b[0m" if self._colours and style and text else text

    @property
    def room(self) -> int:
        """Columns that streaming text has."""
        return self._width - len(_MARGIN)

    def _end_paragraph(self) -> None:
        if self._paragraph is not None:
            self._paragraph.close()
            self._paragraph = None

    def _write(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._out.write(text)
        self._out.flush()


class Paragraph:
    """Streaming text, wrapped. A word is written when it is whole."""

    def __init__(self, screen: Screen, progress: Progress) -> None:
        self._screen = screen
        self._progress = progress
        self._held = ""
        self._column = 0
        self._gap = False
        self._blank = True

    def add(self, text: str, index: int) -> None:
        """What token `index` adds."""
        *whole, self._held = ["", *_PIECES.findall(self._held + text)]
        if self._held.isspace():
            whole, self._held = [*whole, self._held], ""
        self._put(whole)
        self._progress.token(index)

    def mark(self, text: str) -> None:
        """Something that stands in the text and is none of it."""
        self._put([self._held])
        self._held = ""
        self._write(self._screen.styled(text, Style.BAD))
        self._column += len(text)

    def close(self) -> None:
        """End it with a blank line."""
        self._put([self._held])
        self._held = ""
        if self._column:
            self._break()
        self._break()
        self._progress.clear()

    def _put(self, pieces: list[str]) -> None:
        for piece in pieces:
            if piece == "\n":
                self._break()
            elif piece.isspace():
                self._gap = True
            elif piece:
                self._put_word(piece)

    def _put_word(self, word: str) -> None:
        if self._gap and self._column and self._column + 1 + len(word) > self._screen.room:
            self._break()
        space = " " if self._gap and self._column else ""
        self._gap = False
        self._write(space + word)
        self._column += len(space + word)

    def _write(self, text: str) -> None:
        self._progress.write(text if self._column else _MARGIN + text)
        self._blank = False

    def _break(self) -> None:
        """A new line; of several blank ones, one."""
        if self._column or not self._blank:
            self._progress.write("\n")
        self._blank = not self._column
        self._column = 0
        self._gap = False
