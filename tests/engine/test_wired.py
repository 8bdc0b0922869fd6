"""The wired limit of Metal, which does not run everywhere: what would be asked of it."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from tenuto_engine import Engine, GenerationOptions, _stepper
from tenuto_engine._wired import WIRED_LIMIT, WiredLimit

RECOMMENDED = 1000


class Recorder:
    """A device that recommends a working set, and remembers what it was told."""

    def __init__(self, working_set: int = RECOMMENDED) -> None:
        self.working_set = working_set
        self.limit = 7
        self.told: list[Any] = []

    def set_limit(self, limit: int) -> int:
        before, self.limit = self.limit, limit
        self.told.append(limit)
        return before

    def synchronize(self) -> None:
        self.told.append("synchronize")


def test_it_is_raised_while_a_large_model_runs_and_restored_after_its_last_step() -> None:
    device = Recorder()
    wired = WiredLimit(device)
    one, two = object(), object()
    wired.begin(one, 501)
    wired.begin(two, 900)
    wired.begin(one, 501)
    wired.end(one)
    assert device.told == [RECOMMENDED]
    wired.end(two)
    wired.end(two)
    assert device.told == [RECOMMENDED, "synchronize", 7]
    wired.begin(one, 501)
    assert device.limit == RECOMMENDED


@pytest.mark.parametrize(("nbytes", "working_set"), [(500, 1000), (10**12, 0)])
def test_a_small_model_and_another_device_leave_it_alone(nbytes: int, working_set: int) -> None:
    device = Recorder(working_set)
    wired = WiredLimit(device)
    engine = object()
    wired.begin(engine, nbytes)
    wired.end(engine)
    assert device.told == []


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal has a limit")
def test_without_metal_nothing_is_wired(llama: Engine) -> None:
    WIRED_LIMIT.begin(llama, 10**15)
    assert mx.set_wired_limit(0) == 0


def test_an_engine_holds_it_from_its_first_row_to_its_last(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Recorder(llama.weight_bytes)
    monkeypatch.setattr(_stepper, "WIRED_LIMIT", WiredLimit(device))
    options = GenerationOptions(max_tokens=3, ignore_eos=True)
    assert len(list(llama.generate([5, 6, 7], options))) == 3
    assert device.told == [llama.weight_bytes, "synchronize", 7]
    # One that is abandoned, too.
    generation: Any = llama.generate([5, 6, 7], options)
    next(generation)
    del generation
    gc.collect()
    llama.step()
    assert device.told[3:] == [llama.weight_bytes, "synchronize", 7]
