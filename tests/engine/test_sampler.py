"""Sampling: mlx-lm's filters, and draws that depend on seed and index alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from engine_runs import PROMPT, run
from tenuto_engine import Engine, GenerationOptions
from tenuto_engine._sampler import (
    Purpose,
    Sampler,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sampling_key,
)

VOCABULARY = 500

reference: Any = sample_utils


def rows(dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(5), 40)
    logits = [mx.random.normal((1, VOCABULARY), key=key) * 3 for key in keys]
    return [(row - mx.logsumexp(row)).astype(dtype) for row in logits]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda row: keep_top_p(row, top_p=0.9), lambda row: reference.apply_top_p(row, 0.9)),
        (lambda row: keep_top_p(row, top_p=0.2), lambda row: reference.apply_top_p(row, 0.2)),
        (lambda row: keep_min_p(row, min_p=0.05), lambda row: reference.apply_min_p(row, 0.05)),
        (lambda row: keep_top_k(row, top_k=1), lambda row: reference.apply_top_k(row, 1)),
        (lambda row: keep_top_k(row, top_k=40), lambda row: reference.apply_top_k(row, 40)),
    ],
    ids=["top_p=0.9", "top_p=0.2", "min_p=0.05", "top_k=1", "top_k=40"],
)
def test_a_filter_keeps_what_mlx_lm_keeps(
    ours: Callable[[mx.array], mx.array], theirs: Callable[[mx.array], mx.array], dtype: mx.Dtype
) -> None:
    for row in rows(dtype):
        kept = ours(row)
        assert kept.dtype == dtype
        assert mx.array_equal(kept, theirs(row))
        assert 0 < cast(int, mx.sum(mx.isfinite(kept)).item()) < VOCABULARY


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert mx.array_equal(keep_top_k(rows()[0], top_k=VOCABULARY), rows()[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(temperature=1e-5),
        GenerationOptions(temperature=1e-40),
        GenerationOptions(temperature=1e-310),
        GenerationOptions(temperature=1.0, top_p=1e-6),
        GenerationOptions(temperature=1.0, top_p=1e-50),
    ],
    ids=["cold", "colder", "coldest", "top_p", "tiny_top_p"],
)
def test_a_temperature_or_top_p_next_to_nothing_takes_the_likeliest(
    options: GenerationOptions, dtype: mx.Dtype
) -> None:
    sampler = Sampler(options, seed=1)
    for index, row in enumerate(rows(dtype), 1):
        # In half precision several may be the likeliest.
        token = cast(int, sampler(row, index).item())
        assert row[0, token].item() == mx.max(row).item()


def test_a_draw_is_mlx_lms_filters_in_its_order_and_a_key() -> None:
    options = GenerationOptions(temperature=0.7, top_p=0.9, min_p=0.02, top_k=30, seed=1)
    draw = Sampler(options, 99)
    for index, row in enumerate(rows(), 1):
        kept = reference.apply_top_p(row, 0.9)
        kept = reference.apply_min_p(kept, 0.02)
        kept = reference.apply_top_k(kept, 30)
        wanted = mx.random.categorical(kept * (1 / 0.7), key=sampling_key(99, index))
        assert draw(row, index).item() == wanted.item()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """mlx-lm's filters are compiled anew for each number that they are given."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def filtered_by_mlx_lm(row: mx.array, **how: Any) -> mx.array:
    """The logprobs from which mlx-lm's own sampler draws."""
    seen: list[mx.array] = []

    def note(logprobs: mx.array, temperature: float) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sample_utils, "categorical_sampling", note)
        reference.make_sampler(temp=1.0, **how)(row)
    return seen[0]


@settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 1.0),
            "top_k": st.integers(0, VOCABULARY - 1),
            "xtc_probability": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
            "xtc_threshold": st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.5]),
        },
    ),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    number=st.integers(1, 2**16),
    spread=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    exempt=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
)
def test_a_token_is_drawn_from_the_distribution_of_mlx_lms_own_sampler(
    uncompiled: None,
    options: dict[str, Any],
    dtype: mx.Dtype,
    number: int,
    spread: float,
    exempt: list[int],
) -> None:
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(number)) * spread
    row = (logits - mx.logsumexp(logits)).astype(dtype)
    kept = Sampler(GenerationOptions(temperature=1.0, **options), 5, exempt).filtered(row, number)
    # Whether mlx-lm's coin excludes is its own chance; ours is that of the key.
    coin = mx.random.uniform(key=sampling_key(5, number, Purpose.XTC)).item()
    excludes = cast(float, coin) <= options.get("xtc_probability", 0.0)
    how = options | {"xtc_probability": float(excludes), "xtc_special_tokens": exempt}
    wanted = filtered_by_mlx_lm(row, **how)
    assert kept.dtype == dtype
    assert mx.array_equal(kept, wanted)


