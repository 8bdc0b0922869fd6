"""When checkpoints are taken, and what a bad callback can do: nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine_runs import PROMPT, STYLES, run
from tenuto_engine import Checkpoint, Engine, GenerationOptions, LiveCheckpoint, SequenceState
from tenuto_engine._slots import CheckpointClock

OPTIONS: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 40}


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


def taken_at(engine: Engine, **options: Any) -> list[int]:
    taken: list[Checkpoint] = []
    run(engine, encode(engine), **OPTIONS, on_decode_checkpoint=taken.append, **options)
    return [len(checkpoint.cache_tokens) - len(encode(engine)) for checkpoint in taken]


def test_one_at_the_end_of_prefill_and_one_every_so_many_tokens(llama: Engine) -> None:
    made = taken_at(llama, checkpoint_every_tokens=8, checkpoint_every_seconds=None)
    assert made == [0, 8, 16, 24, 32]


def test_zero_seconds_is_at_every_chunk_border_and_token(llama: Engine) -> None:
    made = taken_at(llama, checkpoint_every_tokens=None, checkpoint_every_seconds=0)
    prompt = len(encode(llama))
    assert made == [*(border - prompt for border in range(16, prompt, 16)), *range(40)]


def test_without_either_only_the_end_of_prefill(llama: Engine) -> None:
    made = taken_at(llama, checkpoint_every_tokens=None, checkpoint_every_seconds=None)
    assert made == [0]


def test_time_alone_makes_one_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tenuto_engine._slots.time.monotonic", lambda: now)
    clock = CheckpointClock(GenerationOptions(checkpoint_every_seconds=2.0), 0)
    assert not clock.due(255)
    now = 102.0
    assert clock.due(1)
    clock.reset(1)
    assert not clock.due(255)
    assert clock.due(256)


def test_a_pending_token_is_not_handed_out_before_its_checkpoint(llama: Engine) -> None:
    handed_out: list[int] = []
    seen: list[tuple[int | None, list[int]]] = []

    def callback(checkpoint: LiveCheckpoint) -> None:
        seen.append((checkpoint.pending_token, list(handed_out)))

    sequence = llama.add(
        encode(llama),
        GenerationOptions(**OPTIONS, checkpoint_every_tokens=1, on_decode_checkpoint=callback),
    )
    while not sequence.state.is_end:
        handed_out += [event.token.token for event in llama.step()]
    assert len(seen) == 40
    for count, (pending, before) in enumerate(seen):
        assert before == handed_out[:count]
        assert pending == handed_out[count]


def test_a_callback_that_raises_is_logged_and_counted_and_the_row_goes_on(
    llama: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(llama, encode(llama), **OPTIONS)

    def callback(checkpoint: LiveCheckpoint) -> None:
        raise OSError("disk full")

    generation = llama.generate(
        encode(llama),
        GenerationOptions(**OPTIONS, checkpoint_every_tokens=10, on_decode_checkpoint=callback),
    )
    with caplog.at_level(logging.ERROR, logger="tenuto_engine"):
        assert list(generation) == whole.tokens
    assert (generation.stats.checkpoints, generation.stats.checkpoint_errors) == (4, 4)
    assert "disk full" in caplog.text


def test_taking_checkpoints_changes_no_bit(llama: Engine) -> None:
    whole = run(llama, encode(llama), **OPTIONS)
    often = run(
        llama,
        encode(llama),
        **OPTIONS,
        checkpoint_every_tokens=1,
        on_decode_checkpoint=lambda checkpoint: None,
    )
    assert often == whole


def test_nothing_computed_or_already_ended_has_no_checkpoint(llama: Engine) -> None:
    sequence = llama.add(encode(llama), GenerationOptions(**OPTIONS))
    assert llama.checkpoint(sequence) is None
    llama.step()
    assert llama.checkpoint(sequence) is not None
    while sequence.state is not SequenceState.FINISHED:
        llama.step()
    assert llama.checkpoint(sequence) is None
