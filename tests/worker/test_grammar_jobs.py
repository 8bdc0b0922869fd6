"""A worker and grammars: compiled before the row is seated, refused by name, resumed exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from grammar_samples import GRAMMARS, assert_matches
from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client import JobSpec, Token, pack_spec
from tenuto_client._records import EndEvent
from tenuto_engine._grammar import Grammar
from tenuto_worker._checkpoints import disagreement, engine_tokens
from tenuto_worker._remains import _best, _Copy
from tiny_models import tiny_vocabulary

Start = Callable[..., StepWorker]
OPTIONS: dict[str, Any] = {
    "ignore_eos": False,
    "max_tokens": 70,
    "temperature": 0.9,
    "repetition_penalty": 1.1,
    "logprobs": 5,
}


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    workers = []

    def begin(**settings: Any) -> StepWorker:
        where = (redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data")
        workers.append(StepWorker(*where, **settings))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def text_of(jobs: JobQueue, job: str) -> str:
    return "".join(token.text for token in jobs.tokens(job)) + end_of(jobs, job).text


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("tokens", [1, 11])
def test_what_a_dead_worker_began_another_ends_bit_for_bit(
    jobs: JobQueue, start: Start, name: str, tokens: int
) -> None:
    job, whole = (jobs.submit(grammar=GRAMMARS[name], **OPTIONS) for _ in range(2))
    first = start(slots=1)
    first.claim()
    first.decode(tokens)
    first.publish()
    first.save()
    jobs.lose_lease(job)
    jobs.scripts.take_back(job, "host-dir-0")
    other = start(name="host-dir-1")
    other.claim()
    other.claim()
    other.finish()
    assert jobs.tokens(job) == jobs.tokens(whole)
    for each in (job, whole):
        assert_matches(name, text_of(jobs, each))
        assert (end_of(jobs, each).finish_reason, end_of(jobs, each).exactness) == ("stop", "exact")


@pytest.mark.parametrize("cut", ["within a span", "before a span", "behind a span"])
def test_jumped_tokens_are_marked_and_what_a_dead_worker_began_another_ends_bit_for_bit(
    jobs: JobQueue, start: Start, cut: str
) -> None:
    asked = OPTIONS | {"grammar": GRAMMARS["json_schema"], "jump_forward": True, "logprobs": 0}
    whole = jobs.submit(**asked)
    first = start(slots=1)
    first.claim()
    first.finish()
    expected = jobs.tokens(whole)
    assert sum(token.jumped for token in expected) > 10
    assert all(token.logprob == 0.0 for token in expected if token.jumped)
    # The mark of the last token that is published, and that of the next.
    marks = {"within a span": (True, True), "before a span": (False, True)}
    wanted = marks.get(cut, (True, False))
    published = next(
        token.index - 1
        for before, token in pairwise(expected)
        if token.index > 10 and (before.jumped, token.jumped) == wanted
    )
    job = jobs.submit(**asked)
    first.claim()
    while len(first.run.tokens) < published:
        first.decode(1)
    del first.run.tokens[published:]
    first.publish()
    first.save()
    jobs.lose_lease(job)
    jobs.scripts.take_back(job, "host-dir-0")
    other = start(name="host-dir-1")
    other.claim()
    other.finish()
    assert jobs.tokens(job) == expected
    for each in (job, whole):
        assert_matches("json_schema", text_of(jobs, each))
        assert (end_of(jobs, each).finish_reason, end_of(jobs, each).exactness) == ("stop", "exact")


def test_a_checkpoint_with_other_marks_than_the_stream_is_passed_over() -> None:
    marks = (False, True, True, False)
    stream = [Token(5 + n, n + 1, "x", 0.0, jumped=mark) for n, mark in enumerate(marks)]

    def problem(*known: bool, pending: bool = True) -> str:
        tokens = engine_tokens(stream[: len(known)])
        stored: Any = SimpleNamespace(
            prompt=(1, 2),
            prompt_tokens=2,
            seed=7,
            pending_token=stream[len(known)].token if pending else None,
            tokens=lambda: [replace(t, jumped=m) for t, m in zip(tokens, known, strict=True)],
        )
        return disagreement(stored, (1, 2), stream, 7)

    assert problem(False, True, True) == ""
    assert problem(False, True, True, False, pending=False) == ""
    assert problem(False, True, False) == (
        "its token 3 was in another forward than the published one"
    )
    # What is pending was drawn.
    assert "its token 3 was in another forward" in problem(False, True)


def test_a_longer_copy_with_other_marks_is_not_what_is_recovered() -> None:
    meta: Any = None
    marks = (False, True, True, False, False)
    known = engine_tokens([Token(5, n, "x", 0.0, jumped=m) for n, m in enumerate(marks, 1)])
    newest = _Copy(2, meta, tuple(known[:3]), None)
    longer = _Copy(1, meta, tuple(known), None)
    other = _Copy(1, meta, (*known[:2], replace(known[2], jumped=False), *known[3:]), None)
    assert _best([longer, newest]) is longer
    assert _best([other, newest]) is newest


def test_a_spec_that_jumps_without_a_grammar_fails_by_name(jobs: JobQueue, start: Start) -> None:
    worker = start()
    plain, counted = (
        jobs.submit(jump_forward=True, **more)
        for more in ({}, OPTIONS | {"grammar": GRAMMARS["regex"]})
    )
    assert worker.claim()
    assert worker.claim()
    worker.finish()
    assert (end_of(jobs, plain).error or "").startswith("jump_forward: needs a grammar")
    assert (end_of(jobs, counted).error or "").startswith("jump_forward: cannot be with logprobs")


def test_the_preparer_compiles_so_that_rows_need_not_wait(jobs: JobQueue, start: Start) -> None:
    worker = start()
    jobs.submit(grammar={"regex": "[ab]{3}"}, **OPTIONS)
    worker.claim()
    (plan,) = worker.rooms.decoder._inbox
    assert all(isinstance(road.options.grammar, Grammar) for road in plan.roads)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ({"lark": "start: <|no_such_token|>"}, "grammar: lark: .*unknown special token"),
        ({"regex": "("}, "grammar: regex: .*unclosed group"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "grammar: .*uniqueItems"),
    ],
)
def test_a_grammar_that_fails_at_the_claim_fails_its_job_alone(
    jobs: JobQueue, start: Start, grammar: dict[str, Any], why: str
) -> None:
    worker = start()
    bad = jobs.submit(grammar=grammar, **OPTIONS)
    good = jobs.submit(max_tokens=5)
    assert worker.claim()
    assert worker.claim()
    worker.finish()
    assert jobs.state(bad) == "failed"
    assert re.match(why, end_of(jobs, bad).error or "")
    assert jobs.state(good) == "completed"


def test_a_spec_that_no_client_packs_fails_by_name(jobs: JobQueue, start: Start) -> None:
    worker = start()
    both = jobs.submit(grammar={"regex": "a"}, ignore_eos=True)
    packed = msgpack.unpackb(pack_spec(JobSpec("tiny", "x", seed=1)))
    odd = jobs.submit(spec=msgpack.packb(packed | {"grammar": {"gbnf": "x"}}))
    assert worker.claim()
    assert worker.claim()
    worker.finish()
    assert (end_of(jobs, both).error or "").startswith("ignore_eos: ")
    assert (end_of(jobs, odd).error or "").startswith("grammar: ")


def test_a_model_that_takes_no_grammar_fails_the_job_by_name(
    jobs: JobQueue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    vocabulary = SimpleNamespace(vocab=tiny_vocabulary())
    monkeypatch.setattr(worker.engine.tokenizer, "_tokenizer", vocabulary)
    job = jobs.submit(grammar={"regex": "a"}, prompt=(1, 2, 3), **OPTIONS)
    worker.claim()
    worker.finish()
    assert "grammar: the tokenizer of the model cannot" in (end_of(jobs, job).error or "")


@pytest.mark.parametrize("has_grammar", [True, False])
def test_another_version_of_what_makes_the_masks_is_named(
    jobs: JobQueue, start: Start, monkeypatch: pytest.MonkeyPatch, has_grammar: bool
) -> None:
    asked: dict[str, Any] = {"grammar": GRAMMARS["json_schema"]} if has_grammar else {}
    job = jobs.submit(**asked, **OPTIONS)
    first = start()
    first.claim()
    first.decode(9)
    first.publish()
    published = jobs.tokens(job)
    jobs.scripts.take_back(job, "host-dir-0")
    monkeypatch.setattr("tenuto_worker._geometry_of_run.version", lambda name: "0.0.1")
    other = start(name="host-dir-1")
    other.claim()
    other.finish()
    assert jobs.tokens(job)[:9] == published
    end = end_of(jobs, job)
    assert end.exactness == ("recomputed" if has_grammar else "exact")
    if has_grammar:
        assert "llguidance_version: 0.0.1 here, 1." in (end.exactness_reason or "")


def test_a_grammar_of_many_jobs_is_compiled_once(
    jobs: JobQueue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    real = Grammar.__init__

    def counted(self: Grammar, *args: Any) -> None:
        made.append(self)
        real(self, *args)

    monkeypatch.setattr(Grammar, "__init__", counted)
    worker = start()
    for _ in range(3):
        jobs.submit(grammar=GRAMMARS["regex"], **OPTIONS)
        worker.claim()
        worker.finish()
    assert len(made) == 1
