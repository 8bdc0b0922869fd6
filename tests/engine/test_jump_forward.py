"""Forced tokens in one forward with the token before them: marked, and exact whatever happens.

What a published token's mark decides is seen in the logprob of the next one that was drawn: a
forward of several tokens gives other bits than one of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, get_args

import mlx.core as mx
import pytest

from cache_models import CacheModel
from engine_runs import (
    PROMPT,
    Run,
    encode,
    engine_in_memory,
    finish,
    rest,
    run,
    run_with_checkpoints,
)
from grammar_samples import GRAMMARS, assert_matches
from tenuto_engine import (
    Checkpoint,
    Engine,
    GenerationOptions,
    InvalidOption,
    KVScheme,
    ResumeMismatch,
    Token,
    resume_options,
)
from tenuto_engine._decode import MOST_JUMPED
from tiny_models import SLIDING_WINDOW, Kind, tiny_vocabulary

LoadEngine = Callable[..., Engine]

# Of characters that the models in memory have tokens for, one each.
NAMES: Final = ("TITLE", "YEARS", "ID")
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "TITLE": {"type": "string", "minLength": 2, "maxLength": 6},
        "YEARS": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "ID": {"enum": ["XYZZY-1", "XYQQQ-2"]},
    },
    "required": list(NAMES),
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LONG: Final = "THE-SAME-WORDS-OVER-AND-OVER-AGAIN-IN-A-ROW!"
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "seed": 1}
SAMPLED: Final[dict[str, Any]] = {
    "temperature": 1.5,
    "top_p": 0.95,
    "seed": 20261130,
    "repetition_penalty": 1.2,
    "repetition_context_size": 7,
    "frequency_penalty": 0.3,
    "logit_bias": {40: 1.5},
    "xtc_probability": 0.5,
    "xtc_threshold": 0.02,
}
STYLES: Final = {"greedy": GREEDY, "sampled": SAMPLED}
END: Final = frozenset((93,))
"""The models in memory end with a tilde."""

styles = pytest.mark.parametrize("style", STYLES)
pipelines = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def asked(style: str = "sampled", **more: Any) -> dict[str, Any]:
    """The options of a run that jumps."""
    return {
        "grammar": {"json_schema": SCHEMA},
        "jump_forward": True,
        "max_tokens": 90,
        **STYLES[style],
        **more,
    }


def spans(tokens: list[Token]) -> list[int]:
    """How many tokens jumped behind each drawn one."""
    found: list[int] = []
    for token in tokens:
        if token.jumped:
            found[-1] += 1
        else:
            found.append(0)
    return found


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[int]]:
    """`widths(engine)`: the width of each forward of its model from now on."""

    def watch(engine: Engine) -> list[int]:
        seen: list[int] = []
        model = engine._loaded.model

        def forward(tokens: mx.array, **how: Any) -> mx.array:
            seen.append(tokens.shape[1])
            result: mx.array = model(tokens, **how)
            return result

        monkeypatch.setattr(engine, "_loaded", replace(engine._loaded, model=forward))
        return seen

    return watch


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
    assert value["ID"] in ("XYZZY-1", "XYQQQ-2")
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
def test_a_forward_takes_along_all_that_is_marked(
    load_engine: LoadEngine, widths: Callable[[Engine], list[int]], pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    prompt = encode(engine)
    seen = widths(engine)
    done = run(engine, prompt, **asked())
    # The end is not forwarded.
    expected = [1 + jumped for jumped in spans(done.tokens)][:-1]
    assert seen[-len(expected) :] == expected
    assert sum(seen[: -len(expected)]) == len(prompt)
    assert len(expected) < len(done.tokens) - 10
    seen.clear()
    run(engine, prompt, **asked(jump_forward=False))
    assert set(seen[len(seen) // 2 :]) == {1}


def test_stats_count_the_jumped_tokens(llama: Engine) -> None:
    sequence = llama.add(encode(llama), GenerationOptions(**asked()))
    done = finish(llama, sequence)
    assert sequence.stats.jumped_tokens == sum(spans(done.tokens)) > 10
    assert sequence.stats.decoded_tokens == len(done.tokens) - 1
    plain = llama.add(encode(llama), GenerationOptions(**asked(jump_forward=False)))
    assert not any(token.jumped for token in finish(llama, plain).tokens)
    assert plain.stats.jumped_tokens == 0


def test_a_span_gives_other_bits_than_its_tokens_one_by_one(llama: Engine) -> None:
    """Without this the tests of resuming would prove nothing."""
    done = run(llama, encode(llama), **asked("greedy"))
    alone = tuple(replace(token, jumped=False) for token in done.tokens)
    options = asked("greedy", jump_forward=False, published_tokens=alone)
    sequence = llama.add(encode(llama), GenerationOptions(**options))
    finish(llama, sequence)
    # Those that jumped have a logprob of 0.0, and as drawn ones they nearly never do.
    jumped = sum(spans(done.tokens))
    assert sequence.stats.divergences > jumped


def test_a_long_forced_text_is_cut_into_several_forwards(
    load_engine: LoadEngine, widths: Callable[[Engine], list[int]]
) -> None:
    assert len(LONG) > MOST_JUMPED + 2 > SLIDING_WINDOW
    engine = engine_in_memory(load_engine("llama"), "gemma3_text", ends=END)
    seen = widths(engine)
    done = run(engine, prompt_of(engine), **asked(grammar={"regex": f"[a-z]{LONG}[0-9]"}))
    assert done.text[1:-1] == LONG
    assert spans(done.tokens)[1] == MOST_JUMPED
    assert max(seen[2:]) == MOST_JUMPED + 1


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

    for name in ("_settle_forced", "_advance_span", "settle_after_prefill"):
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
    place = whole.text.index("YEARS")
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


def test_ids_that_the_model_lacks_are_not_forced(load_engine: LoadEngine) -> None:
    """The tokenizer has a token for `na`, and the model has none of that id."""
    engine = engine_in_memory(load_engine("llama"), "llama", ends=END)
    assert tiny_vocabulary()["na"] >= engine.vocab_size
    done = run(engine, prompt_of(engine), **asked(grammar={"regex": "[XY]QQQna[XY]"}))
    assert re.fullmatch("[XY]QQQna[XY]", done.text)
    assert max(done.ids) < engine.vocab_size


# -- going on --------------------------------------------------------------------------


def prompt_of(engine: Engine) -> list[int]:
    return [byte % engine.vocab_size for byte in PROMPT.encode()][:21]


def first(engine: Engine, tokens: list[int], options: GenerationOptions, drawn: int) -> Run:
    """A run until it handed out so many drawn tokens, or ended."""
    sequence = engine.add(tokens, options)
    got: list[Token] = []
    while not sequence.state.is_end and sum(not token.jumped for token in got) < drawn:
        got += [event.token for event in engine.step()]
    engine.close(sequence)
    if sequence.error:
        raise sequence.error
    assert sequence.stats.divergences == 0
    return Run(got, sequence.end_text, sequence.finish_reason)


def goes_on(engine: Engine, checkpoint: Checkpoint | None, published: int, whole: Run) -> None:
    """Assert that a resume with so many published tokens gives what follows, to the bit."""
    tokens, options = resume_options(
        checkpoint,
        GenerationOptions(**asked()),
        whole.tokens[:published],
        prompt_tokens=prompt_of(engine),
    )
    got = first(engine, tokens, options, drawn=2)
    assert got.tokens == whole.tokens[published : published + len(got.tokens)]
    drawn = sum(not token.jumped for token in whole.tokens[published:])
    assert sum(not token.jumped for token in got.tokens) == min(drawn, 2)


SCHEMES: Final = (None, *(KVScheme(bits=4, group_size=32, start=start) for start in (0, 40)))
QUANTIZED: Final = ("llama_wide", "gemma3_text")


@pytest.fixture(params=[False, True], ids=["synchronous", "pipelined"])
def in_memory(
    load_engine: LoadEngine, request: pytest.FixtureRequest
) -> Callable[..., Iterator[Engine]]:
    """`in_memory(model)`: engines of the model, one for each KV scheme that it can have."""

    def engines(model: CacheModel) -> Iterator[Engine]:
        for scheme in SCHEMES if model in QUANTIZED else SCHEMES[:1]:
            yield engine_in_memory(
                load_engine("llama"),
                model,
                pipelined=request.param,
                ends=END,
                kv_scheme=scheme,
                head_dim=32 if scheme and model != "llama_wide" else None,
            )

    return engines


@pytest.mark.parametrize("model", get_args(CacheModel))
def test_a_run_killed_at_any_step_goes_on_to_the_bit(
    in_memory: Callable[..., Iterator[Engine]], model: CacheModel
) -> None:
    """Whatever was published, to the middle of a span, and whatever checkpoint there is."""
    for engine in in_memory(model):
        whole, taken = run_with_checkpoints(engine, prompt_of(engine), asked())
        assert max(spans(whole.tokens)) >= 5
        assert json.loads(whole.text)
        covered = [checkpoint.generated_tokens for checkpoint in taken]
        # They are where spans end, and nowhere else.
        assert not any(whole.tokens[done].jumped for done in covered if done < len(whole.tokens))
        assert len(covered) == len(spans(whole.tokens))
        for published in range(len(whole.tokens) + 1):
            behind = [each for each in taken if each.generated_tokens <= published]
            ahead = [each for each in taken if each.generated_tokens > published]
            for checkpoint in (*behind[-2:], *ahead[:1]):
                goes_on(engine, checkpoint, published, whole)
            if published % 5 == 0 or whole.tokens[published - 1].jumped:
                goes_on(engine, None, published, whole)
