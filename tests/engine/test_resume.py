"""A generation continued from a checkpoint is the one that was never interrupted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_runs import (
    STYLES,
    Run,
    encode,
    finish,
    rest,
    resume,
    run,
    run_with_checkpoints,
)
from tenuto_engine import (
    Checkpoint,
    Engine,
    GenerationOptions,
    InvalidOption,
    ResumeMismatch,
    SequenceState,
    Token,
    resume_options,
)
from tenuto_engine._slots import Row
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

TOKENS = 60

pipelines = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])
styles = pytest.mark.parametrize("style", ["greedy", "sampled"])


@pytest.mark.parametrize(
    # Each kind in both styles and in both loops, without all that there could be.
    ("kind", "style", "pipelined"),
    [
        ("llama", "greedy", True),
        ("llama", "sampled", False),
        ("gemma3_text", "greedy", False),
        ("gemma3_text", "sampled", True),
        ("lfm2", "greedy", True),
        ("lfm2", "sampled", False),
    ],
)
def test_a_resume_at_any_step_gives_the_rest_to_the_bit(
    load_engine: LoadEngine, kind: Kind, style: str, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    options = STYLES[style] | {"max_tokens": TOKENS}
    whole, taken = run_with_checkpoints(engine, encode(engine), options)
    # The pipelined loop runs ahead by one token after the first, with nothing to wait for.
    steps = [0, *range(2, TOKENS)] if pipelined else list(range(TOKENS))
    assert [checkpoint.generated_tokens for checkpoint in taken] == steps
    # Every step to the end would be quadratic: some go to the end, the others a few tokens far.
    for checkpoint in taken:
        done = checkpoint.generated_tokens
        assert list(checkpoint.generated) == whole.tokens[:done]
        if done % 20 == 0:
            assert resume(engine, checkpoint, options) == rest(whole, done)
        else:
            assert first_tokens(engine, checkpoint, options, 3) == whole.tokens[done : done + 3]


def first_tokens(
    engine: Engine, checkpoint: Checkpoint, options: dict[str, Any], count: int
) -> list[Any]:
    tokens, resumed = resume_options(checkpoint, GenerationOptions(**options))
    with engine.generate(tokens, resumed) as generation:
        return [token for token, _ in zip(generation, range(count), strict=False)]


@styles
def test_a_chain_of_resumes_at_every_step_gives_the_same_run(
    load_engine: LoadEngine, kind: Kind, style: str
) -> None:
    engine = load_engine(kind)
    options = STYLES[style] | {"max_tokens": TOKENS}
    whole = run(engine, encode(engine), **options)
    sequence = engine.add(encode(engine), GenerationOptions(**options))
    tokens = []
    while not sequence.state.is_end:
        tokens += [event.token for event in engine.step()]
        checkpoint = engine.checkpoint(sequence)
        if checkpoint is None:
            continue
        engine.close(sequence)
        sequence = engine.add(
            *resume_options(
                checkpoint, GenerationOptions(**options), tokens, prompt_tokens=encode(engine)
            )
        )
    assert Run(tokens, sequence.end_text, sequence.finish_reason) == whole
    assert sequence.stats.divergences == 0
    assert sequence.stats.generated_tokens == TOKENS


@pipelines
def test_a_resume_at_any_prefill_border_gives_the_same_run(
    load_engine: LoadEngine, kind: Kind, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    options = STYLES["sampled"] | {"max_tokens": 40}
    prompt = encode(engine)
    sequence = engine.add(prompt, GenerationOptions(**options))
    borders = []
    assert engine.checkpoint(sequence) is None
    while sequence.state in (SequenceState.WAITING, SequenceState.PREFILL):
        checkpoint = engine.checkpoint(sequence)
        borders += [checkpoint] if checkpoint else []
        engine.step()
    engine.close(sequence)
    whole = run(engine, prompt, **options)
    assert [len(border.cache_tokens) for border in borders] == list(range(16, len(prompt), 16))
    for border in borders:
        assert border.pending_token is None
        assert resume(engine, border, options, prompt_tokens=prompt) == whole


def test_a_resume_hands_over_between_the_loops(load_engine: LoadEngine, kind: Kind) -> None:
    synchronous = load_engine(kind, pipelined=False)
    pipelined = load_engine(kind, pipelined=True)
    options = STYLES["sampled"] | {"max_tokens": 40}
    whole, taken = run_with_checkpoints(synchronous, encode(synchronous), options)
    assert resume(pipelined, taken[17], options) == rest(whole, 17)


def test_a_row_that_outgrows_pipelining_goes_on_with_the_same_bits(
    load_engine: LoadEngine, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_engine(kind)
    options = STYLES["sampled"] | {"max_tokens": 40}
    whole = run(plain, encode(plain), **options)
    chosen: list[bool] = []

    def until_half_way(row: Row) -> bool:
        chosen.append(row.generated < 20)
        return chosen[-1]

    monkeypatch.setattr(Row, "gains_by_pipelining", property(until_half_way))
    switching, taken = run_with_checkpoints(
        load_engine(kind, pipelined=None), encode(plain), options
    )
    assert True in chosen
    assert False in chosen
    assert switching == whole
    for checkpoint in taken[15:25]:
        assert resume(plain, checkpoint, options) == rest(whole, checkpoint.generated_tokens)


def test_a_cpu_pipelines_while_the_caches_are_small(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", pipelined=None)
    sequence = engine.add(encode(engine), GenerationOptions(max_tokens=20, ignore_eos=True))
    while sequence.emitted < 5:
        engine.step()
    [row] = engine._slots.rows
    assert row.gains_by_pipelining
    # Only the pipelined loop has a token in flight that is not handed out.
    assert row.generated == sequence.emitted
    row.caches = [SimpleNamespace(nbytes=2**26 + 1)]
    assert not row.gains_by_pipelining


def test_a_resume_inside_a_held_stop_string_still_finds_it(llama: Engine) -> None:
    plain = run(llama, encode(llama), max_tokens=TOKENS, ignore_eos=True)
    stop = plain.text[20:30]
    options = {"max_tokens": TOKENS, "ignore_eos": True, "stop": (stop,), "seed": 1}
    whole, taken = run_with_checkpoints(llama, encode(llama), options)
    assert whole.finish_reason == "stop"
    assert whole.text == plain.text[: plain.text.index(stop)]
    for checkpoint in taken:
        assert resume(llama, checkpoint, options) == rest(whole, checkpoint.generated_tokens)


def test_a_checkpoint_on_request_resumes_wherever_it_is_taken(llama: Engine) -> None:
    options = STYLES["sampled"] | {"max_tokens": 30}
    whole = run(llama, encode(llama), **options)
    sequence = llama.add(encode(llama), GenerationOptions(**options))
    tokens: list[Token] = []
    while len(tokens) < 12:
        tokens += [event.token for event in llama.step()]
    checkpoint = llama.checkpoint(sequence)
    llama.close(sequence)
    assert checkpoint is not None
    assert tokens + resume(llama, checkpoint, options, published=tokens).tokens == whole.tokens


def test_tokens_that_only_the_checkpoint_has_are_handed_out_first(llama: Engine) -> None:
    options = STYLES["sampled"] | {"max_tokens": 30}
    whole, taken = run_with_checkpoints(llama, encode(llama), options)
    assert resume(llama, taken[20], options, published=whole.tokens[:13]) == rest(whole, 13)
    assert resume(llama, taken[20], options, published=()) == whole


def test_the_limit_counts_the_tokens_before_the_resume(llama: Engine) -> None:
    options = STYLES["greedy"] | {"max_tokens": 30}
    _, taken = run_with_checkpoints(llama, encode(llama), options)
    assert len(resume(llama, taken[29], options).tokens) == 1
    with pytest.raises(InvalidOption, match="max_tokens"):
        resume(llama, taken[20], options | {"max_tokens": 20})


def test_a_resume_runs_no_forward_for_what_the_cache_covers(llama: Engine) -> None:
    options = STYLES["greedy"] | {"max_tokens": 30}
    _, taken = run_with_checkpoints(llama, encode(llama), options)
    tokens, resumed = resume_options(taken[10], GenerationOptions(**options))
    with llama.generate(tokens, resumed) as generation:
        assert next(generation).index == 11
        assert generation.stats.prefilled_tokens == 0
        assert generation.stats.cached_tokens == len(encode(llama))


def test_a_cache_that_does_not_cover_the_prefix_exactly_is_refused(llama: Engine) -> None:
    options = STYLES["greedy"] | {"max_tokens": 30}
    _, taken = run_with_checkpoints(llama, encode(llama), options)
    tokens, resumed = resume_options(taken[10], GenerationOptions(**options))
    from dataclasses import replace

    for changed, error in (
        ({"cached_tokens": len(tokens) - 1}, "different numbers"),
        ({"cache": taken[9].caches, "cached_tokens": None}, "covers"),
    ):
        with pytest.raises(ResumeMismatch, match=error):
            llama.add(tokens, replace(resumed, **changed))
    assert llama.free_slots == 1


def test_a_warm_cache_must_end_at_a_chunk_border_before_the_prompt_does(llama: Engine) -> None:
    _, taken = run_with_checkpoints(llama, encode(llama), STYLES["greedy"] | {"max_tokens": 30})
    tokens, warm = list(taken[10].cache_tokens), taken[10].caches
    with pytest.raises(ResumeMismatch, match="strict prefix"):
        llama.add(tokens, GenerationOptions(cache=warm))
    with pytest.raises(ResumeMismatch, match="chunk borders"):
        llama.add([*tokens, 5, 6, 7], GenerationOptions(cache=warm))


def test_a_checkpoint_inside_a_prefill_needs_the_whole_prompt(llama: Engine) -> None:
    sequence = llama.add(encode(llama))
    llama.step()
    checkpoint = llama.checkpoint(sequence)
    assert checkpoint is not None
    with pytest.raises(ResumeMismatch, match="prompt_tokens"):
        resume_options(checkpoint, GenerationOptions())
    with pytest.raises(ResumeMismatch, match="another prompt"):
        resume_options(checkpoint, GenerationOptions(), prompt_tokens=[1] * len(encode(llama)))


def test_a_checkpoint_that_contradicts_the_published_tokens_is_refused(llama: Engine) -> None:
    options = STYLES["greedy"] | {"max_tokens": 30}
    whole, taken = run_with_checkpoints(llama, encode(llama), options)
    other = list(whole.tokens)
    from dataclasses import replace

    other[4] = replace(other[4], token=(other[4].token + 1) % 100)
    with pytest.raises(ResumeMismatch, match="token 5"):
        resume_options(taken[10], GenerationOptions(**options), other[:8])


def test_without_a_checkpoint_the_run_begins_at_its_prompt(llama: Engine) -> None:
    prompt, options = encode(llama), GenerationOptions(**STYLES["sampled"], max_tokens=20)
    tokens, begun = resume_options(None, options, prompt_tokens=tuple(prompt))
    assert tokens == prompt
    assert begun is options
    assert resume_options(None, options, (), prompt_tokens=prompt)[1] is options
    with pytest.raises(InvalidOption, match="prompt_tokens: are needed"):
        resume_options(None, options)


def test_without_a_checkpoint_published_tokens_are_caught_up(llama: Engine) -> None:
    options: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 20}
    whole = run(llama, encode(llama), **options)
    tokens, begun = resume_options(
        None, GenerationOptions(**options), whole.tokens[:8], prompt_tokens=encode(llama)
    )
    assert finish(llama, llama.add(tokens, begun)) == rest(whole, 8)


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_a_limit_that_the_checkpoint_has_reached_is_named_with_both_numbers(
    llama: Engine, max_tokens: int
) -> None:
    options: dict[str, Any] = STYLES["greedy"] | {"max_tokens": 30}
    whole, taken = run_with_checkpoints(llama, encode(llama), options)
    assert taken[10].generated_tokens == 10
    with pytest.raises(InvalidOption, match=f"max_tokens: is {max_tokens}, .* covers 10") as bad:
        resume_options(taken[10], GenerationOptions(**options | {"max_tokens": max_tokens}))
    assert bad.value.field == "max_tokens"
    last = resume(llama, taken[10], options | {"max_tokens": 11})
    assert last.tokens == whole.tokens[10:11]


def test_a_resumed_row_does_not_hold_the_saved_caches_beside_its_own(llama: Engine) -> None:
    options: dict[str, Any] = STYLES["greedy"] | {"max_tokens": TOKENS}
    sequence = llama.add(encode(llama), GenerationOptions(**options))
    for _ in range(20):
        llama.step()
    checkpoint = llama.checkpoint(sequence)
    llama.close(sequence)
    assert checkpoint is not None
    saved = weakref.ref(checkpoint.caches[0].arrays[0].data)
    heir = llama.add(*resume_options(checkpoint, GenerationOptions(**options)))
    del checkpoint
    gc.collect()
    assert saved() is None
    llama.close(heir)
