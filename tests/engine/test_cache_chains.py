"""Chains of checkpoints and crashes, at any point, for every cache class: equal to the bit.

First with caches alone, fed with random keys and values, where many examples are cheap; then with
whole models, whose logits are compared with those of a run that nothing disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_journal import Journal
from cache_models import CacheModel, cache_model, fresh_caches, mlx_caches
from tenuto_engine._caches import layouts, rebuild, settle_after_prefill, signature
from tenuto_engine._delta import Layout
from tenuto_engine._kv_quantizer import quantize_caches
from tenuto_engine._kv_scheme import KVScheme
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache

STEPS_AFTER: Final = 205
MODEL_STEPS_AFTER: Final = 80
"""Steps after the last crash: more than a window, and enough to let a wrong bit spread."""

# -- caches alone ----------------------------------------------------------------------

Make = Callable[[], list[Any]]
HEADS: Final = 2
WIDTH: Final = 64
LONGEST: Final = 3600
FEW: Final = 5
"""Examples in the ordinary run; the first that hypothesis gives is always the simplest."""


@dataclass(frozen=True)
class Script:
    """What happens to caches: updates of so many tokens each, and what comes in between.

    Attributes:
        updates: tokens of each update, before the single steps at the end.
        takes: numbers of the updates after which a checkpoint is taken.
        crashes: those of them that a crash follows.
        part: a take longer than this is split there.
        quantized_before: number of the update before which ``to_quantized`` happens, if any.
    """

    updates: list[int]
    takes: list[int]
    crashes: list[int]
    part: int
    quantized_before: int | None = None


@st.composite
def scripts(draw: st.DrawFn, *, quantize: bool = False) -> Script:
    prefill = draw(st.lists(st.sampled_from([1, 2, 7, 23, 24, 25, 64, 256, 300]), max_size=3))
    # Bursts between the single steps, as a prefill that goes on after a warm cache.
    decode = draw(st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 5, 40]), max_size=60))
    updates = [*prefill, *decode, 1]
    numbers = st.integers(0, len(updates) - 1)
    takes = sorted(draw(st.sets(numbers, min_size=1, max_size=6)))
    crashes = [takes[-1], *draw(st.lists(st.sampled_from(takes), max_size=3))]
    before = draw(numbers) if quantize else None
    return Script(updates, takes, crashes, draw(st.integers(1, 300)), before)


@cache
def drawn(dtype: str) -> tuple[mx.array, mx.array]:
    """Keys and values of `LONGEST` positions, heads inmost, as a projection leaves them."""
    shape = (1, LONGEST, HEADS, WIDTH)
    keys, values = (mx.random.normal(shape, key=mx.random.key(n)) for n in (1, 2))
    both = keys.astype(getattr(mx, dtype)), values.astype(getattr(mx, dtype))
    mx.eval(both)
    return both


def bits(array: mx.array) -> bytes:
    wide = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(wide).tobytes()


def fetched(cache: Any, keys: mx.array, values: mx.array) -> Iterator[mx.array]:
    """Update the cache, and give what attention or a recurrence would read."""
    if isinstance(cache, mlx_caches.CacheList):
        for child in cache.caches:
            yield from fetched(child, keys, values)
    elif isinstance(cache, mlx_caches.ArraysCache):
        before = 0 if cache[0] is None else cache[0] * 0.5
        cache[0] = before + keys.sum(axis=2)
        cache[2] = values[..., -1:, :]
        yield from (cache[0], cache[2])
    else:
        if isinstance(cache, mlx_caches.ChunkedKVCache):
            cache.maybe_trim_front()
        for got in cache.update_and_fetch(keys, values):
            yield from (got if isinstance(got, (list, tuple)) else (got,))


def update(caches: list[Any], dtype: str, start: int, stop: int) -> list[bytes]:
    keys, values = (a[:, start:stop].transpose(0, 2, 1, 3) for a in drawn(dtype))
    got = [array for cache in caches for array in fetched(cache, keys, values)]
    mx.eval(got)
    out = [bits(array) for array in got]
    if stop - start > 1:
        settle_after_prefill(caches)
    return out


def quantized(caches: list[Any], group_size: int, bits: int) -> list[Any]:
    changed = list(caches)
    quantize_caches(changed, KVScheme(bits=bits, group_size=group_size))
    settle_after_prefill(changed)
    return changed


def check(script: Script, make: Make, dtype: str, group: tuple[int, int] = (32, 4)) -> None:
    """Play the script twice, once without takes and crashes, and compare after each update."""
    undisturbed, crashing = make(), make()
    journal = Journal()
    updates = script.updates + [1] * STEPS_AFTER
    position = 0
    for number, length in enumerate(updates):
        if number == script.quantized_before:
            undisturbed = quantized(undisturbed, *group)
            crashing = quantized(crashing, *group)
        span = (position, position + length)
        assert update(crashing, dtype, *span) == update(undisturbed, dtype, *span)
        assert layouts(crashing) == layouts(undisturbed)
        position += length
        if number in script.takes:
            journal.take(crashing, position, journal.stop + script.part)
        if number in script.crashes:
            crashing = rebuild(journal.states(), make)
            assert layouts(crashing) == layouts(undisturbed)


BARE: Final[Mapping[str, Make]] = {
    "KVCache": lambda: [mlx_caches.KVCache()],
    "ConcatenateKVCache": lambda: [mlx_caches.ConcatenateKVCache()],
    "RotatingKVCache": lambda: [mlx_caches.RotatingKVCache(24)],
    "RotatingKVCache, keep": lambda: [mlx_caches.RotatingKVCache(24, keep=4)],
    "RotatingKVCache, long": lambda: [mlx_caches.RotatingKVCache(300, keep=1)],
    "QuantizedRotatingKVCache": lambda: [QuantizedRotatingKVCache(24, group_size=32, bits=4)],
    "QuantizedRotatingKVCache, keep": lambda: [
        QuantizedRotatingKVCache(300, 4, group_size=64, bits=8)
    ],
    "ChunkedKVCache": lambda: [mlx_caches.ChunkedKVCache(24)],
    "ChunkedKVCache, a multiple of the step": lambda: [mlx_caches.ChunkedKVCache(256)],
    "ArraysCache": lambda: [mlx_caches.ArraysCache(3)],
    "all, nested": lambda: [
        mlx_caches.KVCache(),
        mlx_caches.CacheList(
            mlx_caches.ArraysCache(3),
            mlx_caches.CacheList(mlx_caches.RotatingKVCache(24), mlx_caches.KVCache()),
        ),
        mlx_caches.ChunkedKVCache(40),
        mlx_caches.RotatingKVCache(24),
    ],
}
GROUPS: Final = st.sampled_from([(group, bits) for group in (32, 64) for bits in (4, 8)])


@pytest.mark.parametrize("make", BARE.values(), ids=BARE)
@settings(max_examples=FEW, deadline=None, derandomize=True)
@given(script=scripts())
def test_caches_alone_go_on_to_the_bit_after_any_chain_of_crashes(
    make: Make, script: Script
) -> None:
    check(script, make, "float32")


@settings(max_examples=2 * FEW, deadline=None, derandomize=True)
@given(script=scripts(), group=GROUPS)
def test_quantized_caches_alone_go_on_to_the_bit_after_any_chain_of_crashes(
    script: Script, group: tuple[int, int]
) -> None:
    check(script, lambda: [mlx_caches.QuantizedKVCache(*group)], "bfloat16")


@settings(max_examples=2 * FEW, deadline=None, derandomize=True)
@given(script=scripts(quantize=True), group=GROUPS)
def test_caches_that_are_quantized_on_the_way_go_on_to_the_bit_after_any_chain_of_crashes(
    script: Script, group: tuple[int, int]
) -> None:
    def make() -> list[Any]:
        return [mlx_caches.KVCache(), mlx_caches.RotatingKVCache(24)]

    check(script, make, "float32", group)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=300, deadline=None)
@given(script=scripts(quantize=True), make=st.sampled_from(list(BARE.values())), group=GROUPS)
def test_caches_alone_go_on_to_the_bit_after_many_chains(
    dtype: str, script: Script, make: Make, group: tuple[int, int]
) -> None:
    check(script, make, dtype, group)


# -- whole models ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with its prompt, and what becomes of its caches.

    Attributes:
        chunks: the pieces in which its prompt is read, the last of a single token.
        make: makes its caches; by default, as the model does.
        quantized: group size and bits, once `quantized_at` tokens are decoded.
    """

    model: CacheModel
    dtype: str = "float32"
    chunks: tuple[int, ...] = (32, 17, 1)
    make: Make | None = field(default=None, hash=False)
    quantized: tuple[int, int] | None = None
    quantized_at: int = 30

    def fresh(self) -> list[Any]:
        return self.make() if self.make else fresh_caches(self.loaded)

    @property
    def loaded(self) -> Any:
        return cache_model(self.model, self.dtype)


