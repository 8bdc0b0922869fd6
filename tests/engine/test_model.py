"""Loading: what works is a whole engine, what does not says which folder and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_runs import run
from tenuto_engine import Engine, EngineError, ModelLoadError, UnsupportedCache
from tenuto_engine._model import _first_integer
from tiny_models import EOS, Kind, build_tiny_model, tiny_vocabulary

LoadEngine = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model folder, to be broken."""
    return build_tiny_model(tmp_path / "broken model", "llama")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_by_removing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def put_a_file_there(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "no such folder"),
        (put_a_file_there, "is a file"),
        (break_by_removing("config.json"), "no config.json"),
        (break_by_removing("model.safetensors"), "no model"),
        (break_by_removing("tokenizer.json"), "tokenizer"),
        (truncate_weights, ""),
        (lambda f: (f / "model.safetensors").write_bytes(b""), ""),
        (lambda f: (f / "config.json").write_text("{"), ""),
        (lambda f: (f / "config.json").write_text("[]"), ""),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda f: edit(f / "config.json", model_type="quartet"), "quartet not supported"),
        (lambda f: edit(f / "config.json", num_hidden_layers=1), ""),
        (lambda f: edit(f / "config.json", num_hidden_layers=3), ""),
        (lambda f: edit(f / "config.json", hidden_size=96), ""),
        (lambda f: edit(f / "config.json", model_file="own_code.py"), "own_code.py"),
    ],
    ids=[
        "absent",
        "a-file",
        "no-config",
        "no-weights",
        "no-tokenizer",
        "weights-cut",
        "weights-empty",
        "config-cut",
        "config-no-map",
        "tokenizer-cut",
        "unknown-architecture",
        "too-many-weights",
        "missing-weights",
        "wrong-shapes",
        "foreign-code",
    ],
)
def test_a_broken_folder_is_named_with_the_reason_and_a_hint(
    folder: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder)
    with pytest.raises(ModelLoadError) as caught:
        Engine.load(folder)
    assert str(folder) in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.hint


def test_a_load_that_failed_leaves_nothing_in_the_way_of_the_next(folder: Path) -> None:
    good = run(Engine.load(folder), [5, 6, 7], max_tokens=10)
    weights = (folder / "model.safetensors").read_bytes()
    truncate_weights(folder)
    with pytest.raises(ModelLoadError):
        Engine.load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    assert run(Engine.load(folder), [5, 6, 7], max_tokens=10) == good


def test_a_hub_name_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="nobody/no-such-model") as caught:
        Engine.load("nobody/no-such-model")
    assert "local folder" in str(caught.value.hint)


def test_a_model_with_a_cache_that_cannot_be_saved_is_refused_by_class(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    engine = Engine.load(folder)
    model_class = type(engine._loaded.model)

    class OwnCache:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_class, "make_cache", lambda self: [OwnCache()])
        with pytest.raises(UnsupportedCache, match="OwnCache") as caught:
            Engine.load(folder)
    assert str(folder) in str(caught.value)
    assert isinstance(caught.value, EngineError)


def test_an_engine_knows_its_model(load_engine: LoadEngine, kind: Kind) -> None:
    engine = load_engine(kind, slots=2)
    assert engine.context_length == 4096
    assert engine.eos_token_ids == {tiny_vocabulary()[EOS]}
    assert engine.vocab_size == len(tiny_vocabulary())
    assert (engine.slots, engine.free_slots) == (2, 2)
    assert engine.tokenizer.decode(engine.tokenizer.encode("a中b")) == "a中b"


def test_the_geometry_has_chunk_size_and_width_but_not_slots_or_loop(
    load_engine: LoadEngine,
) -> None:
    plain = load_engine("llama").geometry
    assert (plain.width, plain.chunk_size) == (1, 16)
    assert load_engine("llama", slots=3, pipelined=True).geometry == plain
    assert load_engine("llama", chunk_size=32).geometry.fingerprint != plain.fingerprint
    assert load_engine("lfm2").geometry.fingerprint != plain.fingerprint


def test_the_context_length_is_found_under_its_other_names() -> None:
    keys = ("max_position_embeddings", "n_ctx")
    assert _first_integer({"n_ctx": 7}, keys) == 7
    assert _first_integer({"text_config": {"max_position_embeddings": 9}}, keys) == 9
    assert _first_integer({"text_config": None, "n_ctx": None}, keys) is None


def test_a_model_that_states_no_context_takes_any_length(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine.load(folder)
    assert engine.context_length is None
    assert len(run(engine, [5, 6], max_tokens=3, ignore_eos=True).tokens) == 3
