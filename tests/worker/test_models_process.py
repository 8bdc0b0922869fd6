"""Many models in a real worker: its own thread loads them, while others decode."""

from __future__ import annotations

from pathlib import Path

from job_queue import JobQueue
from tenuto_engine import Engine
from tenuto_worker._models import RESERVE
from tiny_models import build_tiny_model
from workers import WorkerProcess, poll_until


def test_jobs_of_three_models_all_end_in_memory_for_two(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    folders = {name: build_tiny_model(tmp_path / name, seed=n) for n, name in enumerate("abc", 1)}
    engine = Engine.load(folders["a"])
    size = 2 * engine.weight_bytes + 2 * engine.row_cost.of(64)
    queues = {name: JobQueue(redis_url, namespace, name) for name in folders}
    flags: tuple[str, ...] = ("--memory-budget", str(int(size / (1 - RESERVE)) + 1))
    for name in ("b", "c"):
        flags = (*flags, "--model", f"{name}={folders[name]}")
    with WorkerProcess(
        folders["a"], redis_url, tmp_path / "data", name="a", namespace=namespace, flags=flags
    ) as worker:
        worker.wait_ready()
        jobs = [queues[m].submit(prompt=(1, 2, 3, 4), max_tokens=40) for m in "abccbaacb"]
        poll_until(
            lambda: all(queues["a"].state(job) == "completed" for job in jobs), "all", timeout=60
        )
        assert worker.lines("model unloaded")
        assert not worker.lines("child died")
        assert worker.term() == 0
    for queue in queues.values():
        queue.close()


def test_a_worker_whose_only_model_cannot_be_loaded_ends_and_speaks_of_no_retry(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    nothing, whole = tmp_path / "nothing", build_tiny_model(tmp_path / "whole")
    nothing.mkdir()
    with WorkerProcess(nothing, redis_url, tmp_path / "data", namespace=namespace) as worker:
        assert worker.wait() == 2
        assert [line["event"] for line in worker.lines("worker cannot start")]
        assert "retry_in" not in worker.log()
    flags = ("--model", f"whole={whole}")
    with WorkerProcess(
        nothing, redis_url, tmp_path / "data", namespace=namespace, flags=flags
    ) as worker:
        worker.wait_ready()
        (told,) = worker.lines("model cannot be loaded")
        assert told["retry_in"] > 0
        assert worker.term() == 0
