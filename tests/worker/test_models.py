"""Many models in one worker: loaded and unloaded by need, within a memory budget."""

from __future__ import annotations

import gc
import math
import os
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from model_clock import ModelClock
from model_shop import NAMES, ROW, Budget, Shop, run_job, warm
from tenuto_client import LimitExceeded, SyncClient, unpack_worker
from tenuto_engine import model_facts
from tenuto_worker._errors import ConfigError
from tenuto_worker._hosted import Hosted, ModelState
from tenuto_worker._run import Stop

# -- which models are in memory ---------------------------------------------------------


def test_at_the_start_models_are_loaded_in_order_while_they_fit(shop: Shop, budget: Budget) -> None:
    assert warm(shop.worker(budget(2, 0))) == {"a", "b"}
    assert warm(shop.worker(budget(3, 0), name="host-dir-1")) == {"a", "b", "c"}


def test_a_job_of_a_cold_model_is_claimed_and_the_least_recently_used_one_makes_room(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(2, 1))
    run_job(shop, worker, "a")
    job = run_job(shop, worker, "c")
    assert shop.state(job) == "completed"
    assert warm(worker) == {"a", "c"}
    run_job(shop, worker, "b")
    assert warm(worker) == {"b", "c"}


def test_three_models_take_turns_in_memory_for_two_and_all_jobs_end(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(2, 1))
    for model in "abcacbbca":
        assert shop.state(run_job(shop, worker, model, max_tokens=5)) == "completed"
        assert model in warm(worker)
        assert len(warm(worker)) == 2


def test_a_model_with_a_run_is_never_unloaded(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(2, 2, tokens=300))
    shop.submit("a", max_tokens=290)
    assert worker.claim("a")
    for model in "bcbc":
        shop.submit(model, max_tokens=10)
        assert worker.claim(model)
        while worker.rooms.runs.of_model(model):
            worker.decode(1)
            worker.publish()
        assert "a" in warm(worker)
    assert worker.run.model == "a"


def test_a_claimed_job_that_is_not_prepared_yet_keeps_its_model(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(2, 2))
    for model in ("a", "b"):
        shop.submit(model)
        assert worker.rooms.claimer.claim_one(model)
    shop.submit("c")
    assert not worker.rooms.claimer.has_slot("c")
    worker.rooms.preparer.turn()
    worker.rooms.preparer.turn()
    worker.finish()
    assert worker.rooms.claimer.has_slot("c")


def test_neighbours_decode_on_while_another_model_loads(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(2, 2))
    # mlx-lm reads this file where it is there, so the load lasts until somebody writes it.
    gate = shop.folders["c"] / "generation_config.json"
    os.mkfifo(gate)
    first, second = shop.submit("a"), shop.submit("c")
    assert worker.claim("a")
    assert worker.rooms.claimer.claim_one("c")
    loader = threading.Thread(target=worker.rooms.pool.turn)
    loader.start()
    opened = os.open(gate, os.O_WRONLY)  # returns once the loader reads
    try:
        worker.decode(40)
        assert loader.is_alive()
        assert worker.rooms.pool.states()["c"] is ModelState.LOADING
        assert worker.rooms.pool.loads.since is not None
        # Whoever reads it again is not to wait.
        gate.unlink()
        gate.write_text("{}")
    finally:
        os.write(opened, b"{}")
        os.close(opened)
    loader.join(20)
    worker.rooms.preparer.turn()
    worker.finish()
    assert [shop.state(job) for job in (first, second)] == ["completed", "completed"]


