"""``Positions``: the positional arrays of a commit, put together from the blobs of many records.

First the headers say which blobs are needed, and whether they cover all that the caches held;
only then is memory allocated and a payload read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tenuto_engine._cache_kinds import Held, array_names, held, stored_length
from tenuto_engine._cache_tree import HOST_DTYPES, HostArray
from tenuto_engine._chain import StoredCommit
from tenuto_engine._delta import Bits
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._headers import Slices
from tenuto_engine._log import LogFile, SpanEntry, unreadable
from tenuto_engine._records import BadRecord, BlobInfo, Damaged, Reader, read_blob

# Slots that hold nothing are allocated too. More of them than this is not of ours.
_MOST_SPARE_BYTES: Final = 2**30

Owner = tuple[int, int]
Run = tuple[int, int]


class _Shape(NamedTuple):
    """What all slices of an array have in common."""

    dtype: str
    batch: int
    heads: int
    width: int


class _Place(NamedTuple):
    """Where the positions of an array go; arrays with equal ones are stacked."""

    shape: _Shape
    held: tuple[Held, ...]
    length: int


@dataclass(slots=True)
class _Group:
    """Arrays that are filled together: ``[members, batch, heads, slots, width]``."""

    place: _Place
    owners: list[Owner] = field(default_factory=list)
    data: Bits = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot of all its arrays takes."""
        dtype, *lengths = self.place.shape
        return len(self.owners) * math.prod(lengths) * np.dtype(HOST_DTYPES[dtype]).itemsize

    def allocate(self) -> None:
        """Slots that hold no position are zero."""
        dtype, batch, heads, width = self.place.shape
        shape = (len(self.owners), batch, heads, self.place.length, width)
        self.data = np.zeros(shape, HOST_DTYPES[dtype])


class _Move(NamedTuple):
    """Which members of a blob are which of a group's."""

    group: _Group
    rows: slice | list[int]
    members: slice | list[int]


@dataclass(slots=True)
class _Stream:
    """Slices of the same arrays in the same order, over many records."""

    owners: tuple[Owner, ...]
    shape: _Shape
    held: frozenset[Held]
    covered: list[Run] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)

    def cover(self, start: int, stop: int) -> None:
        """Count on positions that were found."""
        if self.covered and self.covered[-1][1] == start:
            start = self.covered.pop()[0]
        self.covered.append((start, stop))

    def wants(self, start: int, stop: int) -> bool:
        """Whether any of these positions is held."""
        return any(run.position < stop and start < run.position + run.length for run in self.held)

    def put(self, data: Bits, start: int, length: int) -> None:
        """Copy slices that begin at position `start` to where they belong."""
        for group, rows, members in self.moves:
            for run in group.place.held:
                part = run.within(start, start + length)
                if part.length:
                    first = part.position - start
                    group.data[rows, :, :, part.slot : part.slot + part.length] = data[
                        members, :, :, first : first + part.length
                    ]


class _Part(NamedTuple):
    """Members of a blob that begin at the same position; None for all of them."""

    stream: _Stream
    members: list[int] | None
    position: int


class _Job(NamedTuple):
    """A blob to be read, and what is in it."""

    log: LogFile
    entry: SpanEntry
    blob: BlobInfo
    length: int
    parts: list[_Part]


