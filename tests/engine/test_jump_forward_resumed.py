"""A run that jumps over forced tokens, killed anywhere: it goes on by the same forwards."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Final, cast, get_args

import pytest

from cache_models import CacheModel
from engine_runs import Run, encode, engine_in_memory, finish, rest, run, run_with_checkpoints
from jump_runs import END, NAMES, Watched, asked, forwards_of, prompt_of, spans, watch
from tenuto_engine import (
    Checkpoint,
    Engine,
    GenerationOptions,
    KVScheme,
    ResumeMismatch,
    Sequence,
    Token,
    resume_options,
)
from tenuto_engine._cache_kinds import entry
from tenuto_engine._cache_tree import kind_name, leaf_caches
from tiny_models import tiny_vocabulary

SCHEMES: Final = (None, *(KVScheme(bits=4, group_size=32, start=start) for start in (0, 40)))
QUANTIZED: Final = ("llama_wide", "gemma3_text")
"""Of the models below those that have these schemes as well."""


def in_memory(other: Engine, model: CacheModel, scheme: KVScheme | None, pipelined: bool) -> Engine:
    return engine_in_memory(
        other,
        model,
        pipelined=pipelined,
        ends=END,
        kv_scheme=scheme,
        head_dim=32 if scheme and model != "llama_wide" else None,
    )


def resumed(
    engine: Engine, checkpoint: Checkpoint | None, published: list[Token], **more: Any
) -> Sequence:
    asked_for = GenerationOptions(**asked(**more))
    tokens, options = resume_options(
        checkpoint, asked_for, published, prompt_tokens=prompt_of(engine)
    )
    return engine.add(tokens, options)


def goes_on(engine: Engine, checkpoint: Checkpoint | None, published: int, whole: Run) -> None:
    """Assert that what follows comes to the bit, two drawn tokens far, by the same forwards."""
    watched = engine._stepper._model
    assert isinstance(watched, Watched)
    watched.forwards.clear()
    sequence = resumed(engine, checkpoint, whole.tokens[:published])
    got: list[Token] = []
    while not sequence.state.is_end and sum(not token.jumped for token in got) < 2:
        got += [event.token for event in engine.step()]
    engine.close(sequence)
    assert sequence.error is None
    assert got == whole.tokens[published : published + len(got)]
    assert sum(not token.jumped for token in got) == min(
        2, sum(not token.jumped for token in whole.tokens[published:])
    )
    assert sequence.stats.divergences == 0
    prompt = [] if checkpoint else prompt_of(engine)
    covered = checkpoint.generated_tokens if checkpoint else 0
    forwards = watched.forwards
    while prompt:
        prompt = prompt[len(forwards.pop(0)) :]
    assert forwards == forwards_of(whole.tokens[covered:])[: len(forwards)]


@pytest.mark.parametrize(
    ("model", "pipelined"),
    [*((model, False) for model in get_args(CacheModel)), ("gemma3_text", True), ("lfm2", True)],
)
def test_a_run_killed_at_any_step_goes_on_to_the_bit(
    llama: Engine, model: CacheModel, pipelined: bool
) -> None:
    """Whatever was published, to the middle of a span, and whatever checkpoint there is."""
    for scheme in SCHEMES if model in QUANTIZED and not pipelined else SCHEMES[:1]:
        engine = in_memory(llama, model, scheme, pipelined)
        watch(engine)
        whole, taken = run_with_checkpoints(engine, prompt_of(engine), asked())
        assert json.loads(whole.text)
        assert max(spans(whole.tokens)) >= 5
        covered = [checkpoint.generated_tokens for checkpoint in taken]
        # They are where spans end, and nowhere else.
        assert covered == [token.index - 1 for token in whole.tokens if not token.jumped]
        for published in range(len(whole.tokens) + 1):
            behind = [each for each in taken if each.generated_tokens <= published]
            ahead = [each for each in taken if each.generated_tokens > published]
            goes_on(engine, behind[-1], published, whole)
            for checkpoint in (behind[-2:][0], *ahead[:1], None)[published % 3 :][:1]:
                goes_on(engine, checkpoint, published, whole)


@pytest.mark.parametrize("model", get_args(CacheModel))
def test_a_span_leaves_buffers_as_a_restored_run_has_them(llama: Engine, model: CacheModel) -> None:
    for scheme in SCHEMES[:2] if model in QUANTIZED else SCHEMES[:1]:
        engine = in_memory(llama, model, scheme, False)
        sequence = engine.add(prompt_of(engine), GenerationOptions(**asked()))
        while not sequence.state.is_end:
            engine.step()
            for row in engine._slots.rows:
                for leaf in leaf_caches(row.caches):
                    for buffer in entry(kind_name(leaf)).buffers(leaf):
                        assert memoryview(cast(Any, buffer)).c_contiguous


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "lfm2", "llama4", "deepseek_v3"])
def test_a_run_killed_at_every_step_is_the_undisturbed_one(
    llama: Engine, model: CacheModel
) -> None:
    engine = in_memory(llama, model, None, False)
    whole = run(engine, prompt_of(engine), **asked())
    for behind in (0, 2):
        published: list[Token] = []
        checkpoints: list[Checkpoint | None] = [None]
        while True:
            sequence = resumed(engine, checkpoints[-1 - behind :][0], published)
            known = len(published)
            while len(published) == known and not sequence.state.is_end:
                events = engine.step()
                # Of what is handed out together, all but the last is sent, or all.
                takes_all = sequence.finish_reason is not None or known % 2
                sent = events if takes_all or len(events) == 1 else events[:-1]
                published += [event.token for event in sent]
            assert sequence.stats.divergences == 0
            if sequence.state.is_end:
                break
            checkpoints.append(engine.checkpoint(sequence))
            engine.close(sequence)
        assert Run(published, sequence.end_text, sequence.finish_reason) == whole


def test_stops_and_limits_in_a_span_hold_for_a_resume(llama: Engine) -> None:
    engine = in_memory(llama, "gemma3_text", None, False)
    for ends in ({"max_tokens": 16}, {"stop": ("YEA",)}):
        whole, taken = run_with_checkpoints(engine, prompt_of(engine), asked(**ends))
        assert whole.tokens[-1].jumped
        for published in range(len(whole.tokens) + 1):
            for checkpoint in (None, *taken)[published % 2 :: 2]:
                sequence = resumed(engine, checkpoint, whole.tokens[:published], **ends)
                assert finish(engine, sequence) == rest(whole, published)
                assert sequence.stats.divergences == 0


def test_a_fast_recovery_ends_with_a_text_that_matches(llama: Engine) -> None:
    engine = in_memory(llama, "gemma3_text", None, False)
    whole = run(engine, prompt_of(engine), **asked())
    for published in range(1, len(whole.tokens) - 1):
        known = tuple(whole.tokens[:published])
        options = asked(initial_generated_tokens=published, initial_tokens=known)
        ids = [*prompt_of(engine), *whole.ids[:published]]
        done = finish(engine, engine.add(ids, GenerationOptions(**options)))
        assert tuple(json.loads("".join(token.text for token in known) + done.text)) == NAMES


# -- marks that say something else -----------------------------------------------------


def marked(tokens: list[Token], *places: int) -> list[Token]:
    """The tokens, of which those at the places have the other mark."""
    return [
        replace(token, jumped=token.jumped != (place in places))
        for place, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_published_marks_stand_whatever_the_grammar_would_have(
    llama: Engine, model: CacheModel
) -> None:
    engine = in_memory(llama, model, None, False)
    watched = watch(engine)
    whole = run(engine, prompt_of(engine), **asked())
    start = next(place for place, token in enumerate(whole.tokens) if token.jumped) + 3
    # A span in two, two in one, and one that goes on for less than the grammar would.
    end = start + whole.tokens[start:].index(next(t for t in whole.tokens[start:] if not t.jumped))
    for places, count in (((start,), end + 3), ((end,), end + 3), ((start,), start + 1)):
        published = marked(whole.tokens, *places)[:count]
        watched.forwards.clear()
        sequence = resumed(engine, None, published)
        done = finish(engine, sequence)
        forwards = watched.forwards[-len(forwards_of([*published, *done.tokens])) + 1 :]
        assert forwards == forwards_of([*published, *done.tokens])[:-1]
        assert sequence.stats.divergences >= 1
        assert sequence.stats.first_divergence == min(places) + 1
        text = "".join(token.text for token in published) + done.text
        assert tuple(json.loads(text)) == NAMES
        # What was published then is what another attempt catches up with, to the bit.
        again = [*published, *done.tokens]
        sequence = resumed(engine, None, again[: count + 5])
        assert finish(engine, sequence).tokens == again[count + 5 :]


def test_a_mark_at_the_first_token_counts_as_a_difference(llama: Engine) -> None:
    """Before it there is none whose forward it could have been in."""
    whole = run(llama, encode(llama), **asked())
    published = tuple(marked(whole.tokens, 0)[:3])
    sequence = llama.add(encode(llama), GenerationOptions(**asked(), published_tokens=published))
    assert finish(llama, sequence).tokens == whole.tokens[3:]
    assert (sequence.stats.divergences, sequence.stats.first_divergence) == (1, 1)


def test_another_token_in_a_span_counts_as_a_difference(llama: Engine) -> None:
    options = asked(grammar={"regex": "[xy](AAAA|AABA)[0-9]{3}"})
    whole = run(llama, encode(llama), **options)
    place = whole.ids.index(tiny_vocabulary()["A"])
    assert [token.jumped for token in whole.tokens[place : place + 3]] == [True, True, False]
    # Another version might have had more of it.
    published = marked(whole.tokens[: place + 3], place + 2)
    sequence = llama.add(
        encode(llama), GenerationOptions(**options, published_tokens=tuple(published))
    )
    done = finish(llama, sequence)
    assert (sequence.stats.divergences, sequence.stats.first_divergence) == (1, place + 3)
    text = "".join(token.text for token in published) + done.text
    assert re.fullmatch("[xy](AAAA|AABA)[0-9]{3}", text)


def test_a_checkpoint_whose_spans_are_not_the_published_ones_is_refused(llama: Engine) -> None:
    whole, taken = run_with_checkpoints(llama, encode(llama), asked())
    place = next(place for place, token in enumerate(whole.tokens) if token.jumped)
    later = next(each for each in taken if each.generated_tokens > place)
    with pytest.raises(ResumeMismatch, match=f"token {place + 1} was in another forward"):
        resume_options(later, GenerationOptions(**asked()), marked(whole.tokens, place))
    covered = later.generated_tokens
    assert not whole.tokens[covered].jumped
    with pytest.raises(ResumeMismatch, match=f"ends before token {covered + 1}, which was in the"):
        resume_options(later, GenerationOptions(**asked()), marked(whole.tokens, covered))