def test_neighbours_keep_half_their_rate_while_a_job_of_another_model_reads_its_prompt(
    shop: Shop, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = shop.worker(budget(2, 2, tokens=400))
    clock = ModelClock(monkeypatch)
    shop.submit("a", max_tokens=300)
    shop.submit("b", prompt=tuple(range(5, 205)), max_tokens=5)
    for model in ("a", "b"):
        assert worker.claim(model)
        clock.drive(worker.engine_of(model), seconds=float)
    talking, reading = worker.runs
    while not talking.tokens:
        worker.rooms.decoder.turn()
    began, had = clock.now, len(talking.tokens)
    while not reading.tokens:
        worker.rooms.decoder.turn()
    chunk = worker.engine_of("b").geometry.chunk_size
    assert len(talking.tokens) - had >= (clock.now - began) / 2 - chunk


def test_the_memory_of_an_unloaded_model_is_really_given_back(shop: Shop, budget: Budget) -> None:
    gc.collect()  # what other tests have left
    before = mx.get_active_memory()
    worker = shop.worker(budget(1, 1))
    levels = []
    for model in "abcabc":
        run_job(shop, worker, model, max_tokens=5)
        levels.append(mx.get_active_memory() - before)
    weights = worker.rooms.pool.engine("c").weight_bytes
    assert all(weights <= level < 1.05 * weights for level in levels)


def test_results_are_exact_across_an_unload_and_a_reload(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(1, 1))
    whole = run_job(shop, worker, "a", temperature=0.9)
    fingerprint = worker.engine_of("a").geometry.fingerprint

    half = shop.submit("a", temperature=0.9)
    assert worker.claim("a")
    worker.decode(20)
    worker.publish()
    worker.run.ask_to_stop(Stop.DRAIN)
    worker.settle()
    run_job(shop, worker, "b")
    assert warm(worker) == {"b"}
    assert worker.claim("a")
    worker.finish()

    assert worker.engine_of("a").geometry.fingerprint == fingerprint
    assert shop.tokens(half) == shop.tokens(whole)
    assert shop.queues["a"].job(half)["exactness"] == "exact"


def test_a_cancel_while_the_model_loads_ends_the_job_at_once(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(1, 1))
    job = shop.submit("c")
    assert worker.rooms.claimer.claim_one("c")
    assert shop.queues["c"].cancel(job) == "flagged"
    worker.run.ask_to_stop(Stop.CANCEL)
    worker.rooms.pool.wake()
    worker.publish()
    assert shop.state(job) == "cancelled"
    assert not worker.runs


def test_a_drain_while_the_model_loads_hands_the_job_back(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(1, 1))
    job = shop.submit("c")
    assert worker.rooms.claimer.claim_one("c")
    worker.run.ask_to_stop(Stop.DRAIN)
    worker.rooms.pool.wake()
    worker.publish()
    assert shop.state(job) == "queued"


# -- models that cannot be loaded -------------------------------------------------------


def damage(folder: Path) -> bytes:
    """Cut the weights short; returns what they were."""
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    return whole


def test_a_model_whose_files_are_damaged_fails_its_jobs_and_not_the_worker(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(2, 1))
    damage(shop.folders["c"])
    job = shop.submit("c")
    for attempt in range(3):
        assert shop.state(job) == "queued", attempt
        assert worker.rooms.claimer.claim_one("c")
        worker.rooms.pool.turn()
        worker.publish()
    assert shop.state(job) == "failed"
    error = shop.queues["c"].job(job)["error"]
    assert error.count("model c cannot be loaded") == 3
    assert "model.safetensors" in error
    assert set(worker.rooms.pool.broken()) == {"c"}
    assert shop.state(run_job(shop, worker, "a")) == "completed"


def test_a_broken_model_is_left_alone_for_a_while_and_longer_each_time() -> None:
    hosted = Hosted("c", "path")
    pauses = [hosted.broke("damaged", 100.0, 10.0) for _ in range(8)]
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    assert hosted.rests(399.0)
    assert not hosted.rests(400.0)


def test_nothing_is_claimed_for_a_model_that_was_found_broken(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(2, 1), load_retry_seconds=60)
    damage(shop.folders["c"])
    shop.submit("c")
    assert worker.rooms.claimer.claim_one("c")
    worker.rooms.pool.turn()
    worker.publish()
    assert not worker.rooms.claimer.has_slot("c")
    assert worker.rooms.claimer.has_slot("a")


def test_a_worker_announces_which_models_it_cannot_load(shop: Shop) -> None:
    damage(shop.folders["a"])
    shop.worker()
    client, keys = shop.queues["a"].client, shop.queues["a"].keys
    packed: Any = client.hget(keys.workers(), "host-dir-0")
    broken = unpack_worker("host-dir-0", packed).broken
    assert list(broken) == ["a"]
    assert "model.safetensors" in broken["a"]


def test_a_model_whose_files_were_mended_is_loaded_again(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(2, 1))
    whole = damage(shop.folders["c"])
    job = shop.submit("c")
    assert worker.rooms.claimer.claim_one("c")
    worker.rooms.pool.turn()
    worker.publish()
    (shop.folders["c"] / "model.safetensors").write_bytes(whole)
    assert worker.claim("c")
    worker.finish()
    assert shop.state(job) == "completed"
    assert worker.rooms.pool.broken() == {}


def test_one_broken_model_of_several_at_the_start_leaves_the_others_served(shop: Shop) -> None:
    whole = damage(shop.folders["a"])
    worker = shop.worker()
    assert set(worker.rooms.pool.broken()) == {"a"}
    assert shop.state(run_job(shop, worker, "b")) == "completed"
    (shop.folders["a"] / "model.safetensors").write_bytes(whole)
    assert shop.state(run_job(shop, worker, "a")) == "completed"


def test_a_mended_model_is_noticed_without_a_job(shop: Shop) -> None:
    whole = damage(shop.folders["a"])
    worker = shop.worker()
    assert "a" not in worker.rooms.pool.facts
    (shop.folders["a"] / "model.safetensors").write_bytes(whole)
    worker.rooms.pool.turn()
    assert "a" in worker.rooms.pool.facts
    assert worker.rooms.pool.fingerprint("a")


def test_a_worker_of_which_no_model_can_be_loaded_does_not_start(shop: Shop) -> None:
    for folder in shop.folders.values():
        damage(folder)
    with pytest.raises(ConfigError, match="--model a: ") as raised:
        shop.worker()
    for name in NAMES:
        assert f"--model {name}" in str(raised.value)


def test_a_model_larger_than_the_budget_is_refused_with_the_numbers(shop: Shop) -> None:
    with pytest.raises(ConfigError, match=r"its weights take .* memory budget of 97\.7 KiB"):
        shop.worker(100_000)


# -- rows -------------------------------------------------------------------------------


def test_a_job_waits_in_its_queue_while_other_rows_have_the_memory(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(2, 1))
    first, second = shop.submit("a"), shop.submit("b")
    assert worker.claim("a")
    assert not worker.claim("b")
    worker.finish()
    assert worker.claim("b")
    worker.finish()
    assert [shop.state(job) for job in (first, second)] == ["completed", "completed"]


def test_a_text_that_turns_out_too_long_for_now_waits_and_is_not_counted_against(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(2, 2))
    first = shop.submit("a")
    second = shop.submit("b", prompt="x" * 100, max_tokens=20)
    assert worker.claim("a")
    assert worker.claim("b")
    worker.publish()
    assert shop.state(second) == "queued"
    assert shop.queues["b"].job(second).get("stalls", "0") == "0"
    # Its length is known now.
    assert not worker.rooms.claimer.claim_one("b")
    worker.finish()
    assert worker.claim("b")
    worker.finish()
    assert [shop.state(job) for job in (first, second)] == ["completed", "completed"]


def test_models_without_runs_are_unloaded_for_the_row_of_another(
    shop: Shop, budget: Budget
) -> None:
    worker = shop.worker(budget(3, 0))
    assert warm(worker) == {"a", "b", "c"}
    assert shop.state(run_job(shop, worker, "c")) == "completed"
    assert warm(worker) == {"b", "c"}


def test_room_is_what_a_row_may_still_take(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(1, 2))
    pool = worker.rooms.pool
    alone = pool.room("a")
    assert alone is not None
    assert alone == pool.max_context("a")
    assert alone >= 2 * ROW
    shop.submit("a")
    assert worker.claim("a")
    left = pool.room("a")
    assert left is not None
    assert ROW <= left < alone
    worker.finish()
    assert pool.room("a") == alone


def test_what_a_cold_model_has_room_for_is_announced_and_submit_refuses_more(
    shop: Shop, budget: Budget, redis_url: str, namespace: str
) -> None:
    worker = shop.worker(budget(1, 1))
    pool = worker.rooms.pool
    most = pool.max_context("c")
    with SyncClient(redis_url, namespace=namespace) as client:
        said = {info.name: info.max_context for info in client.models()}
        assert said == dict.fromkeys(NAMES, most)
        assert most is not None
        with pytest.raises(LimitExceeded, match=f"{most + 1} tokens .* over the {most} that c"):
            client.submit("c", [1, 2, 3], max_tokens=most - 2)
        job = client.submit("c", [1, 2, 3], max_tokens=most - 3)
    assert "c" not in warm(worker)
    assert worker.claim("c")
    assert pool.max_context("c") == most
    worker.run.ask_to_stop(Stop.DRAIN)
    worker.settle()
    assert shop.state(job.id) == "queued"


def test_without_a_budget_there_is_no_limit_to_the_room(shop: Shop) -> None:
    worker = shop.worker()
    assert worker.rooms.pool.room("a") is None
    assert worker.rooms.pool.max_context("a") is None


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4), "Tell me."])
def test_a_job_that_can_never_have_memory_is_refused_with_the_numbers(
    shop: Shop, budget: Budget, prompt: Any
) -> None:
    worker = shop.worker(budget(1, 1))
    most = worker.rooms.pool.max_context("a")
    job = shop.submit("a", prompt=prompt, max_tokens=3000)
    assert worker.rooms.claimer.claim_one("a")
    worker.rooms.preparer.turn()
    worker.publish()
    assert shop.state(job) == "failed"
    error = shop.queues["a"].job(job)["error"]
    assert error.startswith("max_tokens: 3000 do not fit into memory")
    assert f"no worker has memory for more than {most} of prompt and answer" in error


