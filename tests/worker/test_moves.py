"""Every move of a job is one script; what a state does not allow is refused inside Redis."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from job_queue import HOLDER, JobQueue, story
from tenuto_worker._answers import Claim, Fence, PublishStatus

Act = Callable[[JobQueue, str, Fence], object]


def _publish(jobs: JobQueue, _job: str, fence: Fence) -> object:
    return jobs.scripts.publish(fence, story(1, 1)).status.value


def _renew(jobs: JobQueue, _job: str, fence: Fence) -> object:
    renewed = jobs.scripts.renew(
        fence, holder=HOLDER, lease_ms=60_000, phase="decode", done=0, total=1
    )
    return "fenced" if renewed.fenced else "ok"


def _bind(jobs: JobQueue, _job: str, fence: Fence) -> object:
    bound = jobs.scripts.bind(
        fence,
        prompt_ids=b"\x91\x01",
        prompt_tokens=1,
        fingerprint="f",
        geometry=b"\x80",
        reach="dir",
        exactness="exact",
        exactness_reason=None,
    )
    return "ok" if bound else "fenced"


ACTS: dict[str, Act] = {
    "publish": _publish,
    "renew": _renew,
    "bind": _bind,
    "finish": lambda jobs, job, fence: jobs.scripts.finish(fence, state="completed"),
    "fail": lambda jobs, job, fence: jobs.scripts.finish(fence, state="failed", error="x"),
    "drain": lambda jobs, job, fence: jobs.scripts.release(fence, "drain"),
    "error": lambda jobs, job, fence: jobs.scripts.release(fence, "error", "boom"),
    "reap": lambda jobs, job, fence: jobs.scripts.reap(job),
    "take_back": lambda jobs, job, fence: jobs.scripts.take_back(job, HOLDER),
    "cancel": lambda jobs, job, fence: jobs.cancel(job),
    "resume": lambda jobs, job, fence: jobs.resume(job),
    "delete": lambda jobs, job, fence: jobs.delete(job),
}
FENCED = ("publish", "renew", "bind", "finish", "fail", "drain", "error")


def _reach(jobs: JobQueue, state: str) -> tuple[str, Fence]:
    """A job in a state, and the fence of its last attempt."""
    job = jobs.submit()
    if state == "queued":
        return job, Fence(job, 1, "nonce")
    fence = jobs.take().fence
    if state in ("completed", "failed"):
        assert jobs.scripts.finish(fence, state=state) == "ok"
    elif state == "cancelled":
        jobs.cancel(job)
        assert jobs.scripts.finish(fence, state=state) == "ok"
    elif state == "gone":
        jobs.delete(job)
    elif state == "lost":
        jobs.lose_lease(job)
    return job, fence


# state -> act -> (answer, state afterwards). "lost" is running without a lease.
TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "queued": dict.fromkeys(FENCED, ("fenced", "queued"))
    | {
        "reap": ("queued", "queued"),
        "take_back": ("foreign", "queued"),
        "cancel": ("cancelled", "cancelled"),
        "resume": ("active", "queued"),
        "delete": ("deleted", "gone"),
    },
    "running": {
        "publish": ("ok", "running"),
        "renew": ("ok", "running"),
        "bind": ("ok", "running"),
        "finish": ("ok", "completed"),
        "fail": ("ok", "failed"),
        "drain": ("queued", "queued"),
        "error": ("queued", "queued"),
        "reap": ("alive", "running"),
        "take_back": ("queued", "queued"),
        "cancel": ("flagged", "running"),
        "resume": ("active", "running"),
        "delete": ("deleted", "gone"),
    },
    "lost": {
        "publish": ("ok", "running"),
        "renew": ("ok", "running"),
        "bind": ("ok", "running"),
        "finish": ("ok", "completed"),
        "fail": ("ok", "failed"),
        "drain": ("queued", "queued"),
        "error": ("queued", "queued"),
        "reap": ("queued", "queued"),
        "take_back": ("queued", "queued"),
        "cancel": ("flagged", "running"),
        "resume": ("active", "running"),
        "delete": ("deleted", "gone"),
    },
    "completed": dict.fromkeys(FENCED, ("fenced", "completed"))
    | {
        "reap": ("completed", "completed"),
        "take_back": ("foreign", "completed"),
        "cancel": ("over", "completed"),
        "resume": ("completed", "completed"),
        "delete": ("deleted", "gone"),
    },
    "failed": dict.fromkeys(FENCED, ("fenced", "failed"))
    | {
        "reap": ("failed", "failed"),
        "take_back": ("foreign", "failed"),
        "cancel": ("over", "failed"),
        "resume": ("resumed", "queued"),
        "delete": ("deleted", "gone"),
    },
    "cancelled": dict.fromkeys(FENCED, ("fenced", "cancelled"))
    | {
        "reap": ("cancelled", "cancelled"),
        "take_back": ("foreign", "cancelled"),
        "cancel": ("over", "cancelled"),
        "resume": ("resumed", "queued"),
        "delete": ("deleted", "gone"),
    },
    "gone": dict.fromkeys(FENCED, ("fenced", "gone"))
    | {
        "reap": ("gone", "gone"),
        "take_back": ("foreign", "gone"),
        "cancel": ("gone", "gone"),
        "resume": ("gone", "gone"),
        "delete": ("gone", "gone"),
    },
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("state", TABLE)
def test_each_move_from_each_state_is_made_or_refused(jobs: JobQueue, state: str, act: str) -> None:
    job, fence = _reach(jobs, state)
    before = jobs.job(job)
    answer, after = TABLE[state][act]

    assert ACTS[act](jobs, job, fence) == answer
    assert jobs.state(job) == after
    if answer == "fenced":
        assert jobs.job(job) == before


@pytest.mark.parametrize("act", FENCED)
@pytest.mark.parametrize("stale", ["epoch", "nonce"])
def test_a_stale_epoch_or_nonce_writes_nothing(jobs: JobQueue, act: str, stale: str) -> None:
    job = jobs.submit()
    own = jobs.take().fence
    fence = Fence(job, own.epoch + 1, own.nonce) if stale == "epoch" else Fence(job, 1, "other")
    before = jobs.job(job), jobs.stream(job)

    assert ACTS[act](jobs, job, fence) == "fenced"
    assert (jobs.job(job), jobs.stream(job)) == before


@pytest.mark.parametrize("act", ["drain", "error", "take_back"])
def test_a_move_into_the_queue_raises_the_epoch_and_frees_the_lease(
    jobs: JobQueue, act: str
) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    ACTS[act](jobs, job, fence)

    assert jobs.job(job)["epoch"] == "2"
    assert not jobs.client.exists(jobs.keys.lease(job))
    assert _publish(jobs, job, fence) == "fenced"
    assert jobs.take().fence.epoch == 2


def test_only_the_same_worker_takes_a_job_back(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence

    assert jobs.scripts.take_back(job, "host-dir-1") == "foreign"
    assert _publish(jobs, job, fence) == "ok"


# -- the queue -------------------------------------------------------------------------


def _order(jobs: JobQueue, count: int) -> list[str]:
    return [jobs.take().fence.job_id for _ in range(count)]


def test_higher_priorities_are_claimed_first_and_equal_ones_by_age(jobs: JobQueue) -> None:
    low = jobs.submit(priority=-3)
    first, second = jobs.submit(), jobs.submit()
    high = jobs.submit(priority=9)

    assert _order(jobs, 4) == [high, first, second, low]
    assert jobs.claim() is None


def test_tenants_take_turns_however_many_jobs_one_has(jobs: JobQueue) -> None:
    a = [jobs.submit(tenant="a") for _ in range(4)]
    b = [jobs.submit(tenant="b") for _ in range(2)]

    assert _order(jobs, 6) == [a[0], b[0], a[1], b[1], a[2], a[3]]


def test_a_job_keeps_its_age_when_it_is_handed_back(jobs: JobQueue) -> None:
    old, young = jobs.submit(), jobs.submit()
    jobs.scripts.release(jobs.take().fence, "drain")

    assert _order(jobs, 2) == [old, young]


def test_a_job_that_has_begun_waits_for_its_geometry_and_then_for_nobody(jobs: JobQueue) -> None:
    job = jobs.submit()
    claim = jobs.take()
    _bind(jobs, job, claim.fence)
    jobs.scripts.publish(claim.fence, story(1, 3))
    jobs.scripts.release(claim.fence, "drain")

    assert jobs.claim(fingerprint="other") is None
    assert jobs.claim(reach="other") is None
    for there, why in (("other", "dir"), "geometry"), (("f", "other"), "checkpoints"):
        (left,) = jobs.leave(fingerprint=there[0], reach=there[1])
        assert (left.job_id, left.why) == (job, why)
        assert 20 < left.seconds <= 30
    assert jobs.leave(fingerprint="another model's", model="other") == []
    assert jobs.take(fingerprint="other", exact_wait_s=0.0).fence.epoch == 2
    jobs.scripts.take_back(job, HOLDER)
    assert jobs.take().fence.epoch == 3


def test_a_job_without_tokens_needs_no_checkpoint_so_any_reach_will_do(jobs: JobQueue) -> None:
    job = jobs.submit()
    claim = jobs.take()
    _bind(jobs, job, claim.fence)
    jobs.scripts.release(claim.fence, "drain")

    assert jobs.claim(fingerprint="other") is None
    assert jobs.take(reach="other").fence.job_id == job


def test_a_claim_asked_for_again_gives_the_job_that_it_had_taken(jobs: JobQueue) -> None:
    jobs.submit()
    jobs.submit()
    first = jobs.take(nonce="n")

    assert jobs.claim(nonce="n", again=True) == first
    assert jobs.take(nonce="m", again=True).fence.job_id != first.fence.job_id


def test_a_job_whose_deadline_passed_in_the_queue_fails_and_the_next_is_claimed(
    jobs: JobQueue,
) -> None:
    late = jobs.submit(deadline="1.0")
    next_one = jobs.submit()

    assert jobs.take().fence.job_id == next_one
    assert jobs.state(late) == "failed"
    assert "deadline" in jobs.job(late)["error"]


# -- tickets ---------------------------------------------------------------------------


def test_jobs_that_a_worker_must_leave_hide_no_others_however_many(jobs: JobQueue) -> None:
    first = jobs.submit()
    others = [first, *(jobs.submit(tenant=f"t{n % 7}") for n in range(699))]
    for job in others:
        jobs.client.hset(jobs.keys.job(job), mapping={"fingerprint": "another", "tokens": "1"})
    mine = jobs.submit(tenant="t3")

    claims = [jobs.claim() for _ in range(4)]
    assert [claim.fence.job_id for claim in claims if claim] == [mine]
    assert jobs.claim() is None
    jobs.client.hset(jobs.keys.job(first), "fingerprint", "f")
    jobs.client.hset(jobs.keys.job(first), "reach", "dir")
    assert jobs.take().fence.job_id == first, "the best is looked at each time"


def test_a_job_whose_ticket_is_lost_is_claimed_all_the_same(jobs: JobQueue) -> None:
    job = jobs.submit()
    jobs.client.delete(jobs.keys.tickets(jobs.model))

    assert jobs.take().fence.job_id == job


def test_mending_adds_missing_tickets_and_drops_dead_ones(jobs: JobQueue) -> None:
    kept, lost, dead = jobs.submit(), jobs.submit(), jobs.submit()
    jobs.client.zrem(jobs.keys.tickets(jobs.model), f"{lost}:1")
    jobs.client.delete(jobs.keys.ticket_payload(f"{dead}:1"))

    assert jobs.scripts.mend_tickets(jobs.model) == 2
    tickets = jobs.tickets()
    assert len(tickets) == 3
    assert f"{kept}:1" in tickets
    assert f"{dead}:1" not in tickets
    assert all(jobs.client.exists(jobs.keys.ticket_payload(ticket)) for ticket in tickets)
    assert jobs.scripts.mend_tickets(jobs.model) == 0


def test_mending_holds_redis_up_for_a_few_tickets_at_a_time_only(jobs: JobQueue) -> None:
    for _ in range(300):
        jobs.submit()
    jobs.client.delete(jobs.keys.tickets(jobs.model))

    added = [jobs.scripts.mend_tickets(jobs.model) for _ in range(3)]
    assert added == [250, 50, 0]
    assert len(jobs.tickets()) == 300


def test_mended_tickets_go_when_their_jobs_have_gone(jobs: JobQueue) -> None:
    gone, stays = jobs.submit(), jobs.submit()
    for ticket in jobs.tickets():
        jobs.client.zrem(jobs.keys.tickets(jobs.model), ticket)
        jobs.client.delete(jobs.keys.ticket_payload(ticket))
    assert jobs.scripts.mend_tickets(jobs.model) == 2
    jobs.delete(gone)
    assert not [key for key in jobs.client.scan_iter() if gone.encode() in key]

    before = jobs.tickets()
    assert jobs.scripts.mend_tickets(jobs.model) == 0
    (left,) = jobs.tickets()
    payload = jobs.keys.ticket_payload
    assert [ticket for ticket in before if jobs.client.exists(payload(ticket))] == [left]
    assert stays not in left


def test_a_claim_takes_the_ticket_with_it(jobs: JobQueue) -> None:
    job = jobs.submit()
    assert jobs.tickets() == [f"{job}:1"]
    jobs.take()

    assert jobs.tickets() == []
    assert not jobs.client.exists(jobs.keys.ticket_payload(f"{job}:1"))


# -- publishing ------------------------------------------------------------------------


def test_published_tokens_are_the_progress_until_the_next_renewal(jobs: JobQueue) -> None:
    job = jobs.submit(max_tokens=20)
    fence = jobs.take().fence
    jobs.scripts.renew(fence, holder=HOLDER, lease_ms=9000, phase="prefill", done=0, total=33)
    jobs.scripts.publish(fence, story(1, 4))
    told = jobs.job(job)

    assert (told["phase"], told["phase_done"], told["phase_total"]) == ("decode", "4", "20")


def test_publishing_again_changes_nothing(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    assert jobs.scripts.publish(fence, story(1, 4)).status is PublishStatus.OK
    again = jobs.scripts.publish(fence, story(2, 3))

    assert (again.status, again.tokens) == (PublishStatus.REPLAY, 4)
    assert jobs.tokens(job) == story(1, 4)


def test_an_entry_packed_anew_around_published_tokens_is_refused_and_told_where_to_go_on(
    jobs: JobQueue,
) -> None:
    jobs.submit()
    fence = jobs.take().fence
    jobs.scripts.publish(fence, story(1, 4))
    again = jobs.scripts.publish(fence, story(3, 6))
    assert (again.status, again.tokens) == (PublishStatus.GAP, 4)
    jobs.scripts.publish(fence, story(5, 6))
    assert jobs.tokens(fence.job_id) == story(1, 6)


def test_a_gap_is_refused_and_says_what_is_there(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    jobs.scripts.publish(fence, story(1, 2))
    gap = jobs.scripts.publish(fence, story(4, 4))

    assert (gap.status, gap.tokens) == (PublishStatus.GAP, 2)
    assert jobs.tokens(job) == story(1, 2)


def test_publish_and_renew_tell_of_a_cancel(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    assert not jobs.scripts.publish(fence, story(1, 1)).cancel
    jobs.cancel(job)

    assert jobs.scripts.publish(fence, story(2, 2)).cancel
    assert jobs.scripts.renew(
        fence, holder=HOLDER, lease_ms=1, phase="decode", done=0, total=0
    ).cancel


def test_a_resume_that_overtakes_the_cancel_sends_the_job_back(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    jobs.cancel(job)
    jobs.resume(job)

    assert jobs.scripts.finish(fence, state="cancelled") == "requeued"
    assert jobs.job(job)["epoch"] == "2"


def test_a_reaper_that_finds_the_cancel_flag_ends_the_job_cancelled(jobs: JobQueue) -> None:
    job = jobs.submit()
    jobs.take()
    jobs.cancel(job)
    jobs.lose_lease(job)

    assert jobs.scripts.reap(job) == "cancelled"
    assert jobs.stream(job)[1][-1].state == "cancelled"


# -- attempts without progress ---------------------------------------------------------


def _die(jobs: JobQueue, claim: Claim, how: str) -> str:
    if how == "reap":
        jobs.lose_lease(claim.fence.job_id)
        return jobs.scripts.reap(claim.fence.job_id)
    if how == "take_back":
        return jobs.scripts.take_back(claim.fence.job_id, HOLDER)
    return jobs.scripts.release(claim.fence, how, f"boom {claim.fence.epoch}")


@pytest.mark.parametrize("how", ["reap", "take_back", "error"])
def test_three_deaths_in_a_row_without_progress_fail_the_job(jobs: JobQueue, how: str) -> None:
    job = jobs.submit()

    assert [_die(jobs, jobs.take(), how) for _ in range(3)] == ["queued", "queued", "failed"]
    assert jobs.job(job)["error"].startswith("no progress in 3 attempts in a row")
    assert jobs.stream(job)[1][-1].state == "failed"
    if how == "error":
        assert "boom 1; boom 2; boom 3" in jobs.job(job)["error"]


@pytest.mark.parametrize("how", ["reap", "take_back", "error"])
def test_a_new_token_clears_the_count(jobs: JobQueue, how: str) -> None:
    jobs.submit()
    for turn in range(1, 8):
        claim = jobs.take()
        if turn % 2:
            jobs.scripts.publish(claim.fence, story(claim.tokens + 1, turn))
        assert _die(jobs, claim, how) == "queued"


@pytest.mark.parametrize("reason", ["drain", "preempt", "outage"])
def test_hand_backs_that_are_nobodys_fault_never_count(jobs: JobQueue, reason: str) -> None:
    jobs.submit()

    assert {_die(jobs, jobs.take(), reason) for _ in range(8)} == {"queued"}


def _read_prompt(jobs: JobQueue, claim: Claim, *done: int) -> None:
    for each in done:
        jobs.scripts.renew(
            claim.fence, holder=HOLDER, lease_ms=60_000, phase="prefill", done=each, total=99
        )


def test_a_new_prefill_chunk_counts_as_progress_and_the_same_one_again_does_not(
    jobs: JobQueue,
) -> None:
    jobs.submit()
    for done in (8, 16, 24, 32, 40):
        claim = jobs.take()
        _read_prompt(jobs, claim, 0, done)
        assert _die(jobs, claim, "error") == "queued"
    for expected in ("queued", "queued", "failed"):
        claim = jobs.take()
        _read_prompt(jobs, claim, 0, 8, 40)
        assert _die(jobs, claim, "error") == expected


def test_resume_of_a_failed_job_starts_the_count_anew(jobs: JobQueue) -> None:
    job = jobs.submit()
    for _ in range(3):
        _die(jobs, jobs.take(), "error")
    jobs.resume(job)

    assert _die(jobs, jobs.take(), "error") == "queued"


def test_resume_drops_a_deadline_that_has_passed_and_keeps_one_that_has_not(
    jobs: JobQueue,
) -> None:
    late = jobs.submit(deadline="1.0")
    assert jobs.claim() is None
    assert jobs.state(late) == "failed"
    jobs.resume(late)
    assert jobs.take().fence.job_id == late

    early = jobs.submit(deadline="99999999999.0")
    jobs.cancel(early)
    jobs.resume(early)
    assert jobs.job(early)["deadline"] == "99999999999.0"


# -- leases, expiry, lost scripts ------------------------------------------------------


def test_an_owner_that_was_not_reaped_makes_its_lease_anew(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    jobs.lose_lease(job)

    assert _renew(jobs, job, fence) == "ok"
    assert jobs.scripts.reap(job) == "alive"


def test_expiry_removes_everything_of_a_job(jobs: JobQueue) -> None:
    job = jobs.submit(retention="0.0")
    jobs.scripts.finish(jobs.take().fence, state="completed")

    assert jobs.scripts.expire() == [job]
    left = {key.decode() for key in jobs.client.scan_iter(match=f"{jobs.keys.namespace}*{job}*")}
    assert left == set()
    assert jobs.scripts.expire() == []


def test_scripts_that_the_server_forgot_are_loaded_again(jobs: JobQueue) -> None:
    job = jobs.submit()
    fence = jobs.take().fence
    jobs.client.script_flush()

    assert jobs.scripts.publish(fence, story(1, 1)).status is PublishStatus.OK
    assert jobs.tokens(job) == story(1, 1)


def test_a_claim_tells_the_data_set_of_its_job_and_draws_its_id_where_there_is_none(
    jobs: JobQueue,
) -> None:
    jobs.submit()
    jobs.submit()
    first = jobs.take()
    drawn = jobs.client.get(jobs.keys.namespace_id())
    assert first.namespace.encode() == drawn
    assert first.heirs == frozenset()

    jobs.client.sadd(jobs.keys.heirs(), "earlier", "earliest")
    second = jobs.take()
    assert second.namespace == first.namespace
    assert second.heirs == {"earlier", "earliest"}


def test_a_claim_that_is_asked_for_again_tells_the_data_set_too(jobs: JobQueue) -> None:
    jobs.submit()
    first = jobs.take(nonce="same")
    assert jobs.take(nonce="same", again=True) == first
