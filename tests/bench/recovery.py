"""How long a job stands still when its worker goes: from then to the next new token.

    python tests/bench/recovery.py [--rounds 5] [--lease 10] [--write]

Two real workers of a tiny model, both with the model loaded, a real server, one job, one reader.
*dead neighbour*: supervisor and child are killed, and the other worker shares host and data dir.
*lost machine*: both are stopped for good, which is all that others see of a machine without power;
the bound is the lease and 3 s. *drain*: SIGTERM; the bound is 1 s. *child*: the child alone is
killed, and its supervisor starts another one, which loads the model again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench import figures  # noqa: E402
from servers import RealServer  # noqa: E402
from tenuto_client import SyncClient, SyncJob  # noqa: E402
from tiny_models import build_tiny_model  # noqa: E402
from workers import WorkerProcess, poll_until  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
MARK = "<!-- recovery: rows are written by `make bench-recovery ARGS=--write` -->"


def kill(worker: WorkerProcess) -> None:
    """Supervisor and child, as by the kernel."""
    worker.kill()


def vanish(worker: WorkerProcess) -> None:
    """Supervisor and child do nothing any more, and end nothing."""
    for pid in (worker.pid, worker.child_pid):
        os.kill(pid, signal.SIGSTOP)


def drain(worker: WorkerProcess) -> None:
    """As a deploy does it."""
    os.kill(worker.pid, signal.SIGTERM)


def kill_child(worker: WorkerProcess) -> None:
    """As a native abort."""
    worker.kill_child()


CASES: dict[str, tuple[Callable[[WorkerProcess], None], int]] = {
    "dead neighbour": (kill, 2),
    "lost machine": (vanish, 2),
    "drain": (drain, 2),
    "child": (kill_child, 1),
}
"""What happens, and how many workers there are."""


def measure(
    model: Path, fault: Callable[[WorkerProcess], None], workers: int, lease: float
) -> float:
    """Seconds from the fault to the next new token."""
    with (
        RealServer() as server,
        tempfile.TemporaryDirectory() as data_dir,
        SyncClient(server.url) as client,
    ):
        started = [
            WorkerProcess(model, server.url, Path(data_dir), lease=lease) for _ in range(workers)
        ]
        try:
            for worker in started:
                worker.wait_ready()
            job = client.submit(
                "tiny", "Tell me.", max_tokens=100_000, seed=7, ignore_eos=True, temperature=1.0
            )
            poll_until(lambda: job.status().tokens > 100, "tokens")
            (owner,) = (each for each in started if each.lines("job claimed"))
            return _stand_still(job, owner, fault)
        finally:
            for worker in started:
                for pid in (worker.pid, worker.child_pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                worker.close()


def _stand_still(
    job: SyncJob, owner: WorkerProcess, fault: Callable[[WorkerProcess], None]
) -> float:
    began = time.monotonic()
    fault(owner)
    # What was on its way, and the words of a drain, are of the old attempt.
    had = poll_until(lambda: _running_since(job, 2), "another attempt", every=0.002)
    poll_until(lambda: job.status().tokens > had, "a new token", every=0.002)
    return time.monotonic() - began


def _running_since(job: SyncJob, epoch: int) -> int | None:
    record = job.status()
    return record.tokens if record.epoch >= epoch and record.state.value == "running" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each case (5)")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds (10)")
    parser.add_argument("--write", action="store_true", help="put the figures into BENCHMARKS.md")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model", "llama", context_length=131_072)
        for name, (fault, workers) in CASES.items():
            seconds = [measure(model, fault, workers, given.lease) for _ in range(given.rounds)]
            cells = [f"{each:.2f}" for each in (min(seconds), median(seconds), max(seconds))]
            rows.append([name, f"{given.lease:g}", str(given.rounds), *cells])
            print(f"{name}: {', '.join(cells)} s (least, median, longest)", flush=True)
    if given.write:
        where = figures.machine()
        machine = f"{where['device']}, {where['cores']} cores, {where['system']}"
        date = time.strftime("%Y-%m-%d")
        figures.write_rows(REPORT, MARK, [[machine, *row, date] for row in rows], 2)


if __name__ == "__main__":
    main()
