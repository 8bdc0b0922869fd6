"""Children that hang, break or are out of memory: noticed, told, replaced, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto_client import SyncClient
from tenuto_worker._deaths import LastWords, is_out_of_memory, oom_kills, say_last_words
from workers import WorkerProcess, poll_until, with_site

SITE = Path(__file__).parent / "broken_site"


@pytest.fixture
def client(redis_url: str, namespace: str) -> Iterator[SyncClient]:
    with SyncClient(redis_url, namespace=namespace) as found:
        yield found


@pytest.mark.parametrize(
    ("broken", "how", "why"),
    [
        ("hang", "exit code 71", "the decode thread has not moved for"),
        ("preparer", "exit code 71", "made no progress in restore for"),
        ("die", "exit code 70", "thread decode died: ZeroDivisionError: a thread broke"),
        ("memory", "exit code 72", "thread decode died: RuntimeError: [malloc] Unable to allocate"),
    ],
)
def test_a_child_that_broke_says_why_and_its_jobs_go_on(
    broken: str,
    how: str,
    why: str,
    client: SyncClient,
    redis_url: str,
    namespace: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    environ = {
        **with_site(SITE),
        "BROKEN": broken,
        "BROKEN_MARK": str(tmp_path / "mark"),
    }
    flags = ("--stall-seconds", "2", "--slots", "2")
    with WorkerProcess(
        tiny_model, redis_url, tmp_path / "data", namespace=namespace, flags=flags, environ=environ
    ) as worker:
        worker.wait_ready()
        jobs = [
            client.submit("tiny", "Tell me.", max_tokens=40, seed=7, ignore_eos=True)
            for _ in range(2)
        ]
        results = [job.result(timeout=60) for job in jobs]
        death = worker.wait_for("child died")
        assert death["how"] == how
        assert why in death["why"]
        assert len(results[0].tokens) == 40
        assert results[0].tokens == results[1].tokens
        assert [result.exactness for result in results] == ["exact", "exact"]
        (info,) = poll_until(client.workers, "the announcement")
        assert info.last_death is not None
        assert info.last_death.startswith(how)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[malloc] Unable to allocate 10 bytes."), True),
        (RuntimeError("cudaMallocAsync(&data, size) failed: out of memory"), True),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), True),
        (RuntimeError("[metal::malloc] 10 bytes is above the maximum allowed buffer size"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_says_that_memory_is_used_up(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_last_words_arrive_and_none_is_empty() -> None:
    words = LastWords()
    say_last_words(words.write_end, "x" * 5000)
    assert words.read() == "x" * 2000
    assert LastWords().read() == ""


def test_words_to_nobody_are_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    say_last_words(write_end, "why")
    os.close(write_end)


def test_the_kernels_count_is_a_number_or_not_told() -> None:
    found = oom_kills()
    assert found is None or found >= 0
