"""`--compiled`, and a worker that compiles, killed in mid-run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import MODEL, StepWorker
from tenuto_client._records import EndEvent
from tenuto_worker import WorkerSettings
from tenuto_worker._commands.worker import _values, configure
from tenuto_worker._errors import ConfigError
from tiny_models import build_tiny_model

MODELS = ["--model", "a=x", "--model", "b=y"]
OPTIONS: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "logprobs": 3}


def values(*flags: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    configure(parser)
    return _values(parser.parse_args([*MODELS, *flags]), environ or {})


def test_models_are_named_one_by_one_or_by_the_environment() -> None:
    assert values()["compiled"] == ()
    assert values("--compiled", "b", "--compiled", "b")["compiled"] == ("b",)
    assert values(environ={"TENUTO_COMPILED": "a b"})["compiled"] == ("a", "b")
    assert values("--compiled", "a", environ={"TENUTO_COMPILED": "b"})["compiled"] == ("a",)


def test_a_model_that_is_not_served_and_one_with_quantized_kv_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--compiled: no --model is named 'c'"):
        values("--compiled", "c")
    with pytest.raises(ConfigError, match="TENUTO_COMPILED: no --model is named 'c'"):
        values(environ={"TENUTO_COMPILED": "c"})
    given = values("--compiled", "a", "--kv", "a=8:64:0")
    with pytest.raises(ConfigError, match="--compiled a: cannot be with --kv of the same model"):
        WorkerSettings(redis_url="", data_dir=tmp_path, **given)


def test_settings_reach_the_child_with_it(tmp_path: Path) -> None:
    settings = WorkerSettings(redis_url="", data_dir=tmp_path, **values("--compiled", "a"))
    assert WorkerSettings.from_json(settings.to_json()) == settings


def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(
    redis_url: str, jobs: JobQueue, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "model", "gemma3_text")
    with pytest.raises(ConfigError, match="compiled: its caches are not all plain ones: Rotating"):
        StepWorker(redis_url, jobs.keys.namespace, model, tmp_path, compiled=(MODEL,))


def test_what_a_dead_worker_began_another_ends_bit_for_bit(
    redis_url: str, jobs: JobQueue, tiny_model: Path, tmp_path: Path
) -> None:
    job, whole = (jobs.submit(**OPTIONS) for _ in range(2))
    where = (redis_url, jobs.keys.namespace, tiny_model, tmp_path)
    with (
        StepWorker(*where, compiled=(MODEL,), slots=1) as first,
        StepWorker(*where, compiled=(MODEL,), name="host-dir-1") as other,
    ):
        first.claim()
        first.decode(13)
        first.publish()
        first.save()
        jobs.lose_lease(job)
        jobs.scripts.take_back(job, "host-dir-0")
        other.claim()
        other.claim()
        other.finish()
        assert other.engine.geometry.compiled
    assert jobs.tokens(job) == jobs.tokens(whole)
    end = jobs.stream(job)[1][-1]
    assert isinstance(end, EndEvent)
    assert (end.state, end.exactness, end.epoch) == ("completed", "exact", 2)


def test_one_that_does_not_compile_says_that_it_is_another_geometry(
    redis_url: str, jobs: JobQueue, tiny_model: Path, tmp_path: Path
) -> None:
    job = jobs.submit(**OPTIONS)
    where = (redis_url, jobs.keys.namespace, tiny_model, tmp_path)
    with (
        StepWorker(*where, compiled=(MODEL,)) as first,
        StepWorker(*where, name="host-dir-1", exact_wait_seconds=0.0) as other,
    ):
        first.claim()
        first.decode(13)
        first.publish()
        jobs.scripts.take_back(job, "host-dir-0")
        other.claim()
        other.finish()
    end = jobs.stream(job)[1][-1]
    assert isinstance(end, EndEvent)
    assert end.exactness == "recomputed"
    assert "compiled: False here, True there" in (end.exactness_reason or "")
