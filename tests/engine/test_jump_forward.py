"""Forced tokens in one forward with the token before them: what comes out, and where it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from cache_models import CacheModel
from engine_runs import Run, encode, engine_in_memory, finish, run
from grammar_samples import GRAMMARS, assert_matches
from jump_runs import END, NAMES, SAMPLED, STYLES, asked, forwards_of, prompt_of, spans, watch
from tenuto_engine import Engine, GenerationFailed, GenerationOptions, InvalidOption, Token
from tenuto_engine._decode import MOST_JUMPED
from tiny_models import SLIDING_WINDOW, Kind, tiny_vocabulary

LoadEngine = Callable[..., Engine]
LONG: Final = "THE-SAME-WORDS-OVER-AND-OVER-AGAIN-IN-A-ROW!"

styles = pytest.mark.parametrize("style", STYLES)
pipelines = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


# -- what comes out --------------------------------------------------------------------


@styles
def test_the_text_matches_and_what_was_forced_is_marked(
    llama: Engine, kind: Kind, load_engine: LoadEngine, style: str
) -> None:
    engine = load_engine(kind)
    done = run(engine, encode(engine), **asked(style))
    assert done.finish_reason == "stop"
    value = json.loads(done.text)
    assert tuple(value) == NAMES
    assert value["ID"] in ("XYZ-1", "XQQ-2")
    assert max(spans(done.tokens)) >= 5
    for token in done.tokens:
        if token.jumped:
            assert (token.logprob, token.top_logprobs) == (0.0, ())
    # The end is drawn.
    assert not done.tokens[-1].jumped
    assert done.ids[-1] in engine.eos_token_ids


@pytest.mark.parametrize("name", GRAMMARS)
def test_other_grammars_match_too(llama: Engine, name: str) -> None:
    done = run(llama, encode(llama), **asked(grammar=GRAMMARS[name]))
    assert_matches(name, done.text)


@pipelines
def test_a_forward_takes_along_all_that_is_marked(load_engine: LoadEngine, pipelined: bool) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    prompt = encode(engine)
    watched = watch(engine)
    done = run(engine, prompt, **asked())
    # The end is not forwarded.
    expected = forwards_of(done.tokens)[:-1]
    assert watched.forwards[-len(expected) :] == expected
    assert [each for ids in watched.forwards[: -len(expected)] for each in ids] == prompt
    assert len(expected) < len(done.tokens) - 15
    watched.forwards.clear()
    plain = run(engine, prompt, **asked(jump_forward=False))
    # The pipelined loop has begun with the end before it knows that it is one.
    rest_of_it = watched.forwards[-len(plain.tokens) + (not pipelined) :]
    assert rest_of_it == [[each] for each in plain.ids][: len(rest_of_it)]


def test_stats_count_the_jumped_tokens(llama: Engine) -> None:
    sequence = llama.add(encode(llama), GenerationOptions(**asked()))
    done = finish(llama, sequence)
    assert sequence.stats.jumped_tokens == sum(spans(done.tokens)) > 10
    assert sequence.stats.decoded_tokens == len(done.tokens) - 1
    plain = llama.add(encode(llama), GenerationOptions(**asked(jump_forward=False)))
    assert not any(token.jumped for token in finish(llama, plain).tokens)
    assert plain.stats.jumped_tokens == 0


@pytest.mark.parametrize("model", ["gemma3_text", "mamba2", "deepseek_v3"])
def test_a_span_gives_other_bits_than_its_tokens_one_by_one(
    load_engine: LoadEngine, model: CacheModel
) -> None:
    """Of these models: without that the tests of resuming would see forwards, but no bits."""
    engine = engine_in_memory(load_engine("llama"), model, ends=END)
    done = run(engine, prompt_of(engine), **asked())
    alone = tuple(replace(token, jumped=False) for token in done.tokens)
    options = GenerationOptions(**asked(jump_forward=False, published_tokens=alone))
    sequence = engine.add(prompt_of(engine), options)
    finish(engine, sequence)
    assert sequence.stats.divergences > 0


def test_a_long_forced_text_is_cut_into_several_forwards(load_engine: LoadEngine) -> None:
    assert len(LONG) > MOST_JUMPED + 2 > SLIDING_WINDOW
    engine = engine_in_memory(load_engine("llama"), "gemma3_text", ends=END)
    done = run(engine, prompt_of(engine), **asked(grammar={"regex": f"[a-z]{LONG}[0-9]"}))
    assert done.text[1:-1] == LONG
    assert spans(done.tokens) == [MOST_JUMPED, len(LONG) - MOST_JUMPED - 1, 0, 0]


@styles
def test_both_loops_give_the_same_bits(load_engine: LoadEngine, kind: Kind, style: str) -> None:
    synchronous, pipelined = (load_engine(kind, pipelined=each) for each in (False, True))
    expected = run(synchronous, encode(synchronous), **asked(style))
    assert run(pipelined, encode(synchronous), **asked(style)) == expected


def test_neighbours_do_not_matter(load_engine: LoadEngine, kind: Kind) -> None:
    alone = load_engine(kind)
    each = [
        asked(),
        asked(jump_forward=False),
        SAMPLED | {"max_tokens": 40, "ignore_eos": True},
        asked("greedy", grammar=GRAMMARS["regex"]),
        asked(seed=5),
    ]
    expected = [run(alone, encode(alone), **options) for options in each]
    together = load_engine(kind, slots=len(each), pipelined=None)
    rows = [together.add(encode(alone), GenerationOptions(**options)) for options in each]
    got: dict[Any, list[Token]] = {row: [] for row in rows}
    while not all(row.state.is_end for row in rows):
        for event in together.step():
            got[event.sequence].append(event.token)
    assert [Run(got[row], row.end_text, row.finish_reason) for row in rows] == expected


def test_a_plain_run_knows_nothing_of_it(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it does not jump")

    for name in ("_settle_forced", "_advance_span"):
        monkeypatch.setattr(f"tenuto_engine._decode.{name}", never)
    assert run(llama, encode(llama), **asked(jump_forward=False)).tokens


# -- ends ------------------------------------------------------------------------------


def test_a_limit_inside_a_span_ends_the_run_there(llama: Engine) -> None:
    whole = run(llama, encode(llama), **asked())
    complete = len(whole.tokens) - 1
    for limit in range(1, complete + 1):
        cut = run(llama, encode(llama), **asked(max_tokens=limit))
        assert cut.tokens[:-1] == whole.tokens[: limit - 1]
        assert cut.tokens[-1].jumped == whole.tokens[limit - 1].jumped
        assert cut.ids == whole.ids[:limit]
        assert cut.finish_reason == ("stop" if limit == complete else "length")


def test_a_stop_string_inside_a_span_ends_the_run_there(llama: Engine) -> None:
    whole = run(llama, encode(llama), **asked())
    place = whole.text.index("YEAR")
    done = run(llama, encode(llama), **asked(stop=("YEA",)))
    assert (done.text, done.finish_reason) == (whole.text[:place], "stop")
    assert done.ids == whole.ids[: len(done.ids)]
    assert done.tokens[-1].jumped
    assert whole.tokens[len(done.ids)].jumped


def test_a_forced_token_that_ends_the_run_is_drawn(llama: Engine) -> None:
    vocabulary = tiny_vocabulary()
    ends = (vocabulary["E"],)
    done = run(llama, encode(llama), **asked(stop_token_ids=ends))
    assert (done.ids[-1], done.finish_reason) == (vocabulary["E"], "stop")
    assert not done.tokens[-1].jumped
    assert done.tokens[-1].text == ""
    # And the model's own, where a grammar names it.
    done = run(llama, encode(llama), **asked(grammar={"lark": 'start: "AB" /[xy]/ "AB" <|end|>'}))
    assert re.fullmatch("AB[xy]AB", done.text)
    assert [token.jumped for token in done.tokens] == [False, True, False, True, True, False]


def test_what_is_forced_can_be_matched(llama: Engine) -> None:
    """llguidance says of an end that it has to follow, and does not take it."""
    vocabulary = tiny_vocabulary()
    compiled = llama.compile_grammar({"lark": 'start: "AB" /[xy]/ "AB" <|end|>'})
    tokens = [Token(vocabulary[each], n, each, 0.0) for n, each in enumerate("ABxAB", 1)]
    for count in range(6):
        state = compiled.begin()
        forced = state.forced(tokens, count)
        assert forced == [vocabulary[each] for each in {3: "AB", 4: "B"}.get(count, "AB"[count:])]
        # Asking changes nothing.
        assert state.forced(tokens, count) == forced
        alone = compiled.begin().allowed(tokens, count, llama.vocab_size)
        assert (state.allowed(tokens, count, llama.vocab_size) == alone).all()


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_forced_is_a_function_of_the_tokens_matched(llama: Engine, name: str) -> None:
    compiled = llama.compile_grammar(GRAMMARS[name])
    for seed in range(3):
        done = run(llama, encode(llama), **asked(grammar=GRAMMARS[name], seed=seed))
        stepwise, found = compiled.begin(), []
        for count in range(len(done.tokens)):
            forced = stepwise.forced(done.tokens, count)
            stepwise.allowed(done.tokens, count, llama.vocab_size)
            assert compiled.begin().forced(done.tokens, count) == forced
            found += forced[:1] if count and done.tokens[count].jumped else []
        assert found == [token.token for token in done.tokens if token.jumped]


def test_ids_that_the_model_lacks_are_not_forced(load_engine: LoadEngine) -> None:
    """The tokenizer has a token for `na`, and the model has none of that id: as without jumping,
    that fails by name."""
    engine = engine_in_memory(load_engine("llama"), "llama", ends=END)
    assert tiny_vocabulary()["na"] >= engine.vocab_size
    for jumps in (True, False):
        options = asked(grammar={"regex": "[XY]QQQna[XY]"}, jump_forward=jumps)
        with pytest.raises(GenerationFailed, match="no token of the model may follow token 4"):
            run(engine, prompt_of(engine), **options)


# -- refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"grammar": None}, "jump_forward: needs a grammar"),
        ({"logprobs": 1}, "jump_forward: cannot be with logprobs"),
        ({"jump_forward": 1}, "jump_forward: must be true or false"),
        ({"jump_forward": None}, "jump_forward: must be true or false"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        GenerationOptions(**asked(**options))