CASES: Final = {
    "llama": Case("llama", chunks=(128, 90, 1)),
    "llama, bfloat16": Case("llama", "bfloat16", (128, 90, 1)),
    "llama, concatenated": Case(
        "llama", make=lambda: [mlx_caches.ConcatenateKVCache() for _ in range(2)]
    ),
    "llama, ring with keep": Case(
        "llama", make=lambda: [mlx_caches.RotatingKVCache(40, keep=4) for _ in range(2)]
    ),
    "llama, 4 bits": Case(
        "llama_wide",
        make=lambda: [mlx_caches.QuantizedKVCache(group_size=32, bits=4) for _ in range(2)],
    ),
    "llama, to 8 bits on the way": Case("llama_wide", "bfloat16", quantized=(64, 8)),
    "gemma3": Case("gemma3_text"),
    "gemma3, prompt shorter than the window": Case("gemma3_text", chunks=(9, 1)),
    "gemma3, bfloat16": Case("gemma3_text", "bfloat16"),
    "lfm2": Case("lfm2"),
    "mamba2": Case("mamba2"),
    "qwen3_next": Case("qwen3_next"),
    "falcon_h1": Case("falcon_h1"),
    "falcon_h1, bfloat16": Case("falcon_h1", "bfloat16"),
    "llama4": Case("llama4"),
    "deepseek_v3": Case("deepseek_v3"),
    "deepseek_v32": Case("deepseek_v32", chunks=(32, 1)),
}


