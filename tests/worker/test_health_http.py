"""/metrics, /healthz and /readyz of real workers, from their first moment to their last."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics

from job_queue import JobQueue
from scrapes import Reply, Scrape, get, port_of, scrape
from servers import RealServer
from tenuto_worker import ConfigError
from tenuto_worker._health import Health, Stage
from tenuto_worker._health_http import HealthServer
from tenuto_worker._redis import Outage
from workers import WorkerProcess, poll_until

TINY = {"model": "tiny"}
LABELS = {"kind", "le", "model", "phase", "reason", "result", "state", "version"}
# Base units and counts, as Prometheus asks for them; what ends otherwise counts something.
OTHER_UNITS = re.compile(
    r"_(ms|us|ns|millis\w*|micros\w*|minutes|hours|kb|mb|gb|kib|mib|percent)\b"
)
PROMPT = "a canary sings in the prompt"
SECRET = "sesame-street"  # noqa: S105 - a canary


def probe(port: int, path: str) -> Reply | None:
    """The answer; None if nobody listens."""
    try:
        return get(port, path)
    except OSError:
        return None


def wait_value(port: int, goal: float, sample: str, **labels: str) -> Scrape:
    """The first scrape in which the sample is at least `goal`."""

    def look() -> Scrape | None:
        seen = scrape(port)
        return seen if seen.total(sample, **labels) >= goal else None

    return poll_until(look, f"{sample} {labels} to be {goal:g}")


# -- one worker, and what happens to it ------------------------------------------------


def test_a_worker_tells_probes_where_it_stands_and_prometheus_of_an_outage(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    queue = JobQueue(server.url, "tenuto:")
    server.pause()
    with WorkerProcess(tiny_model, server.url, tmp_path, flags=("--metrics-port", "0")) as worker:
        port = port_of(worker)
        assert probe(port, "/healthz") == Reply(200, "text/plain; charset=utf-8", "ok\n")
        assert probe(port, "/readyz") == Reply(503, "text/plain; charset=utf-8", "starting\n")
        assert scrape(port).value("tenuto_ready") == 0
        server.resume()
        seen: set[str] = set()
        while "ok\n" not in seen:
            if reply := probe(port, "/readyz"):
                seen.add(reply.text)
            assert get(port, "/healthz").status == 200
        assert seen <= {"starting\n", "loading\n", "ok\n"}
        assert "loading\n" in seen

        job = queue.submit(max_tokens=1000)
        wait_value(port, 20, "tenuto_tokens_total")
        server.kill()
        away = wait_value(port, 1, "tenuto_redis_outages_total")
        assert away.value("tenuto_redis_up") == 0
        assert get(port, "/readyz").text == "redis is away\n"
        assert get(port, "/healthz").status == 200
        wait_value(port, 1, "tenuto_unsent_tokens")
        server.start()
        poll_until(lambda: get(port, "/readyz").status == 200, "Redis to be back")
        back = wait_value(port, 0.001, "tenuto_redis_outage_seconds_total")
        assert back.value("tenuto_redis_up") == 1
        assert back.value("tenuto_redis_outages_total") == 1

        poll_until(lambda: queue.state(job) == "running", "the job to go on")
        server.pause()
        os.kill(worker.pid, signal.SIGTERM)
        poll_until(lambda: get(port, "/readyz").text == "draining\n", "the drain")
        server.resume()
        assert worker.wait() == 0
        assert probe(port, "/healthz") is None
    queue.close()


def test_crashes_and_take_overs_are_counted_where_they_are_noticed(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    def start() -> WorkerProcess:
        flags = ("--metrics-port", "0", "--checkpoint-every", "16", "--exact-wait", "0")
        namespace = jobs.keys.namespace
        return WorkerProcess(tiny_model, redis_url, tmp_path, namespace=namespace, flags=flags)

    job = jobs.submit(max_tokens=3000)
    with start() as first, start() as second:
        poll_until(lambda: int(jobs.job(job).get("tokens", "0")) > 40, "some tokens")
        owner, other = (first, second) if first.lines("job claimed") else (second, first)
        wait_value(port_of(owner), 1, "tenuto_running_jobs", **TINY, phase="decode")
        began = scrape(port_of(owner)).value("tenuto_start_time_seconds")
        owner.kill_child()
        port = port_of(owner, count=2)
        again = wait_value(port, 1, "tenuto_take_backs_total")
        assert again.value("tenuto_start_time_seconds") > began
        other_port = port_of(other)
        heir = poll_until(
            lambda: next((p for p in (port, other_port) if _recovered(p)), None), "the recovery"
        )
        zombie = owner if heir == port else other
        heir_port = other_port if heir == port else port
        zombie.stop()
        wait_value(heir_port, 1, "tenuto_reaped_total")
        wait_value(heir_port, 1, "tenuto_recoveries_total")
        zombie.cont()
        fenced = wait_value(heir, 1, "tenuto_fenced_writes_total", **TINY)
        assert fenced.value("tenuto_fenced_writes_total", **TINY) == 1


def _recovered(port: int) -> bool:
    reply = probe(port, "/metrics")
    return reply is not None and Scrape(reply.text).total("tenuto_recoveries_total") > 0


# -- what is told ----------------------------------------------------------------------


@pytest.fixture
def told(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """The port of a worker that has completed a job, and the job."""
    with RealServer() as server, server.client() as client:
        client.config_set("requirepass", SECRET)
        url = server.url.replace("unix://", f"unix://:{SECRET}@")
        with (
            closing(JobQueue(url, "tenuto:")) as queue,
            WorkerProcess(tiny_model, url, tmp_path, flags=("--metrics-port", "0")) as worker,
        ):
            job = queue.submit(prompt=PROMPT, tenant="canary-tenant", max_tokens=5)
            port = port_of(worker)
            wait_value(port, 1, "tenuto_jobs_ended_total", **TINY, state="completed")
            yield port, job


def test_metrics_keep_the_rules_of_prometheus_and_tell_nothing_private(
    told: tuple[int, str],
) -> None:
    port, job = told
    seen = scrape(port)
    strict = get(port, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    parse: Any = openmetrics.text_string_to_metric_families
    families = list(parse(strict.text))

    assert {each.name for each in families} == {
        name.removesuffix("_total") for name in seen.families
    }
    for family in families:
        lint(family)
    for private in (job, "canary", SECRET, "127.0.0.1", "unix:"):
        assert private not in seen.text, private


def lint(family: Any) -> None:
    """What promtool checks, and our own rules of names and labels."""
    name = family.name
    assert name.startswith(("tenuto_", "process_")), name
    assert family.documentation, name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
    assert not OTHER_UNITS.search(name), name
    assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
    assert family.type != "unknown", name
    for sample in family.samples:
        assert set(sample.labels) <= LABELS, sample
        if family.type == "counter":
            assert sample.name == f"{name}_total", sample
        if name.startswith("tenuto_") and family.type != "gauge":
            assert sample.value >= 0, sample


def test_an_answer_takes_no_notice_of_a_redis_that_does_not_answer(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    with WorkerProcess(tiny_model, server.url, tmp_path, flags=("--metrics-port", "0")) as worker:
        worker.wait_ready()
        port = port_of(worker)
        server.pause()
        try:
            for path in ("/metrics", "/healthz", "/readyz"):
                assert get(port, path).status in (200, 503)
        finally:
            server.resume()


# -- the server by itself --------------------------------------------------------------


@pytest.fixture
def health() -> Health:
    return Health(Outage())


@pytest.fixture
def alone(health: Health) -> Iterator[int]:
    server = HealthServer("127.0.0.1", 0, health, CollectorRegistry())
    server.start()
    yield server.port
    server.close()


def test_a_stuck_part_is_unwell_and_not_ready_and_is_named(health: Health, alone: int) -> None:
    health.stage = Stage.SERVING
    assert get(alone, "/readyz").status == 200
    health.trouble = lambda: "decode thread stuck for 130 s"

    for path in ("/healthz", "/readyz"):
        reply = get(alone, path)
        assert (reply.status, reply.text) == (503, "decode thread stuck for 130 s\n")


@pytest.mark.parametrize("stage", [each for each in Stage if each is not Stage.SERVING])
def test_only_a_serving_worker_is_ready(health: Health, alone: int, stage: Stage) -> None:
    health.stage = stage

    assert get(alone, "/readyz") == Reply(503, "text/plain; charset=utf-8", f"{stage}\n")
    assert get(alone, "/healthz").status == 200


def test_another_path_is_not_found_and_the_known_ones_are_named(alone: int) -> None:
    reply = get(alone, "/etc/passwd?x=1")

    assert reply.status == 404
    assert "/metrics /healthz /readyz" in reply.text
    assert get(alone, "/healthz?verbose").status == 200


def test_clients_that_say_nothing_or_nonsense_keep_nobody_from_an_answer(alone: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", alone)) for _ in range(20)]
    rude = socket.create_connection(("127.0.0.1", alone))
    rude.sendall(b"\x00\xff nonsense\r\n\r\n")
    assert get(alone, "/healthz").status == 200
    for each in [*silent, rude]:
        each.close()


def _handlers() -> int:
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_connections_that_stay_open_take_no_more_than_a_few_threads(alone: int) -> None:
    others = _handlers()
    with ExitStack() as stack:
        for _ in range(120):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", alone)))
            slow.sendall(b"G")
        assert get(alone, "/healthz").status == 200
        poll_until(lambda: _handlers() <= others + 32, "threads to end", timeout=4)


def test_a_request_that_comes_byte_by_byte_has_little_time_in_all(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto_worker._health_http._REQUEST_S", 0.5, raising=False)
    server = HealthServer("127.0.0.1", 0, health, CollectorRegistry())
    server.start()
    with closing(server), socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(0.1)

        def is_closed() -> bool:
            try:
                slow.sendall(b"G")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        poll_until(is_closed, "the end of the connection", timeout=6)


@pytest.mark.parametrize(
    ("line", "accept", "status"),
    [
        ("GET http://[/metrics HTTP/1.1", "", 400),
        *(
            ("GET /metrics HTTP/1.1", accept, 200)
            for accept in (
                "application/openmetrics-text; version=x.y",
                "application/openmetrics-text;version=1.a.0",
                "text/plain;version=abc",
                "text/plain;=;;=;version=99999999999.1",
            )
        ),
    ],
)
def test_odd_requests_are_answered(alone: int, line: str, accept: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", alone), timeout=10) as asked:
        asked.sendall(f"{line}\r\nAccept: {accept}\r\n\r\n".encode())
        assert asked.makefile("rb").readline().startswith(f"HTTP/1.0 {status} ".encode())


def test_a_page_that_breaks_is_an_error_and_no_silence(health: Health, alone: int) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    health.trouble = broken
    assert get(alone, "/healthz").status == 500


def test_a_port_that_is_taken_is_refused_by_its_flag(alone: int, health: Health) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-port: cannot listen on .* port {alone}"):
        HealthServer("127.0.0.1", alone, health, CollectorRegistry()).start()


def test_a_worker_that_was_well_takes_the_port_as_soon_as_it_is_free(health: Health) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as thief:
        port = thief.getsockname()[1]
        server = HealthServer("127.0.0.1", port, health, CollectorRegistry())
        server.start(must=False)
    reply = poll_until(lambda: probe(port, "/healthz"), "the port")

    assert reply.status == 200
    server.close()


@pytest.mark.parametrize(
    ("port", "said"), [(None, "cannot listen on"), ("70000", "must be 0 to 65535, is 70000")]
)
def test_a_worker_whose_port_cannot_be_had_ends_with_2_and_says_why(
    alone: int, redis_url: str, tiny_model: Path, tmp_path: Path, port: str | None, said: str
) -> None:
    flags = ("--metrics-port", port or str(alone))
    with WorkerProcess(tiny_model, redis_url, tmp_path, flags=flags) as worker:
        assert worker.wait() == 2
        assert f"--metrics-port: {said}" in worker.log()
        assert "Traceback" not in worker.log()
