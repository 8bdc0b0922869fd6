"""Sampling: mlx-lm's filters, and draws that depend on seed and index alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm import sample_utils

from engine_runs import PROMPT, run
from tenuto_engine import Engine, GenerationOptions
from tenuto_engine._sampler import Sampler, keep_min_p, keep_top_k, keep_top_p, sampling_key

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
