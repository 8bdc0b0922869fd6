"""What a generation says of itself: token counts, clocks, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine_runs import PROMPT, STYLES, finish, run, run_with_checkpoints
from model_clock import ModelClock
from tenuto_engine import Engine, GenerationOptions, SequenceState, memory_use, resume_options

LoadEngine = Callable[..., Engine]

OPTIONS: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 10}
PREFILL_FORWARDS = 4
"""Of a prompt of 40 tokens in chunks of 16: to 16, 32, 39, and the last token alone."""

both_loops = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def prompt_of(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)[:40]


@both_loops
def test_the_step_that_ends_a_prefill_hands_out_the_first_token_before_it_decodes(
    load_engine: LoadEngine, pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    sequence = engine.add(prompt_of(engine), GenerationOptions(**OPTIONS))
    [row] = engine._slots.rows
    while not (events := engine.step()):
        assert sequence.state is SequenceState.PREFILL
    assert [event.token.index for event in events] == [1]
    assert row.position == len(sequence.prompt), "its own KV is not dispatched yet"


@both_loops
def test_the_clocks_part_at_the_first_token(
    load_engine: LoadEngine, pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    clock = ModelClock(monkeypatch)
    clock.drive(engine)

    def slow_checkpoint(live: object) -> None:
        clock.now += 100

    options = GenerationOptions(
        **OPTIONS, on_decode_checkpoint=slow_checkpoint, checkpoint_every_seconds=None
    )
    sequence = engine.add(prompt_of(engine), options)
    clock.now += 50
    finish(engine, sequence)
    stats = sequence.stats
    assert stats.checkpoints == 1
    assert (stats.prefilled_tokens, stats.prefill_seconds) == (40, PREFILL_FORWARDS)
    assert (stats.decoded_tokens, stats.decode_seconds) == (9, 9 + 100)
    assert (stats.prefill_tps, stats.decode_tps) == (40 / PREFILL_FORWARDS, 9 / 109)


def test_waiting_for_another_rows_prompt_is_no_prefill(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine("llama", slots=2)
    ModelClock(monkeypatch).drive(engine)
    sequences = [
        engine.add(prompt_of(engine), GenerationOptions(**OPTIONS | {"max_tokens": 1}))
        for _ in range(2)
    ]
    while not all(sequence.state.is_end for sequence in sequences):
        engine.step()
    assert [each.stats.prefill_seconds for each in sequences] == [PREFILL_FORWARDS] * 2
    assert [each.stats.decode_seconds for each in sequences] == [0, 0]


def test_a_prefill_that_is_cut_short_counts_to_there(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ModelClock(monkeypatch).drive(llama)
    sequence = llama.add(prompt_of(llama), GenerationOptions(**OPTIONS))
    llama.step()
    llama.step()
    llama.close(sequence)
    assert (sequence.stats.prefill_seconds, sequence.stats.decode_seconds) == (2, 0)
    assert sequence.stats.prefill_tps == 16


@both_loops
def test_a_resumed_run_counts_what_it_did_itself(load_engine: LoadEngine, pipelined: bool) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    whole, taken = run_with_checkpoints(engine, prompt_of(engine), OPTIONS)
    for published in (4, 7):
        tokens, options = resume_options(
            taken[3], GenerationOptions(**OPTIONS), whole.tokens[:published]
        )
        sequence = engine.add(tokens, options)
        finish(engine, sequence)
        stats = sequence.stats
        # The checkpoint has one token more than it covers: the pending one.
        assert stats.decoded_tokens == 10 - (taken[3].generated_tokens + 1)
        assert (stats.prefilled_tokens, stats.prefill_seconds, stats.prefill_tps) == (0, 0, 0)
        assert (stats.cached_tokens, stats.generated_tokens) == (40, 10)
        assert stats.decode_seconds > 0
    again = GenerationOptions(**OPTIONS, published_tokens=tuple(whole.tokens[:5]))
    sequence = engine.add(prompt_of(engine), again)
    finish(engine, sequence)
    assert (sequence.stats.prefilled_tokens, sequence.stats.decoded_tokens) == (40, 9)


def test_the_peak_of_memory_is_the_processs_while_the_row_is_there(
    load_engine: LoadEngine,
) -> None:
    engine = load_engine("llama", slots=2)
    first = engine.add(prompt_of(engine), GenerationOptions(**OPTIONS | {"max_tokens": 30}))
    engine.step()
    # Other tests of this process have arrays, too.
    most = mx.get_active_memory() + 2**26
    mx.eval(mx.ones((2**26,), dtype=mx.uint8))
    # A row that joins afterwards knows nothing of it, and takes it from nobody.
    run(engine, prompt_of(engine), **OPTIONS)
    late = engine.add(prompt_of(engine), GenerationOptions(**OPTIONS))
    finish(engine, late)
    finish(engine, first)
    assert engine.weight_bytes < late.stats.peak_memory < most
    assert first.stats.peak_memory >= most
    assert memory_use(0).peak >= first.stats.peak_memory
