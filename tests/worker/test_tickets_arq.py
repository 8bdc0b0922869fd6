"""What the client writes is what arq reads."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgpack
from arq import Worker
from arq.connections import RedisSettings, create_pool
from arq.typing import WorkerCoroutine
from arq.worker import func

from raw_worker import poll
from servers import RealServer
from tenuto_client import Client, Keys, ModelInfo, pack_announcement


async def test_arq_picks_a_submitted_ticket_up_and_calls_run_ticket_without_arguments(
    shared_server: RealServer, namespace: str
) -> None:
    keys = Keys(namespace)
    called: asyncio.Queue[Any] = asyncio.Queue()

    async def run_ticket(context: dict[Any, Any], *args: Any, **kwargs: Any) -> None:
        await called.put((context["job_id"], args, kwargs))

    settings = RedisSettings(unix_socket_path=str(shared_server.socket))
    pool = await create_pool(settings, default_queue_name=keys.tickets("m"))
    model = pack_announcement(ModelInfo("m", None, None, "f", 0.0))
    with shared_server.client() as raw:
        raw.hset(keys.models(), mapping={"m": model})
    # arq's type for a coroutine asks for more than arq does.
    function = func(cast(WorkerCoroutine, run_ticket), name="run_ticket", keep_result=0)
    worker = Worker(
        functions=[function],
        redis_pool=pool,
        queue_name=keys.tickets("m"),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        poll_delay=0.02,
        handle_signals=False,
    )
    working = asyncio.create_task(worker.async_run())
    try:
        async with Client(shared_server.url, namespace=namespace) as client:
            job = await client.submit("m", "hi")
            assert await asyncio.wait_for(called.get(), 10) == (f"{job.id}:1", (), {})
            await job.cancel()
            await job.resume()
            assert await asyncio.wait_for(called.get(), 10) == (f"{job.id}:2", (), {})
            with shared_server.client() as raw:
                done = Keys.ticket_payload(f"{job.id}:2")
                # arq removes the ticket's content as the last thing it does for it.
                await asyncio.to_thread(poll, lambda: not raw.exists(done))
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(*worker.tasks.values())
        # Not worker.close(), which calls what redis-py has deprecated.
        await pool.aclose(close_connection_pool=True)
    assert worker.jobs_failed == 0
