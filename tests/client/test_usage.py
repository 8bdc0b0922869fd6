"""What is accounted for jobs is more than what the server takes for them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raw_worker import RawWorker
from servers import RealServer
from tenuto_client import (
    Client,
    Keys,
    LimitExceeded,
    Token,
    pack_tokens,
    script_source,
    ticket_payload,
)

JOBS = 40
TEXTS = (" the", " generation", "é", "", ".\n\n", "    ", " Zürich", " of", " a", "日本")


def _tokens(count: int, top: int) -> list[Token]:
    draw = random.Random(count + top)

    def one() -> tuple[int, float]:
        return draw.randrange(1 << 18), -draw.random() * 20

    return [
        Token(
            draw.randrange(1 << 18), n, draw.choice(TEXTS), -1.5, tuple(one() for _ in range(top))
        )
        for n in range(1, count + 1)
    ]


def _taken(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


@pytest.mark.parametrize(("top", "pack"), [(0, 1), (0, 16), (5, 1), (20, 16)])
async def test_real_use_stays_below_what_is_accounted_before_and_after_the_end(
    top: int, pack: int
) -> None:
    with RealServer(appendfsync="no", appendonly="no") as server, server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        keys = Keys()
        tokens = _tokens(320, top)

        async def submit(client: Client, jobs: int) -> None:
            for _ in range(jobs):
                await client.submit("m", "hi " * 50, max_tokens=len(tokens), logprobs=top)

        def accounted() -> int:
            return int(raw.hget(keys.usage(), "bytes"))

        async with Client(server.url) as client:
            # The scripts and the connections take something, too, but once.
            await submit(client, 1)
            _run_all(worker, tokens, pack)
            before = _taken(raw) - accounted()
            await submit(client, JOBS)
            assert _taken(raw) - before < accounted()
            reserved = accounted()
            _run_all(worker, tokens, pack)
            taken = _taken(raw) - before
            assert taken < accounted() < 2 * taken
            assert accounted() < reserved


def _run_all(worker: RawWorker, tokens: list[Token], pack: int) -> None:
    while (attempt := worker.try_claim()) is not None:
        for at in range(0, len(tokens), pack):
            part = tokens[at : at + pack]
            attempt.call("publish", 0, part[0].index, part[-1].index, pack_tokens(part))
        attempt.finish()


async def test_what_cancels_and_resumes_leave_in_a_stream_is_accounted() -> None:
    with RealServer(appendfsync="no", appendonly="no") as server, server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        keys = Keys()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi", max_tokens=5)

            def cycle(script: str) -> None:
                source = script_source("tenuto_client", script)
                raw.execute_command("EVAL", source, 0, keys.namespace, ticket_payload(0), job.id)

            for _ in range(300):
                cycle("cancel")
                cycle("resume")
            asked: Any = raw
            accounted = int(asked.hget(keys.usage(), "bytes"))
            assert accounted > asked.memory_usage(keys.stream(job.id))
            assert accounted == int(asked.hget(keys.job(job.id), "held"))
            await client.set_limits({"max_stream_memory": accounted})
            with pytest.raises(LimitExceeded, match="max_stream_memory"):
                await client.submit("m", "hi", max_tokens=5)