def test_a_job_too_long_here_waits_while_a_living_worker_has_more_memory(
    shop: Shop, budget: Budget
) -> None:
    large = shop.worker(math.inf, name="host-dir-1")
    worker = shop.worker(budget(1, 1))
    large.rooms._announcer.announce()
    job = shop.submit("a", max_tokens=3000)
    assert not worker.rooms.claimer.claim_one("a")
    assert shop.state(job) == "queued"
    assert large.claim("a")


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4), "Tell me."])
def test_a_job_waits_while_the_only_worker_with_so_much_memory_is_started_again(
    shop: Shop, budget: Budget, prompt: Any
) -> None:
    large = shop.worker(math.inf, name="host-dir-1", widest_seconds=300)
    small = shop.worker(budget(1, 1), widest_seconds=300)
    job = shop.submit("a", prompt=prompt, max_tokens=3000)
    large.rooms._announcer.retract()
    small.rooms._announcer.announce()
    small.claim("a")
    small.settle()
    assert not small.rooms.claimer.claim_one("a")
    assert shop.state(job) == "queued"
    again = shop.worker(math.inf, name="host-dir-1", widest_seconds=300)
    assert again.claim("a")


def test_facts_name_the_models_that_are_not_loaded(shop: Shop, budget: Budget) -> None:
    worker = shop.worker(budget(1, 0))
    assert set(worker.rooms.pool.facts) == set(NAMES)
    facts = model_facts(shop.folders["c"])
    assert worker.rooms.pool.fingerprint("c") == facts.geometry.fingerprint
