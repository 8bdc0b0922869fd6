"""What a submit takes for a grammar: checked by the parser itself, and refused by name."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import Any

import msgpack
import pytest

from tenuto_client import (
    FakeClient,
    InvalidRequest,
    ProtocolError,
    pack_spec,
    unpack_spec,
)
from tenuto_client._grammar import MAX_GRAMMAR_BYTES
from tenuto_client._spec import make_request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"const": "é"}},
    "required": ["b"],
}
GOOD: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": True},
    {"json_schema": {}},
    {"json_schema": {"const": 2**80}},
    {"regex": "[0-9]{4}-[0-9]{2}"},
    {"regex": ""},
    {"lark": 'start: "yes" | "no"'},
    # Only the worker knows the model's tokens.
    {"lark": "start: <|no_such_token|>"},
]
SHAPES: list[tuple[Any, str]] = [
    ("[0-9]", "must be a dict"),
    (["regex", "a"], "must be a dict"),
    ({}, "exactly one"),
    ({"regex": "a", "lark": 'start: "a"'}, "exactly one"),
    ({"gbnf": "root ::= x"}, "exactly one"),
    ({1: "a"}, "exactly one"),
    ({"regex": None}, "regex must be a string"),
    ({"lark": b"start"}, "lark must be a string"),
    ({"regex": "\ud800"}, "surrogate"),
    ({"json_schema": '{"type": "object"}'}, "json_schema must be a JSON object"),
    ({"json_schema": []}, "json_schema must be a JSON object"),
    ({"json_schema": {"const": math.nan}}, "not JSON"),
    ({"json_schema": {"const": {1}}}, "not JSON"),
    ({"json_schema": {"const": "\ud800"}}, "surrogate"),
    ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "262145 bytes, at most 262144"),
    ({"json_schema": {"const": "é" * (MAX_GRAMMAR_BYTES // 2)}}, "at most 262144"),
]
INVALID: list[tuple[Any, str]] = [
    ({"json_schema": {"type": "objekt"}}, "json_schema: Invalid type: objekt"),
    (
        {"json_schema": {"type": "array", "uniqueItems": True}},
        "Unimplemented keys.*uniqueItems",
    ),
    ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "does not exist"),
    ({"json_schema": {"$ref": "http://example.org/schema"}}, "does not fetch"),
    ({"json_schema": False}, "Unsatisfiable"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"lark": ""}, "no start rule"),
    ({"lark": "start: nothing"}, 'unknown name: "nothing"'),
    ({"lark": '{"grammars": [{"regex": "a"}]}'}, "expecting rule"),
]


def refusal(grammar: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make_request("m", "hi", {"grammar": grammar, **options})
    return caught.value


@pytest.fixture
def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)


@pytest.fixture
def with_llguidance() -> None:
    pytest.importorskip("llguidance")


@pytest.mark.parametrize(("grammar", "problem"), SHAPES, ids=lambda each: repr(each)[:30])
def test_what_cannot_be_a_grammar_is_refused_by_name(
    grammar: Any, problem: str, without_llguidance: None
) -> None:
    error = refusal(grammar)
    assert error.field == "grammar"
    assert problem in str(error)


@pytest.mark.parametrize(("grammar", "message"), INVALID, ids=lambda each: repr(each)[:30])
def test_an_invalid_grammar_is_refused_with_the_parsers_message(
    grammar: Any, message: str, with_llguidance: None
) -> None:
    error = refusal(grammar)
    assert error.field == "grammar"
    assert str(error).startswith(f"grammar: {next(iter(grammar))}: ")
    assert re.search(message, str(error))


@pytest.mark.parametrize("grammar", GOOD, ids=repr)
def test_a_grammar_travels_as_it_is(grammar: dict[str, Any], with_llguidance: None) -> None:
    spec = make_request("m", "hi", {"grammar": grammar}).spec
    read = unpack_spec(pack_spec(spec))
    assert read.grammar == spec.grammar == grammar
    # The order of properties is that of the output.
    assert json.dumps(read.grammar) == json.dumps(grammar)


def test_the_grammar_is_part_of_the_body_and_its_order_too(with_llguidance: None) -> None:
    turned = {**SCHEMA, "properties": dict(reversed(list(SCHEMA["properties"].items())))}
    hashes = {
        make_request("m", "hi", {"grammar": grammar}).body_hash
        for grammar in (None, {"json_schema": SCHEMA}, {"json_schema": turned}, {"regex": "a"})
    }
    assert len(hashes) == 4
    assert make_request("m", "hi", {}).body_hash in hashes


def test_a_job_without_a_grammar_is_packed_as_before() -> None:
    assert b"grammar" not in pack_spec(make_request("m", "hi", {"grammar": None}).spec)


def test_a_schema_that_changes_afterwards_does_not_change_the_request(
    with_llguidance: None,
) -> None:
    schema: dict[str, Any] = {"const": "x"}
    spec = make_request("m", "hi", {"grammar": {"json_schema": schema}}).spec
    schema["const"] = "y"
    assert spec.grammar == {"json_schema": {"const": "x"}}


def test_min_tokens_and_a_grammar_exclude_each_other(with_llguidance: None) -> None:
    """Where the text is complete, nothing but an end may follow."""
    assert refusal({"regex": "a"}, min_tokens=3).field == "min_tokens"


def test_ignore_eos_and_a_grammar_exclude_each_other(with_llguidance: None) -> None:
    error = refusal({"regex": "a"}, ignore_eos=True)
    assert error.field == "ignore_eos"
    make_request("m", "hi", {"grammar": {"regex": "a"}, "ignore_eos": False})


@pytest.mark.parametrize("grammar", GOOD[:1] + GOOD[4:5] + GOOD[6:7], ids=repr)
def test_without_llguidance_a_grammar_is_refused_with_what_to_install(
    grammar: dict[str, Any], without_llguidance: None
) -> None:
    error = refusal(grammar)
    assert error.field == "grammar"
    assert "llguidance is not installed" in str(error)
    assert error.hint == "pip install 'tenuto-client[grammar]'"
    make_request("m", "hi", {})


@pytest.mark.parametrize("attributes", ["max_tokens=3", "lazy", 'stop="]"', "capture, lazy"])
def test_attributes_of_rules_are_refused(attributes: str, with_llguidance: None) -> None:
    lark = f"start: x\nx[{attributes}]: /a+/"
    with pytest.raises(InvalidRequest, match="lark: the rule x has attributes in brackets"):
        make_request("m", "hi", {"grammar": {"lark": lark}})
    make_request("m", "hi", {"grammar": {"lark": 'start: x\nx[capture="q"]: /a[x]+/'}})


def test_a_grammar_of_long_chains_ends_no_process(with_llguidance: None) -> None:
    code = """
