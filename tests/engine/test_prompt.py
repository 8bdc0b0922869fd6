"""Prompts: text, messages and ids become tokens, or the error says what is wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tenuto_engine import Engine, GenerationOptions, InvalidOption, PromptError, PromptTooLong
from tiny_models import build_tiny_model


def test_a_text_becomes_one_user_message(llama: Engine) -> None:
    ids = llama.encode_prompt("hello")
    text = llama.tokenizer.decode(ids)
    assert text == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert ids == llama.encode_prompt([{"role": "user", "content": "hello"}])


def test_a_raw_text_is_taken_as_it_is(llama: Engine) -> None:
    assert llama.tokenizer.decode(llama.encode_prompt("hello", raw=True)) == "hello"


def test_ids_are_taken_as_they_are(llama: Engine) -> None:
    assert llama.encode_prompt([3, 1, 412]) == [3, 1, 412]


@pytest.fixture
def no_template(tmp_path: Path) -> Engine:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return Engine.load(folder)


def test_without_a_template_text_is_raw_and_messages_are_refused(no_template: Engine) -> None:
    assert no_template.encode_prompt("hello") == no_template.encode_prompt("hello", raw=True)
    with pytest.raises(PromptError, match="no chat template"):
        no_template.encode_prompt([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 413], r"prompt\[1\]: token id 413"),
        ([-1], r"prompt\[0\]: token id -1"),
        ([1, 2, True], r"prompt\[2\] is True"),
        ([1.0], r"prompt\[0\] is 1.0"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "a"}, 5], r"messages\[1\]"),
    ],
)
def test_a_bad_prompt_says_what_is_wrong(llama: Engine, prompt: Any, problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        llama.encode_prompt(prompt)


def test_a_template_that_raises_is_a_prompt_error(llama: Engine) -> None:
    llama.tokenizer._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        llama.encode_prompt([{"role": "user", "content": "a"}])


def test_add_checks_ids_too(llama: Engine) -> None:
    with pytest.raises(PromptError, match="empty"):
        llama.add([])
    with pytest.raises(PromptError, match="token id 9999"):
        llama.add([9999])
    assert llama.free_slots == 1


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logit_bias", {"logit_bias": {413: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": (2, 413)}),
        ("original_prompt_tokens", {"original_prompt_tokens": 2}),
    ],
)
def test_add_checks_options_against_model_and_prompt(
    llama: Engine, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption) as caught:
        llama.add([1, 2, 3], GenerationOptions(**options))
    assert caught.value.field == field
    assert llama.free_slots == 1


def test_what_does_not_fit_the_context_names_all_three_numbers(llama: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"\b10 prompt tokens.*max_tokens=4087.*\b4096\b"):
        llama.add([5] * 10, GenerationOptions(max_tokens=4087))
    llama.add([5] * 10, GenerationOptions(max_tokens=4086))


def test_a_prompt_longer_than_the_model_makes_no_library_print(tmp_path: Path) -> None:
    engine = Engine.load(build_tiny_model(tmp_path / "short", context_length=16))
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert len(engine.encode_prompt("hello " * 40)) > 16
        assert len(engine.encode_prompt("hello " * 40, raw=True)) > 16
    finally:
        logger.removeHandler(handler)

    assert heard == []
