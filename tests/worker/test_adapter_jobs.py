"""Jobs with LoRA adapters: who takes them, what they give, and what outlives a worker."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_shop import write_adapter
from job_queue import MODEL, JobQueue
from model_shop import Shop
from step_worker import StepWorker
from tenuto_client import ModelInfo, WorkerInfo, pack_announcement, unpack_model, unpack_worker
from tenuto_client._command import main
from tenuto_client._records import EndEvent
from tenuto_engine import Engine, GenerationOptions
from tenuto_worker import WorkerSettings, _model_adapters
from tenuto_worker._answers import Left
from tenuto_worker._calls import head_call, preempt_call, suspect_call
from tenuto_worker._commands.worker import _values, configure
from tenuto_worker._errors import ConfigError
from tenuto_worker._identity import reach_of

Start = Callable[..., StepWorker]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "logprobs": 3}


@pytest.fixture
def adapters(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder with two adapters of the model."""
    folder = tmp_path / "adapters"
    write_adapter(folder, "poet", tiny_model)
    write_adapter(folder, "clerk", tiny_model, seed=2, suffixes=None)
    return folder


@pytest.fixture
def start(
    jobs: JobQueue, redis_url: str, tiny_model: Path, adapters: Path, tmp_path: Path
) -> Iterator[Start]:
    """`start(name, folder=...)`: a worker of one data dir; without adapters if `folder` is None."""
    workers = []

    def begin(
        name: str = "host-dir-0", folder: Path | None = adapters, **settings: Any
    ) -> StepWorker:
        if folder is not None:
            settings["adapter_folders"] = {MODEL: str(folder)}
        where = (redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data")
        workers.append(StepWorker(*where, name=name, **settings))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def model(jobs: JobQueue) -> ModelInfo:
    packed: Any = jobs.client.hget(jobs.keys.models(), MODEL)
    return unpack_model(MODEL, packed)


def worker_info(jobs: JobQueue, name: str) -> WorkerInfo:
    packed: Any = jobs.client.hget(jobs.keys.workers(), name)
    return unpack_worker(name, packed)


# -- what they give --------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("tokens", [1, 13])
def test_what_a_dead_worker_began_side_by_side_another_ends_bit_for_bit(
    jobs: JobQueue, start: Start, adapters: Path, tiny_model: Path, tokens: int, pipelined: bool
) -> None:
    asked: tuple[str | None, ...] = ("poet", None, "clerk")
    began = {name: jobs.submit(adapter=name, **OPTIONS) for name in asked}
    first = start(slots=3, pipelined=pipelined)
    for _ in asked:
        first.claim()
    while min(len(run.tokens) for run in first.runs) < tokens:
        first.rooms.decoder.turn()
    first.publish()
    first.save()
    for job in began.values():
        assert jobs.tokens(job)
        jobs.lose_lease(job)
        jobs.scripts.take_back(job, "host-dir-0")
    other = start("host-dir-1", slots=3)
    for _ in asked:
        assert other.claim()
    other.finish()
    engine = Engine.load(tiny_model, adapters=adapters)
    prompt = engine.encode_prompt("Tell me.")
    for name, job in began.items():
        expected = list(
            engine.generate(
                prompt, GenerationOptions(**OPTIONS, seed=7, ignore_eos=True, adapter=name)
            )
        )
        made = jobs.tokens(job)
        assert [(t.token, t.text, t.logprob, t.top_logprobs) for t in made] == [
            (t.token, t.text, t.logprob, t.top_logprobs) for t in expected
        ]
        assert (end_of(jobs, job).state, end_of(jobs, job).exactness) == ("completed", "exact")
        stored = jobs.field(job, "fingerprint")
        assert stored == engine.geometry_of(name).fingerprint
    assert len({jobs.field(job, "fingerprint") for job in began.values()}) == 3


def test_the_preparer_loads_so_that_rows_need_not_wait(jobs: JobQueue, start: Start) -> None:
    worker = start()
    jobs.submit(adapter="poet", **OPTIONS)
    worker.claim()
    (plan,) = worker.rooms.decoder._inbox
    assert all(road.options.adapter is worker.engine.load_adapter("poet") for road in plan.roads)


def test_prompts_that_begin_alike_share_what_was_computed_with_the_same_adapter(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=1)
    prompt = tuple(5 + (7 * place) % 250 for place in range(300))
    found = []
    for name in ("poet", "poet", "clerk", None):
        jobs.submit(adapter=name, prompt=prompt, max_tokens=2)
        worker.claim()
        worker.rooms.decoder.turn()
        (host,) = worker.rooms.decoder.hosts.values()
        found.append(host.rows[0].sequence.stats.cached_tokens)
        worker.finish()
        assert worker.rooms.pool.prefixes is not None
        worker.rooms.pool.prefixes.flush()
    assert found == [0, 256, 0, 0]


# -- who takes them --------------------------------------------------------------------


def test_a_worker_without_the_adapter_leaves_the_job_and_takes_the_one_behind_it(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(adapter="poet", priority=5, max_tokens=5)
    behind = jobs.submit(max_tokens=5)
    without = start(folder=None)
    assert without.claim()
    without.finish()
    assert (jobs.state(job), jobs.state(behind)) == ("queued", "completed")
    assert not without.claim()
    assert jobs.leave() == [Left(job, 0.0, "adapter")]
    assert jobs.leave(adapters={"clerk": "f"}) == [Left(job, 0.0, "adapter")]
    fields = jobs.job(job)
    assert (fields["stalls"], fields["attempts"]) == ("0", "0")
    having = start("host-dir-1")
    assert having.claim()
    having.finish()
    assert jobs.state(job) == "completed"


def test_nothing_makes_way_for_a_job_that_could_not_be_taken(jobs: JobQueue) -> None:
    job = jobs.submit(adapter="poet", priority=50, hash_fields={"suspect": 0})
    jobs.client.zadd(jobs.keys.suspects(MODEL), {job: 1})
    jobs.backdate(job, "queued_at", 100)
    terms: dict[str, Any] = {"fingerprint": "f", "reach": "dir", "exact_wait_s": 30.0}
    calls: dict[str, Callable[..., Any]] = {
        "apart": lambda **how: preempt_call(
            MODEL, holder="host-dir-0", patience_s=0.0, hold_s=0.0, **terms, **how
        ),
        "suspect": lambda **how: suspect_call(MODEL, **terms, **how),
    }
    poor: dict[str, Any]
    for name, call in calls.items():
        for poor in ({}, {"adapters": {}}, {"adapters": {"clerk": "g"}}):
            assert not jobs.scripts.run(call(**poor)), name
        assert jobs.scripts.run(call(adapters={"poet": "g"})), name
    plain = jobs.submit(adapter="poet")
    for poor in ({}, {"adapters": {"clerk": "g"}}):
        assert jobs.scripts.run(head_call(MODEL, **(terms | poor))) is None
    head = jobs.scripts.run(head_call(MODEL, **terms, adapters={"poet": "g"}))
    assert head is not None
    assert head.job_id == plain


def test_a_job_that_began_with_other_bytes_waits_for_them_and_is_labelled_then(
    jobs: JobQueue, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_adapter(other, "poet", tiny_model, seed=9)
    job, whole = (jobs.submit(adapter="poet", **OPTIONS) for _ in range(2))
    first = start(slots=1)
    first.claim()
    first.decode(9)
    first.publish()
    first.save()
    jobs.scripts.take_back(job, "host-dir-0")
    stranger = start("host-dir-1", other)
    jobs.client.zrem(jobs.keys.suspects(MODEL), job)
    jobs.client.hdel(jobs.keys.job(job), "suspect")
    assert stranger.claim(), "the one that has not begun"
    stranger.finish()
    assert not stranger.claim()
    left = jobs.leave(fingerprint="x", adapters=dict(stranger.rooms.pool.adapters(MODEL)))
    assert [(each.job_id, each.why) for each in left] == [(job, "geometry")]
    jobs.backdate(job, "queued_at", 31)
    assert stranger.claim()
    stranger.finish()
    published = jobs.tokens(job)
    end = end_of(jobs, job)
    assert (end.state, end.exactness) == ("completed", "recomputed")
    assert "adapter_hash" in (end.exactness_reason or "")
    assert len(published) == OPTIONS["max_tokens"]
    assert jobs.tokens(whole) != published


def test_an_adapter_that_comes_needs_no_restart_and_one_that_goes_is_not_offered(
    jobs: JobQueue, start: Start, adapters: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    job = jobs.submit(adapter="bard", max_tokens=5)
    assert not worker.claim()
    write_adapter(adapters, "bard", tiny_model, seed=5)
    worker.rooms.pool.turn()
    assert not worker.claim(), "it looks every few seconds only"
    monkeypatch.setattr(_model_adapters, "_LOOK_S", 0.0)
    worker.rooms.pool.look_at_adapters(MODEL)
    worker.rooms.pool.turn()
    assert worker.claim()
    worker.finish()
    assert jobs.state(job) == "completed"
    (adapters / "bard").rename(adapters.parent / "bard")
    worker.rooms.pool.turn()
    jobs.submit(adapter="bard")
    assert not worker.claim()


def test_one_that_goes_between_claim_and_start_is_left_to_others(
    jobs: JobQueue, start: Start, adapters: Path
) -> None:
    worker = start()
    job, good = jobs.submit(adapter="poet"), jobs.submit(adapter="clerk", max_tokens=4)
    (adapters / "poet").rename(adapters.parent / "poet")
    assert worker.claim()
    worker.publish()
    assert (jobs.state(job), jobs.job(job)["stalls"]) == ("queued", "0")
    assert worker.claim()
    assert not worker.claim(), "it is not taken again"
    worker.finish()
    assert jobs.state(good) == "completed"


def test_one_that_is_damaged_between_claim_and_start_fails_its_job_alone(
    jobs: JobQueue, start: Start, adapters: Path
) -> None:
    worker = start()
    bad, good = jobs.submit(adapter="poet"), jobs.submit(adapter="clerk", max_tokens=4)
    weights = adapters / "poet" / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert worker.claim()
    assert worker.claim()
    worker.finish()
    assert jobs.state(bad) == "failed"
    assert (end_of(jobs, bad).error or "").startswith("adapter: poet: adapters.safetensors: has")
    assert jobs.state(good) == "completed"


def test_a_job_that_has_begun_waits_while_its_adapter_is_damaged(
    jobs: JobQueue, start: Start, adapters: Path
) -> None:
    worker = start()
    job, whole = (jobs.submit(adapter="poet", max_tokens=20) for _ in range(2))
    assert worker.claim()
    worker.decode(5)
    worker.publish()
    worker.save()
    jobs.scripts.take_back(job, "host-dir-0")
    weights = adapters / "poet" / "adapters.safetensors"
    kept = weights.read_bytes()
    other = start(name="host-dir-1")
    weights.write_bytes(kept[:-4])
    assert other.claim()
    other.publish()
    assert jobs.state(job) == "queued"
    assert not other.claim(), "it is not offered any more"
    weights.write_bytes(kept)
    other.rooms.pool.look_at_adapters(MODEL)
    assert other.claim()
    assert other.claim()
    other.finish()
    assert jobs.tokens(job) == jobs.tokens(whole)
    assert end_of(jobs, job).exactness == "exact"


def test_a_job_whose_hash_has_another_adapter_than_its_spec_fails_by_name(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    job = jobs.submit(adapter="poet", max_tokens=4)
    jobs.client.hdel(jobs.keys.job(job), "adapter")
    assert worker.claim()
    worker.publish()
    assert jobs.state(job) == "failed"
    assert "adapter: the job's hash has another one" in (end_of(jobs, job).error or "")


def test_one_that_does_not_fit_is_told_once_and_not_offered(
    jobs: JobQueue,
    start: Start,
    adapters: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_adapter(adapters, "wrong", tiny_model, rank=4)
    config = adapters / "wrong" / "adapter_config.json"
    config.write_text(config.read_text().replace('"rank": 4', '"rank": 8'))
    worker = start()
    worker.rooms.pool.look_at_adapters(MODEL)
    assert sorted(worker.rooms.pool.adapters(MODEL)) == ["clerk", "poet"]
    job = jobs.submit(adapter="wrong")
    assert not worker.claim()
    assert jobs.state(job) == "queued"
    told = capsys.readouterr().out + capsys.readouterr().err
    assert told.count("adapter not usable") == 1


# -- what is announced -----------------------------------------------------------------


def test_the_adapters_of_the_living_workers_are_announced(
    jobs: JobQueue, start: Start, adapters: Path, tiny_model: Path, tmp_path: Path
) -> None:
    first = start("first")
    assert model(jobs).adapters == dict(first.rooms.pool.adapters(MODEL))
    assert sorted(model(jobs).adapters or {}) == ["clerk", "poet"]
    other = tmp_path / "other"
    write_adapter(other, "bard", tiny_model)
    second = start("second", other)
    assert sorted(model(jobs).adapters or {}) == ["bard", "clerk", "poet"]
    assert sorted(worker_info(jobs, "second").adapters[MODEL]) == ["bard"]
    second.rooms._announcer.retract()
    first.rooms.housekeeper.chores()
    assert sorted(model(jobs).adapters or {}) == ["clerk", "poet"]


def test_a_worker_without_any_says_so(jobs: JobQueue, start: Start) -> None:
    start(folder=None)
    assert model(jobs).adapters == {}


def test_adapters_of_a_worker_that_starts_again_stay_known_for_a_while(
    jobs: JobQueue, start: Start
) -> None:
    having = start("having", widest_seconds=300)
    without = start("without", None, widest_seconds=300)
    having.rooms._announcer.retract()
    without.rooms.housekeeper.chores()
    assert sorted(model(jobs).adapters or {}) == ["clerk", "poet"]
    info = model(jobs)
    assert info.wide_at is not None
    older = replace(info, wide_at=info.wide_at - 301)
    jobs.client.hset(jobs.keys.models(), mapping={MODEL: pack_announcement(older)})
    without.rooms.housekeeper.chores()
    assert model(jobs).adapters == {}


def test_the_command_shows_them_and_refuses_others(
    jobs: JobQueue, start: Start, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]

    def say(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*words, *where])
        told = capsys.readouterr()
        return code, told.out, told.err

    assert "; adapters clerk, poet" in say("models")[1]
    assert '"adapters":["clerk","poet"]' in say("models", "--json")[1]
    assert f"adapters clerk, poet of {MODEL}" in say("doctor")[1]
    code, _, error = say("submit", MODEL, "Hello", "--adapter", "poett")
    assert code == 2
    assert f"adapter: no worker of {MODEL} has poett (did you mean poet?)" in error
    code, job, _ = say("submit", MODEL, "Hello", "--adapter", "poet")
    assert code == 0
    assert '"adapter":"poet"' in say("status", job.strip(), "--json")[1]
    assert jobs.field(job.strip(), "adapter") == "poet"


# -- memory, and what was lost ---------------------------------------------------------


def test_rows_count_the_bytes_of_the_largest_adapter(
    shop: Shop, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapters", "small", folders["a"])
    write_adapter(tmp_path / "adapters", "large", folders["a"], rank=8, suffixes=None)
    plain = shop.worker()
    worker = shop.worker(name="host-dir-1", adapter_folders={"a": str(tmp_path / "adapters")})
    engine = worker.engine_of("a")
    largest = engine.load_adapter("large").nbytes
    assert largest > engine.load_adapter("small").nbytes
    hosted, without = (each.rooms.pool._hosted["a"] for each in (worker, plain))
    assert hosted.need(50) == without.need(50) + largest
    assert hosted.need(0) == 0
    size = without.need(1000)
    assert hosted.tokens_in(size) == without.tokens_in(size - largest)


def test_a_job_that_redis_lost_comes_back_with_its_adapter(
    jobs: JobQueue,
    start: Start,
    redis_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, job = (jobs.submit(adapter="poet", **OPTIONS) for _ in range(2))
    (tmp_path / "data").mkdir()
    reach = reach_of(tmp_path / "data")
    dead = start(slots=1, reach=reach)
    dead.claim()
    dead.finish()
    expected = jobs.tokens(whole)
    dead.claim()
    dead.decode(13)
    dead.publish()
    dead.save()
    jobs.client.delete(*jobs.client.scan_iter(f"{jobs.keys.namespace}*"))
    where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]
    assert main(["checkpoints", "recover", job, *where, "--data-dir", str(tmp_path / "data")]) == 0
    capsys.readouterr()
    assert (jobs.field(job, "adapter"), jobs.state(job)) == ("poet", "queued")
    heir = start("host-dir-1", reach=reach)
    assert heir.claim()
    heir.finish()
    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "exact"


# -- flags -----------------------------------------------------------------------------


def folders_of(*flags: str, **environ: str) -> Any:
    parser = argparse.ArgumentParser()
    configure(parser)
    models = ("--model", "small=org/small", "--model", "large=org/large")
    return _values(parser.parse_args([*models, *flags]), environ)["adapter_folders"]


def test_flags_say_the_folder_of_each_model(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "a=b"
    one.mkdir()
    two.mkdir()
    assert folders_of() == {}
    assert folders_of("--adapters", str(one)) == {"small": str(one), "large": str(one)}
    assert folders_of("--adapters", f"large={one}") == {"large": str(one)}
    assert folders_of("--adapters", str(two), "--adapters", f"large={one}") == {
        "small": str(two),
        "large": str(one),
    }
    assert folders_of(TENUTO_ADAPTERS=f"{one} large={two}") == {
        "small": str(one),
        "large": str(two),
    }
    assert folders_of("--adapters", f"small={two}", TENUTO_ADAPTERS=str(one)) == {"small": str(two)}
    settings = WorkerSettings(
        models={"m": "x"}, redis_url="", data_dir=tmp_path, adapter_folders={"m": str(one)}
    )
    assert WorkerSettings.from_json(settings.to_json()) == settings


def test_a_bad_flag_is_named(tmp_path: Path) -> None:
    here = str(tmp_path)
    for flags, said in (
        ((f"{here}/none",), f"--adapters: {here}/none: no such folder"),
        ((f"large={here}/none",), f"--adapters large: {here}/none: no such folder"),
        (("large=",), "--adapters large: : no such folder"),
        ((f"huge={here}",), "--adapters: no --model is named 'huge'"),
        ((f"large={here}", f"large={here}"), "--adapters: 'large' is given twice"),
        ((here, here), f"--adapters: {here!r} is the second folder for all models"),
    ):
        with pytest.raises(ConfigError) as caught:
            folders_of(*(part for flag in flags for part in ("--adapters", flag)))
        assert str(caught.value) == said
    with pytest.raises(ConfigError, match=r"^TENUTO_ADAPTERS: "):
        folders_of(TENUTO_ADAPTERS="/no/such/folder")
