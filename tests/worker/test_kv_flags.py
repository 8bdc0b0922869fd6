"""Workers whose KV is quantized: their flags, their geometry, and a job that outlives one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import MODEL, StepWorker
from tenuto_client._records import EndEvent
from tenuto_engine import Engine, GenerationOptions
from tenuto_worker import WorkerSettings
from tenuto_worker._commands.worker import _values, configure
from tenuto_worker._errors import ConfigError
from tiny_models import build_tiny_model
from workers import WorkerProcess, poll_until


def schemes(*flags: str, **environ: str) -> Any:
    parser = argparse.ArgumentParser()
    configure(parser)
    models = ("--model", "small=org/small", "--model", "large=org/large")
    return _values(parser.parse_args([*models, *flags]), environ)["kv_schemes"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), {}),
        (("--kv", "none"), {}),
        (("--kv", "8"), {"small": "8:64:0", "large": "8:64:0"}),
        (("--kv", "large=4:32:100"), {"large": "4:32:100"}),
        (("--kv", "8", "--kv", "small=none"), {"large": "8:64:0"}),
        (
            ("--kv", "small=config", "--kv", "large=config:9"),
            {"small": "config:0", "large": "config:9"},
        ),
        (("--kv", "large=0-3=4:64@0"), {"large": "0-3=4:64@0"}),
        (("--kv", "0-3=4:64@0"), {"small": "0-3=4:64@0", "large": "0-3=4:64@0"}),
        (("--kv-bits", "8"), {"small": "8:64:0", "large": "8:64:0"}),
        (("--kv-bits", "8", "--kv-start", "5"), {"small": "8:64:5", "large": "8:64:5"}),
        (
            ("--kv-bits", "4", "--kv-group-size", "32", "--kv", "large=8"),
            {"small": "4:32:0", "large": "8:64:0"},
        ),
    ],
)
def test_flags_say_the_scheme_of_each_model(flags: tuple[str, ...], found: dict[str, str]) -> None:
    assert schemes(*flags) == found


def test_variables_say_it_too_and_flags_come_first() -> None:
    assert schemes(TENUTO_KV="8 large=4") == {"small": "8:64:0", "large": "4:64:0"}
    assert schemes("--kv", "small=4", TENUTO_KV="8") == {"small": "4:64:0"}
    assert schemes(TENUTO_KV_BITS="8", TENUTO_KV_START="7")["small"] == "8:64:7"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv", "q8"), "--kv: 'q8' is not BITS"),
        (("--kv", "5"), "--kv: bits must be 4 or 8, is 5"),
        (("--kv", "large=5"), "--kv large: bits must be 4 or 8, is 5"),
        (("--kv", "large="), "--kv large: '' is not BITS"),
        (("--kv", "huge=8"), "--kv: no --model is named 'huge'"),
        (("--kv", "large=8", "--kv", "large=4"), "--kv: 'large' is given twice"),
        (("--kv", "8", "--kv", "4"), "--kv: '4' is the second scheme for all models"),
        (("--kv-bits", "8", "--kv", "4"), "--kv: '4' is the second scheme for all models"),
        (("--kv-bits", "eight"), "--kv-bits: 'eight' is not a whole number"),
        (("--kv-bits", "3"), "--kv-bits: bits must be 4 or 8, is 3"),
        (("--kv-bits", "8", "--kv-group-size", "48"), "--kv-group-size: group_size must be"),
        (("--kv-bits", "8", "--kv-start", "-1"), "--kv-start: '-1' is not a whole number"),
        (("--kv-bits", "8", "--kv-start", "9999999999"), "--kv-start: start must be from 0"),
        (("--kv-group-size", "64"), "--kv-group-size: needs --kv-bits"),
        (("--kv-start", "64"), "--kv-start: needs --kv-bits"),
    ],
)
def test_a_bad_flag_is_named(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schemes(*flags)
    assert str(caught.value).startswith(said)


def test_a_bad_variable_is_named() -> None:
    for name, value in (("TENUTO_KV", "q8"), ("TENUTO_KV_BITS", "3")):
        with pytest.raises(ConfigError, match=f"^{name}: "):
            schemes(**{name: value})


def test_settings_reach_the_child_with_their_schemes(tmp_path: Path) -> None:
    settings = WorkerSettings(
        models={"m": "x"}, redis_url="", data_dir=tmp_path, kv_schemes={"m": "8:64:0"}
    )
    assert WorkerSettings.from_json(settings.to_json()) == settings


# -- workers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("wide"), "gemma3_text", wide=True)


Start = Callable[..., StepWorker]


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, wide_model: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(scheme: str | None, **settings: Any) -> StepWorker:
            schemes = {} if scheme is None else {MODEL: scheme}
            worker = StepWorker(
                redis_url,
                jobs.keys.namespace,
                wide_model,
                tmp_path,
                kv_schemes=schemes,
                **settings,
            )
            return stack.enter_context(worker)

        yield begin


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def test_the_fingerprint_tells_schemes_apart_and_rows_count_their_bytes(start: Start) -> None:
    workers = [start(scheme) for scheme in (None, "8:32:0", "4:32:0", "4:32:64")]
    pools = [worker.rooms.pool for worker in workers]
    assert len({pool.fingerprint(MODEL) for pool in pools}) == 4
    needs = [pool._hosted[MODEL].need(5000) for pool in pools]
    assert needs[0] > 2 * needs[1] > 2 * needs[2]
    for worker, pool in zip(workers, pools, strict=True):
        assert worker.engine.geometry.fingerprint == pool.fingerprint(MODEL)
        assert worker.engine.row_cost == pool.facts[MODEL].row_cost


def test_a_job_goes_on_exactly_in_a_worker_of_its_scheme(jobs: JobQueue, start: Start) -> None:
    expected = run_alone(start("8:32:20").engine)
    job = jobs.submit(prompt=PROMPT, max_tokens=60, ignore_eos=True)
    first = start("8:32:20")
    first.claim()
    first.decode(30)
    first.publish()
    first.save()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start("8:32:20", name="host-dir-1")
    assert heir.claim()
    heir.finish()
    assert [token.token for token in jobs.tokens(job)] == expected
    assert end_of(jobs, job).exactness == "exact"


PROMPT = (5, 6, 7, 8)


def run_alone(engine: Engine) -> list[int]:
    options = GenerationOptions(max_tokens=60, ignore_eos=True)
    return [token.token for token in engine.generate(list(PROMPT), options)]


def test_another_scheme_is_named_and_what_was_published_stands(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(prompt=PROMPT, max_tokens=30, ignore_eos=True)
    first = start("8:32:0")
    first.claim()
    first.decode(12)
    first.publish()
    first.save()
    published = jobs.tokens(job)
    jobs.scripts.take_back(job, "host-dir-0")
    other = start("4:32:0", name="host-dir-1", exact_wait_seconds=0.0)
    other.claim()
    other.finish()
    assert jobs.tokens(job)[:12] == published
    end = end_of(jobs, job)
    assert (end.state, end.exactness) == ("completed", "recomputed")
    assert "kv_scheme: 4:32:0 here, 8:32:0 there" in (end.exactness_reason or "")


def test_a_model_that_cannot_have_its_scheme_is_broken_by_name(start: Start) -> None:
    with pytest.raises(ConfigError, match="head dimension of 32, no multiple of the group size 64"):
        start("8:64:0")


def test_a_killed_worker_process_goes_on_with_quantized_caches(
    redis_url: str, jobs: JobQueue, wide_model: Path, tmp_path: Path
) -> None:
    job = jobs.submit(prompt=PROMPT, max_tokens=160, ignore_eos=True)
    worker = WorkerProcess(
        wide_model,
        redis_url,
        tmp_path / "data",
        namespace=jobs.keys.namespace,
        flags=("--kv-bits", "4", "--kv-group-size", "32", "--kv-start", "50"),
    )
    try:
        poll_until(lambda: int(jobs.job(job).get("tokens", "0")) >= 80, "80 tokens", every=0.005)
        worker.kill_child()
        poll_until(lambda: jobs.state(job) == "completed", "the end")
        assert worker.wait_for("model loaded")["kv_scheme"] == "4:32:50"
    finally:
        worker.close()
    engine = Engine.load(wide_model, kv_scheme="4:32:50")
    options = GenerationOptions(max_tokens=160, ignore_eos=True)
    expected = [token.token for token in engine.generate(list(PROMPT), options)]
    assert [token.token for token in jobs.tokens(job)] == expected
    assert end_of(jobs, job).exactness == "exact"
    assert jobs.job(job)["epoch"] == "2"
