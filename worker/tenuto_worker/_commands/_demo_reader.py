"""`Reader`: one subscription to one job's stream, and what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tenuto_client import EndEvent, Event, Job, Token

from ._demo_verdict import Heard


class Reader:
    """One subscription to one job's stream, from its first token to its end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.heard = Heard()
        self._events = job.events()
        self._next: asyncio.Task[Event] | None = None

    @property
    def index(self) -> int:
        """Of the last token it has."""
        return len(self.heard.tokens)

    async def next(self, seconds: float) -> Event | None:
        """What comes next, or None if nothing does for so long."""
        if self._next is None:
            self._next = asyncio.create_task(_next_of(self._events))
        done, _ = await asyncio.wait({self._next}, timeout=seconds)
        if not done:
            return None
        task, self._next = self._next, None
        event = task.result()
        if isinstance(event, Token):
            self.heard.tokens.append(event)
        elif isinstance(event, EndEvent):
            self.heard.end = event
        return event

    async def close(self) -> None:
        """End the subscription."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        await self._events.aclose()


async def _next_of(events: AsyncGenerator[Event, None]) -> Event:
    """`anext` as a coroutine, which is what a task takes."""
    return await anext(events)
