"""What a worker counts as it happens, for Prometheus.

These are events that come now and then; what comes with every token is a `Tally`, and what only
stands at some value is read when it is asked for (`Gauges`). All of it is of this process: a child
that is started again begins at 0, which Prometheus takes for the restart it is.

Labels are few and bounded: a model, a state, a reason. Never a job, a tenant or a text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

# A second series for each counter, which says only when this process began.
cast(Callable[[], None], disable_created_metrics)()

REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

RECOVERIES: Final = ("checkpoint", "older", "replay", "prefill")
"""How an attempt found back to where the job was: from its newest checkpoint, from an older one
because newer ones could not be used, from the prompt with every published token fed again, or
(`recovery: "fast"`) with the published tokens prefilled."""

ENDS: Final = ("completed", "failed", "cancelled")
RELEASES: Final = ("drain", "error", "preempt", "limits", "memory")

started = Gauge(
    "tenuto_start_time_seconds",
    "When this process began, in Unix seconds. A change is a restart",
    registry=REGISTRY,
)
started.set(time.time())

claimed = Counter("tenuto_jobs_claimed", "Attempts begun here", ["model"], registry=REGISTRY)
ended = Counter(
    "tenuto_jobs_ended", "Jobs that came to an end here", ["model", "state"], registry=REGISTRY
)
released = Counter(
    "tenuto_jobs_released",
    "Attempts that ended here with the job handed back to the queue",
    ["model", "reason"],
    registry=REGISTRY,
)
preempted = Counter(
    "tenuto_preemptions",
    "Attempts that made room for a job of higher priority",
    ["model"],
    registry=REGISTRY,
)
queue_wait = Histogram(
    "tenuto_queue_wait_seconds",
    "How long claimed jobs had been queued",
    ["model"],
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400),
    registry=REGISTRY,
)
recoveries = Counter(
    "tenuto_recoveries",
    "Attempts that took up where an earlier one of the job had stopped",
    ["model", "kind"],
    registry=REGISTRY,
)
recomputed = Counter(
    "tenuto_jobs_recomputed",
    "Attempts in which a job lost the label exact",
    ["model"],
    registry=REGISTRY,
)
fenced = Counter(
    "tenuto_fenced_writes",
    "Attempts here that were not the job's own any more, and whose writes were refused",
    ["model"],
    registry=REGISTRY,
)
taken_back = Counter(
    "tenuto_take_backs", "Jobs taken back from a dead process of this machine", registry=REGISTRY
)
reaped = Counter(
    "tenuto_reaped", "Jobs that this worker took from one whose lease ran out", registry=REGISTRY
)
stuck = Counter(
    "tenuto_stuck_attempts",
    "Attempts without progress for so long that their leases were let go",
    registry=REGISTRY,
)
checkpoint_errors = Counter(
    "tenuto_checkpoint_errors",
    "Checkpoints that could not be saved, once for each reason in a row",
    registry=REGISTRY,
)
lost_by_redis = Counter(
    "tenuto_redis_lost_tokens",
    "Published tokens that Redis had lost, and that were sent again",
    registry=REGISTRY,
)
publish_seconds = Histogram(
    "tenuto_publish_seconds",
    "Round trips in which tokens and ends were sent to Redis",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
    registry=REGISTRY,
)
model_loads = Counter(
    "tenuto_model_loads",
    "Models loaded, and models that could not be",
    ["model", "result"],
    registry=REGISTRY,
)


def begin_at_zero(models: Iterable[str]) -> None:
    """Have all series of these models there from the start, so that a first event is a rise."""
    for model in models:
        for metric in (claimed, preempted, queue_wait, recomputed, fenced):
            metric.labels(model)
        for metric, values in (
            (ended, ENDS),
            (released, RELEASES),
            (recoveries, RECOVERIES),
            (model_loads, ("loaded", "failed")),
        ):
            for value in values:
                metric.labels(model, value)
