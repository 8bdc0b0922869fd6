"""Damaged bytes in a stream are told as what they are, with an error of ours."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgpack
import pytest

from tenuto_client import EndEvent, JobStats, ProtocolError, Token, pack_tokens, unpack_entry

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
STATS = {
    "cached_tokens": 1,
    "prefill_tokens": 0,
    "prefill_seconds": 0,
    "decode_tokens": 6,
    "decode_seconds": 1.5,
    "peak_memory": 2**33,
    "attempts": 2,
    "seconds": 4,
}


@pytest.mark.parametrize(
    ("field", "payload"),
    [(b"t", TOKENS), (b"e", msgpack.packb(END)), (b"e", msgpack.packb(END | {"stats": STATS}))],
    ids=["tokens", "event", "event with stats"],
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
        (b"e", END | {"stats": 3}),
        (b"e", END | {"stats": STATS | {"attempts": "many"}}),
        (b"e", END | {"stats": STATS | {"peak_memory": float("inf")}}),
        (b"e", END | {"stats": {}}),
    ],
)
def test_an_entry_that_is_not_whole_is_a_protocol_error(field: bytes, body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_entry("6-1", {field: msgpack.packb(body)})


def test_an_end_has_the_stats_that_were_told_and_none_where_none_were() -> None:
    cached = {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 1}}
    # A later version may tell more.
    told = END | cached | {"stats": STATS | {"bytes_sent": 7}}
    end = unpack_entry("6-1", {b"e": msgpack.packb(told)})
    assert isinstance(end, EndEvent)
    assert end.usage.cached_tokens == 1
    assert end.stats == JobStats(1, 0, 0.0, 6, 1.5, 2**33, 2, 4.0)
    assert (end.stats.prefill_tps, end.stats.decode_tps) == (0.0, 4.0)
    assert type(end.stats.prefill_seconds) is float
    assert type(end.stats.peak_memory) is int
    older = unpack_entry("6-1", {b"e": msgpack.packb(END)})
    assert isinstance(older, EndEvent)
    assert (older.stats, older.usage.cached_tokens) == (None, None)
    assert older.usage == end.usage, "what a cache spared is no part of what was used"
