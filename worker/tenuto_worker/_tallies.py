"""`Tally`: what the decode thread counts of a model, at next to no cost.

Each is written by one thread and only ever grows, so it needs no lock: a reader may see a token
that its gap does not show yet, never a wrong number.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ._run import Run

if TYPE_CHECKING:
    from tenuto_engine import Sequence as EngineSequence

_INTER_TOKEN_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
_FIRST_TOKEN_S: Final = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 900.0, 3600.0),
)


class Distribution:
    """How often which values came; a Prometheus histogram without its locks.

    Args:
        bounds: upper bounds of the buckets, ascending; beyond the last is one more.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Upper bound and cumulative count of each bucket, the last `+Inf`; and the sum."""
        names = [*map(str, self._bounds), "+Inf"]
        count = 0
        buckets: list[tuple[str, float]] = []
        for name, here in zip(names, list(self._counts), strict=True):
            count += here
            buckets.append((name, count))
        return buckets, self._total


class Tally:
    """Of one model. Written by the decode thread only.

    Attributes:
        tokens: new tokens decoded.
        prefilled: prompt tokens read.
        caught_up: published tokens fed again.
        diverged: those of them that came out differently.
        first_token: seconds from submit to a job's first token.
        inter_token: seconds between two tokens of a row.
    """

    __slots__ = ("caught_up", "diverged", "first_token", "inter_token", "prefilled", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.prefilled = 0
        self.caught_up = 0
        self.diverged = 0
        self.first_token = Distribution(_FIRST_TOKEN_S)
        self.inter_token = Distribution(_INTER_TOKEN_S)


class RowMeter:
    """Counts what one row does into the tally of its model. Of the decode thread, too.

    What the row has when the meter is made is not counted: an earlier attempt did that.
    """

    __slots__ = ("_caught_up", "_diverged", "_last", "_prefilled", "_read", "_run", "_tally")

    def __init__(self, tally: Tally, run: Run, sequence: EngineSequence) -> None:
        self._tally = tally
        self._run = run
        self._last: float | None = None
        self._note(sequence)

    def token(self, index: int) -> None:
        """The row has a new token."""
        now = time.monotonic()
        self._tally.tokens += 1
        if self._last is not None:
            self._tally.inter_token.observe(now - self._last)
        elif index == 1:
            run = self._run
            self._tally.first_token.observe(run.claim.age + now - run.claimed_at)
        self._last = now

    def progress(self, sequence: EngineSequence) -> None:
        """The row did something that may have yielded no token."""
        if sequence.prefill_done + sequence.catch_up_done == self._read:
            return
        self._tally.prefilled += sequence.prefill_done - self._prefilled
        self._tally.caught_up += sequence.catch_up_done - self._caught_up
        self._tally.diverged += sequence.stats.divergences - self._diverged
        self._note(sequence)

    def _note(self, sequence: EngineSequence) -> None:
        self._prefilled = sequence.prefill_done
        self._caught_up = sequence.catch_up_done
        self._diverged = sequence.stats.divergences
        self._read = self._prefilled + self._caught_up
