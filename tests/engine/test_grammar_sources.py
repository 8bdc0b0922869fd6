"""What a grammar is made of: what is refused by name, and when it is compiled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_runs import PROMPT, STYLES, engine_in_memory, finish, run
from grammar_samples import LARK, SCHEMA
from tenuto_engine import Engine, GenerationOptions, InvalidOption
from tiny_models import tiny_vocabulary

LoadEngine = Callable[..., Engine]

SAMPLED = STYLES["sampled"] | {"ignore_eos": False, "max_tokens": 70}


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ({}, "exactly one of json_schema, regex, lark"),
        ({"regex": "a", "lark": 'start: "a"'}, "exactly one"),
        ({"gbnf": "root ::= x"}, "exactly one"),
        ({1: "a"}, "exactly one"),
        ("[a-z]", "must be a mapping, is a str"),
        ({"regex": 5}, "regex is 5, not a text"),
        ({"lark": None}, "lark is None"),
        ({"regex": "\ud800"}, "regex"),
        ({"json_schema": '{"type": "object"}'}, "not an object or bool"),
        ({"json_schema": [1]}, "not an object or bool"),
        ({"json_schema": {"const": math.nan}}, "not JSON"),
        ({"json_schema": {"const": {1, 2}}}, "not JSON"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(grammar: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason) as caught:
        GenerationOptions(grammar=grammar)
    assert caught.value.field == "grammar"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ({"json_schema": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json_schema": {"$ref": "http://example.org/x"}}, "does not fetch"),
        ({"json_schema": False}, "Unsatisfiable"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"lark": ""}, "no start rule"),
        ({"lark": "start: nothing"}, "unknown name"),
        ({"lark": "start: <|no_such_token|>"}, "unknown special token"),
        ({"lark": '{"grammars": [{"regex": "a"}]}'}, "expecting rule"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_parsers_reason(
    llama: Engine, grammar: Any, reason: str
) -> None:
    for refuse in (
        lambda: llama.compile_grammar(grammar),
        lambda: llama.add([1, 2], GenerationOptions(grammar=grammar)),
    ):
        with pytest.raises(InvalidOption, match=reason) as caught:
            refuse()
        assert caught.value.field == "grammar"
    assert llama.free_slots == 1


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(the yellow canary"},
        {"lark": 'start: "the yellow canary" | the_yellow_canary_'},
        {"json_schema": {"type": "string", "pattern": "(the yellow canary"}},
    ],
)
def test_an_error_does_not_repeat_the_grammar(llama: Engine, grammar: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        llama.compile_grammar(grammar)
    assert "yellow" not in str(caught.value)


def test_min_tokens_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(InvalidOption) as caught:
        GenerationOptions(grammar={"regex": "a"}, min_tokens=3)
    assert caught.value.field == "min_tokens"


def test_ignore_eos_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(InvalidOption, match="grammar") as caught:
        GenerationOptions(grammar={"regex": "a"}, ignore_eos=True)
    assert caught.value.field == "ignore_eos"


def test_a_model_without_an_end_token_takes_no_grammar(llama: Engine) -> None:
    endless = engine_in_memory(llama, "llama")
    with pytest.raises(InvalidOption, match="grammar: the model has no end token"):
        endless.add([1, 2], GenerationOptions(grammar={"regex": "a"}))


def test_a_tokenizer_that_cannot_be_wrapped_takes_no_grammar(
    llama: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = SimpleNamespace(vocab=tiny_vocabulary())
    monkeypatch.setattr(llama.tokenizer, "_tokenizer", vocabulary)
    with pytest.raises(InvalidOption, match="grammar: the tokenizer of the model cannot"):
        llama.add([1, 2], GenerationOptions(grammar={"regex": "a"}))


# -- compiling -------------------------------------------------------------------------


def test_a_grammar_is_compiled_once(llama: Engine) -> None:
    first = llama.compile_grammar({"json_schema": SCHEMA})
    assert llama.compile_grammar({"json_schema": json.loads(json.dumps(SCHEMA))}) is first
    assert llama.compile_grammar(first) is first
    for number in range(40):
        llama.compile_grammar({"regex": f"a{number}"})
    assert llama.compile_grammar({"json_schema": SCHEMA}) is not first


def test_the_order_of_properties_makes_another_grammar(llama: Engine) -> None:
    turned = SCHEMA | {"properties": dict(reversed(list(SCHEMA["properties"].items())))}  # type: ignore[attr-defined]
    done = run(llama, encode(llama), grammar={"json_schema": SCHEMA}, **SAMPLED)
    assert list(json.loads(done.text)) == ["name", "age", "tags"]
    done = run(llama, encode(llama), grammar={"json_schema": turned}, **SAMPLED)
    assert list(json.loads(done.text)) == ["tags", "age", "name"]


def test_a_compiled_grammar_runs_as_its_source_does_and_moves_between_engines(
    load_engine: LoadEngine,
) -> None:
    one, other = load_engine("llama"), load_engine("llama")
    expected = run(one, encode(one), grammar={"lark": LARK}, **SAMPLED)
    compiled = one.compile_grammar({"lark": LARK})
    for engine in (one, other):
        assert run(engine, encode(engine), grammar=compiled, **SAMPLED) == expected


def test_a_schema_that_changes_afterwards_does_not_change_the_run(llama: Engine) -> None:
    schema: dict[str, Any] = {"const": "x"}
    options = GenerationOptions(grammar={"json_schema": schema})
    schema["const"] = "y"
    assert finish(llama, llama.add(encode(llama), options)).text == '"x"'
