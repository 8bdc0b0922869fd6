"""`Tails`: reads streams; readers that wait at the same place of one share the waiting.

Where many readers of a process follow one job, a reading each would cost the server and the process
as much for each token as all of them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ._redis import Connection
from ._wire import Entry, unpack_entry

COUNT: Final = 500
"""How many entries one read returns at most."""
_BLOCK_MS: Final = 1000

_Place = tuple[str, bytes]


class ReadEntry(NamedTuple):
    """An entry of a stream: its id, its bytes, and what they say."""

    id: bytes
    payload: bytes
    content: Entry


@dataclass(slots=True)
class _Wait:
    """A read that waits, and what each of its readers awaits."""

    task: asyncio.Task[list[ReadEntry]]
    readers: set[asyncio.Future[list[ReadEntry]]] = field(default_factory=set)


class Tails:
    """Reads the streams of one server, for all readers of one client."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._waits: dict[_Place, _Wait] = {}

    async def read(self, key: str, after: bytes) -> list[ReadEntry]:
        """The entries after an id, as they are now.

        Raises:
            ServerUnavailable: no answer.
            ProtocolError: an entry is damaged, or of another version.
        """
        return await self._xread(key, after)

    async def wait(self, key: str, after: bytes) -> list[ReadEntry]:
        """The same, once there are some; none after about a second, or less."""
        place = (key, after)
        wait = self._waits.get(place) or self._start(place)
        # A future each and no shield, which takes every reader twice through the event loop.
        reader: asyncio.Future[list[ReadEntry]] = asyncio.get_running_loop().create_future()
        wait.readers.add(reader)
        try:
            return await reader
        finally:
            wait.readers.discard(reader)
            # One reader that is cancelled is no reason for the others to stop.
            if not wait.readers and not wait.task.done():
                self._forget(place, wait)
                wait.task.cancel()

    def _start(self, place: _Place) -> _Wait:
        task = asyncio.create_task(self._xread(*place, "BLOCK", _BLOCK_MS))
        wait = self._waits[place] = _Wait(task)
        task.add_done_callback(lambda _: self._serve(place, wait))
        return wait

    def _serve(self, place: _Place, wait: _Wait) -> None:
        # Before its readers go on: who then waits at the same place wants another answer.
        self._forget(place, wait)
        cancelled = wait.task.cancelled()
        error = None if cancelled else wait.task.exception()
        for reader in wait.readers:
            if reader.done():
                continue
            if cancelled:
                reader.cancel()
            elif error is not None:
                reader.set_exception(error)
            else:
                reader.set_result(wait.task.result())

    def _forget(self, place: _Place, wait: _Wait) -> None:
        if self._waits.get(place) is wait:
            del self._waits[place]

    async def _xread(self, key: str, after: bytes, *block: Any) -> list[ReadEntry]:
        reply = await self._redis.once("XREAD", "COUNT", COUNT, *block, "STREAMS", key, after)
        return _entries(reply)


def _entries(reply: Any) -> list[ReadEntry]:
    """What XREAD found in the one stream it was asked about; redis-py has two shapes for it."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (found,) = reply.values()
        # RESP3 in some versions of redis-py: the entries are in a list of their own.
        if found and found[0] and isinstance(found[0][0], list | tuple):
            found = found[0]
    else:
        found = reply[0][1]
    return [as_entry(entry) for entry in found]


def as_entry(entry: Any) -> ReadEntry:
    """An entry of a reply of XREAD or XREVRANGE, in any shape that redis-py has for it."""
    entry_id, fields = entry
    if not isinstance(fields, Mapping):
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    return ReadEntry(entry_id, b"".join(fields.values()), unpack_entry(entry_id.decode(), fields))
