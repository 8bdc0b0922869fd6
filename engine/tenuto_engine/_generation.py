"""``Generation``: one run as an iterator of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from tenuto_engine._errors import EngineError, GenerationFailed
from tenuto_engine._sequence import GenerationStats, Sequence, SequenceState
from tenuto_engine._token import Token


class Generation(Iterator[Token]):
    """The tokens of one generation. Made by ``Engine.generate``; used on the decode thread.

    It steps the whole engine whenever it needs a token. Its row is free again when it ends,
    when it is closed (it is a context manager), or when nobody holds it any more.

    Attributes:
        sequence: the generation as the engine sees it.
    """

    def __init__(
        self, sequence: Sequence, *, pump: Callable[[], None], close: Callable[[Sequence], None]
    ) -> None:
        self.sequence = sequence
        self._pump = pump
        self._close = close
        self._ready: deque[Token] = deque()

    @property
    def stats(self) -> GenerationStats:
        """What it did; final once it has ended or is closed."""
        return self.sequence.stats

    @property
    def end_text(self) -> str:
        """The text that was held back until its natural end."""
        return self.sequence.end_text

    def receive(self, token: Token) -> None:
        """Take a token that a step of the engine handed out."""
        self._ready.append(token)

    def close(self) -> None:
        """Free the row and drop what was not read. Harmless when called again."""
        self._ready.clear()
        self._close(self.sequence)

    def __next__(self) -> Token:
        while not self._ready:
            if self.sequence.state.is_end:
                self._raise_failure()
                raise StopIteration
            self._pump()
        return self._ready.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _raise_failure(self) -> None:
        error = self.sequence.error
        if self.sequence.state is not SequenceState.FAILED or error is None:
            return
        if isinstance(error, EngineError):
            raise error
        index = len(self.sequence.tokens) + 1
        raise GenerationFailed(f"token {index}: {type(error).__name__}: {error}") from error