def test_xtc_keeps_the_least_likely_of_the_top_choices_and_what_is_exempt() -> None:
    row = mx.log(mx.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))

    def kept(threshold: float, *exempt: int) -> list[int]:
        options = GenerationOptions(temperature=1.0, xtc_probability=1.0, xtc_threshold=threshold)
        left = mx.isfinite(Sampler(options, 1, exempt).filtered(row, 1)[0])
        return [place for place, is_left in enumerate(cast(list[bool], left.tolist())) if is_left]

    assert kept(0.12) == [2, 3, 4]
    assert kept(0.12, 0) == [0, 2, 3, 4]
    # An id that the model does not have, such as one of a tokenizer with more of them.
    assert kept(0.12, 0, 10**6) == [0, 2, 3, 4]
    assert kept(0.35) == kept(0.5) == [0, 1, 2, 3, 4]
    assert kept(0.0) == [4]


def test_the_coin_of_xtc_has_a_key_of_its_own() -> None:
    row = mx.log(mx.array([[0.6, 0.4]]))
    options = GenerationOptions(temperature=1.0, xtc_probability=0.5)
    sampler = Sampler(options, 8)
    for index in range(1, 50):
        coin = mx.random.uniform(key=sampling_key(8, index, Purpose.XTC))
        excluded = not mx.isfinite(sampler.filtered(row, index)[0, 0]).item()
        assert excluded == (cast(float, coin.item()) <= 0.5)


def test_xtc_excludes_as_often_as_it_was_asked_to() -> None:
    row = mx.log(mx.array([[0.6, 0.4]]))
    options = GenerationOptions(temperature=1.0, xtc_probability=0.25, xtc_threshold=0.1)
    sampler = Sampler(options, 8)
    times = sum(
        not math.isfinite(cast(float, sampler.filtered(row, index)[0, 0].item()))
        for index in range(2000)
    )
    assert abs(times / 2000 - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 2000)


def test_the_purposes_of_random_numbers_are_fixed_forever() -> None:
    assert {each.name: each.value for each in Purpose} == {"DRAW": 0, "XTC": 1}
    assert sampling_key(7, 1, Purpose.XTC).tolist() == [2327825257, 1126805341]


def test_keys_differ_by_seed_and_by_index_and_are_fixed_forever() -> None:
    keys = {
        tuple(cast(list[int], sampling_key(s, i).tolist())) for s in range(30) for i in range(30)
    }
    assert len(keys) == 900
    assert sampling_key(7, 1).tolist() == [1159755335, 3194816612]
    assert sampling_key(2**64 - 1, 2**40).tolist() == [2094369555, 1026008876]


def test_draws_follow_the_probabilities() -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    draw = Sampler(GenerationOptions(temperature=1.0), 3)
    counts = [0, 0, 0]
    for index in range(3000):
        counts[cast(int, draw(logprobs, index).item())] += 1
    for count, share in zip(counts, (0.5, 0.3, 0.2), strict=True):
        assert abs(count / 3000 - share) < 5 * math.sqrt(share * (1 - share) / 3000)


def test_the_global_random_state_is_neither_read_nor_moved(llama: Engine) -> None:
    prompt = llama.encode_prompt(PROMPT, raw=True)
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 4}
    state: Any = mx.random.state
    runs = []
    for seed in (1, 2):
        mx.random.seed(seed)
        before = [part.tolist() for part in state]
        runs.append(run(llama, prompt, **options))
        assert [part.tolist() for part in state] == before
    assert runs[0] == runs[1]


def test_draws_in_a_worker_thread_vary_and_are_those_of_any_other() -> None:
    draw = Sampler(GenerationOptions(temperature=1.0, top_p=0.95, top_k=100), 11)

    def drawn() -> list[int]:
        row = mx.array(VALUES)
        return [cast(int, draw(row, index).item()) for index in range(1, 60)]

    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(drawn).result()
    assert elsewhere == drawn()
    assert len(set(elsewhere)) > 10


VALUES = [[math.log((1 + i % 7) / 4.0) for i in range(VOCABULARY)]]


def test_other_seeds_give_other_tokens_and_none_draws_one(llama: Engine) -> None:
    prompt = llama.encode_prompt(PROMPT, raw=True)
    made = {
        tuple(run(llama, prompt, max_tokens=20, temperature=1.0, seed=seed).ids)
        for seed in (1, 2, 3, None, None)
    }
    assert len(made) == 5
