"""`StreamReader`: follows one job's stream through reconnects, without gap or duplicate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ._backend import Event
from ._errors import JobGone, ProtocolError, ServerUnavailable
from ._records import QUIET_PHASES, EndEvent, JobState, ProgressEvent, StateEvent, Token
from ._redis import Backoff, Connection
from ._tails import COUNT, ReadEntry, Tails, as_entry
from ._wire import is_token_id
from .keys import Keys


class StreamReader:
    """One reading of one job's stream.

    The cursor is the id of the last entry that was handled. After a lost connection it goes back
    to the last token, because a server that lost its tail numbers later events anew; events that
    were shown already are known by their bytes.

    Args:
        tails: of the connection; readers of the same job that share it share its reading.
        after: index of the last token that the caller has.
        reconnect_timeout: how many seconds to wait for a server that was lost; None is forever.
    """

    def __init__(
        self,
        connection: Connection,
        tails: Tails,
        keys: Keys,
        job_id: str,
        after: int,
        reconnect_timeout: float | None,
    ) -> None:
        self._redis = connection
        self._tails = tails
        self._keys = keys
        self._job_id = job_id
        self._stream = keys.stream(job_id)
        self._seen = after
        self._backoff = Backoff(reconnect_timeout)
        self._shown: set[tuple[bytes, bytes]] = set()
        self._last_progress: ProgressEvent | None = None
        self._rewind()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Tokens, states and progress as they come; the last one is the `EndEvent`.

        Raises:
            JobGone: there is no such job, or there is none any more.
            ServerUnavailable: the server was not reached at all, or not for `reconnect_timeout`.
        """
        cancels = _Cancels()
        while True:
            try:
                batch = await self._next()
            except ServerUnavailable as error:
                await self._redis.recover(error, self._backoff)
                self._rewind()
                continue
            cancels.raise_if_swallowed()
            self._backoff.reset()
            for event in batch:
                yield event
                if isinstance(event, EndEvent):
                    return

    def _rewind(self) -> None:
        self._cursor = f"{self._seen}-0".encode()
        # The first look is at what is there; only then is it worth waiting.
        self._wait = False

    async def _next(self) -> list[Event]:
        read = self._tails.wait if self._wait else self._tails.read
        entries = await read(self._stream, self._cursor)
        self._wait = True
        return self._digest(entries) if entries else await self._look()

    def _digest(self, entries: list[ReadEntry]) -> list[Event]:
        full = len(entries) == COUNT
        events: list[Event] = []
        for place, entry in enumerate(entries):
            is_last = place + 1 == len(entries)
            content = entry.content
            if isinstance(content, EndEvent) and is_last and full:
                # Whether something follows is seen only when it is read again, as the first.
                self._wait = False
                break
            self._cursor = entry.id
            if isinstance(content, list):
                events += self._new_tokens(content)
            elif self._is_new(entry):
                events.append(content if is_last else _history(content))
        return events

    def _new_tokens(self, tokens: list[Token]) -> list[Token]:
        new = tokens[max(0, self._seen + 1 - tokens[0].index) :] if tokens else []
        if new and new[0].index != self._seen + 1:
            raise ProtocolError(
                f"job {self._job_id}: token {new[0].index} follows {self._seen} in its stream",
                hint="was the stream trimmed? tenuto doctor looks at the server's settings",
            )
        if new:
            self._seen = new[-1].index
            self._shown.clear()
        return new

    def _is_new(self, entry: ReadEntry) -> bool:
        mark = (entry.id, entry.payload)
        if mark in self._shown:
            return False
        self._shown.add(mark)
        return True

    async def _look(self) -> list[Event]:
        """What the job's hash says while its stream says nothing."""
        state, phase, done, total = await self._redis.once(
            "HMGET", self._keys.job(self._job_id), "state", "phase", "phase_done", "phase_total"
        )
        if state is None:
            raise JobGone(self._job_id)
        if JobState(state.decode()).is_over:
            return await self._find_end()
        if phase is None or phase.decode() not in QUIET_PHASES or is_token_id(self._cursor):
            return []
        progress = ProgressEvent(phase.decode(), int(done), int(total))
        if progress == self._last_progress:
            return []
        self._last_progress = progress
        return [progress]

    async def _find_end(self) -> list[Event]:
        """The end of a job that ended before the cursor: fewer tokens than the caller has.

        That is so when the caller asks for more than there is, or when the server lost its tail.
        """
        if entries := await self._tails.read(self._stream, self._cursor):
            return self._digest(entries)
        last = await self._redis.once("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        if not last:
            if not await self._redis.once("EXISTS", self._keys.job(self._job_id)):
                raise JobGone(self._job_id)
            raise ProtocolError(
                f"job {self._job_id}: it has ended, but its stream is missing",
                hint="is maxmemory-policy noeviction? tenuto doctor looks",
            )
        content = as_entry(last[0]).content
        return [content] if isinstance(content, EndEvent) else []


class _Cancels:
    """Notices a cancel that was swallowed on its way.

    redis-py looks at an idle connection under a timeout of 0 s. A cancel that was asked for while
    the task ran, as a signal handler does, arrives there, and is taken for that timeout.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task else 0

    def raise_if_swallowed(self) -> None:
        """Raise `CancelledError` when the task was cancelled and goes on all the same."""
        task = asyncio.current_task()
        if task is not None and task is self._task and task.cancelling() > self._before:
            raise asyncio.CancelledError


def _history(event: StateEvent | EndEvent) -> StateEvent:
    """An end that something follows was resumed from: it is a state like others."""
    if isinstance(event, StateEvent):
        return event
    return StateEvent(state=event.state, epoch=event.epoch, index=event.index, reason=event.error)
