"""`Patron`: somebody with one job, who reads it whatever happens, and changes their mind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

from exact_runs import Outcome, Reading, assert_same
from tenuto_client import Client, Job, JobGone, JobRecord, JobState, SubmitOptions, Token

from .pool import Piece

_PAUSE_S = 0.5
_LIMITS_OF_TIME = ("deadline:", "queue_ttl:", "max_runtime:")


class Patron:
    """One job and its user.

    Args:
        poison: the job kills whoever runs it, and is expected to fail.

    Attributes:
        readings: one for each time that it was subscribed to.
        deleted: its user had it deleted.
        resumes: how often it went on after a cancel, or after it had failed.
        given_up: how often it failed, of three attempts in a row that died without progress.
        late: how often it failed as its time was over.
    """

    def __init__(self, client: Client, piece: Piece, extra: SubmitOptions, poison: bool) -> None:
        self._client = client
        self._piece = piece
        self._extra = extra
        self._reader: asyncio.Task[None] | None = None
        self.poison = poison
        self.job: Job | None = None
        self.readings: list[Reading] = []
        self.deleted = False
        self.resumes = 0
        self.given_up = 0
        self.late = 0

    def __str__(self) -> str:
        job_id = self.job.id if self.job else "not submitted"
        return f"{'poison' if self.poison else self._piece.case.name} ({job_id})"

    @property
    def model(self) -> str:
        return self._piece.case.model

    @property
    def last_state(self) -> JobState:
        """How it ends when nobody cancels it. From any other end its user resumes it."""
        return JobState.FAILED if self.poison else JobState.COMPLETED

    @property
    def count(self) -> int:
        """How many tokens it has, over all subscriptions."""
        if not self.readings:
            return 0
        return self.readings[-1].after + len(self.readings[-1].tokens)

    @property
    def is_reading(self) -> bool:
        return self._reader is not None and not self._reader.done()

    @property
    def ended(self) -> bool:
        """Whether an end was read that nothing follows, as far as its user knows."""
        return bool(self.readings) and self.readings[-1].done.is_set()

    async def live(self) -> None:
        """Submit, read, go on after a cancel, until there is an end to stay."""
        case = self._piece.case
        options: Any = case.options | self._extra
        self.job = await self._client.submit(case.model, case.prompt, **options)
        await self.read_on()

    async def read_on(self) -> None:
        """Read from the first token that is not there yet, until there is an end to stay."""
        assert self.job is not None
        while True:
            await self._subscribe()
            if self.deleted:
                return
            if not self.ended:
                continue
            end = self.readings[-1].end
            if end.state is self.last_state:
                return
            if end.state is JobState.FAILED:
                is_late = (end.error or "").startswith(_LIMITS_OF_TIME)
                self.late += is_late
                self.given_up += not is_late
            await asyncio.sleep(_PAUSE_S)
            await self._resume()

    async def read_again(self, state: JobState) -> None:
        """Its user had read an end, and the server has forgotten it."""
        if state.is_over:
            await self._resume()
        await self.read_on()

    def drop_reader(self) -> None:
        """End its connection; it comes again with the last index that it saw."""
        assert self._reader is not None
        self._reader.cancel()

    async def cancel(self) -> None:
        """Ask for the end; `read_on` resumes it."""
        assert self.job is not None
        await self.job.cancel()

    async def delete(self) -> None:
        """Have it removed, with all it produced."""
        assert self.job is not None
        self.deleted = True
        with suppress(JobGone):
            await self.job.delete()
        if self._reader is not None:
            self._reader.cancel()

    # -- what must hold --------------------------------------------------------------------

    def check_readings(self) -> None:
        """Each index came once and in order, over all subscriptions, and the end last.

        Raises:
            AssertionError: it did not, or something differs from the undisturbed run.
        """
        for reading in self.readings:
            reading.assert_gapless()
        for before, after in zip(self.readings, self.readings[1:], strict=False):
            assert after.after == before.after + len(before.tokens), "a subscription lacks tokens"
        if self.deleted:
            return
        if self.poison:
            state = self.readings[-1].end.state
            assert state is JobState.FAILED, state
            error = self.readings[-1].end.error or ""
            assert error.count("died") + error.count("lost its lease") == 3, error
            return
        assert_same(self._outcome(), self._piece.outcome, str(self))

    async def check_afterwards(self) -> None:
        """Who comes when all is over reads the same, and the job's record says the same."""
        if self.poison or self.deleted:
            return
        assert self.job is not None
        expected = self._piece.outcome
        late = Reading(0)
        await self._read(late)
        late.assert_gapless()
        end = late.end
        seen = Outcome(
            tuple(late.tokens), end.state, end.finish_reason, end.text, end.usage, end.exactness
        )
        assert_same(seen, expected, f"{self}, read afterwards")
        record = await self.job.status()
        assert (record.state, record.tokens) == (expected.state, len(expected.tokens)), record
        assert (record.exactness, record.exactness_reason) == ("exact", None), record

    async def record(self) -> JobRecord | None:
        """The job as it is now; None when it is gone."""
        assert self.job is not None
        try:
            return await self.job.status()
        except JobGone:
            return None

    def _outcome(self) -> Outcome:
        tokens = tuple(token for reading in self.readings for token in reading.tokens)
        end = self.readings[-1].end
        assert end.index == len(tokens), f"an end at {end.index} after {len(tokens)} tokens"
        return Outcome(tokens, end.state, end.finish_reason, end.text, end.usage, end.exactness)

    # -- reading ---------------------------------------------------------------------------

    async def _resume(self) -> None:
        assert self.job is not None
        with suppress(JobGone):
            await self.job.resume()
            self.resumes += 1

    async def _subscribe(self) -> None:
        reading = Reading(self.count)
        self.readings.append(reading)
        self._reader = asyncio.create_task(self._read(reading))
        try:
            # Waited for, not awaited: a cancel of ours is not that of the reader.
            await asyncio.wait([self._reader])
        except asyncio.CancelledError:
            self._reader.cancel()
            raise
        if self._reader.cancelled():
            return
        try:
            self._reader.result()
        except JobGone:
            if not self.deleted:
                raise

    async def _read(self, reading: Reading) -> None:
        assert self.job is not None
        expected = self._piece.outcome.tokens
        events = self.job.events(reading.after)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Token) and event.index <= len(expected):
                    # Equal ones need not be kept twice.
                    same = expected[event.index - 1]
                    event = same if same == event else event
                reading.events.append(event)
        reading.done.set()
