"""`Gauges`: what stands at some value when Prometheus asks, and what the decode thread counted."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ._answers import Depth
from ._health import Health, Stage
from ._hosted import ModelState
from ._redis import Outage
from ._run import Phase, Run
from ._settings import VERSION, WorkerSettings
from ._tallies import Distribution, Tally

if TYPE_CHECKING:
    from tenuto_engine import MemoryUse, PrefixCache

    from ._rooms import Rooms


class Gauges(Collector):
    """Reads the rooms of a worker without stopping any of them.

    Attributes:
        rooms: None until they are built.
    """

    def __init__(self, settings: WorkerSettings, health: Health, outage: Outage) -> None:
        self._models = tuple(settings.models)
        self._slots = settings.slots
        self._health = health
        self._outage = outage
        self.rooms: Rooms | None = None

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        if self.rooms is not None:
            yield from self._jobs(self.rooms)
            yield from self._tokens(self.rooms.decoder.tallies)
            yield from self._checkpoints(self.rooms)
            yield _models(self.rooms.pool.states())
            if self.rooms.pool.prefixes is not None:
                yield from _prefixes(self.rooms.pool.prefixes)
            yield from _queue(self.rooms.depths.latest())
            # Before, MLX is not there yet, and the decode thread has to be the first to import it.
            if self._health.stage in (Stage.SERVING, Stage.DRAINING):
                yield from _memory(self.rooms.memory_use())

    def _service(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("tenuto_build_info", "Always 1", labels=["version"])
        info.add_metric([VERSION], 1)
        yield info
        yield _gauge("tenuto_ready", "1 while jobs are taken", not self._health.unready())
        yield _gauge("tenuto_healthy", "1 while nothing is stuck", not self._health.unwell())
        yield _gauge("tenuto_redis_up", "1 while Redis answers", not self._outage.is_on)
        yield _count("tenuto_redis_outages", "Times that Redis went away", self._outage.count)
        yield _count(
            "tenuto_redis_outage_seconds",
            "How long Redis was away in all, with the outage that lasts",
            self._outage.seconds(),
        )

    def _jobs(self, rooms: Rooms) -> Iterator[Metric]:
        runs = rooms.runs.all()
        slots = GaugeMetricFamily("tenuto_slots", "Most jobs at once", labels=["model"])
        for model in self._models:
            slots.add_metric([model], self._slots)
        yield slots
        running = GaugeMetricFamily(
            "tenuto_running_jobs", "Attempts here, by phase", labels=["model", "phase"]
        )
        phases = Counter((run.model, run.phase) for run in runs)
        for model in self._models:
            for phase in Phase:
                running.add_metric([model, phase.value], phases[model, phase])
        yield running
        yield self._of_runs("tenuto_unsent_tokens", "Decoded, not yet in Redis", runs, _unsent)
        yield self._of_runs(
            "tenuto_tokens_at_risk",
            "Published, and to be computed again if this machine is lost",
            runs,
            lambda run: run.at_risk,
        )
        yield _gauge(
            "tenuto_decoding_paused",
            "1 while decoding waits because Redis lacks too many tokens",
            rooms.decoder.paused and bool(runs),
        )

    def _of_runs(
        self, name: str, words: str, runs: list[Run], value: Callable[[Run], int]
    ) -> Metric:
        family = GaugeMetricFamily(name, words, labels=["model"])
        for model in self._models:
            family.add_metric([model], sum(value(run) for run in runs if run.model == model))
        return family

    def _tokens(self, tallies: dict[str, Tally]) -> Iterator[Metric]:
        for name, words, value in _TALLIED:
            family = CounterMetricFamily(name, words, labels=["model"])
            for model, tally in tallies.items():
                family.add_metric([model], value(tally))
            yield family
        for name, words, times in _TIMED:
            histogram = HistogramMetricFamily(name, words, labels=["model"])
            for model, tally in tallies.items():
                buckets, total = times(tally).read()
                histogram.add_metric([model], buckets, total)
            yield histogram

    def _checkpoints(self, rooms: Rooms) -> Iterator[Metric]:
        writer, budget = rooms.writer, rooms.collector.budget
        seconds = SummaryMetricFamily(
            "tenuto_checkpoint_seconds", "Writing what checkpoints add, disk included"
        )
        seconds.add_metric([], writer.written, writer.written_seconds)
        yield seconds
        yield _count("tenuto_checkpoint_bytes", "Bytes that they added", writer.written_bytes)
        yield _gauge(
            "tenuto_checkpoint_pending_bytes", "Memory that waits for disk", writer.pending_bytes
        )
        yield _gauge(
            "tenuto_checkpoint_lag_seconds",
            "Longest time since the last durable checkpoint of a job that has newer tokens",
            max([0.0, *map(_lag, rooms.runs.all())]),
        )
        yield _gauge("tenuto_checkpoint_disk_bytes", "What checkpoints take on disk", budget.used())
        limit = budget.limit
        yield _gauge(
            "tenuto_checkpoint_disk_budget_bytes",
            "What they may take; +Inf is no limit",
            math.inf if limit is None else limit,
        )


_TALLIED: tuple[tuple[str, str, Callable[[Tally], int]], ...] = (
    ("tenuto_tokens", "New tokens decoded", lambda tally: tally.tokens),
    ("tenuto_prefill_tokens", "Prompt tokens read", lambda tally: tally.prefilled),
    (
        "tenuto_catch_up_tokens",
        "Published tokens fed again after a recovery",
        lambda tally: tally.caught_up,
    ),
    (
        "tenuto_divergences",
        "Published tokens that came out differently when they were fed again",
        lambda tally: tally.diverged,
    ),
)
_TIMED: tuple[tuple[str, str, Callable[[Tally], Distribution]], ...] = (
    (
        "tenuto_time_to_first_token_seconds",
        "From submit to the first token of a job, the queue included",
        lambda tally: tally.first_token,
    ),
    (
        "tenuto_inter_token_seconds",
        "Between two tokens of a job",
        lambda tally: tally.inter_token,
    ),
)


def _models(states: Mapping[str, ModelState]) -> Metric:
    family = GaugeMetricFamily(
        "tenuto_model_state", "1 for the state that a model is in", labels=["model", "state"]
    )
    for model, state in states.items():
        for each in ModelState:
            family.add_metric([model, each.value], each is state)
    return family


def _queue(depths: dict[str, Depth]) -> Iterator[Metric]:
    """Nothing where nothing is known: a gap says more than a number of minutes ago."""
    queued = GaugeMetricFamily("tenuto_queued_jobs", "Jobs that wait", labels=["model"])
    oldest = GaugeMetricFamily(
        "tenuto_queue_oldest_seconds", "How long the first of them has waited", labels=["model"]
    )
    for model, depth in depths.items():
        queued.add_metric([model], depth.jobs)
        oldest.add_metric([model], depth.oldest_seconds)
    yield queued
    yield oldest


def _prefixes(cache: PrefixCache) -> Iterator[Metric]:
    stats = cache.stats
    yield _count("tenuto_prefix_hits", "Prompts of which the beginning was known", stats.hits)
    yield _count("tenuto_prefix_misses", "Prompts of which it was not", stats.misses)
    yield _count("tenuto_prefix_tokens", "Prompt tokens that were not read again", stats.tokens)
    yield _gauge("tenuto_prefix_memory_bytes", "Memory of what is known", cache.nbytes)


def _memory(use: MemoryUse) -> Iterator[Metric]:
    yield _gauge("tenuto_memory_active_bytes", "Device memory in arrays", use.active)
    yield _gauge("tenuto_memory_cache_bytes", "Device memory kept for reuse", use.cache)
    yield _gauge("tenuto_memory_peak_bytes", "Most that arrays ever took", use.peak)
    yield _gauge("tenuto_memory_budget_bytes", "What may be used; +Inf is no limit", use.budget)


def _unsent(run: Run) -> int:
    return max(0, run.unsent)


def _lag(run: Run) -> float:
    return time.monotonic() - run.durable_at if len(run.tokens) > run.durable else 0.0


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=float(value))


def _count(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=float(value))