class Run:
    """A greedy generation; its logits are handed out as bits."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.caches = case.fresh()
        self.position = 0
        self.token = 0

    def forward(self, number: int) -> bytes:
        """One chunk of the prompt, or one decode step, by their number."""
        chunks = self.case.chunks
        if number == len(chunks) + self.case.quantized_at and self.case.quantized:
            self.caches = quantized(self.caches, *self.case.quantized)
        tokens = self._prompt(chunks[number]) if number < len(chunks) else [self.token]
        logits = self.case.loaded(mx.array([tokens]), cache=self.caches)[0, -1]
        logits = logits.astype(mx.float32)
        self.token = cast(int, mx.argmax(logits).item())
        self.position += len(tokens)
        if len(tokens) > 1:
            settle_after_prefill(self.caches)
        return np.array(logits).tobytes()

    def _prompt(self, length: int) -> list[int]:
        return [(13 * i + 5) % 97 for i in range(self.position, self.position + length)]

    def crash(self, journal: Journal) -> None:
        """Lose the caches, and go on with what the journal has."""
        self.caches = rebuild(journal.states(), self.case.fresh)


class Undisturbed:
    """A run that nothing befalls; it goes as far as it is asked to."""

    def __init__(self, case: Case) -> None:
        self.run = Run(case)
        self.passes: list[tuple[bytes, tuple[Layout, ...]]] = []

    def __getitem__(self, number: int) -> tuple[bytes, tuple[Layout, ...]]:
        while len(self.passes) <= number:
            logits = self.run.forward(len(self.passes))
            self.passes.append((logits, layouts(self.run.caches)))
        return self.passes[number]


undisturbed = cache(Undisturbed)


def check_model(case: Case, takes: list[int], crashes: list[int], part: int) -> None:
    """Takes and crashes by the number of the forward pass that they follow."""
    expected = undisturbed(case)
    run, journal = Run(case), Journal()
    for number in range(max(crashes) + 1 + MODEL_STEPS_AFTER):
        got = run.forward(number), layouts(run.caches)
        assert got == expected[number], f"differs at pass {number}"
        if number in takes:
            journal.take(run.caches, run.position, journal.stop + part)
        if number in crashes:
            run.crash(journal)


def chain(draw: Random) -> tuple[list[int], list[int], int]:
    """A crash in the prompt or soon after it, two more later on, and takes between them."""
    takes = list(accumulate(draw.randint(1, 20) for _ in range(5)))
    return takes, [takes[0], takes[2], takes[4]], draw.randint(1, 60)


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_a_model_are_those_of_an_undisturbed_run_after_a_chain_of_crashes(
    name: str,
) -> None:
    check_model(CASES[name], *chain(Random(name)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_the_logits_of_a_model_are_those_of_an_undisturbed_run_after_many_chains(
    name: str, draw: Random
) -> None:
    check_model(CASES[name], *chain(draw))


def test_a_signature_changes_when_a_cache_changes_its_class_and_else_never() -> None:
    run = Run(CASES["llama, to 8 bits on the way"])
    border = len(run.case.chunks) + run.case.quantized_at
    seen = []
    for number in range(border + 40):
        run.forward(number)
        seen.append(signature(run.caches))
    assert len(set(seen[:border])) == len(set(seen[border:])) == 1
    assert seen[0] != seen[-1]
