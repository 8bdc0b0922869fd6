"""One data dir, two servers: what the one has is not lost for the other."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from job_queue import JobQueue
from servers import RealServer
from step_worker import StepWorker
from tenuto_client._command import main
from tenuto_client._server import ensure_server, stop_server
from tenuto_worker._identity import Identity, living_workers, note_of, take_identity
from tenuto_worker._served import Served
from workers import WorkerProcess, poll_until

Say = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def embedded(data_dir: Path, namespace: str) -> Iterator[JobQueue]:
    """A queue in the embedded server of the data dir."""
    queue = JobQueue(ensure_server(data_dir), namespace)
    yield queue
    queue.close()
    stop_server(data_dir)


@pytest.fixture
def other(server: RealServer, namespace: str) -> Iterator[JobQueue]:
    """A queue in another server than the one that is looked at, and than the embedded one."""
    queue = JobQueue(server.url, namespace)
    yield queue
    queue.close()


@pytest.fixture
def identity(data_dir: Path) -> Iterator[Identity]:
    """Of a worker that lives: its lock is held."""
    taken = take_identity(data_dir)
    yield taken
    os.close(taken.lock)


@pytest.fixture
def say(jobs: JobQueue, redis_url: str, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `tenuto ... --json` against the server that is looked at: exit code and lines."""

    def run(*words: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]
        code = main([*words, "--json", *where, "--data-dir", str(data_dir)])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def begun(queue: JobQueue, url: str, model: Path, data_dir: Path, **who: Any) -> str:
    """A job of which checkpoints are on disk, and which still runs as far as its server knows."""
    job = queue.submit()
    with StepWorker(url, queue.keys.namespace, model, data_dir, **who) as worker:
        worker.claim()
        worker.decode(10)
        worker.publish()
        worker.save()
    return job


def found_by_doctor(say: Say) -> dict[str, dict[str, Any]]:
    return {line["subject"]: line for line in say("doctor")[1]}


def test_jobs_of_the_embedded_server_that_runs_are_not_lost_for_another(
    embedded: JobQueue, jobs: JobQueue, tiny_model: Path, data_dir: Path, say: Say
) -> None:
    job = begun(embedded, ensure_server(data_dir), tiny_model, data_dir)
    found = found_by_doctor(say)
    assert "lost" not in found
    assert found["elsewhere"]["level"] == "ok"
    assert "1 job" in found["elsewhere"]["says"]
    assert "the embedded server of this data dir, which runs" in found["elsewhere"]["says"]

    for words in (["recover"], ["recover", job], ["recover", "--dry-run"]):
        code, (line,) = say("checkpoints", *words)
        assert (code, line["type"], line["job"]) == (1, "elsewhere", job)
        assert "the embedded server of this data dir, which runs" in line["reason"]
    assert not jobs.client.exists(jobs.keys.job(job))
    code, (line,) = say("checkpoints", "gc")
    assert (code, line["type"]) == (0, "kept")
    assert "embedded server" in line["reason"]

    code, (line,) = say("checkpoints", "recover", "--force")
    assert (code, line["type"], line["state"]) == (0, "recovered", "queued")
    assert jobs.client.exists(jobs.keys.job(job))


def test_a_worker_warns_of_jobs_of_another_server_and_calls_none_of_them_lost(
    embedded: JobQueue, jobs: JobQueue, redis_url: str, tiny_model: Path, data_dir: Path
) -> None:
    begun(embedded, ensure_server(data_dir), tiny_model, data_dir)
    with structlog.testing.capture_logs() as logs:
        worker = StepWorker(redis_url, jobs.keys.namespace, tiny_model, data_dir)
        worker.rooms.collector.collect()
        worker.rooms.writer.close(10)
    told = [line for line in logs if "jobs" in line]
    assert [(line["event"], line["log_level"]) for line in told] == [
        ("jobs on disk are in another redis", "warning")
    ]
    assert "embedded server" in told[0]["where"]


