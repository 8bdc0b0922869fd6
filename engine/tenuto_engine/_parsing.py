"""Reading the header maps of the records of format version 2.

Whatever a map may hold that is not in the specification (engine/DESIGN.md) is ``Damaged``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from tenuto_engine._cache_kinds import CACHE_LIST, check_meta
from tenuto_engine._delta import BLOB_SEQUENCE_AXIS, Commit, Layout
from tenuto_engine._errors import CheckpointError
from tenuto_engine._headers import (
    STATE_FILES,
    Begin,
    BlockHeader,
    Content,
    Continued,
    End,
    Slices,
    Span,
    State,
    StateRef,
)
from tenuto_engine._records import BLOBS, DIGEST_BYTES, Damaged, Header, Record, RecordType
from tenuto_engine._token import Token

MAX_CACHE_DEPTH: Final = 16
MAX_LEAVES: Final = 2**16
_MAX_POSITION: Final = 2**48
_MAX_INTEGER: Final = 2**64 - 1
_BLOB_RANK: Final = BLOB_SEQUENCE_AXIS + 2


class HeaderParser:
    """Checks the headers of one file, one after the other.

    Raises from each call:
        Damaged: the header is not what the specification says.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
        self._distinct: dict[tuple[tuple[tuple[int, int], ...], ...], bool] = {}
        self._parsers: Mapping[RecordType, Callable[[Record, Header], Content]] = {
            RecordType.BEGIN: _parse_begin,
            RecordType.PART: self._parse_part,
            RecordType.COMMIT: self._parse_commit,
            RecordType.STATE: _parse_state,
            RecordType.END: _parse_end,
            RecordType.BLOCK: self._parse_block,
        }

    def parse(self, record: Record, header: Header) -> Content:
        """What the record's header says; ``header`` is as ``read_record`` gave it."""
        try:
            return self._parsers[record.type](record, header)
        except KeyError as missing:
            raise Damaged(f"the header has no {missing}") from missing
        except (TypeError, ValueError) as error:
            raise Damaged(f"the header has a wrong value: {error}") from error

    def _parse_part(self, record: Record, header: Header) -> Span:
        generation = _integer(header["generation"], "generation")
        return Span(generation, *self._parse_positions(record, header, len(record.blobs)))

    def _parse_positions(
        self, record: Record, header: Header, count: int
    ) -> tuple[int, int, tuple[Slices, ...]]:
        """Start, stop, and the members of the first ``count`` blobs."""
        start = _integer(header["start"], "start", _MAX_POSITION)
        stop = _integer(header["stop"], "stop", _MAX_POSITION)
        _require(start <= stop, "it stops before it starts")
        slices = tuple(
            self._parse_slices(entry[3], blob.shape)
            for entry, blob in zip(header[BLOBS][:count], record.blobs[:count], strict=True)
        )
        for each in slices:
            inside = min(each.positions) >= start and max(each.positions) + each.length <= stop
            _require(inside, "a blob holds positions outside its record's")
        _require(self._disjoint(slices), "two blobs hold the same positions")
        return start, stop, slices

    def _parse_block(self, record: Record, header: Header) -> BlockHeader:
        positional = _integer(header["positional"], "positional", len(record.blobs))
        start, stop, slices = self._parse_positions(record, header, positional)
        return BlockHeader(
            _string(header["name"], "name"),
            start,
            stop,
            _parse_layouts(header["layouts"], header["caches"]),
            slices,
            _parse_state_members(header[BLOBS][positional:]),
        )

    def _parse_slices(self, members: list[Any], shape: tuple[int, ...]) -> Slices:
        _require(len(shape) == _BLOB_RANK, "a blob of positions has another rank")
        _require(len(members) == shape[0] > 0, "a blob has other members than its shape says")
        leaves, arrays, positions = zip(*members, strict=True)
        for column in (leaves, arrays, positions):
            # A bool is equal to an int.
            _require(set(map(type, column)) == {int}, "a member is not told by integers")
        owners = tuple(zip(leaves, arrays, strict=True))
        # In a log of many records these are nearly always the same.
        known = self._owners.get(owners)
        if known is None:
            inside = min(leaves) >= 0 and max(leaves) < MAX_LEAVES and min(arrays) >= 0
            _require(inside, "a member has no leaf or array")
            known = self._owners[owners] = owners
        return Slices(known, positions, shape[BLOB_SEQUENCE_AXIS])

    def _disjoint(self, slices: Sequence[Slices]) -> bool:
        owners = tuple(each.owners for each in slices)
        distinct = self._distinct.get(owners)
        if distinct is None:
            flat = [owner for each in owners for owner in each]
            distinct = self._distinct[owners] = len(set(flat)) == len(flat)
        return distinct or not _overlap(slices)

    def _parse_commit(self, record: Record, header: Header) -> Span:
        part = self._parse_part(record, header)
        first = _integer(header["first"], "first", _MAX_POSITION)
        _require(first >= 1, "tokens are numbered from 1")
        divergence = header["first_divergence"]
        commit = Commit(
            _parse_tokens(header["tokens"], first),
            first,
            *_parse_pending(header["pending"]),
            _integer(header["divergences"], "divergences"),
            None if divergence is None else _integer(divergence, "first_divergence"),
            _parse_layouts(header["layouts"], header["caches"]),
        )
        return replace(
            part, commit=commit, state=_parse_state_ref(header["state"]), at=_time(header["at"])
        )


