"""What the commands say of a job that nobody works on, and of a server that is away."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import redis

from raw_worker import RawWorker, poll
from servers import RealServer
from tenuto_client import Keys, SyncClient, WorkerInfo, pack_announcement
from tenuto_client._server import ensure_server, stop_server
from tenuto_client._server_home import ServerHome

SCRIPT = "import sys; from tenuto_client._command import main; sys.exit(main())"


@contextmanager
def command(*args: str, stderr: Any = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A command beside the test; it is ended with it."""
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def read_until(stream: IO[str] | None, wanted: str) -> str:
    """Read a command's output until it matches."""
    assert stream is not None
    got = ""
    while not re.search(wanted, got):
        piece = stream.read(1)
        assert piece, got
        got += piece
    return got


@pytest.fixture
def where(redis_url: str, namespace: str) -> list[str]:
    """The flags that lead a command to the test's namespace."""
    return ["--redis", redis_url, "--namespace", namespace]


@pytest.fixture
def job_id(redis_url: str, namespace: str, worker: RawWorker) -> str:
    """A queued job of the model `m`."""
    with SyncClient(redis_url, namespace=namespace) as client:
        return client.submit("m", "hi", max_tokens=9).id


def has_waited(raw: Any, keys: Keys, job_id: str, seconds: float) -> None:
    """Make it look so."""
    raw.hset(keys.job(job_id), "queued_at", f"{time.time() - seconds:.3f}")