class Positions:
    """The positional arrays of all leaves of a commit.

    Raises:
        CheckpointCorrupt: the records do not hold them. No payload was read yet.
    """

    def __init__(self, commit: StoredCommit) -> None:
        self._commit = commit
        self._leaves = [leaf for each in commit.commit.layouts for leaf in each.leaves()]
        self._held = [held(leaf.kind, leaf.meta) for leaf in self._leaves]
        self._names = [array_names(leaf.kind) for leaf in self._leaves]
        self._streams: dict[tuple[tuple[Owner, ...], _Shape], _Stream] = {}
        self._shapes: dict[Owner, _Shape] = {}
        self._jobs: list[_Job] = []
        for log, entry in commit.spans():
            try:
                self._plan(log, entry)
            except Damaged as error:
                raise _corrupt(log, entry, error) from error
        try:
            self._check_covered()
            self._groups = self._group()
        except Damaged as error:
            raise _corrupt(commit.log, commit.entry, error) from error

    def read(self) -> list[list[HostArray]]:
        """Read the payloads: the arrays of each leaf, in the order of its kind."""
        for group in self._groups:
            group.allocate()
        self._fill()
        rows = {
            owner: HostArray(self._names[owner[0]][owner[1]], group.place.shape.dtype, row)
            for group in self._groups
            for owner, row in zip(group.owners, group.data, strict=True)
        }
        return [
            [rows[leaf, array] for array in range(len(names)) if (leaf, array) in rows]
            for leaf, names in enumerate(self._names)
        ]

    # -- by headers --------------------------------------------------------------------

    def _plan(self, log: LogFile, entry: SpanEntry) -> None:
        for slices, blob in zip(entry.span.slices, entry.record.blobs, strict=True):
            parts = [part for part in self._parts(slices, blob) if self._needed(part, slices)]
            if parts:
                self._jobs.append(_Job(log, entry, blob, slices.length, parts))

    def _parts(self, slices: Slices, blob: BlobInfo) -> Iterator[_Part]:
        _, batch, heads, _, width = blob.shape
        shape = _Shape(blob.dtype, batch, heads, width)
        first = slices.positions[0]
        if slices.positions.count(first) == len(slices.positions):
            yield _Part(self._stream(slices.owners, shape), None, first)
            return
        members: dict[int, list[int]] = {}
        for member, position in enumerate(slices.positions):
            members.setdefault(position, []).append(member)
        for position, chosen in members.items():
            owners = tuple(slices.owners[member] for member in chosen)
            yield _Part(self._stream(owners, shape), chosen, position)

    def _stream(self, owners: tuple[Owner, ...], shape: _Shape) -> _Stream:
        found = self._streams.get((owners, shape))
        if found is None:
            for leaf, array in owners:
                if leaf >= len(self._names) or array >= len(self._names[leaf]):
                    raise Damaged(f"it holds array {array} of leaf {leaf}, which there is not")
                if self._shapes.setdefault((leaf, array), shape) != shape:
                    raise Damaged(f"the arrays of leaf {leaf} change their shape")
            runs = frozenset(run for leaf, _ in owners for run in self._held[leaf])
            found = self._streams[owners, shape] = _Stream(owners, shape, runs)
        return found

    def _needed(self, part: _Part, slices: Slices) -> bool:
        start, stop = part.position, part.position + slices.length
        if not part.stream.wants(start, stop):
            return False
        part.stream.cover(start, stop)
        return True

    def _check_covered(self) -> None:
        covered: dict[Owner, list[Run]] = {}
        for stream in self._streams.values():
            for owner in stream.owners:
                covered.setdefault(owner, []).extend(stream.covered)
        for leaf, (names, runs) in enumerate(zip(self._names, self._held, strict=True)):
            for array in range(len(names)):
                known = _union(covered.get((leaf, array), []))
                for run in runs:
                    stop = run.position + run.length
                    if stop > self._commit.cache_length or not _contains(known, run.position, stop):
                        raise Damaged(
                            f"positions {run.position} to {stop} of leaf {leaf} are missing"
                        )

    def _group(self) -> list[_Group]:
        groups: dict[_Place, _Group] = {}
        rows: dict[Owner, tuple[_Group, int]] = {}
        # Arrays lie in the order in which most blobs have them, which lets those be copied whole.
        for stream in sorted(self._streams.values(), key=lambda each: -len(each.covered)):
            for owner in stream.owners:
                if owner not in rows:
                    place = self._place(owner)
                    group = groups.setdefault(place, _Group(place))
                    rows[owner] = (group, len(group.owners))
                    group.owners.append(owner)
        for stream in self._streams.values():
            stream.moves = _moves([rows[owner] for owner in stream.owners])
        used = sum(
            each.slot_bytes * sum(r.length for r in each.place.held) for each in groups.values()
        )
        total = sum(each.slot_bytes * each.place.length for each in groups.values())
        if total > 2 * used + _MOST_SPARE_BYTES:
            raise Damaged("the caches have more room than they could use")
        return list(groups.values())

    def _place(self, owner: Owner) -> _Place:
        leaf = self._leaves[owner[0]]
        length = stored_length(leaf.kind, leaf.meta)
        return _Place(self._shapes[owner], self._held[owner[0]], length)

    # -- by payloads -------------------------------------------------------------------

    def _fill(self) -> None:
        scratch = np.empty(max((job.blob.length for job in self._jobs), default=0), np.uint8)
        with ExitStack() as stack:
            readers: dict[str, Reader] = {}
            for job in self._jobs:
                name = job.log.path.name
                if name not in readers:
                    readers[name] = stack.enter_context(_open(job.log))
                self._fill_from(readers[name], job, scratch)

    def _fill_from(self, reader: Reader, job: _Job, scratch: Bits) -> None:
        try:
            data = read_blob(reader, job.blob, scratch)
        except BadRecord as error:
            raise _corrupt(job.log, job.entry, error) from error
        except OSError as error:
            raise unreadable(job.log.path, error) from error
        for stream, members, position in job.parts:
            chosen = data if members is None else data[members]
            stream.put(chosen, position, job.length)


def _moves(rows: Sequence[tuple[_Group, int]]) -> list[_Move]:
    chosen: dict[int, tuple[_Group, list[int], list[int]]] = {}
    for member, (group, row) in enumerate(rows):
        _, into, out_of = chosen.setdefault(id(group), (group, [], []))
        into.append(row)
        out_of.append(member)
    return [
        _Move(group, _selector(into), _selector(out_of)) for group, into, out_of in chosen.values()
    ]


def _selector(indices: list[int]) -> slice | list[int]:
    """A slice where it can be, which numpy copies without a detour."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and all(b - a == step for a, b in pairwise(indices)):
        return slice(indices[0], indices[-1] + 1, step)
    return indices


def _union(runs: list[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _contains(runs: Sequence[Run], start: int, stop: int) -> bool:
    return any(first <= start and stop <= last for first, last in runs)


def _open(log: LogFile) -> Reader:
    try:
        return Reader(log.path)
    except OSError as error:
        raise unreadable(log.path, error) from error


def _corrupt(log: LogFile, entry: SpanEntry, error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(log.path, str(error), offset=entry.record.offset)
