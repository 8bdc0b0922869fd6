"""A full queue, many readers: 5,000 queued jobs, 200 readers, 8 slots, on one machine.

    python tests/bench/load.py [--queued 5000] [--readers 200] [--slots 8] [--seconds 60]

A real server (`appendfsync always`), a real `tenuto worker` with a tiny model, and processes full
of readers, which use the client as any service does. A step of the engine takes `--step-ms` at
least, without using the processor, as on a GPU. As jobs end, others are submitted, so that the
queue stays full; all readers follow running jobs, so each token goes to many of them.

*beyond the decode*: from the moment at which the decode thread has a token. *queue*: what a call
costs by how many jobs are queued, on a server of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench import load_report  # noqa: E402
from bench.load_figures import Memory, SubmittedJob, Turns, latency, turns  # noqa: E402
from bench.load_queue import measure_queue  # noqa: E402
from bench.load_report import LoadRun  # noqa: E402
from servers import RealServer  # noqa: E402
from tenuto_client import Client, Keys  # noqa: E402
from tiny_models import build_tiny_model  # noqa: E402
from workers import WorkerProcess, with_site  # noqa: E402

MODEL = "bench"
NAMESPACE = "tenuto:"
# Four fifths of the queue are of one tenant; the others must not notice.
GREEDY = "greedy"
MODEST = tuple(f"modest-{number}" for number in range(9))
URGENT = "urgent"
_SUBMITTERS = 16


class ReaderProcess:
    """Many readers in a process of their own."""

    def __init__(self, url: str, readers: int, out: Path) -> None:
        self.out = out
        self._process = subprocess.Popen(
            [sys.executable, HERE / "load_readers.py", url, NAMESPACE, str(readers), out],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def finish(self) -> None:
        """Have it write down what it read."""
        self._process.communicate(timeout=120)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self._process.kill()
        self._process.communicate()


class Load:
    """Server, worker and readers while they run.

    Attributes:
        submitted: tenant of every job, by id.
        memory: of each process, once a second.
    """

    def __init__(self, args: argparse.Namespace, server: RealServer, folder: Path) -> None:
        self._args = args
        self._server = server
        self._folder = folder
        self._keys = Keys(NAMESPACE)
        self._redis = server.client()
        self._draw = random.Random(1)
        self._stamps = folder / "stamps"
        self.submitted: dict[str, str] = {}

    def run(self) -> LoadRun:
        """Fill the queue, read for the given time, and say what came of it."""
        args = self._args
        with ExitStack() as stack:
            worker = stack.enter_context(self._worker())
            worker.wait_ready(timeout=300)
            asyncio.run(self._fill())
            readers = self._start_readers(stack)
            memory = self._memory(worker, readers)
            time.sleep(args.warm_up)
            pids = [worker.child_pid, self._server.pid, *(each.pid for each in readers)]
            since_ns, since, before = time.monotonic_ns(), self._now(), _cpu_seconds(pids)
            asyncio.run(self._keep_full(memory))
            until_ns, until, after = time.monotonic_ns(), self._now(), _cpu_seconds(pids)
            fair = self._turns(since, until)
            for each in readers:
                each.finish()
            worker.term()
        found = latency(self._stamps, [each.out for each in readers], since_ns, until_ns)
        cores = [(b - a) / (until - since) for a, b in zip(before, after, strict=True)]
        busy = {"worker": cores[0], "Redis": cores[1], "readers": sum(cores[2:])}
        return LoadRun(found, fair, memory, busy)

    # -- what runs ---------------------------------------------------------------------

    def _worker(self) -> WorkerProcess:
        environ = {
            **with_site(HERE / "load_site"),
            "LOAD_STAMPS": str(self._stamps),
            "LOAD_STEP_MS": str(self._args.step_ms),
            "LOAD_WORK_FIRST": "1" if self._args.work_first else "",
        }
        model = build_tiny_model(self._folder / "model")
        return WorkerProcess(
            model, self._server.url, self._folder / "data", name=MODEL, lease=10,
            flags=("--slots", str(self._args.slots)), environ=environ,
        )  # fmt: skip

    def _start_readers(self, stack: ExitStack) -> list[ReaderProcess]:
        count, processes = self._args.readers, self._args.processes
        found = []
        for number in range(processes):
            share = count // processes + (number < count % processes)
            each = ReaderProcess(self._server.url, share, self._folder / f"read-{number}")
            stack.callback(each.close)
            found.append(each)
        return found

    # -- the queue ---------------------------------------------------------------------

    async def _fill(self) -> None:
        """All jobs at once, before anybody reads."""
        tenants = [GREEDY] * (self._args.queued * 4 // 5)
        tenants += [MODEST[n % len(MODEST)] for n in range(self._args.queued - len(tenants))]
        self._draw.shuffle(tenants)
        async with Client(self._server.url, namespace=NAMESPACE) as client:
            for first in range(0, len(tenants), _SUBMITTERS):
                few = tenants[first : first + _SUBMITTERS]
                await asyncio.gather(*(self._submit(client, tenant) for tenant in few))

    async def _keep_full(self, memory: Sequence[Memory]) -> None:
        """Once a second put in as many as were taken out, and look at the memory."""
        end = time.monotonic() + self._args.seconds
        second = 0
        async with Client(self._server.url, namespace=NAMESPACE) as client:
            while time.monotonic() < end:
                second += 1
                missing = self._args.queued - sum(self._queued().values())
                for _ in range(missing):
                    greedy = self._draw.random() < 0.8
                    await self._submit(client, GREEDY if greedy else self._draw.choice(MODEST))
                if second % 5 == 0:
                    await self._submit(client, URGENT, priority=10)
                    await self._submit(client, f"new-{second}")
                self._look_at(memory)
                await asyncio.sleep(1)

    async def _submit(self, client: Client, tenant: str, priority: int = 0) -> None:
        prompt = [self._draw.randrange(10, 200) for _ in range(16)]
        # Of different lengths, so that slots do not become free all at once.
        tokens = self._draw.randint(self._args.tokens // 2, self._args.tokens * 3 // 2)
        job = await client.submit(
            MODEL, prompt, tenant=tenant, priority=priority, max_tokens=tokens,
            ignore_eos=True, retention=3600,
        )  # fmt: skip
        self.submitted[job.id] = tenant

    def _queued(self) -> Counter[str]:
        """How many jobs of each tenant wait."""
        found: Counter[str] = Counter()
        lanes: Any = self._redis.zrange(self._keys.queue(MODEL), 0, -1)
        for lane in lanes:
            tenant = lane.decode().partition(":")[2]
            found[tenant] += int(self._redis.zcard(self._keys.lane(MODEL, lane.decode())))  # type: ignore[arg-type]
        return found

    def _turns(self, since: float, until: float) -> list[Turns]:
        pipe: Any = self._redis.pipeline(transaction=False)
        for job in self.submitted:
            pipe.hmget(self._keys.job(job), "created_at", "started_at")
        jobs = [
            SubmittedJob(tenant, float(created), math.inf if started is None else float(started))
            for tenant, (created, started) in zip(
                self.submitted.values(), pipe.execute(), strict=True
            )
        ]
        return turns(jobs, self._queued(), since, until)

    def _now(self) -> float:
        seconds, micros = self._redis.time()  # type: ignore[misc]
        return float(seconds) + float(micros) / 1e6

    # -- memory ------------------------------------------------------------------------

    def _memory(self, worker: WorkerProcess, readers: list[ReaderProcess]) -> list[Memory]:
        self._pids = {"worker": worker.child_pid, "Redis": self._server.pid}
        self._pids["a reader process"] = readers[0].pid
        return [Memory(what) for what in (*self._pids, "Redis's data")]

    def _look_at(self, memory: Sequence[Memory]) -> None:
        facts: Any = self._redis.info("memory")
        for each in memory:
            pid = self._pids.get(each.what)
            each.samples.append(int(facts["used_memory"]) if pid is None else _resident(pid))


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; as it must be asked for, Linux only."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_seconds(pids: Sequence[int]) -> list[float]:
    found = []
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    args = parse(sys.argv[1:])
    costs = measure_queue(args.depths)
    with RealServer() as server, tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
        run = Load(args, server, Path(folder)).run()
    if args.json:
        print(
            json.dumps({"type": "load", "queue": [asdict(each) for each in costs], **asdict(run)})
        )
    else:
        print(load_report.describe(args, run, costs))
    if args.write:
        load_report.write(args, run, costs)
    return 1 if run.latency.errors else 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def whole(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} ({default})"
        )

    whole("--queued", 5000, "jobs that wait, all the time")
    whole("--readers", 200, "readers in all")
    whole("--processes", 2, "processes that they are in")
    whole("--slots", 8, "jobs that run at once")
    whole("--tokens", 100, "of a job; half as many to half as many again")
    whole("--seconds", 60, "to measure")
    whole("--warm-up", 5, "seconds before")
    whole("--step-ms", 50, "milliseconds of a decode step, at least")
    parser.add_argument(
        "--work-first", action="store_true",
        help="compute at the begin of a step, beside the carrying of the tokens before it",
    )  # fmt: skip
    parser.add_argument(
        "--depths", type=lambda text: [int(each) for each in text.split(",")],
        default=[100, 1000, 5000, 20000], metavar="N,N", help="of the queue, for its cost",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--write", action="store_true", help="put the figures into BENCHMARKS.md")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
