"""What a worker tells Prometheus and probes, read as they read it."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from workers import WorkerProcess


@dataclass(frozen=True)
class Reply:
    """Answer to a GET."""

    status: int
    kind: str
    text: str


def get(port: int, path: str, accept: str = "text/plain") -> Reply:
    """What this machine's server on `port` answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return Reply(answer.status, answer.headers["Content-Type"], answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.headers["Content-Type"], error.read().decode())


class Scrape:
    """The samples of one exposition."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families, f"{family.name} is there twice"
            self.families[family.name] = family
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, sample: str, **labels: str) -> float:
        """Of the sample with exactly these labels; a KeyError if it is not there."""
        return self._values[sample, frozenset(labels.items())]

    def total(self, sample: str, **labels: str) -> float:
        """Of all samples that have at least these labels; 0 if there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (name, have), value in self._values.items()
            if name == sample and wanted <= have
        )

    def has(self, sample: str) -> bool:
        return any(name == sample for name, _ in self._values)


def scrape_collector(*collectors: Collector) -> Scrape:
    """What collectors of this process say."""
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return Scrape(generate_latest(registry).decode())


def port_of(worker: WorkerProcess, *, count: int = 1) -> int:
    """Of the n-th child that was started with `--metrics-port 0`."""
    return int(worker.wait_for("metrics served", count=count)["port"])


def scrape(port: int) -> Scrape:
    """What a worker says now."""
    reply = get(port, "/metrics")
    assert reply.status == 200, reply
    return Scrape(reply.text)


def differences(before: Scrape, after: Scrape) -> Mapping[str, float]:
    """Counters by name that rose between two scrapes, and by how much; all labels together."""
    names = {
        sample.name
        for family in after.families.values()
        if family.type == "counter"
        for sample in family.samples
    }
    rises = {name: after.total(name) - before.total(name) for name in names}
    return {name: rise for name, rise in rises.items() if rise}
