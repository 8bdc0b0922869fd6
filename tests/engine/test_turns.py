"""A long prompt leaves half of the device to those that decode, whichever engine reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from model_clock import ModelClock
from tenuto_engine import Engine, GenerationOptions, PrefillTurn, SequenceState
from tenuto_engine import Sequence as Running

LoadEngine = Callable[..., Engine]

OPTIONS: dict[str, Any] = {"max_tokens": 900, "seed": 5, "ignore_eos": True}
LONG = [5 + place % 200 for place in range(200)]
CHUNKS = 13
"""Of `LONG` in chunks of 16: twelve to 192, and one to 199; the last token follows at once."""


def add(engine: Engine, prompt: Sequence[int]) -> Running:
    return engine.add(prompt, GenerationOptions(**OPTIONS))


@dataclass
class Watch:
    """When each token of a generation came, by the model's clock."""

    sequence: Running
    times: list[float]


def step_until(
    engines: Sequence[Engine], clock: ModelClock, talking: Sequence[Running], is_over: Any
) -> list[Watch]:
    watches = [Watch(each, []) for each in talking]
    while not is_over():
        for engine in engines:
            for event in engine.step():
                for watch in watches:
                    if watch.sequence is event.sequence:
                        watch.times.append(clock.now)
    return watches


def assert_half(watch: Watch, began: float, a_token: float, a_chunk: float) -> None:
    """From any chunk on, of the time of `n` chunks and the decoding owed for them, half was the
    row's; so it is never further behind than by one chunk."""
    for place, at in enumerate(watch.times, 1):
        assert place * a_token >= (at - began) / 2 - a_chunk, f"token {place}"


@pytest.mark.parametrize("talkers", [1, 2])
def test_those_that_decode_keep_half_their_rate_while_another_reads(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch, talkers: int
) -> None:
    engine = load_engine("llama", slots=3)
    clock = ModelClock(monkeypatch)
    clock.drive(engine, seconds=float)
    talking = [add(engine, [5, 6, 7]) for _ in range(talkers)]
    while not all(each.state is SequenceState.DECODE for each in talking):
        engine.step()
    reading = add(engine, LONG)
    began = clock.now
    watches = step_until([engine], clock, talking, lambda: reading.emitted)
    for watch in watches:
        assert_half(watch, began, talkers, 16)
        assert len(watch.times) * talkers >= 16 * (CHUNKS - 1)


def test_those_of_another_engine_do_so_too(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = PrefillTurn()
    one, other = (load_engine("llama", prefill_turn=turn) for _ in range(2))
    clock = ModelClock(monkeypatch)
    for engine in (one, other):
        clock.drive(engine, seconds=float)
    talking = add(one, [5, 6, 7])
    while talking.state is not SequenceState.DECODE:
        one.step()
    reading = add(other, LONG)
    began = clock.now
    [watch] = step_until([one, other], clock, [talking], lambda: reading.emitted)
    assert_half(watch, began, 1, 16)
    assert len(watch.times) >= 16 * (CHUNKS - 1)


def test_engines_that_read_take_turns(load_engine: LoadEngine) -> None:
    turn = PrefillTurn()
    engines = [load_engine("llama", prefill_turn=turn) for _ in range(2)]
    one, other = (add(engine, LONG) for engine in engines)
    while not (one.emitted and other.emitted):
        for engine in engines:
            engine.step()
        assert abs(one.prefill_done - other.prefill_done) <= 16


def test_those_that_read_do_not_wait_for_rows_that_are_gone(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = PrefillTurn()
    one, other = (load_engine("llama", prefill_turn=turn) for _ in range(2))
    clock = ModelClock(monkeypatch)
    clock.drive(other, seconds=float)
    talking, reading = add(one, [5, 6, 7]), add(other, LONG)
    while not reading.prefill_done:
        one.step()
        other.step()
    other.step()
    assert reading.prefill_done == 16, "16 s are owed"
    one.close(talking)
    other.step()
    assert reading.prefill_done == 32


def test_a_reader_that_is_closed_or_dropped_leaves_its_turn(load_engine: LoadEngine) -> None:
    turn = PrefillTurn()
    one, other, last = (load_engine("llama", prefill_turn=turn) for _ in range(3))
    first, second = add(one, LONG), add(other, LONG)
    third = add(last, LONG)
    for each in (one, other, last):
        each.step()
    assert [each.prefill_done for each in (first, second, third)] == [16, 0, 0]
    one.close(first)
    del each, other
    for place in range(1, 4):
        last.step()
        assert third.prefill_done == 16 * place
