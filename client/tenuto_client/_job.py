"""`Job`: one job's handle, over any backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from . import _checks as check
from ._backend import Backend, Event
from ._errors import JobCancelled, JobFailed, JobGone, ResultTimeout
from ._records import EndEvent, JobRecord, JobState, Result, StateEvent, Token

_MAX_INDEX = 2**53


class Job:
    """A job that was submitted, here or elsewhere. Making one asks the server nothing."""

    def __init__(self, backend: Backend, job_id: str) -> None:
        self._backend = backend
        self._id = check.text("job", job_id, 255)

    @property
    def id(self) -> str:
        """Its id, to find it again with `client.job(id)`, also from another process."""
        return self._id

    def __repr__(self) -> str:
        return f"Job({self._id!r})"

    def stream(
        self, after: int = 0, *, reconnect_timeout: float | None = None
    ) -> AsyncGenerator[Token, None]:
        """The tokens after index `after`, as they come, to the last one.

        It goes on through restarts of the server, by default for as long as it takes;
        `reconnect_timeout` limits that, in seconds. To go on elsewhere, give the index of the last
        token that you have.

        Raises:
            JobFailed, JobCancelled: after the last token, when the job ended so.
            JobGone: there is no such job, or it was deleted meanwhile.
            ServerUnavailable: no server was reached at all, or not for `reconnect_timeout`.
        """
        return self._tokens(self.events(after, reconnect_timeout=reconnect_timeout))

    def events(
        self, after: int = 0, *, reconnect_timeout: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Everything that happens after token `after`; the last one, and only it, is `EndEvent`.

        How the job ended is in the `EndEvent`, and raises nothing; otherwise as `stream`.
        """
        after = check.integer("after", after, 0, _MAX_INDEX)
        return self._backend.events(self._id, after, reconnect_timeout)

    async def status(self) -> JobRecord:
        """The job as it is now. Raises `JobGone`."""
        return await self._backend.status(self._id)

    async def result(self, timeout: float | None = None) -> Result:  # noqa: ASYNC109  as users expect
        """Wait for the end and return everything that the job produced.

        Raises:
            JobFailed, JobCancelled: the job ended so; `.result` has what there is.
            JobGone: there is no such job.
            ResultTimeout: it has not ended after `timeout` seconds; it goes on.
        """
        try:
            async with asyncio.timeout(timeout):
                result = await self._collect()
        except TimeoutError as error:
            raise ResultTimeout(self._id, timeout or 0) from error
        _raise_unless_completed(result)
        return result

    async def cancel(self) -> JobRecord:
        """Ask the job to stop, at its next token where it is running; returns it as it is now.

        Idempotent, also after the end. What was produced stays, and `resume` goes on from there.
        Raises `JobGone`.
        """
        return await self._backend.cancel(self._id)

    async def resume(self) -> JobRecord:
        """Let a cancelled or failed job go on, exactly as if it had not stopped.

        A job that is queued or running stays so; a cancel that it has not seen yet is taken back.
        A deadline that has passed is dropped.
        Raises `IllegalTransition` when it is completed, and `JobGone`.
        """
        return await self._backend.resume(self._id)

    async def delete(self) -> None:
        """Remove the job with all it produced, whatever its state. Raises `JobGone`."""
        await self._backend.delete(self._id)

    async def _tokens(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Token, None]:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Token):
                    yield event
                elif isinstance(event, EndEvent) and event.state is not JobState.COMPLETED:
                    _raise_unless_completed(await self._until(event))

    async def _collect(self) -> Result:
        gathered = _Gathered(self._id)
        async with aclosing(self.events()) as events:
            async for event in events:
                gathered.add(event)
                if isinstance(event, EndEvent):
                    return gathered.result(event)
        raise AssertionError("a stream ends with an EndEvent")

    async def _until(self, end: EndEvent) -> Result:
        """What the job had produced when it ended so, also if it was resumed or removed since."""
        gathered = _Gathered(self._id)
        try:
            async with aclosing(self.events()) as events:
                async for event in events:
                    gathered.add(event)
                    if isinstance(event, EndEvent | StateEvent) and (
                        event.state is end.state and event.epoch == end.epoch
                    ):
                        break
        except JobGone:
            pass
        return gathered.result(end)


@dataclass(slots=True)
class _Gathered:
    job_id: str
    tokens: list[Token] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, Token):
            self.tokens.append(event)

    def result(self, end: EndEvent) -> Result:
        return Result(
            job_id=self.job_id,
            state=end.state,
            text="".join(token.text for token in self.tokens) + end.text,
            tokens=tuple(self.tokens),
            finish_reason=end.finish_reason,
            usage=end.usage,
            exactness=end.exactness,
            exactness_reason=end.exactness_reason,
            error=end.error,
            stats=end.stats,
        )


def _raise_unless_completed(result: Result) -> None:
    if result.state is JobState.FAILED:
        raise JobFailed(f"job {result.job_id} failed: {result.error or 'no reason given'}", result)
    if result.state is JobState.CANCELLED:
        raise JobCancelled(
            f"job {result.job_id} was cancelled after {len(result.tokens)} tokens",
            result,
            hint="resume() goes on from there",
        )
