"""Rows do not notice their neighbours; slots are counted, freed and bounded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_runs import PROMPT, STYLES, Run, run
from tenuto_engine import (
    Engine,
    GenerationFailed,
    GenerationOptions,
    InvalidOption,
    NoFreeSlot,
    Sequence,
    SequenceState,
    Token,
)
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

OPTIONS = STYLES["sampled"] | {"max_tokens": 40}


def encode(engine: Engine, text: str = PROMPT) -> list[int]:
    return engine.encode_prompt(text, raw=True)


def run_all(engine: Engine, sequences: list[Sequence]) -> list[Run]:
    tokens: dict[Sequence, list[Token]] = {sequence: [] for sequence in sequences}
    while not all(sequence.state.is_end for sequence in sequences):
        for event in engine.step():
            tokens[event.sequence].append(event.token)
    return [Run(tokens[s], s.end_text, s.finish_reason) for s in sequences]


@pytest.mark.parametrize("pipelined", [False, True])
def test_rows_beside_others_give_what_they_give_alone(
    load_engine: LoadEngine, kind: Kind, pipelined: bool
) -> None:
    engine = load_engine(kind, slots=3, pipelined=pipelined)
    wishes = [
        (encode(engine), OPTIONS),
        (encode(engine, "so do re mi fa so la"), OPTIONS | {"seed": 5, "max_tokens": 25}),
        (encode(engine, PROMPT * 2), STYLES["greedy"] | {"max_tokens": 30}),
    ]
    alone = [run(engine, prompt, **options) for prompt, options in wishes]
    beside = [engine.add(prompt, GenerationOptions(**options)) for prompt, options in wishes]
    assert engine.free_slots == 0
    assert run_all(engine, beside) == alone
    assert engine.free_slots == 3


def test_a_row_that_joins_later_changes_nobody(llama: Engine, load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=2)
    alone = run(engine, encode(engine), **OPTIONS)
    first = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    tokens = [event.token for _ in range(9) for event in engine.step()]
    second = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    rest, joined = run_all(engine, [first, second])
    assert tokens + rest.tokens == alone.tokens
    assert joined == alone


def test_one_more_than_the_slots_is_refused(llama: Engine) -> None:
    llama.add([1, 2, 3])
    with pytest.raises(NoFreeSlot, match="all 1 slots"):
        llama.add([1, 2, 3])


def test_slots_and_chunk_size_below_one_are_refused_by_name(load_engine: LoadEngine) -> None:
    with pytest.raises(InvalidOption, match="slots"):
        load_engine("llama", slots=0)
    with pytest.raises(InvalidOption, match="chunk_size"):
        load_engine("llama", chunk_size=0)


def break_row(engine: Engine, sequence: Sequence, after: int) -> None:
    """Make the row of `sequence` raise when it draws token `after`."""
    row = engine._slots.find(sequence)
    assert row is not None
    draw: Any = row.sampler

    def sampler(logprobs: Any, index: int) -> Any:
        if index == after:
            raise ArithmeticError("a broken row")
        return draw(logprobs, index)

    row.sampler = sampler  # type: ignore[assignment]  # a row that breaks has to be made


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_row_that_raises_fails_alone(load_engine: LoadEngine, pipelined: bool) -> None:
    engine = load_engine("llama", slots=2, pipelined=pipelined)
    alone = run(engine, encode(engine), **OPTIONS)
    broken = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    healthy = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    break_row(engine, broken, after=8)
    made, whole = run_all(engine, [broken, healthy])
    assert broken.state is SequenceState.FAILED
    assert isinstance(broken.error, ArithmeticError)
    assert made.tokens == alone.tokens[: len(made.tokens)]
    assert whole == alone
    assert engine.free_slots == 2
    assert engine.checkpoint(broken) is None


def test_a_callback_that_closes_its_row_harms_nobody(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=2)
    closing: list[Sequence] = []
    options = GenerationOptions(
        **OPTIONS, on_decode_checkpoint=lambda live: engine.close(closing[0])
    )
    closing.append(engine.add(encode(engine), options))
    other = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    while not other.state.is_end:
        engine.step()
    assert closing[0].state.is_end
    assert other.error is None
    assert "prompt" not in repr(closing[0])


def test_a_failed_generation_raises_with_its_cause(llama: Engine) -> None:
    generation = llama.generate(encode(llama), GenerationOptions(**OPTIONS))
    break_row(llama, generation.sequence, after=4)
    with pytest.raises(GenerationFailed, match="token 4: ArithmeticError: a broken row") as caught:
        list(generation)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert llama.free_slots == 1


def test_logits_that_are_no_numbers_fail_the_row(llama: Engine) -> None:
    weights = llama._loaded.model.model.norm
    weights.weight = weights.weight * float("nan")
    with pytest.raises(GenerationFailed, match="NaN"):
        list(llama.generate(encode(llama), GenerationOptions(**OPTIONS)))


def test_closing_a_generation_frees_its_row_and_sets_its_stats(llama: Engine) -> None:
    generation = llama.generate(encode(llama), GenerationOptions(**OPTIONS))
    taken = [next(generation) for _ in range(5)]
    generation.close()
    generation.close()
    assert llama.free_slots == 1
    assert list(generation) == []
    stats = generation.stats
    assert generation.sequence.state is SequenceState.CLOSED
    assert (stats.generated_tokens, stats.finish_reason) == (5, None)
    assert stats.cache_tokens == (*encode(llama), *(token.token for token in taken[:4]))
    assert generation.end_text == ""


def test_a_generation_that_nobody_holds_frees_its_row(llama: Engine) -> None:
    for token in llama.generate(encode(llama), GenerationOptions(**OPTIONS)):
        if token.index == 3:
            break
    gc.collect()
    assert len(list(llama.generate(encode(llama), GenerationOptions(**OPTIONS)))) == 40
    assert llama.free_slots == 1


def test_two_generations_read_in_turns_get_their_own_tokens(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=3)
    alone = run(engine, encode(engine), **OPTIONS)
    other = engine.add(encode(engine), GenerationOptions(**OPTIONS))
    one = engine.generate(encode(engine), GenerationOptions(**OPTIONS))
    two = engine.generate(encode(engine), GenerationOptions(**OPTIONS))
    pairs = list(zip(one, two, strict=True))
    assert [pair[0] for pair in pairs] == [pair[1] for pair in pairs] == alone.tokens
    # Its row ran along; its tokens wait for the next step.
    assert other.state is SequenceState.FINISHED
    assert [event.token for event in engine.step()] == alone.tokens


def test_stats_tell_what_a_run_did(llama: Engine) -> None:
    generation = llama.generate(encode(llama), GenerationOptions(**OPTIONS))
    tokens = list(generation)
    stats = generation.stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (len(encode(llama)), 0)
    assert (stats.generated_tokens, stats.finish_reason) == (40, "length")
    assert stats.cache_tokens == (*encode(llama), *(token.token for token in tokens[:39]))
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    assert min(stats.prefill_tps, stats.decode_tps) > 0


def test_the_last_token_of_the_limit_is_never_forwarded(load_engine: LoadEngine) -> None:
    for pipelined in (False, True):
        engine = load_engine("llama", pipelined=pipelined)
        generation = engine.generate([5, 6], GenerationOptions(**OPTIONS | {"max_tokens": 1}))
        assert len(list(generation)) == 1
        assert generation.stats.cache_tokens == (5, 6)


def test_the_others_go_on_while_a_long_prompt_is_read(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=2)
    talking = engine.add([5, 6, 7], GenerationOptions(**OPTIONS | {"max_tokens": 400}))
    engine.step()
    reading = engine.add(encode(engine, PROMPT * 4), GenerationOptions(**OPTIONS))
    chunks = 0
    while reading.state in (SequenceState.WAITING, SequenceState.PREFILL):
        before, done = talking.emitted, reading.prefill_done
        engine.step()
        assert talking.emitted == before + 1
        chunks += reading.prefill_done > done
    assert chunks == -(-reading.prefill_total // 16)


def test_an_engine_lives_on_any_one_thread(load_engine: LoadEngine) -> None:
    def whole_life() -> Run:
        assert threading.current_thread() is not threading.main_thread()
        engine = load_engine("lfm2")
        return run(engine, encode(engine), **OPTIONS)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        runs = [pool.submit(whole_life).result() for pool in (first, second)]
    engine = load_engine("lfm2")
    assert runs == [run(engine, encode(engine), **OPTIONS)] * 2


def test_an_engine_loaded_on_one_thread_may_run_on_another(load_engine: LoadEngine) -> None:
    engine = load_engine("gemma3_text")
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(run, engine, encode(engine), **OPTIONS).result()
    assert elsewhere == run(engine, encode(engine), **OPTIONS)
