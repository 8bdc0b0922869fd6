"""What a reader has is fed again, compared, and never handed out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine_runs import PROMPT, STYLES, Run, finish, run, run_with_checkpoints
from tenuto_engine import (
    Engine,
    GenerationOptions,
    InvalidOption,
    LiveCheckpoint,
    ResumeMismatch,
    SequenceState,
    Token,
    resume_options,
)
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

OPTIONS = STYLES["sampled"] | {"max_tokens": 50}


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_replay_from_the_prompt_hands_out_only_what_the_reader_lacks(
    load_engine: LoadEngine, kind: Kind, pipelined: bool
) -> None:
    engine = load_engine(kind, pipelined=pipelined)
    whole = run(engine, encode(engine), **OPTIONS)
    for published in (1, 2, 20, 49):
        sequence = engine.add(
            encode(engine),
            GenerationOptions(**OPTIONS, published_tokens=tuple(whole.tokens[:published])),
        )
        assert finish(engine, sequence) == whole._replace(tokens=whole.tokens[published:])
        assert sequence.stats.divergences == 0
        assert sequence.stats.first_divergence is None
        assert sequence.catch_up_done == sequence.catch_up_total == published


def test_a_checkpoint_older_than_the_stream_is_caught_up(
    load_engine: LoadEngine, kind: Kind
) -> None:
    engine = load_engine(kind)
    whole, taken = run_with_checkpoints(engine, encode(engine), OPTIONS)
    tokens, resumed = resume_options(taken[10], GenerationOptions(**OPTIONS), whole.tokens[:33])
    sequence = engine.add(tokens, resumed)
    assert finish(engine, sequence) == whole._replace(tokens=whole.tokens[33:])
    assert sequence.stats.divergences == 0


def test_checkpoints_of_a_catch_up_resume_exactly(llama: Engine) -> None:
    whole = run(llama, encode(llama), **OPTIONS)
    again = OPTIONS | {"published_tokens": tuple(whole.tokens[:30])}
    done, taken = run_with_checkpoints(llama, encode(llama), again)
    assert done.tokens == whole.tokens[30:]
    for checkpoint in taken[:40:6]:
        tokens, resumed = resume_options(
            checkpoint, GenerationOptions(**OPTIONS), whole.tokens[:30]
        )
        assert finish(llama, llama.add(tokens, resumed)) == done


@pytest.mark.parametrize("place", [1, 2, 12, 30])
def test_a_published_token_that_differs_stands_and_is_counted(llama: Engine, place: int) -> None:
    whole = run(llama, encode(llama), **OPTIONS)
    published = list(whole.tokens[:30])
    old = published[place - 1]
    published[place - 1] = replace(old, token=(old.token + 1) % 250)
    sequence = llama.add(
        encode(llama), GenerationOptions(**OPTIONS, published_tokens=tuple(published))
    )
    made = finish(llama, sequence)
    assert sequence.stats.first_divergence == place
    assert sequence.stats.divergences >= 1
    assert sequence.tokens[:30] == published
    assert [token.index for token in made.tokens] == list(range(31, 51))
    assert made.tokens != whole.tokens[30:]


def test_a_published_logprob_that_differs_in_the_last_bit_is_counted(llama: Engine) -> None:
    import math

    whole = run(llama, encode(llama), **OPTIONS)
    published = list(whole.tokens[:9])
    nudged = math.nextafter(published[6].logprob, 0)
    published[6] = replace(published[6], logprob=nudged)
    sequence = llama.add(
        encode(llama), GenerationOptions(**OPTIONS, published_tokens=tuple(published))
    )
    assert finish(llama, sequence) == whole._replace(tokens=whole.tokens[9:])
    assert (sequence.stats.divergences, sequence.stats.first_divergence) == (1, 7)


def test_a_pending_token_that_differs_from_the_published_one_is_counted(llama: Engine) -> None:
    whole, taken = run_with_checkpoints(llama, encode(llama), OPTIONS)
    published = [*whole.tokens[:10], replace(whole.tokens[10], token=3)]
    tokens, resumed = resume_options(taken[10], GenerationOptions(**OPTIONS), published)
    sequence = llama.add(tokens, resumed)
    assert sequence.stats.first_divergence == 11
    assert finish(llama, sequence).tokens[0].index == 12


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_a_run_whose_end_alone_was_lost_ends_again_and_hands_out_nothing(
    llama: Engine, from_checkpoint: bool
) -> None:
    plain = run(llama, encode(llama), **OPTIONS)
    for options in (OPTIONS, OPTIONS | {"stop": (plain.text[30:36],)}):
        whole, taken = run_with_checkpoints(llama, encode(llama), options)
        tokens, asked = encode(llama), GenerationOptions(**options)
        if from_checkpoint:
            tokens, asked = resume_options(taken[-1], asked, whole.tokens)
        else:
            asked = replace(asked, published_tokens=tuple(whole.tokens))
        sequence = llama.add(tokens, asked)
        assert finish(llama, sequence) == Run([], whole.end_text, whole.finish_reason)
        assert sequence.state is SequenceState.FINISHED


def test_published_tokens_after_an_end_are_refused(llama: Engine) -> None:
    end = next(iter(llama.eos_token_ids))
    published = (Token(end, 1, "", -1.0), Token(5, 2, "x", -1.0))
    sequence = llama.add(encode(llama), GenerationOptions(published_tokens=published))
    with pytest.raises(ResumeMismatch, match="after the end at 1"):
        finish(llama, sequence)


def test_sampled_published_tokens_need_their_seed(llama: Engine) -> None:
    published = (Token(5, 1, "x", -1.0),)
    with pytest.raises(InvalidOption, match="seed"):
        llama.add(encode(llama), GenerationOptions(temperature=1, published_tokens=published))


def test_a_checkpoint_remembers_the_divergences_before_it(llama: Engine) -> None:
    whole = run(llama, encode(llama), **OPTIONS)
    other = replace(whole.tokens[4], token=(whole.tokens[4].token + 1) % llama.vocab_size)
    published = (*whole.tokens[:4], other)
    taken: list[LiveCheckpoint] = []
    options = GenerationOptions(
        **OPTIONS,
        published_tokens=published,
        checkpoint_every_tokens=10,
        checkpoint_every_seconds=None,
        on_decode_checkpoint=taken.append,
    )
    first = llama.add(encode(llama), options)
    finish(llama, first)
    tokens, resumed = resume_options(taken[-1], GenerationOptions(**OPTIONS))
    second = llama.add(tokens, resumed)
    finish(llama, second)
    assert first.stats.divergences == second.stats.divergences == 1
    assert first.stats.first_divergence == second.stats.first_divergence == 5


def test_published_tokens_can_be_prefilled_with_the_prompt(
    load_engine: LoadEngine, kind: Kind
) -> None:
    """The quick road: other bits are possible, but places, text and limits are the same."""
    engine = load_engine(kind)
    whole, _ = run_with_checkpoints(engine, encode(engine), OPTIONS)
    taken: list[LiveCheckpoint] = []
    ids = [*encode(engine), *whole.ids[:30]]
    sequence = engine.add(
        ids,
        GenerationOptions(
            **OPTIONS,
            initial_generated_tokens=30,
            initial_tokens=tuple(whole.tokens[:30]),
            on_decode_checkpoint=taken.append,
            checkpoint_every_seconds=0.0,
        ),
    )
    assert sequence.prefill_total == len(ids)
    rest = finish(engine, sequence)
    assert [token.index for token in rest.tokens] == list(range(31, 51))
    text = "".join(token.text for token in whole.tokens[:30]) + rest.text
    assert text == engine.tokenizer.decode([*whole.ids[:30], *rest.ids])
    assert rest.finish_reason == "length"
    covered = [c.generated_tokens for c in taken if c.pending_token is not None]
    assert covered[0] == 30
    assert all(c.original_prompt_tokens == len(ids) - 30 for c in taken)
    assert all(c.generated_tokens == 0 for c in taken if c.pending_token is None)
