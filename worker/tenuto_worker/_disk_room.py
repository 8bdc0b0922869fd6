"""What `tenuto doctor` says of the disk budget: what the workers of the data dir announced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tenuto_client import Finding, Level, Settings, SyncClient, TenutoError, WorkerInfo
from tenuto_client._findings import count, size

from ._identity import living_workers


def check_budget(settings: Settings, url: str | None) -> Iterator[Finding]:
    """A line for each live worker of the data dir; without one, what would hold by default.

    Args:
        url: of the Redis, if it answers.
    """
    workers = [] if url is None else announced(settings, url)
    for worker in workers:
        yield Finding(Level.OK, "disk budget", f"{worker.name}: {_usage(worker)}")
    living = len(living_workers(settings.data_dir))
    if not workers and living:
        why = "Redis, where it says what it keeps to, does not answer"
        if url is not None:
            why = "it has not told this Redis of itself: it starts, or serves another"
        says = f"{count(living, 'worker')} of this data dir {'runs' if living == 1 else 'run'}"
        yield Finding(Level.OK, "disk budget", f"{says}; {why}")
    elif not workers and (settings.data_dir / "checkpoints").is_dir():
        try:
            says = _by_default(settings.data_dir / "checkpoints")
        except ValueError as error:
            yield Finding(Level.PROBLEM, "disk budget", f"{error}", note="mend TENUTO_DISK_BUDGET")
            return
        yield Finding(Level.OK, "disk budget", f"no worker runs; {says}")


def announced(settings: Settings, url: str) -> list[WorkerInfo]:
    """The live workers of the data dir; none where Redis does not answer."""
    try:
        own = (settings.data_dir / "id").read_text("ascii").strip()
        with SyncClient(url, namespace=settings.namespace) as client:
            return [worker for worker in client.workers() if worker.data_dir == own]
    except (TenutoError, OSError):
        # That the server fails is a finding of its own.
        return []


def _usage(worker: WorkerInfo) -> str:
    if worker.checkpoint_bytes is None:
        return "it does not tell"
    if worker.checkpoint_budget is None:
        return f"{size(worker.checkpoint_bytes)} taken, no limit (--disk-budget none)"
    return f"{size(worker.checkpoint_bytes)} of {size(worker.checkpoint_budget)} taken"


def _by_default(root: Path) -> str:
    """What a worker would take its budget to be. Raises ValueError."""
    from tenuto_engine import DiskBudget

    from ._collector import limit_of
    from ._settings import disk_budget

    given = os.environ.get("TENUTO_DISK_BUDGET")
    used = DiskBudget(root).used()
    limit = limit_of(disk_budget(given) if given else None, root, used)
    why = "by TENUTO_DISK_BUDGET" if given else "by default"
    if limit is None:
        return f"{why} one would have no limit; {size(used)} taken"
    note = "" if given else " (four fifths of what is free)"
    return f"{why} one would have {size(limit)}{note}; {size(used)} taken"
