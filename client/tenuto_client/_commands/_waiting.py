"""Saying what a job waits for, while a command waits for the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from tenuto_client._command import complain
from tenuto_client._config import Settings
from tenuto_client._errors import ServerUnavailable, TenutoError
from tenuto_client._outlook import Outlook, look
from tenuto_client._redis import Connection
from tenuto_client.keys import Keys

_EVERY_S: Final = 1.0
# A job that a worker takes at once is no news.
_SHORT_WAIT_S: Final = 2.0

Show = Callable[[str | None, bool], None]
"""Gets the line, or None where nothing is waited for, and whether more than its timer changed."""


@asynccontextmanager
async def telling(settings: Settings, job_id: str, show: Show) -> AsyncGenerator[None, None]:
    """In the meantime, call `show` once a second with what the job waits for."""
    task = asyncio.create_task(_tell(settings, job_id, show))
    try:
        yield
    finally:
        await _end(task)


async def _end(task: asyncio.Task[None]) -> None:
    # Again and again: redis-py may take a cancel for one of its own timeouts.
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
    if not task.cancelled():
        task.result()


def complain_of_changes(line: str | None, is_new: bool) -> None:
    """A `Show` for stderr that is no terminal."""
    if line is not None and is_new:
        complain(line)


async def _tell(settings: Settings, job_id: str, show: Show) -> None:
    # Waits a little, so that an embedded server's own reason not to start is heard.
    connection = Connection(settings.redis_url, settings.data_dir, retry_for=_EVERY_S)
    keys = Keys(settings.namespace)
    before: object = None
    is_away = False
    try:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                line, what = await _line(connection, keys, job_id)
            except ServerUnavailable as error:
                line = what = f"waiting for the server: {error}"
                is_away = True
            else:
                if is_away:
                    line = f"the server is back{'' if line is None else f'; {line}'}"
                    is_away, before = False, None
            show(line, what != before or what is None)
            before = what
    finally:
        await connection.close()


async def _line(connection: Connection, keys: Keys, job_id: str) -> tuple[str | None, object]:
    """What to say, and what of it is news when it changes; raises `ServerUnavailable`."""
    try:
        outlook = await look(connection, keys, job_id)
    except ServerUnavailable:
        raise
    except TenutoError:
        # Where it matters to the job, its reader says so.
        return None, None
    if outlook is None or _is_short(outlook):
        return None, None
    return str(outlook), (outlook.waited is None, outlook.why)


def _is_short(outlook: Outlook) -> bool:
    return outlook.waited is not None and outlook.waited < _SHORT_WAIT_S
