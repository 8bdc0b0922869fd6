"""Tickets: arq reads the queue of each model and wakes the claimer.

A ticket has no content. The handler claims through the claimer whatever is best, and returns at
once, so arq's own retry, timeout and in-progress keys never matter for a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import msgpack
import redis
from arq.connections import ArqRedis
from arq.worker import Worker, func
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from tenuto_client import Keys
from tenuto_client._endpoint import Endpoint, close_client

from ._logging import get_log
from ._redis import Backoff, is_outage

TICKET_FUNCTION: Final = "run_ticket"
_POLL_S = 0.5
# A ticket takes no time; arq hides it for this long (and 10 s) when its reader died over it.
_TICKET_TIMEOUT_S = 60
_LONGEST_PAUSE_S = 10.0
_CLOSE_S = 2.0


class TicketReader(Worker):
    """arq's worker for one model. It leaves tickets to others while no slot is free here."""

    def __init__(self, pool: ArqRedis, queue: str, handler: Any, has_slot: Callable[[], bool]):
        self._has_slot = has_slot
        super().__init__(
            functions=[func(handler, name=TICKET_FUNCTION)],
            queue_name=queue,
            redis_pool=pool,
            handle_signals=False,
            job_timeout=_TICKET_TIMEOUT_S,
            keep_result=0,
            max_tries=10**6,
            poll_delay=_POLL_S,
            job_serializer=_pack,
            job_deserializer=_unpack,
        )

    async def heart_beat(self) -> None:
        """arq calls it with each poll."""
        self.allow_pick_jobs = self._has_slot()
        await super().heart_beat()


class Tickets:
    """Reads the tickets of all models.

    Args:
        url: of Redis, as `Endpoint` knows it.
        poke: wakes the claimer.
        has_slot: whether a job of a model could be taken now.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        models: Iterable[str],
        *,
        poke: Callable[[], object],
        has_slot: Callable[[str], bool],
    ) -> None:
        self._endpoint = Endpoint.parse(url)
        self._keys = keys
        self._models = tuple(models)
        self._poke = poke
        self._has_slot = has_slot
        self._log = get_log()

    async def serve(self) -> None:
        """Read until cancelled. A reader that dies is replaced."""
        async with asyncio.TaskGroup() as group:
            for model in self._models:
                group.create_task(self._serve(model), name=f"tickets-{model}")

    async def _serve(self, model: str) -> None:
        backoff = Backoff(longest=_LONGEST_PAUSE_S)
        while True:
            reader = self._reader(model)
            try:
                await reader.async_run()
            except Exception as error:  # noqa: BLE001 - the queue must be read, whatever broke
                # Redis being away is told by those who miss it; a lost wake-up costs a second.
                if not is_outage(error):
                    self._log.warning("ticket reader died", model=model, error=repr(error))
            finally:
                await _close(reader)
            await asyncio.sleep(backoff.pause())

    def _reader(self, model: str) -> TicketReader:
        client = self._endpoint.asynchronous(
            socket_connect_timeout=5,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )

        async def run_ticket(_context: dict[Any, Any]) -> None:
            self._poke()

        return TicketReader(
            ArqRedis(client.connection_pool, job_serializer=_pack, job_deserializer=_unpack),
            self._keys.tickets(model),
            run_ticket,
            lambda: self._has_slot(model),
        )


async def _close(reader: TicketReader) -> None:
    pool = reader.pool
    # It raises what its tasks do, and whatever Redis says.
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await asyncio.wait_for(reader.close(), _CLOSE_S)
    with contextlib.suppress(Exception):
        await close_client(pool)


def _pack(value: dict[str, Any]) -> bytes:
    # arq packs what a ticket ended with, and that may be an exception.
    return msgpack.packb(value, default=repr)


def _unpack(payload: bytes) -> dict[str, Any]:
    return cast(dict[str, Any], msgpack.unpackb(payload))
