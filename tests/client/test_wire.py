"""Damaged bytes in a stream are told as what they are, with an error of ours."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgpack
import pytest

from tenuto_client import ProtocolError, Token, pack_tokens, unpack_entry

TOKENS = pack_tokens([Token(1, 5, "a", -0.5, ((1, -0.5),)), Token(2, 6, "b", -0.25, ((2, -0.5),))])
END = {
    "v": 1,
    "type": "end",
    "state": "completed",
    "epoch": 1,
    "text": "",
    "exactness": "exact",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2},
}


@pytest.mark.parametrize(
    ("field", "payload"), [(b"t", TOKENS), (b"e", msgpack.packb(END))], ids=["tokens", "event"]
)
def test_no_damage_makes_another_error_than_a_protocol_error(field: bytes, payload: bytes) -> None:
    draw = random.Random(1)
    for place in range(len(payload)):
        end = payload[place + 1 :]
        flipped = [payload[:place] + bytes([draw.randrange(256)]) + end for _ in range(8)]
        for damaged in (payload[:place], *flipped):
            with contextlib.suppress(ProtocolError):
                unpack_entry("6-1", {field: damaged})


@pytest.mark.parametrize(
    ("field", "body"),
    [
        (b"t", {"v": 1}),
        (b"t", {"v": 1, "a": "x", "i": [1], "x": ["t"], "l": [1.0]}),
        (b"t", {"v": 1, "a": 1, "i": [1, 2], "x": ["t"], "l": [1.0]}),
        (b"e", {"v": 1}),
        (b"e", END | {"state": "weird"}),
        (b"e", END | {"usage": 3}),
    ],
)
def test_an_entry_that_is_not_whole_is_a_protocol_error(field: bytes, body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_entry("6-1", {field: msgpack.packb(body)})
