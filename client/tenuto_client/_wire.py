"""What stands in a job's stream, and how it is packed.

An entry has one field. `t` holds tokens, under the id `<last index>-0`; `e` holds an event, under
`<index>-<n>`, written by a script. Both are msgpack maps with a version `v`.

    t: {v: 1, a: first index, i: [token ids], x: [texts], l: [logprobs], k: [[[id, logprob]...]...]}
       `k` (the top logprobs) is absent when none were asked for. Floats are IEEE single precision,
       which is what the engine computes in, so they come back with the same bits.
       `j` are the places in the entry, from 0, of tokens that jumped; it is absent where none did.
    e: {v: 1, type: "state" | "end", state, epoch, at, ...}
       An end has `usage`, and `stats` where the worker that ended the job told them (`JobStats`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

import msgpack

from ._errors import ProtocolError
from ._records import EndEvent, JobState, JobStats, StateEvent, Token, Usage

VERSION: Final = 1
TOKENS_FIELD: Final = b"t"
EVENT_FIELD: Final = b"e"

_T = TypeVar("_T")

Entry = list[Token] | StateEvent | EndEvent


def pack_tokens(tokens: Sequence[Token]) -> bytes:
    """Pack tokens of consecutive indexes into the payload of one entry."""
    body: dict[str, Any] = {
        "v": VERSION,
        "a": tokens[0].index,
        "i": [t.token for t in tokens],
        "x": [t.text for t in tokens],
        "l": [t.logprob for t in tokens],
    }
    if any(t.top_logprobs for t in tokens):
        body["k"] = [t.top_logprobs for t in tokens]
    if jumped := [place for place, t in enumerate(tokens) if t.jumped]:
        body["j"] = jumped
    packed: bytes = msgpack.packb(body, use_single_float=True)
    return packed


def unpack_tokens(payload: bytes) -> list[Token]:
    """The inverse of `pack_tokens`.

    Raises:
        ProtocolError: it is damaged, or of a version that this one cannot read.
    """
    return _read(_tokens, _unpack(payload))


def _tokens(body: Mapping[str, Any]) -> list[Token]:
    tops = body.get("k") or [()] * len(body["i"])
    jumped = frozenset(body.get("j", ()))
    if not jumped <= set(range(len(body["i"]))):
        raise ValueError("a place that no token has")
    return [
        Token(
            token=token,
            index=body["a"] + n,
            text=text,
            logprob=logprob,
            top_logprobs=tuple((i, p) for i, p in top),
            jumped=n in jumped,
        )
        for n, (token, text, logprob, top) in enumerate(
            zip(body["i"], body["x"], body["l"], tops, strict=True)
        )
    ]


def unpack_entry(entry_id: str, entry: Mapping[bytes, bytes]) -> Entry:
    """One stream entry as the tokens or the event that it holds.

    Raises:
        ProtocolError: the entry is damaged, or of a version that this one cannot read.
    """
    if (payload := entry.get(TOKENS_FIELD)) is not None:
        return unpack_tokens(payload)
    if (payload := entry.get(EVENT_FIELD)) is not None:
        index = index_of(entry_id)
        return _read(lambda body: _event(index, body), _unpack(payload))
    raise ProtocolError(f"stream entry {entry_id} has neither tokens nor an event")


def is_token_id(entry_id: bytes) -> bool:
    """Whether the entry of this id holds tokens; `0-0` is none's."""
    index, _, place = entry_id.partition(b"-")
    return place == b"0" and index != b"0"


def index_of(entry_id: str) -> int:
    """The token index in a stream id."""
    return int(entry_id.partition("-")[0])


def _event(index: int, body: Mapping[str, Any]) -> StateEvent | EndEvent:
    if body["type"] != "end":
        return StateEvent(
            state=JobState(body["state"]),
            epoch=body["epoch"],
            index=index,
            worker=body.get("worker"),
            reason=body.get("reason"),
        )
    usage = body["usage"]
    return EndEvent(
        index=index,
        state=JobState(body["state"]),
        epoch=body["epoch"],
        finish_reason=body.get("finish_reason"),
        text=body["text"],
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], usage.get("cached_tokens")),
        exactness=body["exactness"],
        exactness_reason=body.get("exactness_reason"),
        error=body.get("error"),
        stats=None if (told := body.get("stats")) is None else stats_of(told),
    )


def stats_of(told: Mapping[str, Any], **totals: float) -> JobStats:
    """Of what a worker told of itself, and Redis of all attempts; what else is there is left out.

    Raises:
        KeyError, TypeError, ValueError: something is missing, or no number.
    """
    values = {**told, **totals}
    numbers = {each.name: float(values[each.name]) for each in fields(JobStats)}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("a number that is none")
    # Lua knows one kind of number, so that a whole one may come back as either.
    counts = {each.name: int(numbers[each.name]) for each in fields(JobStats) if each.type == "int"}
    return JobStats(**{**numbers, **counts})  # type: ignore[arg-type]


def _read(read: Callable[[Mapping[str, Any]], _T], body: Mapping[str, Any]) -> _T:
    try:
        return read(body)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a stream entry is damaged: {error!r}") from error


def _unpack(payload: bytes) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a stream entry is not msgpack: {error}") from error
    if not isinstance(body, dict) or body.get("v") != VERSION:
        version = body.get("v") if isinstance(body, dict) else None
        raise ProtocolError(
            f"a stream entry has version {version!r}, this client reads {VERSION}",
            hint="upgrade tenuto-client",
        )
    return body