@pytest.mark.parametrize("name", ["watch", "result"])
def test_a_job_that_no_worker_serves_is_said_once_on_a_stderr_that_is_no_terminal(
    name: str, where: list[str], job_id: str, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    raw.delete(keys.workers())
    has_waited(raw, keys, job_id, 12)
    with command(name, job_id, *where) as running:
        said = read_until(running.stderr, r"\n")
        assert re.fullmatch(
            r"tenuto: queued, waiting 1\d s; no worker serves m \(tenuto doctor\)\n", said
        )
        worker.announce()
        assert "a worker of m is free to take it" in read_until(running.stderr, r"\n")
        worker.tell([" w1"])
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (0, " w1\n", "")


def test_on_a_terminal_the_wait_is_a_part_of_the_progress_line_and_counts(
    where: list[str], job_id: str, raw: Any, keys: Keys
) -> None:
    raw.delete(keys.workers())
    has_waited(raw, keys, job_id, 100)
    screen, theirs = pty.openpty()
    with command("watch", job_id, *where, stderr=theirs):
        os.close(theirs)
        got = b""
        while len(set(re.findall(rb"queued, waiting (\d+) s", got))) < 2:
            got += os.read(screen, 4096)
    os.close(screen)
    assert b"0/9 tokens | queued" in got
    assert b"tenuto: queued" not in got


def test_a_running_job_whose_worker_died_is_said(
    where: list[str], job_id: str, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    attempt = worker.claim()
    attempt.publish(1, 2)
    raw.delete(keys.lease(job_id))
    old = WorkerInfo(worker.name, ("m",), 1, 1, started_at=0.0, seen_at=time.time() - 60)
    raw.hset(keys.workers(), worker.name, pack_announcement(old))
    with command("watch", job_id, *where) as running:
        said = read_until(running.stderr, r"\n")
    assert re.match(r"tenuto: no worker holds it \(worker raw-1 was last heard of 6\d s ago", said)
    assert "the next worker that serves m takes it over" in said


A = WorkerInfo("w", ("m", "a"), 2, 0, started_at=0.0, seen_at=0.0, loaded=("m",))


@pytest.mark.parametrize(
    ("worker_info", "says"),
    [
        (A, "a worker of m is free to take it"),
        (replace(A, loaded=("a",)), "a worker of m is free to take it"),
        (
            replace(A, loaded=("a",), running=1, busy={"a": 1}),
            "m is not in memory, and has to wait for room beside a (1 job runs there)",
        ),
        (replace(A, running=1, busy={"m": 1}), "every slot for m is taken"),
        (
            replace(A, loaded=("a", "m"), running=1, busy={"a": 1}),
            "a worker of m has a free slot, but perhaps no memory (1 job runs there)",
        ),
        (replace(A, broken={"m": "x"}), "no worker can load m (tenuto doctor)"),
        # One of a version that tells less.
        (replace(A, loaded=None, running=2), "every slot for m is taken"),
    ],
)
def test_the_reason_of_a_wait_is_what_the_workers_tell_and_no_promise(
    where: list[str], job_id: str, raw: Any, keys: Keys, worker_info: WorkerInfo, says: str
) -> None:
    has_waited(raw, keys, job_id, 12)
    raw.delete(keys.workers())
    raw.hset(keys.workers(), "w", pack_announcement(replace(worker_info, seen_at=time.time())))
    with command("status", job_id, *where) as running:
        out, _ = running.communicate(timeout=20)
    assert f"s; {says}\n" in out


def test_result_of_a_cancelled_job_names_the_command_that_resumes(
    where: list[str], job_id: str, redis_url: str, namespace: str
) -> None:
    with SyncClient(redis_url, namespace=namespace) as client:
        client.job(job_id).cancel()
    with command("result", job_id, *where) as running:
        _, err = running.communicate(timeout=20)
    assert running.returncode == 1
    assert err.endswith(f"was cancelled after 0 tokens; to go on: tenuto resume {job_id}\n")


def test_ctrl_c_in_result_says_that_the_job_goes_on(
    where: list[str], job_id: str, raw: Any, keys: Keys
) -> None:
    has_waited(raw, keys, job_id, 12)
    with command("result", job_id, *where) as running:
        read_until(running.stderr, r"queued.*\n")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert err == f"tenuto: the job goes on without you; to wait again: tenuto result {job_id}\n"


def test_a_watcher_says_that_the_server_is_away_and_that_it_is_back() -> None:
    with RealServer() as server:
        with server.client() as raw:
            worker = RawWorker(raw, "tenuto:")
            worker.announce()
            with SyncClient(server.url) as client:
                job_id = client.submit("m", "hi").id
            worker.claim().publish(1, 1)
        with command("watch", job_id, "--redis", server.url) as running:
            assert read_until(running.stdout, "w1") == " w1"
            server.kill()
            assert "waiting for the server" in read_until(running.stderr, r"\n")
            server.start()
            assert "tenuto: the server is back" in read_until(running.stderr, r"is back.*\n")


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A disk of its own, with an embedded server, and a job without a worker."""
    folder = Path(tempfile.mkdtemp(prefix="tenuto-"))
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False, capture_output=True
    )
    if made.returncode != 0:
        folder.rmdir()
        pytest.skip("needs to mount a small disk")
    try:
        yield folder
    finally:
        stop_server(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def test_a_watcher_waits_for_an_embedded_server_on_a_full_disk_and_says_what_is_full(
    data_dir: Path,
) -> None:
    where = ["--data-dir", str(data_dir)]
    with (
        redis.Redis.from_url(ensure_server(data_dir)) as raw,
        SyncClient(data_dir=data_dir) as client,
    ):
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        job = client.submit("m", "hi")
        attempt = worker.claim()
        attempt.publish(1, 1)
        with command("watch", job.id, *where) as running:
            assert read_until(running.stdout, "w1") == " w1"
            ballast = data_dir / "ballast"
            fill(ballast)
            # Without a write a server comes up even so; this one does not, as if one had come.
            os.kill(int((data_dir / "redis" / "pid").read_text()), signal.SIGKILL)
            [log] = (data_dir / "redis" / "aof").glob("*.incr.aof")
            with log.open("r+b") as file:
                file.write(b"x")
            said = read_until(running.stderr, r"no space left.*\n")
            assert "holds the jobs" in said
            assert "#" not in said
            listed = subprocess.run(
                [sys.executable, "-c", SCRIPT, "list", *where],
                capture_output=True,
                text=True,
                check=False,
            )
            assert listed.returncode == 3
            assert len(listed.stderr.splitlines()) == 1
            ballast.unlink()
            with log.open("r+b") as file:
                file.write(b"*")
            raw.connection_pool.disconnect()
            wait_for(data_dir)
            attempt.publish(2, 2)
            attempt.finish()
            out, _ = running.communicate(timeout=30)
    assert (running.returncode, out) == (0, " w2\n")


def test_doctor_says_that_the_embedded_server_cannot_start_on_a_full_disk(data_dir: Path) -> None:
    ensure_server(data_dir)
    stop_server(data_dir)
    where = ["--data-dir", str(data_dir), "--redis", ""]
    with command("doctor", *where) as running:
        out, _ = running.communicate(timeout=20)
    assert re.search(r"^ok +server +the embedded server does not run; it starts with", out, re.M)
    assert re.search(r"^PROBLEM +disk +[5-8]\.\d MiB free$", out, re.M)
    fill(data_dir / "ballast")
    with command("doctor", *where) as running:
        out, _ = running.communicate(timeout=20)
    assert re.search(r"^PROBLEM +server +.* cannot: its disk is full$", out, re.M)
    assert re.search(r"^PROBLEM +disk +\d+ bytes? free$", out, re.M)
    assert re.search(r"^ok +data dir ", out, re.M)


def fill(ballast: Path) -> None:
    """Leave nothing of the disk."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def wait_for(data_dir: Path) -> None:
    """Until the watcher has started the server again."""
    poll(lambda: ServerHome.of(data_dir).ask().name == "READY")