def _parse_begin(record: Record, header: Header) -> Begin:
    _require(not record.blobs, "it has a payload")
    continues = header["continues"]
    prompt = tuple(_token_id(token) for token in _list(header["prompt"], "prompt"))
    prompt_tokens = _integer(header["prompt_tokens"], "prompt_tokens", _MAX_POSITION)
    _require(len(prompt) <= prompt_tokens, "the prompt is longer than it says")
    return Begin(
        _string(header["job"], "job"),
        _integer(header["epoch"], "epoch"),
        _string(header["nonce"], "nonce"),
        prompt,
        prompt_tokens,
        _integer(header["seed"], "seed"),
        _map(header["meta"], "meta"),
        _time(header["created_at"]),
        None if continues is None else _parse_continued(continues),
    )


def _parse_continued(entry: object) -> Continued:
    match entry:
        case [str(file), offset, bytes(known), generation, position]:
            _require(len(known) == DIGEST_BYTES, "what it continues has no digest")
            return Continued(
                file,
                _integer(offset, "offset"),
                known,
                _integer(generation, "generation"),
                _integer(position, "position", _MAX_POSITION),
            )
    raise Damaged("it does not say what it continues")


def _parse_state(record: Record, header: Header) -> State:
    return State(_parse_state_members(header[BLOBS]))


def _parse_state_members(blobs: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    members = []
    for _, _, _, owners in blobs:
        match owners:
            case [[int(leaf), str(name)]]:
                members.append((_integer(leaf, "leaf", MAX_LEAVES), name))
            case _:
                raise Damaged("a state array has no leaf or name")
    _require(len(set(members)) == len(members), "two state arrays have one name")
    return tuple(members)


def _parse_end(record: Record, header: Header) -> End:
    _require(not record.blobs, "it has a payload")
    return End(_map(header["end"], "end"), _parse_tokens(header["tokens"], 1), _time(header["at"]))


def _parse_tokens(entries: object, first: int) -> tuple[Token, ...]:
    return tuple(
        _parse_token(entry, index) for index, entry in enumerate(_list(entries, "tokens"), first)
    )


def _parse_token(entry: Any, expected: int) -> Token:
    token, index, text, logprob, top, *jumped = entry
    _require(type(index) is int and index == expected, "tokens are not numbered one by one")
    _require(type(logprob) is float, "a token has no logprob")
    # The mark stands with those tokens alone that have it.
    _require(not jumped or (len(jumped) == 1 and jumped[0] is True), "its mark is none")
    return Token(
        _token_id(token), index, _string(text, "text"), logprob, _parse_top(top), bool(jumped)
    )


def _parse_pending(
    entry: Any,
) -> tuple[int | None, float | None, tuple[tuple[int, float], ...]]:
    if entry is None:
        return None, None, ()
    token, logprob, top = entry
    _require(logprob is None or type(logprob) is float, "the pending token's logprob is none")
    return _token_id(token), logprob, _parse_top(top)


def _parse_top(entries: object) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, logprob in _list(entries, "top logprobs"):
        _require(type(logprob) is float, "a likely token has no logprob")
        pairs.append((_token_id(token), logprob))
    return tuple(pairs)


def _parse_layouts(entries: object, caches: object) -> tuple[Layout, ...]:
    distinct = [_parse_layout(entry) for entry in _list(entries, "layouts")]
    found = tuple(_lookup(distinct, entry, MAX_CACHE_DEPTH) for entry in _list(caches, "caches"))
    leaves = sum(sum(1 for _ in each.leaves()) if each.children else 1 for each in found)
    _require(leaves <= MAX_LEAVES, "it has too many caches")
    return found


def _parse_layout(entry: Any) -> Layout:
    kind, meta = entry
    _require(_string(kind, "kind") != CACHE_LIST, "a list of caches is given as a leaf")
    try:
        check_meta(kind, _map(meta, "meta"))
    except CheckpointError as error:
        raise Damaged(str(error)) from error
    return Layout(kind, meta)


def _lookup(distinct: Sequence[Layout], entry: object, depth: int) -> Layout:
    if isinstance(entry, list):
        _require(depth > 0, "its caches are nested too deeply")
        children = tuple(_lookup(distinct, child, depth - 1) for child in entry)
        return Layout(CACHE_LIST, {}, children)
    return distinct[_integer(entry, "cache", len(distinct) - 1)]


def _parse_state_ref(entry: object) -> StateRef | None:
    match entry:
        case None:
            return None
        case [int(file), bytes(known)] if len(known) == DIGEST_BYTES:
            return StateRef(_integer(file, "state file", STATE_FILES - 1), known)
    raise Damaged("it does not say where its state is")


def _overlap(slices: Sequence[Slices]) -> bool:
    """Whether two slices of one array share a position."""
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in slices:
        for owner, position in zip(each.owners, each.positions, strict=True):
            seen.setdefault(owner, []).append((position, position + each.length))
    for runs in seen.values():
        runs.sort()
        if any(later < end for (_, end), (later, _) in pairwise(runs)):
            return True
    return False


# -- single values ---------------------------------------------------------------------


def _integer(value: object, what: str, most: int = _MAX_INTEGER) -> int:
    # A bool is an int to isinstance.
    if type(value) is int and 0 <= value <= most:
        return value
    raise Damaged(f"{what} is not an integer from 0 to {most}")


def _token_id(value: object) -> int:
    return _integer(value, "a token id", 2**32 - 1)


def _time(value: object) -> float:
    if type(value) is float and math.isfinite(value) and 0 <= value < 2**40:
        return value
    raise Damaged("a time is none")


def _string(value: object, what: str) -> str:
    if isinstance(value, str):
        return value
    raise Damaged(f"{what} is not a string")


def _list(value: object, what: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise Damaged(f"{what} is not a list")


def _map(value: object, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise Damaged(f"{what} is not a map")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(otherwise)
