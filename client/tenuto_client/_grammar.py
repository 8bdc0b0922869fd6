"""`grammar`: what the text of a job must match; its checks, and how it travels in a spec.

It is packed as a map of its kind to a text, a JSON schema being JSON: msgpack has no integers as
large, and the order of a schema's properties is that of the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from . import _checks as check
from ._deep_stack import on_deep_stack
from ._errors import InvalidRequest

GRAMMAR_KINDS: Final = ("json_schema", "regex", "lark")
MAX_GRAMMAR_BYTES: Final = 256 * 1024
_LONGEST_MESSAGE: Final = 1000
_RULE_HEAD: Final = re.compile(r"(?m)(?:^|\{)[ \t]*[?!]?(?P<name>[a-z_]\w*)(?:\.-?\d+)?[ \t]*\[")
_CAPTURE: Final = re.compile(r'\[[ \t]*capture[ \t]*(?:=[ \t]*"[^"\n]*"[ \t]*)?\]')


def check_grammar(name: str, value: object) -> dict[str, Any]:
    """A copy of `value`, if llguidance takes it.

    Raises:
        InvalidRequest: it has not exactly one kind, is too large, or is not valid: with the
            parser's message; or llguidance is not installed here.
    """
    known = ", ".join(GRAMMAR_KINDS)
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"must be a dict with one of {known}, is {check.show(value)}")
    if len(value) != 1 or not set(value) <= set(GRAMMAR_KINDS):
        raise InvalidRequest(name, f"must have exactly one of {known}, has {check.show([*value])}")
    ((kind, content),) = value.items()
    text = _text_of(name, kind, content)
    size = check.encodable(name, text)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            name, f"{kind} is {size} bytes, at most {MAX_GRAMMAR_BYTES} (256 KiB) are allowed"
        )
    grammar = unpack_grammar({kind: text})
    if problem := _problem(name, kind, grammar[kind]):
        raise InvalidRequest(name, f"{kind}: {problem}")
    return grammar


def check_alone(*, ignore_eos: bool, min_tokens: int) -> None:
    """Raise `InvalidRequest` for what a grammar does not go with: the model has to end where it
    is complete."""
    if ignore_eos:
        raise InvalidRequest("ignore_eos", "cannot be with a grammar, which the model has to end")
    if min_tokens:
        raise InvalidRequest("min_tokens", "cannot be with a grammar, which says where to end")


def check_jump_forward(*, grammar: Mapping[str, Any] | None, logprobs: int) -> None:
    """Raise `InvalidRequest` for what `jump_forward` does not go with, or not without."""
    if grammar is None:
        raise InvalidRequest("jump_forward", "needs a grammar, which forces the tokens")
    if logprobs:
        raise InvalidRequest(
            "jump_forward", "cannot be with logprobs: nothing is drawn where a token is forced"
        )


def pack_grammar(grammar: Mapping[str, Any]) -> dict[str, str]:
    """The packed form of a checked grammar."""
    ((kind, content),) = grammar.items()
    return {kind: _json(content) if kind == "json_schema" else content}


def is_packed_grammar(value: object) -> bool:
    """Whether `unpack_grammar` can read it."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, text),) = value.items()
    if kind not in GRAMMAR_KINDS or not isinstance(text, str):
        return False
    try:
        return isinstance(unpack_grammar(value)[kind], dict | bool | str)
    except (ValueError, RecursionError):
        return False


def unpack_grammar(packed: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of `pack_grammar`."""
    ((kind, text),) = packed.items()
    return {kind: json.loads(text) if kind == "json_schema" else text}


def _text_of(name: str, kind: str, content: object) -> str:
    if kind != "json_schema":
        if not isinstance(content, str):
            raise InvalidRequest(name, f"{kind} must be a string, is {check.show(content)}")
        return content
    if not isinstance(content, Mapping | bool):
        raise InvalidRequest(
            name, f"{kind} must be a JSON object, True or False, is {check.show(content)}"
        )
    try:
        return _json(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"{kind} is not JSON: {error}") from None


def _json(content: object) -> str:
    schema = dict(content) if isinstance(content, Mapping) else content
    return json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _problem(name: str, kind: str, content: Any) -> str:
    """What the parser says is wrong; "" for nothing. Tokens named in a Lark grammar only the
    model's tokenizer knows, so the worker looks for those."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InvalidRequest(
            name,
            "cannot be checked here: llguidance is not installed",
            hint="pip install 'tenuto-client[grammar]'",
        ) from None
    if kind == "lark" and (problem := _attributes_of(content)):
        return problem
    if kind == "regex":
        form = LLMatcher.grammar_from_regex(content)
    else:
        part = {"json_schema" if kind == "json_schema" else "lark_grammar": content}
        form = json.dumps({"grammars": [part]})
    # Long chains of rules recurse.
    is_error, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(form))
    if not is_error:
        return ""
    message = "\n".join(messages).strip()
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."


def _attributes_of(lark: str) -> str:
    """Attributes of rules that workers cannot keep over a resume, as the engine's `attributes_of`
    says; "" for none."""
    for head in _RULE_HEAD.finditer(lark):
        if not _CAPTURE.match(lark, head.end() - 1):
            return f"the rule {head['name']} has attributes in brackets, which are not supported"
    return ""
