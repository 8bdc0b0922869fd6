"""``min_tokens``: a generation does not end by itself before it has so many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from engine_runs import PROMPT, Run, engine_in_memory, run
from tenuto_engine import Engine, InvalidOption

LoadEngine = Callable[..., Engine]

both_loops = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


def eager(engine: Engine) -> dict[str, Any]:
    """Options with which the model ends as soon as it may."""
    return {"logit_bias": dict.fromkeys(engine.eos_token_ids, 100.0), "max_tokens": 20}


@both_loops
def test_an_end_token_comes_after_that_many_others_and_no_sooner(
    load_engine: LoadEngine, pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    [end] = engine.eos_token_ids
    assert run(engine, encode(engine), **eager(engine)).ids == [end]
    made = run(engine, encode(engine), min_tokens=7, **eager(engine))
    assert end not in made.ids[:7]
    assert (made.ids[7:], made.finish_reason) == ([end], "stop")
    # The biased end token has all of the probability, but for where it cannot be drawn.
    assert made.tokens[7].logprob == 0.0
    assert all(token.logprob < -0.01 for token in made.tokens[:7])


def test_as_many_as_the_limit_end_by_the_limit(llama: Engine) -> None:
    made = run(llama, encode(llama), min_tokens=20, **eager(llama))
    assert (len(made.ids), made.finish_reason) == (20, "length")
    assert not llama.eos_token_ids & set(made.ids)


def test_stop_token_ids_wait_as_well_and_an_ignored_end_token_may_come(llama: Engine) -> None:
    [end] = llama.eos_token_ids
    asked = eager(llama) | {"min_tokens": 5, "ignore_eos": True}
    assert run(llama, encode(llama), **asked).ids == [end] * 20
    first = run(llama, encode(llama), max_tokens=20, ignore_eos=True).ids
    made = run(llama, encode(llama), max_tokens=20, min_tokens=6, stop_token_ids=tuple(first))
    assert not set(first) & set(made.ids[:6])


def test_an_end_token_beyond_the_vocabulary_does_no_harm(llama: Engine) -> None:
    plain = engine_in_memory(llama, "llama", ends=frozenset((93,)))
    more = engine_in_memory(llama, "llama", ends=frozenset((93, 10**9)))
    asked: dict[str, Any] = {"min_tokens": 8, "max_tokens": 8}
    assert run(more, [40, 41, 42], **asked) == run(plain, [40, 41, 42], **asked)


def test_likeliest_tokens_are_those_that_can_be_drawn(llama: Engine) -> None:
    left = (65, 66, 67)
    ends = tuple(token for token in range(llama.vocab_size) if token not in left)
    made = run(llama, encode(llama), max_tokens=4, min_tokens=3, logprobs=20, stop_token_ids=ends)
    for token in made.tokens[:3]:
        assert {each for each, _ in token.top_logprobs} == set(left)
        assert math.isclose(sum(math.exp(p) for _, p in token.top_logprobs), 1, abs_tol=1e-5)
    assert len(made.tokens[3].top_logprobs) == 20


def test_a_model_that_could_only_end_is_refused(llama: Engine) -> None:
    everything = tuple(range(llama.vocab_size))
    with pytest.raises(InvalidOption, match="min_tokens: every token"):
        run(llama, encode(llama), min_tokens=1, stop_token_ids=everything)
    assert len(run(llama, encode(llama), stop_token_ids=everything).ids) == 1


def where_complete(plain: Run, stop: str) -> int:
    """The index of the token with which `stop` is first complete."""
    text = ""
    for token in plain.tokens:
        text += token.text
        if stop in text:
            return token.index
    raise AssertionError("it never is")


@both_loops
def test_a_stop_string_that_is_complete_sooner_is_ordinary_text(
    load_engine: LoadEngine, pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    plain = run(engine, encode(engine), **asked)
    stop = plain.text[12:18]
    complete = where_complete(plain, stop)
    assert plain.text.count(stop) == 1
    early = run(engine, encode(engine), stop=(stop,), min_tokens=complete, **asked)
    assert (early.ids, early.text, early.finish_reason) == (plain.ids, plain.text, "length")
    # Begun before and complete with the first token that may end: nothing of it shows.
    for least in range(complete):
        made = run(engine, encode(engine), stop=(stop,), min_tokens=least, **asked)
        assert (len(made.ids), made.finish_reason) == (complete, "stop")
        assert made.text == plain.text[: plain.text.index(stop)]


def test_the_next_place_of_a_stop_string_that_came_too_soon_ends(llama: Engine) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    plain = run(llama, encode(llama), **asked)
    # The commonest character comes again and again.
    stop = max(set(plain.text), key=plain.text.count)
    least = where_complete(plain, stop) + 5
    made = run(llama, encode(llama), stop=(stop,), min_tokens=least, **asked)
    assert len(made.ids) > least
    assert made.text.count(stop) >= 1
    assert plain.text.startswith(made.text + stop)
    assert made.finish_reason == "stop"
