"""From token ids to text: whole characters only, and nothing of a stop string.

``Detokenizer`` holds back half a character, ``StopMatcher`` what may be the start of a
stop string; ``TextStream`` is both in a row. All three are functions of the tokens they
were given, so replaying the tokens rebuilds them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

REPLACEMENT: Final = "\ufffd"

# A character has at most four bytes, so at most three may wait for the last one.
_LONGEST_PARTIAL: Final = 3

# Some decoders look at a token's neighbours (a leading space, a run of byte tokens), so
# a few tokens already handed out stay in the window as context.
_CONTEXT_TOKENS: Final = 4
_WINDOW_TOKENS: Final = 24


class Detokenizer:
    """Turns tokens into text one at a time; never hands out half a character.

    Bytes that are no UTF-8 come out as U+FFFD, at most three characters late.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._handed_out = 0  # characters of the window's text
        self._text = ""

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now."""
        self._window.append(token)
        self._text = self._decode(self._window)
        certain = len(self._text) - _trailing_replacements(self._text)
        new = self._text[self._handed_out : certain]
        self._handed_out = max(self._handed_out, certain)
        if len(self._window) >= _WINDOW_TOKENS:
            self._slide()
        return new

    def flush(self) -> str:
        """Return what was held back; the stream ends here."""
        held = self._text[self._handed_out :]
        self._handed_out = len(self._text)
        return held

    def _slide(self) -> None:
        for kept in range(_CONTEXT_TOKENS, _WINDOW_TOKENS // 2):
            window = self._window[-kept:]
            text = self._decode(window)
            gone = len(self._text) - len(text)
            # A window that begins inside a character would decode to other text.
            if 0 <= gone <= self._handed_out and self._text.endswith(text):
                self._window, self._text = window, text
                self._handed_out -= gone
                return


def _trailing_replacements(text: str) -> int:
    tail = text[-_LONGEST_PARTIAL:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class Matched(NamedTuple):
    """What a piece of text led to: the text now certain, and whether a stop string came."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds stop strings across pieces of text; never lets out the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Matched:
        """Take the next piece; return the text before the first stop string, or what cannot
        be part of one any more.

        A stop string that is complete with a piece that may not stop is ordinary text.
        """
        earlier = len(self._held)
        self._held += text
        found = [at for stop in self._stops if (at := self._find(stop, earlier)) >= 0]
        if found and may_stop:
            before, self._held = self._held[: min(found)], ""
            return Matched(before, True)
        certain = len(self._held) - self._longest_start()
        out, self._held = self._held[:certain], self._held[certain:]
        return Matched(out, False)

    def flush(self) -> str:
        """Return what was held back, since no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _find(self, stop: str, earlier: int) -> int:
        """Where `stop` is that was not whole in the first `earlier` characters; -1 if nowhere."""
        return self._held.find(stop, max(0, earlier - len(stop) + 1))

    def _longest_start(self) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Tokens in, text out: whole characters, cut before the first stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)

    def push(self, token: int, *, may_stop: bool = True) -> Matched:
        """Take the next token; return its text and whether a stop string is complete."""
        return self._matcher.push(self._detokenizer.push(token), may_stop=may_stop)

    def flush(self, *, may_stop: bool = True) -> Matched:
        """Return all that is held back at a natural end, still cut before a stop string."""
        last = self._matcher.push(self._detokenizer.flush(), may_stop=may_stop)
        return last if last.stopped else Matched(last.text + self._matcher.flush(), False)
