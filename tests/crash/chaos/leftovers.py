"""What must not be left when every job has ended: in Redis, and on the disks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .patron import Patron
from .stage import Stage


def in_redis(stage: Stage, models: Iterable[str]) -> list[str]:
    """Keys and counts that say something of jobs that do not wait or run any more."""
    return [*_of_models(stage, models), *_of_jobs(stage), *_usage(stage)]


def of_deleted(stage: Stage, patrons: Iterable[Patron]) -> list[str]:
    """Keys of jobs that were deleted."""
    raw, keys = stage.raw, stage.keys
    return [
        f"{key} of a deleted job"
        for patron in patrons
        if patron.deleted and patron.job
        for key in (keys.job(patron.job.id), keys.stream(patron.job.id), keys.lease(patron.job.id))
        if raw.exists(key)
    ]


def on_disk(stage: Stage, patrons: Iterable[Patron]) -> list[str]:
    """Files of deleted jobs, and those of completed jobs other than how they ended.

    What was damaged may stay for as long as its job: it may not even say whose it is.
    """
    found: list[str] = []
    for patron in patrons:
        if patron.job is None or patron.poison:
            continue
        found += [
            str(path.relative_to(stage.root))
            for path in sorted(stage.root.glob(f"*/checkpoints/{patron.job.id}/*"))
            if patron.deleted or (path.suffix != ".end" and path.parent not in stage.damaged)
        ]
    return found


def _of_models(stage: Stage, models: Iterable[str]) -> Iterator[str]:
    raw, keys = stage.raw, stage.keys
    for model in models:
        for key in (keys.queue(model), keys.queued(model), keys.suspects(model)):
            if raw.exists(key):
                yield f"{key}: {raw.type(key)} is not empty"


def _of_jobs(stage: Stage) -> Iterator[str]:
    raw, keys = stage.raw, stage.keys
    for key in (keys.running(), keys.due()):
        if members := raw.zrange(key, 0, -1):
            yield f"{key}: {members}"
    for pattern in ("lease:*", "half:*", "queue:*:*", "preempt:*"):
        for key in raw.scan_iter(match=stage.namespace + pattern, count=1000):
            yield f"{key} is left"
    listed = set(raw.zrange(keys.jobs(), 0, -1))
    there = {key.rpartition(":")[2] for key in raw.scan_iter(match=keys.job("*"), count=1000)}
    if listed != there:
        yield f"jobs listed but not there, or the other way: {sorted(listed ^ there)}"
    streams = {key.rpartition(":")[2] for key in raw.scan_iter(match=keys.stream("*"), count=1000)}
    if streams != there:
        yield f"streams without job, or jobs without stream: {sorted(streams ^ there)}"


def _usage(stage: Stage) -> Iterator[str]:
    raw, keys = stage.raw, stage.keys
    ids = raw.zrange(keys.jobs(), 0, -1)
    held = sum(int(raw.hget(keys.job(each), "held") or 0) for each in ids)
    used = int(raw.hget(keys.usage(), "bytes") or 0)
    if used != held:
        yield f"usage is {used} bytes, and jobs hold {held}"