from tenuto_client import InvalidRequest
from tenuto_client._spec import make_request
defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(4000)}
schema = {"$defs": defs | {"d4000": {"type": "string"}}, "$ref": "#/$defs/d0"}
try:
    make_request("m", "hi", {"grammar": {"json_schema": schema}})
except InvalidRequest as error:
    print(error)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("alive\n"), done.stderr[-500:]


def test_the_client_imports_llguidance_for_no_other_job() -> None:
    code = (
        "import sys, tenuto_client; from tenuto_client._spec import make_request;"
        "make_request('m', 'hi', {}); print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_the_fake_checks_as_the_client_does(with_llguidance: None) -> None:
    async with FakeClient() as tenuto:
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await tenuto.submit("m", "hi", grammar={"regex": "("})
        job = await tenuto.submit("m", "hi", grammar={"regex": "Hello.*"})
        assert (await job.result()).text


async def test_the_fake_refuses_what_cannot_be_checked(without_llguidance: None) -> None:
    async with FakeClient() as tenuto:
        with pytest.raises(InvalidRequest, match="llguidance is not installed"):
            await tenuto.submit("m", "hi", grammar={"regex": "a"})


def test_other_names_lead_to_it() -> None:
    for name in ("json_schema", "response_format", "gramar"):
        with pytest.raises(InvalidRequest, match="did you mean grammar"):
            make_request("m", "hi", {name: {}})


@pytest.mark.parametrize(
    "packed",
    [
        {"regex": 5},
        {"json_schema": "{"},
        {"json_schema": "[" * 100_000},
        {"json_schema": "[1]"},
        {"gbnf": "x"},
        {"regex": "a", "lark": "b"},
        {},
        "a",
    ],
    ids=lambda each: repr(each)[:30],
)
def test_a_packed_grammar_that_cannot_be_read_is_named(packed: Any) -> None:
    body = msgpack.unpackb(pack_spec(make_request("m", "hi", {}).spec))
    with pytest.raises(ProtocolError, match="grammar: ") as caught:
        unpack_spec(msgpack.packb(body | {"grammar": packed}))
    assert "the job's spec" in str(caught.value)
