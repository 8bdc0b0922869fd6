"""Text that has to match a grammar: it always does, and a resume changes no bit of it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine_runs import (
    STYLES,
    Run,
    encode,
    engine_in_memory,
    finish,
    rest,
    resume,
    run,
    run_with_checkpoints,
)
from grammar_samples import GRAMMARS, assert_matches
from tenuto_engine import (
    Checkpoint,
    Engine,
    GenerationFailed,
    GenerationOptions,
    InvalidOption,
    ResumeMismatch,
    SequenceState,
    Token,
    resume_options,
)
from tenuto_engine._grammar import GrammarState
from tenuto_engine._logits import only_allowed
from tiny_models import EOS, Kind, build_tiny_model, tiny_vocabulary

LoadEngine = Callable[..., Engine]

STYLES_HERE = {
    name: style | {"ignore_eos": False, "max_tokens": 70} for name, style in STYLES.items()
}

grammars = pytest.mark.parametrize("grammar", GRAMMARS)
# Each kind of cache, each grammar and each style, without all their pairs.
cases = pytest.mark.parametrize(
    ("kind", "grammar", "style"),
    [
        ("llama", "json_schema", "sampled"),
        ("gemma3_text", "regex", "greedy"),
        ("lfm2", "lark", "sampled"),
    ],
)
styles = pytest.mark.parametrize("style", STYLES_HERE)
pipelines = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def options_of(name: str, style: str, **more: Any) -> dict[str, Any]:
    return STYLES_HERE[style] | {"grammar": GRAMMARS.get(name)} | more


# -- what comes out --------------------------------------------------------------------


@cases
@pipelines
def test_the_text_matches_and_the_run_ends_with_a_stop(
    load_engine: LoadEngine, kind: Kind, grammar: str, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    done = run(engine, encode(engine), **options_of(grammar, style))
    assert done.finish_reason == "stop"
    assert_matches(grammar, done.text)
    # The end is drawn and counted like that of any other run.
    assert done.ids[-1] in engine.eos_token_ids
    assert done.tokens[-1].text == ""


@cases
def test_both_loops_give_the_same_bits(
    load_engine: LoadEngine, kind: Kind, grammar: str, style: str
) -> None:
    synchronous, pipelined = (load_engine(kind, pipelined=each) for each in (False, True))
    options = options_of(grammar, style)
    expected = run(synchronous, encode(synchronous), **options)
    assert run(pipelined, encode(synchronous), **options) == expected


@grammars
def test_a_seed_gives_the_same_text_again_and_another_one_another(
    llama: Engine, grammar: str
) -> None:
    texts = [
        run(llama, encode(llama), **options_of(grammar, "sampled", seed=seed)).text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@grammars
@pipelines
def test_a_limit_cuts_the_text_where_it_stands(
    load_engine: LoadEngine, grammar: str, pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    whole = run(engine, encode(engine), **options_of(grammar, "sampled"))
    # Without the end token nothing is missing, and nothing else could have followed.
    complete = len(whole.tokens) - 1
    for limit in (1, 2, complete // 2, complete - 1, complete):
        cut = run(engine, encode(engine), **options_of(grammar, "sampled", max_tokens=limit))
        assert cut.ids == whole.ids[:limit]
        assert whole.text.startswith(cut.text.rstrip("\ufffd"))
        assert cut.finish_reason == ("stop" if limit == complete else "length")


def test_a_grammar_that_could_go_on_is_cut_short_by_a_limit(llama: Engine) -> None:
    cut = run(llama, encode(llama), grammar={"regex": "[a-z]+"}, max_tokens=1)
    assert re.fullmatch("[a-z]+", cut.text)
    assert cut.finish_reason == "length"


def test_an_empty_grammar_gives_the_end_alone(llama: Engine) -> None:
    done = run(llama, encode(llama), grammar={"regex": ""}, max_tokens=5)
    assert (len(done.tokens), done.text, done.finish_reason) == (1, "", "stop")


def test_stop_strings_and_stop_tokens_still_end_a_run(llama: Engine) -> None:
    whole = run(llama, encode(llama), **options_of("regex", "sampled"))
    stop = whole.text[5:7]
    by_text = run(llama, encode(llama), **options_of("regex", "sampled", stop=(stop,)))
    assert (by_text.text, by_text.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    last = whole.ids[4]
    by_token = run(llama, encode(llama), **options_of("regex", "sampled", stop_token_ids=(last,)))
    assert by_token.ids == whole.ids[: whole.ids.index(last) + 1]
    assert by_token.finish_reason == "stop"


# -- masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_mask_changes_no_bit_of_what_it_allows(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((1, 77), key=mx.random.key(1)) * 30).astype(dtype)
    allowed = np.arange(77) % 3 == 1
    masked = only_allowed(logits, allowed)
    assert masked.dtype == dtype
    values, before = (np.array(each.astype(mx.float32))[0] for each in (masked, logits))
    assert (values[allowed] == before[allowed]).all()
    assert (values[~allowed] == -math.inf).all()


def test_logits_beyond_the_tokenizers_are_masked_and_fewer_will_do(llama: Engine) -> None:
    compiled = llama.compile_grammar({"regex": "[a-z]"})
    wide = compiled.begin().allowed((), 0, llama.vocab_size + 50)
    assert wide.shape == (llama.vocab_size + 50,)
    assert wide.sum() == 26
    assert not wide[llama.vocab_size :].any()
    narrow = compiled.begin().allowed((), 0, 70)
    assert (narrow == wide[:70]).all()
    assert narrow.any()
    with pytest.raises(GenerationFailed, match="no token of the model"):
        compiled.begin().allowed((), 0, 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@styles
def test_no_token_is_drawn_or_named_that_the_grammar_does_not_allow(
    tmp_path: Path, dtype: str, style: str
) -> None:
    """An oracle of our own: a language that can be listed. The logits go beyond the tokenizer's."""
    words = [a + b + c for a in ("ba", "be", "bo") for b in "xyz" for c in ("12", "34", "5", "é")]
    folder = build_tiny_model(tmp_path, vocab_size=len(tiny_vocabulary()) + 30, dtype=dtype)
    engine = Engine.load(folder, chunk_size=16)
    eos = tiny_vocabulary()[EOS]
    ids = range(engine.vocab_size)
    raw = {token: engine.tokenizer.decode([token]) for token in ids}

    def fits(text: str, token: int) -> bool:
        if token == eos:
            return text in words
        # Half of a character fits wherever there is one.
        new = text + raw[token].rstrip("\ufffd")
        return token < eos - 2 and any(word.startswith(new) for word in words)

    for seed in range(6):
        forbidden = {token: 100.0 for token in ids if not fits("", token)}
        done = run(
            engine,
            encode(engine),
            **options_of(
                "",
                style,
                grammar={"regex": "|".join(words)},
                logprobs=20,
                seed=seed,
                logit_bias=forbidden,
            ),
        )
        assert done.text in words
        text = ""
        for token in done.tokens:
            named = [each for each, _ in token.top_logprobs]
            assert token.token in named
            assert 1 <= len(named) <= 20
            assert all(fits(text, each) for each in named)
            # What is named has all of the probability, since it is all that may come.
            if len(named) < 20:
                total = sum(math.exp(logprob) for _, logprob in token.top_logprobs)
                assert total == pytest.approx(1, abs=1e-3 if dtype == "float32" else 0.3)
            text += token.text


