"""What models and rows take of memory: told from files, from shapes, and by what is really used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest

from cache_models import CacheModel, cache_model, fresh_caches
from tenuto_engine import Engine, GenerationOptions, ModelLoadError, RowCost, model_facts
from tenuto_engine._memory import host_memory
from tenuto_engine._row_cost import row_cost
from tiny_models import KINDS, Kind, build_tiny_model

CHUNK = 32


def held_bytes(caches: list[Any]) -> int:
    """What the caches really take."""
    return sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize("kind", get_args(CacheModel))
@pytest.mark.parametrize("tokens", [1, 40, 300, 700])
def test_a_row_never_takes_more_than_its_cost_and_nearly_that(
    kind: CacheModel, tokens: int
) -> None:
    model = cache_model(kind)
    cost = row_cost(model, lambda: fresh_caches(model), CHUNK)
    caches = fresh_caches(model)
    most = 0
    for start in range(0, tokens, CHUNK):
        length = min(CHUNK, tokens - start)
        mx.eval(model(mx.zeros((1, length), mx.int32), cache=caches))
        most = max(most, held_bytes(caches))
    assert most <= cost.of(tokens)
    # Buffers grow by 256 positions at a time, so that much may be unused, of windows all.
    assert most >= cost.fixed + cost.per_token * (tokens - 1)


def test_measuring_the_cost_of_a_row_computes_nothing() -> None:
    model = cache_model("llama_wide")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    row_cost(model, lambda: fresh_caches(model), CHUNK)
    # One token's id, and the counters of the caches.
    assert mx.get_peak_memory() - before < 1024


def test_the_tokens_that_fit_are_the_most_that_fit() -> None:
    cost = RowCost(fixed=1000, per_token=50, windows=((64, 20),))
    for size in (0, 999, 14_000, 100_000, 10**9):
        tokens = cost.tokens_in(size)
        assert tokens is not None
        assert cost.of(tokens) <= size < cost.of(tokens + 1)


def test_a_row_of_fixed_size_fits_for_any_number_of_tokens_or_for_none() -> None:
    recurrent = RowCost(fixed=1000, per_token=0)
    assert recurrent.tokens_in(1000) is None
    assert recurrent.tokens_in(999) == 0
    assert RowCost(0, 0).tokens_in(float("inf")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_those_of_the_loaded_model(tmp_path: Path, kind: Kind) -> None:
    folder = build_tiny_model(tmp_path, kind)
    facts = model_facts(folder, chunk_size=16)
    engine = Engine.load(folder, chunk_size=16)
    assert facts.geometry == engine.geometry
    assert facts.context_length == engine.context_length
    assert facts.vocab_size == engine.vocab_size


def test_facts_load_nothing(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    before = mx.get_active_memory()
    facts = model_facts(folder)
    assert mx.get_active_memory() == before < before + facts.weight_bytes


def test_a_model_that_nobody_uses_gives_all_its_memory_back(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    before = mx.get_active_memory()
    engine = Engine.load(folder)
    assert mx.get_active_memory() - before >= engine.weight_bytes
    list(engine.generate([1, 2, 3], GenerationOptions(max_tokens=5, seed=1)))
    del engine
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1024


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def _write_list(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("model.safetensors", _cut, "belong to it"),
        ("model.safetensors", _garble, "no safetensors file"),
        ("model.safetensors", Path.unlink, "no model"),
        ("config.json", _garble, "config.json"),
        ("config.json", _write_list, "no object"),
        ("config.json", Path.unlink, "no config.json"),
    ],
)
def test_facts_of_a_damaged_folder_name_the_file(
    tmp_path: Path, name: str, damage: Any, says: str
) -> None:
    folder = build_tiny_model(tmp_path)
    damage(folder / name)
    with pytest.raises(ModelLoadError, match=says) as raised:
        model_facts(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "memory.max"),
        ("4:memory:/a/b", "memory/memory.limit_in_bytes"),
        ("0::/elsewhere", "memory.max"),
        ("0::/a/b", "a/memory.max"),
    ],
)
def test_the_memory_of_the_host_is_what_the_control_group_allows(
    tmp_path: Path, line: str, file: str
) -> None:
    mine = tmp_path / "mine"
    mine.write_text(f"3:cpuset:/\n{line}\n")
    limit = tmp_path / "groups" / file
    limit.parent.mkdir(parents=True)
    whole = host_memory(tmp_path / "groups", mine)
    limit.write_text("max\n")
    assert host_memory(tmp_path / "groups", mine) == whole
    limit.write_text("123456\n")
    assert host_memory(tmp_path / "groups", mine) == 123456


def test_without_control_groups_the_memory_of_the_host_is_the_machines(tmp_path: Path) -> None:
    assert host_memory(tmp_path, tmp_path / "none") > 2**28


def test_unused_buffers_are_given_back_when_the_first_token_is_known(tmp_path: Path) -> None:
    engine = Engine.load(build_tiny_model(tmp_path), chunk_size=16)
    engine.add(list(range(5, 30)), GenerationOptions(max_tokens=5, seed=1))
    while not engine.step():
        pass
    assert mx.get_cache_memory() < 4096, "only what the step itself still held"
