"""Jobs that wait for memory: those of a lower priority make way, of whatever model they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from model_shop import ROW, Budget, Shop, run_job, warm
from step_worker import StepWorker
from tenuto_worker._run import Run, Stop

NOW: dict[str, Any] = {"preempt_wait_seconds": 0.0, "preempt_hold_seconds": 0.0}
Start = Callable[..., StepWorker]


@pytest.fixture
def start(shop: Shop, budget: Budget) -> Start:
    """Starts workers with memory for so many models and rows."""

    def begin(models: int, rows: int, **settings: Any) -> StepWorker:
        return shop.worker(budget(models, rows), **{**NOW, **settings})

    return begin


def turn(worker: StepWorker) -> None:
    """One round of the claimer; what it took is loaded and prepared."""
    before = set(worker.runs)
    worker.rooms.claimer.turn()
    for run in set(worker.runs) - before:
        if run.model not in warm(worker):
            worker.rooms.pool.turn()
    for _ in set(worker.runs) - before:
        worker.rooms.preparer.turn()


def begin(worker: StepWorker) -> None:
    """Take what there is memory for, and publish a token of each."""
    turn(worker)
    while any(run.end is None and run.sent == run.claim.tokens for run in worker.runs):
        worker.rooms.decoder.turn()
        worker.rooms.publisher.turn()


def going(worker: StepWorker) -> set[str]:
    """The jobs that are to make way."""
    return {run.job_id for run in worker.runs if run.stop is Stop.PREEMPT}


def running(worker: StepWorker) -> set[str]:
    return {run.job_id for run in worker.runs}


def test_a_job_of_another_model_gets_the_memory_of_a_less_important_one_which_goes_on_exactly(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 1)
    undisturbed = shop.tokens(run_job(shop, worker, "a"))
    low = shop.submit("a")
    begin(worker)
    high = shop.submit("b", priority=1)
    turn(worker)
    assert going(worker) == {low}
    worker.settle()
    turn(worker)
    assert running(worker) == {high}
    worker.finish()
    turn(worker)
    worker.finish()
    assert shop.state(high) == shop.state(low) == "completed"
    assert shop.tokens(low) == undisturbed
    assert shop.queues["a"].field(low, "preemptions") == "1"
    assert shop.queues["a"].field(low, "stalls") == "0"


@pytest.mark.parametrize("priority", [-1, 0])
def test_nothing_makes_way_for_the_same_or_a_lower_priority(
    shop: Shop, start: Start, priority: int
) -> None:
    worker = start(1, 1)
    shop.submit("a")
    begin(worker)
    shop.submit("b", priority=priority)
    turn(worker)
    assert going(worker) == set()


def test_within_a_model_a_row_makes_way_for_one_that_is_more_important(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 2, slots=3)
    first, second = shop.submit("a"), shop.submit("a")
    begin(worker)
    begin(worker)
    assert running(worker) == {first, second}
    shop.submit("a", priority=1)
    turn(worker)
    assert going(worker) == {second}


def test_as_few_runs_as_will_do_make_way_the_least_important_first(
    shop: Shop, start: Start
) -> None:
    worker = start(2, 3, slots=2)
    kept = shop.submit("a", priority=4)
    begin(worker)
    gone = {shop.submit("b", priority=n) for n in (1, 3)}
    begin(worker)
    begin(worker)
    assert running(worker) == {kept, *gone}
    shop.submit("c", priority=5)
    turn(worker)
    # The weights of b, which both have to leave; the row alone would have been that of one.
    assert going(worker) == gone


def test_a_run_that_would_not_help_goes_on(shop: Shop, start: Start) -> None:
    worker = start(2, 3)
    stays = {shop.submit("a", priority=priority) for priority in (9, 0)}
    begin(worker)
    goes = shop.submit("b", priority=1)
    begin(worker)
    assert running(worker) == {*stays, goes}
    shop.submit("c", priority=5)
    turn(worker)
    # Of model a a row would come free, and nothing of its weights.
    assert going(worker) == {goes}


def test_where_too_much_is_more_important_nothing_makes_way_and_others_go_on(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 2)
    shop.submit("a", priority=9)
    begin(worker)
    shop.submit("b", priority=5)
    other = shop.submit("a", priority=1)
    begin(worker)
    assert other in running(worker)
    turn(worker)
    assert going(worker) == set()


def test_what_is_less_important_is_not_taken_in_front_of_what_waits(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 2, preempt_hold_seconds=60.0)
    low = shop.submit("a")
    begin(worker)
    shop.submit("b", priority=5)
    other = shop.submit("a")
    turn(worker)
    assert running(worker) == {low}
    more = shop.submit("a", priority=6)
    turn(worker)
    assert running(worker) == {low, more}
    assert shop.state(other) == "queued"


def test_the_most_important_model_is_claimed_for_first(shop: Shop, start: Start) -> None:
    worker = start(1, 1)
    shop.submit("a")
    high = shop.submit("c", priority=1)
    turn(worker)
    assert running(worker) == {high}


def test_a_smaller_job_does_not_take_what_comes_free_for_a_larger_one(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 3, slots=4)
    rows = [shop.submit("a") for _ in range(3)]
    for _ in rows:
        begin(worker)
    large = shop.submit("a", priority=5, max_tokens=2 * ROW - 4)
    shop.submit("a", priority=4)
    turn(worker)
    assert going(worker) == set(rows[1:])
    release(worker, rows[2])
    turn(worker)
    assert running(worker) == {rows[0], rows[1]}
    worker.settle()
    turn(worker)
    assert running(worker) == {rows[0], large}


def release(worker: StepWorker, job_id: str) -> None:
    """One run is gone, and the others are not yet."""
    run = worker.rooms.runs.get(job_id)
    assert run is not None
    others = [each for each in worker.runs if each is not run]
    stops = {each: each.stop for each in others}
    for each in others:
        each._stop = None
    worker.settle()
    for each, stop in stops.items():
        each._stop = stop


def test_a_run_goes_on_until_it_has_a_new_token_and_has_had_its_time(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 1, preempt_hold_seconds=5.0)
    shop.submit("a")
    turn(worker)
    shop.submit("b", priority=1)
    run = worker.run
    age(run, 100.0)
    turn(worker)
    assert run.stop is None
    worker.decode(1)
    worker.publish()
    age(run, -100.0)
    turn(worker)
    assert run.stop is None
    age(run, 5.0)
    turn(worker)
    assert run.stop is Stop.PREEMPT


def test_each_time_that_a_job_made_way_doubles_what_it_has(shop: Shop, start: Start) -> None:
    worker = start(1, 1, preempt_hold_seconds=5.0)
    low = shop.submit("a")
    shop.queues["a"].client.hset(shop.queues["a"].keys.job(low), "preemptions", "2")
    begin(worker)
    shop.submit("b", priority=1)
    age(worker.run, 19.0)
    turn(worker)
    assert going(worker) == set()
    age(worker.run, 2.0)
    turn(worker)
    assert going(worker) == {low}


def age(run: Run, seconds: float) -> None:
    """As if it had been claimed so much earlier."""
    run.claimed_at -= seconds


def test_a_free_worker_has_time_to_take_it_first(shop: Shop, start: Start) -> None:
    worker = start(1, 1, preempt_wait_seconds=2.0)
    low = shop.submit("a")
    begin(worker)
    high = shop.submit("b", priority=1)
    turn(worker)
    assert going(worker) == set()
    long_ago(shop, high, 2.0)
    turn(worker)
    assert going(worker) == {low}


def test_only_one_worker_makes_room_for_a_job(shop: Shop, budget: Budget) -> None:
    workers = [shop.worker(budget(1, 1), name=f"host-dir-{n}", **NOW) for n in range(2)]
    for worker in workers:
        shop.submit("a")
        begin(worker)
    shop.submit("b", priority=1)
    for worker in workers:
        turn(worker)
    assert [len(going(worker)) for worker in workers] == [1, 0]


# -- turns of models, where no job is more important than the others ----------------------


def test_a_model_that_waits_for_memory_gets_its_turn_though_others_are_never_idle(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 2, memory_wait_seconds=30.0)
    shop.submit("a")
    begin(worker)
    waiting = shop.submit("c")
    more = [shop.submit("a") for _ in range(2)]
    begin(worker)
    assert running(worker) > {more[0]}
    had_turn(worker, 60.0)
    worker.finish()
    begin(worker)
    assert running(worker) == {more[1]}
    long_ago(shop, waiting, 30.0)
    shop.submit("a")
    turn(worker)
    assert running(worker) == {more[1]}
    assert going(worker) == set()
    worker.finish()
    turn(worker)
    assert running(worker) == {waiting}


def test_a_model_that_was_loaded_keeps_its_memory_for_a_turn(shop: Shop, start: Start) -> None:
    worker = start(1, 1, memory_wait_seconds=30.0)
    waiting = shop.submit("c")
    long_ago(shop, waiting, 1000.0)
    first, second = shop.submit("a"), shop.submit("a")
    turn(worker)
    assert running(worker) == {first}
    worker.finish()
    turn(worker)
    assert running(worker) == {second}
    worker.finish()
    shop.submit("a")
    had_turn(worker, 30.0)
    turn(worker)
    assert running(worker) == {waiting}


def test_of_two_models_that_wait_the_one_whose_job_waits_longest_comes_first(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 1, memory_wait_seconds=30.0)
    younger, older = shop.submit("b"), shop.submit("c")
    shop.submit("a")
    long_ago(shop, younger, 40.0)
    long_ago(shop, older, 41.0)
    had_turn(worker, 30.0)
    turn(worker)
    assert running(worker) == {older}


def test_a_turn_is_over_when_nobody_wants_the_model_any_more(shop: Shop, start: Start) -> None:
    worker = start(1, 2, memory_wait_seconds=0.0)
    shop.submit("a")
    begin(worker)
    waiting = shop.submit("c")
    other = shop.submit("a")
    turn(worker)
    assert other not in running(worker)
    shop.queues["c"].cancel(waiting)
    turn(worker)
    assert other in running(worker)


def test_a_turn_does_not_hold_up_what_is_more_important(shop: Shop, start: Start) -> None:
    worker = start(1, 2, memory_wait_seconds=0.0)
    first = shop.submit("a")
    begin(worker)
    shop.submit("c")
    more = shop.submit("a", priority=1)
    turn(worker)
    assert running(worker) == {first, more}


def test_a_job_that_failed_at_once_does_not_cost_its_model_the_turn(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 1, slots=1, memory_wait_seconds=30.0)
    too_long = shop.submit("b", max_tokens=100 * ROW)
    second = shop.submit("b")
    for job in (too_long, second):
        long_ago(shop, job, 50.0)
    shop.submit("a")
    had_turn(worker, 30.0)
    turn(worker)
    assert running(worker) == {too_long}
    worker.finish()
    assert shop.state(too_long) == "failed"
    turn(worker)
    assert running(worker) == {second}


def long_ago(shop: Shop, job_id: str, seconds: float) -> None:
    """As if it had been queued so much earlier."""
    queue = shop.queues["a"]
    queued_at = float(queue.job(job_id)["queued_at"])
    queue.client.hset(queue.keys.job(job_id), "queued_at", f"{queued_at - seconds:.3f}")


def had_turn(worker: StepWorker, seconds: float) -> None:
    """As if the last model had been loaded so much earlier."""
    worker.rooms.pool.loaded_at -= seconds


# -- what makes nobody go ------------------------------------------------------------------


def test_of_two_workers_that_look_at_once_one_makes_room(shop: Shop, budget: Budget) -> None:
    workers = [shop.worker(budget(1, 1), name=f"host-dir-{n}", **NOW) for n in range(2)]
    for worker in workers:
        shop.submit("a")
        begin(worker)
    shop.submit("b", priority=1)
    rooms = [worker.rooms.claimer._room for worker in workers]
    for room in rooms:
        room.look()
    assert [room.make() is not None for room in rooms] == [True, False]


def test_a_job_that_can_never_fit_here_makes_nobody_go(shop: Shop, start: Start) -> None:
    worker = start(1, 1)
    low = shop.submit("a")
    begin(worker)
    shop.submit("a", priority=9, max_tokens=100 * ROW)
    turn(worker)
    assert running(worker) == {low}
    assert going(worker) == set()
    shop.submit("a", priority=8)
    turn(worker)
    assert going(worker) == {low}


def test_while_a_suspect_runs_nobody_makes_way_for_memory(shop: Shop, start: Start) -> None:
    worker = start(1, 1)
    queue = shop.queues["a"]
    job = shop.submit("a")
    begin(worker)
    queue.scripts.take_back(job, queue.job(job)["worker"], crashed=True)
    worker.run.ask_to_stop(Stop.FENCED)
    worker.settle()
    begin(worker)
    assert worker.run.apart
    shop.submit("b", priority=1)
    turn(worker)
    assert going(worker) == set()


def test_a_model_whose_slots_are_taken_holds_nobody_back(shop: Shop, start: Start) -> None:
    worker = start(2, 2, slots=1)
    first = shop.submit("a", priority=5)
    begin(worker)
    shop.submit("a", priority=5, max_tokens=2 * ROW - 4)
    other = shop.submit("b")
    turn(worker)
    assert running(worker) == {first, other}


def test_a_suspect_is_no_reason_to_make_room(shop: Shop, start: Start) -> None:
    worker = start(1, 1)
    shop.submit("a")
    begin(worker)
    suspect = shop.submit("b", priority=9)
    queue = shop.queues["b"]
    queue.client.hset(queue.keys.job(suspect), "suspect", "0")
    turn(worker)
    assert going(worker) == set()


def test_a_job_whose_time_is_over_is_no_reason_to_make_room(shop: Shop, start: Start) -> None:
    worker = start(1, 1)
    shop.submit("a")
    begin(worker)
    late = shop.submit("b", priority=9)
    shop.queues["b"].client.hset(shop.queues["b"].keys.job(late), "deadline", "1")
    turn(worker)
    assert going(worker) == set()


def test_nobody_goes_as_long_as_that_would_not_be_enough(shop: Shop, start: Start) -> None:
    worker = start(1, 2, preempt_hold_seconds=60.0)
    jobs = [shop.submit("a") for _ in range(2)]
    begin(worker)
    begin(worker)
    shop.submit("b", priority=1)
    age(worker.runs[0], 100.0)
    turn(worker)
    assert going(worker) == set()
    age(worker.runs[1], 100.0)
    turn(worker)
    assert going(worker) == set(jobs)


# -- suspects that no memory or no model is for --------------------------------------------


def suspected(shop: Shop, model: str, **options: Any) -> str:
    """A job on which some other worker died, long ago."""
    job = shop.submit(model, **options)
    queue = shop.queues[model]
    assert queue.take(holder="w9").fence.job_id == job
    assert queue.scripts.take_back(job, "w9", crashed=True) == "queued"
    long_ago(shop, job, 31.0)
    return job


def test_no_worker_empties_itself_for_a_suspect_for_which_it_never_has_memory(
    shop: Shop, start: Start
) -> None:
    start(1, 40, name="larger")
    worker = start(1, 2, slots=1)
    suspected(shop, "a", max_tokens=20 * ROW)
    shop.submit("a")
    begin(worker)
    turn(worker)
    assert going(worker) == set()
    assert worker.run.claim.attempts == 1


def test_no_worker_empties_itself_for_a_suspect_whose_model_is_broken_here(
    shop: Shop, start: Start
) -> None:
    (shop.folders["c"] / "model.safetensors").write_bytes(b"damaged")
    worker = start(3, 2, load_retry_seconds=60.0)
    assert set(worker.rooms.pool.broken()) == {"c"}
    suspected(shop, "c")
    shop.submit("a")
    begin(worker)
    turn(worker)
    assert going(worker) == set()
    assert worker.run.claim.attempts == 1


def test_a_worker_that_emptied_itself_for_a_suspect_takes_it_before_jobs_of_other_models(
    shop: Shop, start: Start
) -> None:
    worker = start(1, 1)
    low = shop.submit("a")
    begin(worker)
    suspect = suspected(shop, "b")
    shop.submit("a")
    turn(worker)
    assert going(worker) == {low}
    worker.settle()
    turn(worker)
    assert running(worker) == {suspect}