def test_an_embedded_server_that_does_not_run_may_have_the_jobs_until_its_data_is_gone(
    embedded: JobQueue,
    jobs: JobQueue,
    redis_url: str,
    tiny_model: Path,
    data_dir: Path,
    say: Say,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = begun(embedded, ensure_server(data_dir), tiny_model, data_dir)
    stop_server(data_dir)
    lost = found_by_doctor(say)["lost"]
    assert "which does not run, but has data" in lost["says"]
    assert lost["fix"] == f"tenuto server --namespace {jobs.keys.namespace} --data-dir {data_dir}"
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"]) == (1, "elsewhere")
    assert "may be in the embedded server" in line["reason"]
    where = ["--redis", redis_url, "--namespace", jobs.keys.namespace, "--data-dir", str(data_dir)]
    assert main(["checkpoints", "recover", *where]) == 1
    assert capsys.readouterr().out.endswith(f"run this again: {lost['fix']}\n")

    shutil.rmtree(data_dir / "redis" / "aof")
    assert "tenuto checkpoints recover" in found_by_doctor(say)["lost"]["fix"]
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"], line["job"]) == (0, "recovered", job)


def test_an_embedded_server_that_is_empty_has_nobodys_jobs(
    data_dir: Path, other: JobQueue, server: RealServer, tiny_model: Path, say: Say
) -> None:
    ensure_server(data_dir)
    stop_server(data_dir)
    job = begun(other, server.url, tiny_model, data_dir)
    server.kill()
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"], line["job"]) == (0, "recovered", job)


def test_jobs_that_a_living_worker_of_the_data_dir_serves_elsewhere_are_left_to_it(
    identity: Identity,
    other: JobQueue,
    server: RealServer,
    jobs: JobQueue,
    tiny_model: Path,
    data_dir: Path,
    say: Say,
) -> None:
    who: dict[str, Any] = {"name": identity.name, "reach": identity.reach}
    job = begun(other, server.url, tiny_model, data_dir, **who)
    found = found_by_doctor(say)
    assert "lost" not in found
    assert f"which worker {identity.name} serves" in found["elsewhere"]["says"]
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"]) == (1, "elsewhere")
    assert identity.name in line["reason"]
    assert not jobs.client.exists(jobs.keys.job(job))

    # The worker dies, and the server with it.
    fcntl.flock(identity.lock, fcntl.LOCK_UN)
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"], line["job"]) == (0, "recovered", job)


def test_what_was_put_back_into_another_server_is_left_to_it(
    identity: Identity,
    jobs: JobQueue,
    other: JobQueue,
    server: RealServer,
    redis_url: str,
    tiny_model: Path,
    data_dir: Path,
    say: Say,
) -> None:
    who: dict[str, Any] = {"name": identity.name, "reach": identity.reach}
    first = begun(jobs, redis_url, tiny_model, data_dir, **who)
    jobs.client.delete(*jobs.client.scan_iter(f"{jobs.keys.namespace}*"))
    where = ["--redis", server.url, "--namespace", jobs.keys.namespace]
    note_of(data_dir, "0").unlink()
    assert main(["checkpoints", "recover", *where, "--data-dir", str(data_dir)]) == 0
    with StepWorker(server.url, jobs.keys.namespace, tiny_model, data_dir, **who):
        assert other.client.exists(other.keys.job(first))
        code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"]) == (1, "elsewhere")


def test_a_server_that_was_emptied_under_its_worker_gets_its_jobs_back_at_once(
    identity: Identity, jobs: JobQueue, redis_url: str, tiny_model: Path, data_dir: Path, say: Say
) -> None:
    who: dict[str, Any] = {"name": identity.name, "reach": identity.reach}
    job = begun(jobs, redis_url, tiny_model, data_dir, **who)
    jobs.client.delete(*jobs.client.scan_iter(f"{jobs.keys.namespace}*"))
    assert "tenuto checkpoints recover" in found_by_doctor(say)["lost"]["fix"]
    code, (line,) = say("checkpoints", "recover")
    assert (code, line["type"], line["job"]) == (0, "recovered", job)


def test_jobs_of_another_namespace_are_not_lost(
    server: RealServer, jobs: JobQueue, redis_url: str, tiny_model: Path, data_dir: Path, say: Say
) -> None:
    queue = JobQueue(server.url, "elsewhere:")
    begun(queue, server.url, tiny_model, data_dir)
    queue.close()
    found = found_by_doctor(say)
    assert "lost" not in found
    assert "--namespace elsewhere" in found["elsewhere"]["says"]


def test_what_a_worker_serves_stands_beside_its_lock_without_a_password(
    tmp_path: Path, tiny_model: Path, data_dir: Path
) -> None:
    with RealServer(user="me on >sesame ~* &* +@all") as guarded, guarded.client() as admin:
        url = f"unix://me:sesame@{guarded.socket}"
        with WorkerProcess(tiny_model, url, data_dir) as worker:
            note = note_of(data_dir, "0")
            # A server without a data set has no id; the worker draws one when it is ready.
            worker.wait_ready()
            served = Served.read(note)
            assert served is not None
            namespace_id = admin.get("tenuto:namespace")
            assert isinstance(namespace_id, bytes)
            assert served.ids == (namespace_id.decode(),)
            assert "sesame" not in note.read_text()
            assert note.stat().st_mode & 0o077 == 0
            assert living_workers(data_dir) == [0]
            worker.kill()
    assert poll_until(lambda: living_workers(data_dir) == [], "the lock's end")
    # Whoever gets its number does not serve what it served.
    os.close(take_identity(data_dir).lock)
    assert not note.exists()


def test_force_is_for_recover_alone(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "gc", "--force", "--data-dir", str(data_dir)]) == 2
    assert "it is for recover" in capsys.readouterr().err
