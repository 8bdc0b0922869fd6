"""Grammars of each kind, whose texts a tiny random model ends soon, and whether a text fits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    # Random models are fond of endless blanks.
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"([a-z]{2,5} ){2,4}[0-9]{2,5}\."
LARK = 'start: part part part part\npart: NUMBER ("+" | "-")\nNUMBER: /[0-9]{1,4}/\n'
GRAMMARS: Mapping[str, Mapping[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": REGEX},
    "lark": {"lark": LARK},
}


def assert_matches(grammar: str, text: str) -> None:
    if grammar == "json_schema":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 4
        assert value["age"] in range(151)
        assert len(value["tags"]) <= 2
        assert set(value["tags"]) <= {"red", "green", "blue"}
    else:
        pattern = REGEX if grammar == "regex" else r"([0-9]{1,4}[+-]){4}"
        assert re.fullmatch(pattern, text)
