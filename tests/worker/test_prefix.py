"""Prompts that begin alike, in real workers: quicker, and with the very same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto_client import Result, SyncClient
from workers import WorkerProcess, poll_until

LONG = 600
SEED = 5


def prompt(tail: int) -> list[int]:
    """Some that begin alike and end differently."""
    return [5 + (7 * place) % 250 for place in range(LONG)] + [5 + tail] * 30


def result(client: SyncClient, tail: int) -> Result:
    job = client.submit("tiny", prompt(tail), max_tokens=30, seed=SEED, temperature=0.8,
                        logprobs=2, ignore_eos=True)  # fmt: skip
    return job.result(timeout=100)


def found(worker: WorkerProcess) -> list[int]:
    """How many tokens each attempt was spared."""
    return [line["prefix_tokens"] for line in worker.lines("attempt prepared")]


def test_a_second_job_and_one_after_a_restart_read_only_what_is_new(
    redis_url: str, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    off = ("--prefix-memory", "0", "--prefix-disk", "0")
    with SyncClient(redis_url, namespace=namespace) as client:
        with WorkerProcess(
            tiny_model, redis_url, tmp_path / "off", namespace=namespace, flags=off
        ) as worker:
            worker.wait_ready()
            plain = [result(client, tail) for tail in range(3)]
            assert found(worker) == [0, 0, 0]
            assert worker.term() == 0
        assert not (tmp_path / "off" / "prefixes").exists()
        shared = tmp_path / "data"
        with WorkerProcess(tiny_model, redis_url, shared, namespace=namespace) as worker:
            worker.wait_ready()
            told = [result(client, tail) for tail in range(2)]
            assert found(worker) == [0, LONG // 256 * 256]
            poll_until(
                lambda: len(list((shared / "prefixes").glob("*.block"))) == LONG // 256,
                "the blocks on disk",
            )
            worker.kill()
        with WorkerProcess(tiny_model, redis_url, shared, namespace=namespace) as worker:
            worker.wait_ready()
            told.append(result(client, 2))
            assert found(worker) == [LONG // 256 * 256]
            assert worker.term() == 0
    assert [(each.tokens, each.text, each.exactness) for each in told] == [
        (each.tokens, each.text, "exact") for each in plain
    ]


@pytest.mark.parametrize("flag", ["--prefix-memory", "--prefix-disk"])
def test_a_size_that_is_none_is_refused_by_its_flag(
    flag: str, redis_url: str, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    flags = (flag, "much")
    with WorkerProcess(tiny_model, redis_url, tmp_path, namespace=namespace, flags=flags) as worker:
        assert worker.wait() == 2
        assert flag in worker.log()
