"""`jump_forward`: refused by name where it cannot be had; its marks, from a stream to readers."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from raw_worker import RawWorker, story
from tenuto_client import (
    Client,
    InvalidRequest,
    ProtocolError,
    Token,
    pack_spec,
    pack_tokens,
    unpack_entry,
    unpack_spec,
    unpack_tokens,
)
from tenuto_client._spec import make_request

# A drawn token, three that jumped behind it, and two more drawn ones.
SPAN = [
    Token(7, 1, "ü", -0.25),
    *(Token(8, index, "a", 0.0, jumped=True) for index in (2, 3, 4)),
    Token(9, 5, "", -0.5),
    Token(9, 6, "c", 0.0),
]


def asked(**options: Any) -> Any:
    return make_request("m", "hi", {"jump_forward": True, **options})


# -- asking for it ---------------------------------------------------------------------


@pytest.mark.parametrize("grammar", [{}, {"grammar": None}])
def test_it_needs_a_grammar(grammar: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="jump_forward: needs a grammar"):
        asked(**grammar)


@pytest.mark.parametrize("name", ["logprobs", "top_logprobs"])
def test_it_goes_with_no_logprobs(name: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(InvalidRequest, match="jump_forward: cannot be with logprobs"):
        asked(grammar={"regex": "a"}, **{name: 1})
    assert asked(grammar={"regex": "a"}, **{name: 0}).spec.jump_forward
    make_request("m", "hi", {"grammar": {"regex": "a"}, name: 1, "jump_forward": False})


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_it_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="jump_forward: must be"):
        make_request("m", "hi", {"jump_forward": value})


def test_it_is_packed_where_it_is_asked_for_and_nowhere_else() -> None:
    pytest.importorskip("llguidance")
    request = asked(grammar={"regex": "a"})
    assert unpack_spec(pack_spec(request.spec)) == request.spec
    assert request.spec.jump_forward
    plain = make_request("m", "hi", {"grammar": {"regex": "a"}, "jump_forward": False})
    assert b"jump_forward" not in pack_spec(plain.spec)
    assert plain.body_hash == make_request("m", "hi", {"grammar": {"regex": "a"}}).body_hash
    assert plain.body_hash != request.body_hash


def test_a_packed_one_that_is_none_is_named() -> None:
    body = msgpack.unpackb(pack_spec(make_request("m", "hi", {}).spec))
    with pytest.raises(ProtocolError, match="jump_forward: the job's spec has a int there"):
        unpack_spec(msgpack.packb(body | {"jump_forward": 1}))


# -- reading it ------------------------------------------------------------------------


def test_marks_come_back_and_entries_without_any_are_what_they_were() -> None:
    assert unpack_tokens(pack_tokens(SPAN)) == SPAN
    assert msgpack.unpackb(pack_tokens(SPAN))["j"] == [1, 2, 3]
    assert "j" not in msgpack.unpackb(pack_tokens(SPAN[4:]))
    assert not any(token.jumped for token in unpack_tokens(pack_tokens(story(1, 9))))


@pytest.mark.parametrize("places", [[6], [-1], [0, "1"], 3, [[1]], {"a": 1}])
def test_marks_at_places_that_are_none_are_damage(places: Any) -> None:
    body = msgpack.unpackb(pack_tokens(SPAN)) | {"j": places}
    with pytest.raises(ProtocolError, match="damaged"):
        unpack_entry("6-0", {b"t": msgpack.packb(body)})


@pytest.mark.parametrize("cut", range(1, 6))
async def test_readers_get_the_marks_wherever_they_come_in(
    client: Client, worker: RawWorker, cut: int
) -> None:
    job = await client.submit("m", "hi")
    attempt = worker.claim()
    for part in (SPAN[:cut], SPAN[cut:]):
        attempt.call("publish", 0, part[0].index, part[-1].index, pack_tokens(part))
    attempt.finish()
    for after in range(len(SPAN) + 1):
        assert [token async for token in job.stream(after)] == SPAN[after:]
    assert list((await job.result()).tokens) == SPAN
