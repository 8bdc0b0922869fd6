"""What a run of `load.py` gives: latencies from the stamps, turns of tenants, and memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

TokenKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many values: how many, their median, 99th percentile, and the largest."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """All 0 where there are no values."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0)
        last = len(ordered) - 1
        return cls(len(ordered), ordered[last // 2], ordered[last * 99 // 100], ordered[last])


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from the moment at which the decode thread has a token.

    Attributes:
        sent: until Redis has confirmed it.
        carried: from then until a reader has it, once for every reader of the token.
        read: both together.
        last: until the last of its readers has it.
        errors: what readers got that they should not have.
    """

    sent: Spread
    carried: Spread
    read: Spread
    last: Spread
    errors: tuple[str, ...]


def latency(stamps: Path, outs: Sequence[Path], since_ns: int, until_ns: int) -> Latency:
    """Of the tokens made between two times.

    A reader that came to its job after a token was made does not count for it.
    """
    made, sent = _stamps(stamps)
    window = {key for key, at in made.items() if since_ns <= at < until_ns}
    carried: list[float] = []
    read: list[float] = []
    last: dict[TokenKey, float] = defaultdict(float)
    errors: list[str] = []
    for out in outs:
        report = json.loads(out.read_text())
        errors += report["errors"]
        for job, index, at, since in report["tokens"]:
            key = (job, index)
            if key in window and made[key] >= since:
                read.append((at - made[key]) / 1e6)
                # A reader may have it before the worker has read the answer.
                carried.append(max(0.0, (at - sent.get(key, at)) / 1e6))
                last[key] = max(last[key], read[-1])
    confirmed = ((sent[key] - made[key]) / 1e6 for key in window if key in sent)
    return Latency(
        Spread.of(confirmed),
        Spread.of(carried),
        Spread.of(read),
        Spread.of(last.values()),
        tuple(errors),
    )


def _stamps(path: Path) -> tuple[dict[TokenKey, int], dict[TokenKey, int]]:
    found: dict[str, dict[TokenKey, int]] = {"made": {}, "sent": {}}
    for line in path.read_text().splitlines():
        what, job, index, at = line.split()
        found[what].setdefault((job, int(index)), int(at))
    return found["made"], found["sent"]


@dataclass(frozen=True, slots=True)
class Turns:
    """How the jobs of one tenant fared; seconds.

    Attributes:
        started: how many of its jobs began in the time that was measured.
        longest_wait: from submit to start, or to the end of the time, of those that were submitted
            in that time.
        longest_gap: without a start of one of its jobs, where some waited at the end.
    """

    tenant: str
    queued: int
    started: int
    longest_wait: float
    longest_gap: float


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """When a job was submitted and when it began (infinite: not yet), by Redis's clock."""

    tenant: str
    created_at: float
    started_at: float


def turns(
    jobs: Sequence[SubmittedJob], queued: Mapping[str, int], since: float, until: float
) -> list[Turns]:
    """How each tenant fared between two times, by Redis's clock; `queued` is at the end."""
    by_tenant: dict[str, list[SubmittedJob]] = defaultdict(list)
    for job in jobs:
        by_tenant[job.tenant].append(job)
    found = []
    for tenant in sorted(by_tenant):
        mine = by_tenant[tenant]
        started = sorted(job.started_at for job in mine if since <= job.started_at < until)
        new = [job for job in mine if job.created_at >= since]
        has_backlog = queued.get(tenant, 0) > 0
        marks = [since, *started, until] if has_backlog else []
        found.append(
            Turns(
                tenant,
                queued.get(tenant, 0),
                len(started),
                max((min(job.started_at, until) - job.created_at for job in new), default=0.0),
                max((after - before for before, after in pairwise(marks)), default=0.0),
            )
        )
    return found


@dataclass(slots=True)
class Memory:
    """Bytes that something takes, looked at once in a while."""

    what: str
    samples: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Bytes between the means of the third and of the last quarter of the time."""
        quarter = max(1, len(self.samples) // 4)
        third, last = self.samples[-2 * quarter : -quarter], self.samples[-quarter:]
        return sum(last) / len(last) - sum(third) / max(1, len(third)) if third else 0.0
