"""The progress line of `watch`, on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raw_worker import RawWorker
from tenuto_client import SyncClient

SCRIPT = "import sys; from tenuto_client._command import main; sys.exit(main())"


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal."""
    ends = pty.openpty()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def shown(end: int) -> str:
    """What the terminal was sent."""
    os.set_blocking(end, False)
    got = b""
    try:
        while piece := os.read(end, 4096):
            got += piece
    except BlockingIOError:
        return got.decode()
    return got.decode()


@pytest.fixture
def job_id(redis_url: str, namespace: str, worker: RawWorker) -> str:
    """A job that has failed once, and been resumed and completed."""
    with SyncClient(redis_url, namespace=namespace) as client:
        job = client.submit("m", "hi", max_tokens=9)
        first = worker.claim()
        first.publish(1, 2)
        first.finish("failed", "", error="broken")
        job.resume()
        second = worker.claim()
        second.publish(3, 3)
        second.finish()
        return job.id


def watch(redis_url: str, namespace: str, job_id: str, **streams: Any) -> int:
    """Run `tenuto watch`; returns its exit code."""
    where = ("--redis", redis_url, "--namespace", namespace)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, "watch", job_id, *where],
        check=False,
        timeout=60,
        env={**os.environ, "TERM": "xterm"},
        **streams,
    ).returncode


def test_progress_goes_to_stderr_when_it_is_a_terminal_and_text_stays_clean(
    redis_url: str, namespace: str, job_id: str
) -> None:
    read, write = os.pipe()
    with terminal() as (screen, theirs):
        assert watch(redis_url, namespace, job_id, stdout=write, stderr=theirs) == 0
        os.close(write)
        line = shown(screen)
    with os.fdopen(read) as text:
        assert text.read() == " w1 w2 w3\n"
    assert "3/9 tokens" in line
    assert "attempt 2" in line
    # The last thing is that the line is taken away.
    assert line.endswith("\r\x1b[K")


def test_text_and_progress_can_share_a_terminal(
    redis_url: str, namespace: str, job_id: str
) -> None:
    with terminal() as (screen, theirs):
        assert watch(redis_url, namespace, job_id, stdout=theirs, stderr=theirs) == 0
        seen = shown(screen)
    # Before each piece of text what stands below is erased, and nothing is left at the end.
    assert seen.index("\x1b[J w1") < seen.index("\x1b[J w2") < seen.index("\x1b[J w3")
    assert "3/9 tokens" in seen
    assert seen.endswith("\x1b[J")
