"""What the header maps of the records of format version 2 say, and the maps made from it.

``_parsing`` reads them back; engine/DESIGN.md has the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tenuto_engine._cache_kinds import CACHE_LIST
from tenuto_engine._delta import Blob, Commit, Delta, Layout, StateArray
from tenuto_engine._records import Header, PayloadBlob, RecordType
from tenuto_engine._token import Token

STATE_FILES: Final = 2


class Continued(NamedTuple):
    """The commit that a log goes on from.

    Attributes:
        file: name of its log.
        offset: byte after its record.
        digest: of its record's header.
        generation: the commit's.
        position: tokens whose KV it covers.
    """

    file: str
    offset: int
    digest: bytes
    generation: int
    position: int


@dataclass(frozen=True, slots=True)
class Begin:
    """What one attempt at a job starts from.

    Attributes:
        job: the job's id.
        epoch: which attempt it is.
        nonce: the attempt's own.
        prompt: the token ids of the prompt, as far as they are known.
        prompt_tokens: how many the whole prompt has.
        seed: what the draws derive from.
        meta: the caller's own.
        created_at: seconds since 1970.
        continues: None if it starts from nothing.
    """

    job: str
    epoch: int
    nonce: str
    prompt: tuple[int, ...]
    prompt_tokens: int
    seed: int
    meta: Mapping[str, Any]
    created_at: float
    continues: Continued | None = None


class Slices(NamedTuple):
    """The members of a blob.

    Attributes:
        owners: leaf and array of each. Equal ones are one object within a file.
        positions: the first absolute position of each.
        length: positions that each covers.
    """

    owners: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    length: int


class StateRef(NamedTuple):
    """Where the state arrays of a commit are: which file, and the digest of its record's header."""

    file: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A PART or a COMMIT.

    Attributes:
        generation, start, stop: as in ``Delta``.
        slices: the members of each blob.
        commit: None in a PART. Its state arrays are elsewhere.
        state: where; None if there are none.
        at: seconds since 1970; 0 in a PART.
    """

    generation: int
    start: int
    stop: int
    slices: tuple[Slices, ...]
    commit: Commit | None = None
    state: StateRef | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """Leaf and name of each state array in a state file."""

    members: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended.

    Attributes:
        end: the caller's own.
        tokens: all of the job.
        at: seconds since 1970.
    """

    end: Mapping[str, Any]
    tokens: tuple[Token, ...]
    at: float


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block of a prefix.

    Attributes:
        name: 32 hex digits over the geometry and all tokens before ``stop``.
        start, stop: absolute positions.
        layouts: the caches at ``stop``, one a layer.
        slices: the members of each blob of positions.
        state: leaf and name of each state array, whose blobs follow those.
    """

    name: str
    start: int
    stop: int
    layouts: tuple[Layout, ...]
    slices: tuple[Slices, ...] = ()
    state: tuple[tuple[int, str], ...] = ()


Content = Begin | Span | State | End | BlockHeader


# -- making ----------------------------------------------------------------------------


def begin_header(begin: Begin) -> Header:
    """The map of a BEGIN record."""
    return {
        "job": begin.job,
        "epoch": begin.epoch,
        "nonce": begin.nonce,
        "prompt": list(begin.prompt),
        "prompt_tokens": begin.prompt_tokens,
        "seed": begin.seed,
        "meta": dict(begin.meta),
        "created_at": float(begin.created_at),
        "continues": None if begin.continues is None else list(begin.continues),
    }


def type_of(delta: Delta) -> RecordType:
    """PART or COMMIT."""
    return RecordType.PART if delta.commit is None else RecordType.COMMIT


def span_header(delta: Delta, at: float = 0.0, state: StateRef | None = None) -> Header:
    """The map of a PART or COMMIT record.

    Args:
        at: seconds since 1970; only of a commit.
        state: where its state arrays were written; only of a commit that has any.
    """
    header: Header = {"generation": delta.generation, "start": delta.start, "stop": delta.stop}
    commit = delta.commit
    if commit is None:
        return header
    assert (state is None) == (not commit.state)
    layouts, caches = _layouts_to_lists(commit.layouts)
    return header | {
        "first": commit.first,
        "tokens": [_token_to_list(token) for token in commit.tokens],
        "pending": _pending_to_list(commit),
        "divergences": commit.divergences,
        "first_divergence": commit.first_divergence,
        "layouts": layouts,
        "caches": caches,
        "state": None if state is None else list(state),
        "at": float(at),
    }


def span_blobs(delta: Delta) -> list[PayloadBlob]:
    """The payload of a PART or COMMIT record."""
    return _positional_blobs(delta.blobs)


def state_blobs(arrays: Sequence[StateArray]) -> list[PayloadBlob]:
    """The payload of a STATE record."""
    return [PayloadBlob(a.dtype, [[a.leaf, a.name]], a.host()) for a in arrays]


def end_header(end: End) -> Header:
    """The map of an END record."""
    tokens = [_token_to_list(token) for token in end.tokens]
    return {"end": dict(end.end), "tokens": tokens, "at": float(end.at)}


def block_header(block: BlockHeader, *, positional: int) -> Header:
    """The map of a BLOCK record, of whose blobs the first ``positional`` hold positions."""
    layouts, caches = _layouts_to_lists(block.layouts)
    return {
        "name": block.name,
        "start": block.start,
        "stop": block.stop,
        "layouts": layouts,
        "caches": caches,
        "positional": positional,
    }


def block_blobs(blobs: Sequence[Blob], state: Sequence[StateArray]) -> list[PayloadBlob]:
    """The payload of a BLOCK record."""
    return [*_positional_blobs(blobs), *state_blobs(state)]


def _positional_blobs(blobs: Sequence[Blob]) -> list[PayloadBlob]:
    # What could not be read again must not be written.
    assert all(len(blob.members) == blob.data.shape[0] > 0 for blob in blobs)
    return [
        PayloadBlob(blob.dtype, [list(member) for member in blob.members], blob.host())
        for blob in blobs
    ]


def _layouts_to_lists(layouts: Sequence[Layout]) -> tuple[list[object], list[object]]:
    numbers: dict[object, int] = {}
    distinct: list[object] = []

    def reference(layout: Layout) -> object:
        if layout.kind == CACHE_LIST:
            return [reference(child) for child in layout.children]
        key = (layout.kind, *sorted(layout.meta.items()))
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append([layout.kind, dict(layout.meta)])
        return numbers[key]

    return distinct, [reference(layout) for layout in layouts]


def _token_to_list(token: Token) -> list[object]:
    fields = [token.token, token.index, token.text, *_logprobs(token.logprob, token.top_logprobs)]
    return [*fields, True] if token.jumped else fields


def _pending_to_list(commit: Commit) -> list[object] | None:
    if commit.pending_token is None:
        return None
    return [commit.pending_token, *_logprobs(commit.pending_logprob, commit.pending_top_logprobs)]


def _logprobs(logprob: float | None, top: Sequence[tuple[int, float]]) -> list[object]:
    likeliest = [[token, float(value)] for token, value in top]
    return [None if logprob is None else float(logprob), likeliest]
