"""Compiled decode steps: who can have them, the same bits, and exact after every kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from adapter_shop import write_adapter
from architectures import ARCHITECTURES, engine_of, model_of
from engine_runs import STYLES, finish, resume, run, run_with_checkpoints
from tenuto_engine import (
    Engine,
    GenerationOptions,
    InvalidOption,
    ModelLoadError,
    PrefixCache,
    model_facts,
)
from tenuto_engine._compiled import CompiledForward, check_compiles
from tiny_models import Kind, build_tiny_model

LoadEngine = Callable[..., Engine]

OPTIONS: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 40}
PROMPT = [5 + place % 200 for place in range(240)]
"""So long that the buffers grow among the generated tokens."""
COMPILED = {
    *("llama", "qwen3", "qwen2", "phi3", "olmo2", "smollm3", "gemma2", "gpt2"),
    *("mixtral", "qwen3_moe", "llama_wide", "deepseek_v3"),
}


@pytest.fixture(params=[False, True], ids=["synchronous", "pipelined"])
def compiled(load_engine: LoadEngine, request: pytest.FixtureRequest) -> Engine:
    return load_engine("llama", compiled=True, pipelined=request.param)


# -- who can have them -----------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_compiled_to_the_same_bits_on_this_device_or_refused(
    llama: Engine, name: str
) -> None:
    model = model_of(name)
    can = all(type(cache) is KVCache for cache in make_prompt_cache(model))
    assert can == (name in COMPILED)
    if not can:
        with pytest.raises(ModelLoadError, match="compiled: its caches are not all plain ones: "):
            check_compiles(model, lambda: make_prompt_cache(model))
        return
    check_compiles(model, lambda: make_prompt_cache(model))
    prompt = [3 + (7 * place) % 89 for place in range(45)]
    plain, fast = (
        run(
            engine_of(name, model, llama, pipelined=False, compiled=each),
            prompt,
            max_tokens=40,
            logprobs=5,
        )
        for each in (False, True)
    )
    assert fast == plain


def test_a_model_that_looks_at_its_position_is_refused_with_the_reason(llama: Engine) -> None:
    model = llama._loaded.model

    def looks(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = model(tokens, cache=cache)
        return logits * (2 if cache[0].offset > 1000 else 1)

    with pytest.raises(ModelLoadError, match="compiled: a step cannot be traced: ") as refused:
        check_compiles(looks, lambda: make_prompt_cache(model))
    assert "load it without `compiled`" in str(refused.value)


def test_a_model_with_other_caches_is_refused_when_it_is_loaded_and_before(
    load_engine: LoadEngine, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match="not all plain ones: RotatingKVCache"):
        load_engine("gemma3_text", compiled=True)
    folder = build_tiny_model(tmp_path, "gemma3_text")
    with pytest.raises(ModelLoadError, match="not all plain ones: RotatingKVCache") as refused:
        model_facts(folder, compiled=True)
    assert str(folder) in str(refused.value)


def test_quantized_kv_is_refused_with_it(load_engine: LoadEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="compiled: cannot be with quantized KV"):
        load_engine("llama", compiled=True, kv_scheme="8:32:0")
    with pytest.raises(InvalidOption, match="compiled: cannot be with quantized KV"):
        model_facts(build_tiny_model(tmp_path), compiled=True, kv_scheme="8:32:0")


def test_it_is_part_of_the_geometry_which_facts_know(
    load_engine: LoadEngine, tmp_path: Path
) -> None:
    folder = build_tiny_model(tmp_path)
    plain = Engine.load(folder).geometry
    geometry = Engine.load(folder, compiled=True).geometry
    assert plain.differences(geometry) == ["compiled: False here, True there"]
    assert model_facts(folder, compiled=True).geometry == geometry


# -- exactness -------------------------------------------------------------------------


def test_a_long_run_has_the_bits_of_one_that_is_not_compiled(
    compiled: Engine, load_engine: LoadEngine
) -> None:
    plain = load_engine("llama")
    assert run(compiled, PROMPT, **OPTIONS) == run(plain, PROMPT, **OPTIONS)


def test_a_resume_from_any_checkpoint_gives_the_rest_bit_for_bit(compiled: Engine) -> None:
    whole, checkpoints = run_with_checkpoints(compiled, PROMPT, OPTIONS)
    for checkpoint in checkpoints[3:37:3]:
        covered = checkpoint.generated_tokens
        rest = resume(compiled, checkpoint, OPTIONS)
        assert rest.tokens == whole.tokens[covered:]
        published = whole.tokens[: covered + 3]
        assert (
            resume(compiled, checkpoint, OPTIONS, published=published).tokens
            == (whole.tokens[covered + 3 :])
        )


def test_a_row_beside_others_and_after_a_hit_of_the_prefix_cache_is_the_same(
    load_engine: LoadEngine,
) -> None:
    prefixes = PrefixCache(64 * 2**20)
    engine = load_engine("llama", compiled=True, slots=2, prefix_cache=prefixes)
    alone = run(engine, [*PROMPT, *PROMPT], **OPTIONS)
    prefixes.flush()
    neighbour = engine.add(PROMPT[:50], GenerationOptions(**OPTIONS))
    again = engine.add([*PROMPT, *PROMPT], GenerationOptions(**OPTIONS))
    assert finish(engine, again) == alone
    assert again.stats.cached_tokens == 256
    engine.close(neighbour)


def test_rows_with_an_adapter_run_as_they_do_without_it(
    load_engine: LoadEngine, model_folders: dict[Kind, Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path, "poet", model_folders["llama"])
    plain, fast = (
        load_engine("llama", adapters=tmp_path, slots=2, compiled=each) for each in (False, True)
    )
    asked = OPTIONS | {"adapter": "poet"}
    beside = fast.add(PROMPT[:50], GenerationOptions(**OPTIONS))
    assert (
        run(fast, PROMPT, **asked) == run(plain, PROMPT, **asked) != run(plain, PROMPT, **OPTIONS)
    )
    fast.close(beside)


def test_what_attention_sees_follows_from_the_length_alone(llama: Engine) -> None:
    model = llama._loaded.model
    forward = CompiledForward(model)
    tokens = mx.array([[5, 6, 7]])

    def caches(capacity: int) -> list[KVCache]:
        made = make_prompt_cache(model)
        model(tokens, cache=made)
        for each in made:
            assert each.keys is not None
            assert each.values is not None
            spare = capacity - each.keys.shape[2]
            if spare > 0:
                # What is behind the mask of a longer one may be anything that is a number.
                junk = mx.full((*each.keys.shape[:2], spare, each.keys.shape[3]), 3.0)
                each.keys = mx.concatenate([each.keys, junk], axis=2)
                each.values = mx.concatenate([each.values, junk], axis=2)
        return made

    expected = model(mx.array([[8]]), cache=caches(0))
    for capacity in (256, 512, 700):
        held = caches(capacity)
        assert mx.array_equal(forward(mx.array([[8]]), cache=held), expected)
        assert {each.keys.shape[2] for each in held if each.keys is not None} == {256}
        assert {each.offset for each in held} == {4}


def test_a_model_that_nobody_uses_gives_all_its_memory_back(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    before = mx.get_active_memory()
    engine = Engine.load(folder, compiled=True)
    run(engine, [1, 2, 3], max_tokens=5, seed=1)
    del engine
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1024
