"""Real worker processes: they die in every way, and no token is lost, doubled or changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from servers import RealServer
from tenuto_client._records import EndEvent
from tenuto_client._server import ensure_server, find_server, stop_server
from workers import WorkerProcess, child_is_alive, poll_until

OPTIONS: dict[str, Any] = {"max_tokens": 240, "temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def common() -> Iterator[RealServer]:
    """The server of this module's tests, each under its own namespace."""
    with RealServer() as server:
        yield server


@pytest.fixture
def queue(common: RealServer, namespace: str) -> Iterator[JobQueue]:
    queue = JobQueue(common.url, namespace)
    yield queue
    queue.close()


@pytest.fixture
def start(common: RealServer, queue: JobQueue, tiny_model: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[WorkerProcess] = []

    def begin(data: str = "data", **more: Any) -> WorkerProcess:
        worker = WorkerProcess(
            tiny_model, common.url, tmp_path / data, namespace=queue.keys.namespace, **more
        )
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.close()


def wait_tokens(queue: JobQueue, job: str, count: int) -> None:
    poll_until(
        lambda: int(queue.job(job).get("tokens", "0")) >= count,
        f"{count} tokens of {queue.state(job)} {job}",
        every=0.005,
    )


def wait_end(queue: JobQueue, job: str) -> EndEvent:
    poll_until(lambda: queue.state(job) in ("completed", "failed", "cancelled"), "an end")
    last = queue.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def same(queue: JobQueue, job: str, reference: str) -> None:
    """The two jobs have the same tokens, logprobs, texts and end."""
    wait_end(queue, reference)
    end = wait_end(queue, job)
    tokens = queue.tokens(job)
    assert tokens == queue.tokens(reference)
    assert [token.index for token in tokens] == list(range(1, OPTIONS["max_tokens"] + 1))
    assert (end.state, end.exactness, end.finish_reason) == ("completed", "exact", "length")
    assert end.text == wait_end(queue, reference).text


@pytest.fixture
def reference(queue: JobQueue) -> str:
    """A job like the others, run by the last worker without interruption."""
    return queue.submit(priority=-5, **OPTIONS)


def test_a_killed_child_gets_its_job_back_without_waiting_for_the_lease(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    worker = start(lease=30.0)
    wait_tokens(queue, job, 40)
    dead = worker.kill_child()
    taken = worker.wait_for("job taken back")
    assert taken["lost_by"] == taken["worker"]
    same(queue, job, reference)

    assert not child_is_alive(dead)
    assert worker.lines("child died")[0]["how"] == "SIGKILL"
    assert queue.job(job)["epoch"] == "2"


def test_when_supervisor_and_child_die_another_worker_goes_on_after_the_lease(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    first = start()
    wait_tokens(queue, job, 40)
    first.kill()
    second = start()
    same(queue, job, reference)

    assert second.lines("worker starting")[0]["worker"].endswith("-0"), "the name was free again"


def test_a_drain_hands_the_job_back_and_exits_with_0(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    first = start()
    wait_tokens(queue, job, 40)
    began = time.monotonic()
    assert first.term() == 0
    assert time.monotonic() - began < 10
    assert queue.state(job) == "queued"
    assert queue.job(job)["stalls"] == "0"
    assert not queue.client.hgetall(queue.keys.workers())
    handed_back = first.lines("job handed back")[0]
    assert handed_back["tokens"] == len(queue.tokens(job)), "what was decoded was published"
    start()
    same(queue, job, reference)


def test_a_child_whose_supervisor_dies_drains_by_itself(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    first = start(lease=30.0)
    wait_tokens(queue, job, 40)
    first.kill_supervisor()
    child = first.child_pid
    poll_until(lambda: not child_is_alive(child), "the child's end")
    assert queue.state(job) == "queued"
    start()
    same(queue, job, reference)


def test_a_paused_worker_that_wakes_after_its_lease_publishes_nothing(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    zombie = start()
    wait_tokens(queue, job, 40)
    zombie.stop()
    heir = start()
    wait_end(queue, job)
    tokens = queue.tokens(job)
    zombie.cont()
    zombie.wait_for("attempt fenced")
    same(queue, job, reference)

    assert queue.tokens(job) == tokens
    ends = [event for event in queue.stream(job)[1] if isinstance(event, EndEvent)]
    assert [end.epoch for end in ends] == [2]
    (reaped,) = heir.lines("job reaped")
    assert reaped["lost_by"] == zombie.lines("worker ready")[0]["worker"]
    assert zombie.is_running


def test_a_second_signal_ends_at_once_and_loses_nothing(
    queue: JobQueue, start: Any, reference: str
) -> None:
    job = queue.submit(**OPTIONS)
    first = start()
    wait_tokens(queue, job, 40)
    first.stop()
    os.kill(first.pid, signal.SIGTERM)
    first.wait_for("stopping")
    poll_until(lambda: _signalled_to_death(first), "the end", every=0.3)
    assert first.wait(10) == 128 + signal.SIGKILL
    assert first.lines("stopping at once")
    start()
    same(queue, job, reference)


def _signalled_to_death(worker: WorkerProcess) -> bool:
    if worker.is_running:
        os.kill(worker.pid, signal.SIGINT)
    return not worker.is_running


def test_a_group_that_is_signalled_as_a_whole_drains_all_the_same(
    queue: JobQueue, start: Any
) -> None:
    job = queue.submit(**OPTIONS)
    worker = start()
    wait_tokens(queue, job, 40)
    os.kill(worker.child_pid, signal.SIGTERM)
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(worker.pid, signal.SIGINT)

    assert worker.wait(30) == 0
    assert "SIG" not in worker.lines("worker drains")[0]["why"], "only the supervisor knows it"
    assert queue.state(job) == "queued"
    assert worker.lines("worker ended")


def test_a_signal_while_the_worker_starts_ends_it_with_0(start: Any) -> None:
    worker = start()
    worker.wait_for("child started")

    assert worker.term(20) == 0


def test_signals_until_the_very_end_do_not_change_how_it_ends(start: Any) -> None:
    worker = start()
    worker.wait_for("child started")
    os.kill(worker.pid, signal.SIGTERM)
    while worker.is_running:
        os.kill(worker.pid, signal.SIGINT)
    assert worker.wait(1) in (0, 128 + signal.SIGKILL)


def test_every_line_of_a_job_carries_job_epoch_and_worker_and_no_text(
    queue: JobQueue, start: Any
) -> None:
    job = queue.submit(prompt="a very private prompt", max_tokens=20)
    worker = start()
    wait_end(queue, job)
    worker.wait_for("job ended")
    lines = worker.lines()

    assert all(line["worker"].endswith("-0") for line in lines)
    mine = [line for line in lines if line.get("job") == job]
    assert {line["event"] for line in mine} >= {"job claimed", "attempt prepared", "job ended"}
    assert all(line["epoch"] == 1 for line in mine)
    assert "private" not in worker.log()
    assert len(lines) == len(worker.log().splitlines()), "every line is JSON"


def test_a_worker_survives_a_server_that_is_killed_in_mid_run(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    queue = JobQueue(server.url, "tenuto:")
    job, reference = queue.submit(**OPTIONS), queue.submit(priority=-5, **OPTIONS)
    with WorkerProcess(tiny_model, server.url, tmp_path) as worker:
        wait_tokens(queue, job, 40)
        server.kill()
        worker.wait_for("redis away")
        server.start()
        same(queue, job, reference)
        assert not worker.lines("child died")
        assert not worker.lines("attempt fenced")
    queue.close()


def test_the_embedded_server_is_started_again_when_it_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    queue = JobQueue(ensure_server(tmp_path), "tenuto:")
    job = queue.submit(**OPTIONS)
    try:
        with WorkerProcess(tiny_model, None, tmp_path) as worker:
            wait_tokens(queue, job, 40)
            os.kill(int((tmp_path / "redis" / "pid").read_text()), signal.SIGKILL)
            worker.wait_for("redis back")
            (started,) = worker.lines("embedded server started again")
            assert started["pid"] == int((tmp_path / "redis" / "pid").read_text())
            poll_until(lambda: find_server(tmp_path), "the server to answer us too")
            assert wait_end(queue, job).exactness == "exact"
            assert len(queue.tokens(job)) == OPTIONS["max_tokens"]
    finally:
        queue.close()
        stop_server(tmp_path)


def test_a_child_that_starts_while_redis_is_away_waits_for_it(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    queue = JobQueue(server.url, "tenuto:")
    with WorkerProcess(tiny_model, server.url, tmp_path) as worker:
        worker.wait_ready()
        server.kill()
        worker.kill_child()
        worker.wait_for("worker starting", count=2)
        worker.wait_for("redis away")
        server.start()
        job = queue.submit(max_tokens=5)
        assert wait_end(queue, job).state == "completed"
        assert len(worker.lines("child died")) == 1
    queue.close()


def test_an_error_that_nobody_expected_ends_the_child_loudly_and_it_starts_again(
    queue: JobQueue, start: Any
) -> None:
    worker = start()
    worker.wait_ready()
    running = queue.keys.running()
    queue.client.set(running, "not a sorted set")
    dead = worker.wait_for("child died")
    queue.client.delete(running)
    job = queue.submit(max_tokens=5)

    assert dead["how"] == "exit code 70"
    assert worker.lines("thread died")[0]["thread"] == "housekeeper"
    assert "WRONGTYPE" in worker.lines("thread died")[0]["exception"]
    assert wait_end(queue, job).state == "completed"


# -- what cannot start -----------------------------------------------------------------


def _fails(tmp_path: Path, *flags: str, code: int) -> str:
    tenuto = Path(sys.executable).with_name("tenuto")
    done = subprocess.run(
        [tenuto, "worker", *flags], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("path", ["nowhere", "./no/where", "{}/nowhere"])
def test_a_path_that_leads_nowhere_ends_the_worker_with_2_before_anything_is_made(
    tmp_path: Path, path: str
) -> None:
    path = path.format(tmp_path)
    said = _fails(tmp_path, "--model", f"m={path}", "--data-dir", str(tmp_path / "d"), code=2)

    assert f"--model m: {path}: no such folder" in said
    assert not (tmp_path / "d").exists()


def test_a_variable_that_is_no_number_is_named_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_SLOTS", "abc")
    said = _fails(tmp_path, "--model", "m=org/x", "--data-dir", str(tmp_path / "d"), code=2)

    assert "TENUTO_SLOTS: 'abc' is not a whole number" in said


def test_no_redis_ends_the_worker_with_3_and_names_the_url(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    said = _fails(
        tmp_path, "--model", "m=org/x", "--data-dir", str(tmp_path / "d"), "--redis", url, code=3
    )

    assert url in said


def test_a_data_dir_that_cannot_be_made_ends_the_worker_with_2_and_names_it(
    common: RealServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "data"
    said = _fails(
        tmp_path, "--model", "m=org/x", "--data-dir", str(path), "--redis", common.url, code=2
    )

    assert str(path.parent) in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--model"),
        (("--model", "nonsense"), "'nonsense'"),
        (("--model", "m=x", "--slots", "0"), "--slots"),
        (("--model", "my model=x"), "'my model'"),
        (("--model", "m=x", "--lease-seconds", "inf"), "--lease-seconds"),
        (("--model", "m=x", "--grace-seconds", "inf"), "--grace-seconds"),
        (("--model", "m=x", "--restart-pause", "-1"), "--restart-pause"),
        (("--model", "m=x", "--checkpoint-seconds", "nan"), "--checkpoint-seconds"),
        (("--model", "m=x", "--exact-wait", "-1"), "--exact-wait"),
        (("--model", "m=x", "--redis", "redis://:12/sesame@h"), "redis: not a Redis URL"),
        (("--model", "m=x", "--model", "m=y"), "'m' is given twice"),
    ],
)
def test_a_bad_flag_ends_the_worker_with_2_before_anything_is_made(
    tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    said = _fails(tmp_path, *flags, "--data-dir", str(tmp_path / "d"), code=2)

    assert named in said
    assert "sesame" not in said
    assert not (tmp_path / "d").exists()
