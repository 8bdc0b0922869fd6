"""A process with many readers: each follows one running job after the other to its end.

    python load_readers.py URL NAMESPACE READERS OUT

It reads until stdin ends, then writes to OUT, as JSON: `tokens`, rows of job, index, when it
arrived and since when its reader was there (monotonic ns), and `errors`. Jobs are followed as any
service does it, by `Job.stream()`; a reader takes the running job that has the fewest here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redis.asyncio

from tenuto_client import Client, Keys, TenutoError

_LOOK_S = 0.05


class Readers:
    """The readers of this process.

    Attributes:
        tokens: what arrived, as it is written.
        errors: of streams that did not end as they should.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._client = Client(url, namespace=namespace)
        connect: Any = redis.asyncio.from_url  # untyped in redis-py
        self._redis: Any = connect(url)
        self._running_key = Keys(namespace).running()
        self._followed: Counter[str] = Counter()
        self._running: list[str] = []
        self.tokens: list[tuple[str, int, int, int]] = []
        self.errors: list[str] = []

    async def run(self, count: int) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            for _ in range(count):
                group.create_task(self._follow())

    async def _look(self) -> None:
        while True:
            jobs = await self._redis.zrange(self._running_key, 0, -1)
            self._running = [job.decode() for job in jobs]
            await asyncio.sleep(_LOOK_S)

    async def _follow(self) -> None:
        done: set[str] = set()
        while True:
            open_jobs = [job for job in self._running if job not in done]
            if not open_jobs:
                await asyncio.sleep(_LOOK_S)
                continue
            job = min(open_jobs, key=lambda each: self._followed[each])
            self._followed[job] += 1
            try:
                await self._read(job)
            except TenutoError as error:
                self.errors.append(repr(error))
            self._followed[job] -= 1
            done.add(job)

    async def _read(self, job: str) -> None:
        since = time.monotonic_ns()
        expected = 0
        async for token in self._client.job(job).stream():
            self.tokens.append((job, token.index, time.monotonic_ns(), since))
            expected += 1
            if token.index != expected:
                self.errors.append(f"job {job}: token {token.index} in the place of {expected}")


async def _main(url: str, namespace: str, count: int, out: Path) -> None:
    readers = Readers(url, namespace)
    work = asyncio.create_task(readers.run(count))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    report = json.dumps({"tokens": readers.tokens, "errors": readers.errors})
    await asyncio.to_thread(out.write_text, report)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