def test_bias_and_penalties_still_choose_among_what_is_allowed(llama: Engine) -> None:
    vocabulary = tiny_vocabulary()
    for wanted in ("x", "y", "z"):
        done = run(
            llama,
            encode(llama),
            grammar={"regex": "[xyz]{5}"},
            logit_bias={vocabulary[wanted]: 100.0, vocabulary["q"]: 100.0},
        )
        assert done.text == wanted * 5


def test_logprobs_are_those_of_the_allowed_tokens_alone(llama: Engine) -> None:
    vocabulary = tiny_vocabulary()
    free = run(llama, encode(llama), max_tokens=1, logit_bias={vocabulary["x"]: 0.0})
    assert free.tokens[0].token not in (vocabulary["x"], vocabulary["y"])
    done = run(llama, encode(llama), grammar={"regex": "[xy]"}, logprobs=5)
    pairs = dict(done.tokens[0].top_logprobs)
    assert set(pairs) == {vocabulary["x"], vocabulary["y"]}
    assert sum(map(math.exp, pairs.values())) == pytest.approx(1, abs=1e-5)
    assert done.tokens[0].logprob == max(pairs.values())


# -- going on --------------------------------------------------------------------------


@cases
@pipelines
def test_a_resume_at_any_step_gives_the_rest_to_the_bit(
    load_engine: LoadEngine, kind: Kind, grammar: str, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    options = options_of(grammar, style)
    whole, taken = run_with_checkpoints(engine, encode(engine), options)
    steps = [checkpoint.generated_tokens for checkpoint in taken]
    assert len(steps) >= len(whole.tokens) - 2
    # Every step to the end would be quadratic: some go to the end, the others a few tokens far.
    for checkpoint in taken:
        done = checkpoint.generated_tokens
        if done in (0, 5, steps[-1]):
            assert resume(engine, checkpoint, options) == rest(whole, done)
        else:
            assert first_tokens(engine, checkpoint, options, 3) == whole.tokens[done : done + 3]


def first_tokens(
    engine: Engine, checkpoint: Checkpoint, options: dict[str, Any], count: int
) -> list[Token]:
    tokens, resumed = resume_options(checkpoint, GenerationOptions(**options))
    with engine.generate(tokens, resumed) as generation:
        return [token for token, _ in zip(generation, range(count), strict=False)]


def test_a_resume_hands_over_between_the_loops(load_engine: LoadEngine, kind: Kind) -> None:
    synchronous, pipelined = (load_engine(kind, pipelined=each) for each in (False, True))
    options = options_of("regex", "sampled")
    whole, taken = run_with_checkpoints(synchronous, encode(synchronous), options)
    assert resume(pipelined, taken[7], options) == rest(whole, 7)
    whole, taken = run_with_checkpoints(pipelined, encode(synchronous), options)
    assert resume(synchronous, taken[7], options) == rest(whole, taken[7].generated_tokens)


@pipelines
def test_a_chain_of_resumes_at_every_step_gives_the_same_run(
    load_engine: LoadEngine, kind: Kind, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    options = options_of("json_schema", "sampled")
    whole = run(engine, encode(engine), **options)
    sequence = engine.add(encode(engine), GenerationOptions(**options))
    tokens: list[Token] = []
    while not sequence.state.is_end:
        tokens += [event.token for event in engine.step()]
        checkpoint = engine.checkpoint(sequence)
        if checkpoint is None:
            continue
        engine.close(sequence)
        asked = GenerationOptions(**options)
        sequence = engine.add(
            *resume_options(checkpoint, asked, tokens, prompt_tokens=encode(engine))
        )
    assert Run(tokens, sequence.end_text, sequence.finish_reason) == whole
    assert sequence.stats.divergences == 0


@cases
@pipelines
def test_published_tokens_are_fed_again_with_the_same_masks(
    load_engine: LoadEngine, kind: Kind, grammar: str, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    options = options_of(grammar, style)
    whole, taken = run_with_checkpoints(engine, encode(engine), options)
    for published in (1, 9, len(whole.tokens)):
        asked = GenerationOptions(**options, published_tokens=tuple(whole.tokens[:published]))
        sequence = engine.add(encode(engine), asked)
        assert finish(engine, sequence) == rest(whole, published)
        assert sequence.stats.divergences == 0
    tokens, asked = resume_options(taken[5], GenerationOptions(**options), whole.tokens[:9])
    sequence = engine.add(tokens, asked)
    assert finish(engine, sequence) == rest(whole, 9)
    assert sequence.stats.divergences == 0


def test_checkpoints_of_a_catch_up_resume_exactly(llama: Engine) -> None:
    options = options_of("json_schema", "sampled")
    whole = run(llama, encode(llama), **options)
    again = options | {"published_tokens": tuple(whole.tokens[:15])}
    done, taken = run_with_checkpoints(llama, encode(llama), again)
    assert done == rest(whole, 15)
    for checkpoint in taken[:20:3]:
        assert resume(llama, checkpoint, options, published=whole.tokens[:15]) == done


def test_published_tokens_that_are_prefilled_count_for_the_grammar(llama: Engine) -> None:
    options = options_of("json_schema", "sampled")
    whole = run(llama, encode(llama), **options)
    ids = [*encode(llama), *whole.ids[:12]]
    asked = GenerationOptions(
        **options, initial_generated_tokens=12, initial_tokens=tuple(whole.tokens[:12])
    )
    done = finish(llama, llama.add(ids, asked))
    text = "".join(token.text for token in whole.tokens[:12]) + done.text
    assert_matches("json_schema", text)


def test_a_published_token_that_another_grammar_let_through_is_refused(llama: Engine) -> None:
    whole = run(llama, encode(llama), **options_of("regex", "sampled"))
    published = list(whole.tokens[:9])
    published[4] = replace(published[4], token=tiny_vocabulary()["{"])
    options = options_of("regex", "sampled", published_tokens=tuple(published))
    sequence = llama.add(encode(llama), GenerationOptions(**options))
    with pytest.raises(ResumeMismatch, match="does not allow token 5"):
        finish(llama, sequence)


@grammars
def test_a_state_is_a_function_of_the_tokens_matched(llama: Engine, grammar: str) -> None:
    compiled = llama.compile_grammar(GRAMMARS[grammar])
    width = llama.vocab_size
    for seed in range(3):
        done = run(llama, encode(llama), **options_of(grammar, "sampled", seed=seed))
        stepwise = compiled.begin()
        for count in range(len(done.tokens)):
            mask = stepwise.allowed(done.tokens, count, width)
            assert (compiled.begin().allowed(done.tokens, count, width) == mask).all()
            assert mask[done.ids[count]]


# -- others ----------------------------------------------------------------------------


def test_neighbours_do_not_matter(load_engine: LoadEngine, kind: Kind) -> None:
    alone = load_engine(kind)
    asked = [
        options_of("json_schema", "sampled"),
        STYLES["sampled"] | {"max_tokens": 40},
        options_of("json_schema", "sampled", seed=5),
        options_of("lark", "greedy"),
    ]
    expected = [run(alone, encode(alone), **options) for options in asked]
    together = load_engine(kind, slots=len(asked), pipelined=None)
    rows = [together.add(encode(alone), GenerationOptions(**options)) for options in asked]
    got: dict[Any, list[Token]] = {row: [] for row in rows}
    while not all(row.state.is_end for row in rows):
        for event in together.step():
            got[event.sequence].append(event.token)
    runs = [Run(got[row], row.end_text, row.finish_reason) for row in rows]
    assert runs == expected


def test_a_grammar_that_is_too_complex_fails_its_row_alone(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=2)
    many = range(3000)
    lark = f"start: {' | '.join(f'a{n}' for n in many)}\n"
    lark += "\n".join(f'a{n}: "x" "y" b{n}\nb{n}: "{n}"' for n in many)
    bad = engine.add(encode(engine), GenerationOptions(grammar={"lark": lark}))
    good = engine.add(encode(engine), GenerationOptions(max_tokens=10, ignore_eos=True))
    finish(engine, good)
    assert bad.state is SequenceState.FAILED
    assert isinstance(bad.error, GenerationFailed)
    assert "grammar: Parser Error: Current row has 3000 items" in str(bad.error)


def test_a_plain_run_knows_nothing_of_grammars(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a plain row has no grammar")

    monkeypatch.setattr(GrammarState, "allowed", never)
    monkeypatch.setattr("tenuto_engine._decode.only_allowed", never)
    monkeypatch.setattr("tenuto_engine._grammars._wrap", never)
    assert run(llama, encode(llama), max_tokens=5).tokens


def test_an_end_token_that_is_ordinary_text_too_ends_only_a_whole_text(llama: Engine) -> None:
    # Of the models in memory a token is a character; this one is the tilde.
    engine = engine_in_memory(llama, "llama", ends=frozenset((93,)))
    for seed in range(5):
        made = run(
            engine,
            [40, 41, 42],
            grammar={"regex": "[ -~]{12,20}"},
            logit_bias={93: 30.0},
            temperature=1.0,
            seed=seed,
            max_tokens=60,
        )
        assert made.finish_reason == "stop"
        assert len(made.text) == 12
        assert made.ids.index(93) == 12


# -- what llguidance does that a resume cannot repeat --------------------------------------

DEEP = """
import sys
from tenuto_engine import Engine, InvalidOption
engine = Engine.load(sys.argv[1])
defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(4000)}
defs["d4000"] = {"type": "string", "maxLength": 3}
try:
    engine.compile_grammar({"json_schema": {"$defs": defs, "$ref": "#/$defs/d0"}})
except InvalidOption as error:
    print(error)
print("alive")
"""


@pytest.mark.parametrize(
    "attributes",
    [
        *("max_tokens=3", "lazy", 'stop="b"', 'suffix="b"', "temperature=0.5"),
        *("capture, lazy", 'stop="]"', "stop=/]/, capture"),
    ],
)
def test_attributes_of_rules_are_refused_but_for_captures(llama: Engine, attributes: str) -> None:
    with pytest.raises(InvalidOption, match="lark: the rule x has attributes in brackets"):
        llama.compile_grammar({"lark": f"start: x\n x[{attributes}]: /a+/"})
    for kept in ("[capture]", ' [ capture = "q" ]', ""):
        llama.compile_grammar({"lark": f"start: x\n?x{kept}: /a[x]+/\n  | y [y] /b/\ny: /c/"})


def test_a_grammar_of_long_chains_ends_no_process(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", DEEP, str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.endswith("alive\n"), done.stderr[-500:]


@pytest.mark.parametrize("lark", [r"start: /[^\s\S]/", 'start: a\na: a "x"'])
def test_a_grammar_that_allows_nothing_is_refused(llama: Engine, lark: str) -> None:
    with pytest.raises(InvalidOption, match="grammar: lark: nothing can begin"):
        llama.compile_grammar({"lark": lark})


def test_a_grammar_in_which_a_limit_was_hit_is_compiled_anew(llama: Engine) -> None:
    """Its copies share a lexer: what one has used up, or broken, another has not got."""
    source = GRAMMARS["regex"]
    first = llama.compile_grammar(source)
    assert llama.compile_grammar(source) is first
    state = first.begin()
    state._matcher.try_consume_tokens([10**6])
    with pytest.raises(GenerationFailed):
        state.allowed([], 0, llama.vocab_size)
    again = llama.compile_grammar(source)
    assert again is not first
    assert llama.compile_grammar(first) is again
