"""``StoredCommit``: a checkpoint in a log, known by headers alone; and the logs it builds on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from tenuto_engine._delta import Commit
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._headers import Continued
from tenuto_engine._log import Attempt, LogFile, SpanEntry
from tenuto_engine._token import Token

MAX_CHAIN: Final = 2**16

Find = Callable[[str], LogFile | None]


class _Segment(NamedTuple):
    """A log, and how many of its spans later logs build on (of the last log: all)."""

    log: LogFile
    used: int


class Chain:
    """A log and those that it continues, one behind the other.

    Args:
        log: the last of them.
        find: gives the log of that file name in the same folder; None if it is gone or damaged.

    Raises:
        CheckpointCorrupt: what it continues is not there.
    """

    def __init__(self, log: LogFile, find: Find) -> None:
        segments = [_Segment(log, len(log.spans))]
        names = {log.path.name}
        while (continues := segments[-1].log.begin.continues) is not None:
            if continues.file in names or len(names) == MAX_CHAIN:
                raise CheckpointCorrupt(log.path, "it continues itself")
            names.add(continues.file)
            segments.append(_before(segments[-1].log, continues, find))
        self.log = log
        self._segments = segments[::-1]

    @property
    def paths(self) -> list[Path]:
        """Of all the logs, oldest first."""
        return [segment.log.path for segment in self._segments]

    def spans(self, last: int) -> Iterator[tuple[LogFile, SpanEntry]]:
        """All records up to the log's span `last`, oldest first."""
        for log, used in self._segments[:-1]:
            for entry in log.spans[:used]:
                yield log, entry
        for entry in self.log.spans[: last + 1]:
            yield self.log, entry

    def tokens(self, index: int) -> list[Token]:
        """The generated tokens up to the log's span `index`. They are shared, the list is not."""
        count = self.log.spans[index].generated
        if count <= self._never_replaced[index]:
            return self._newest_tokens[:count]
        return self._collect(index, count)

    def find(self, path: Path, offset: int, last: int) -> SpanEntry | None:
        """The record at that place, if the log's span `last` comes after it or is it."""
        for log, used in self._segments:
            if log.path == path:
                end = last + 1 if log is self.log else used
                at = bisect_left(log.spans, offset, hi=end, key=_offset)
                found = log.spans[at] if at < end else None
                return found if found and found.record.offset == offset else None
        return None

    @cached_property
    def _newest_tokens(self) -> list[Token]:
        last = len(self.log.spans) - 1
        return self._collect(last, self.log.spans[last].generated)

    @cached_property
    def _never_replaced(self) -> list[int]:
        """For each span of the log, how many tokens at least every later commit leaves as is."""
        bounds = []
        bound = self.log.spans[-1].generated if self.log.spans else 0
        for entry in reversed(self.log.spans):
            bounds.append(bound)
            if entry.span.commit is not None:
                bound = min(bound, entry.span.commit.first - 1)
        return bounds[::-1]

    def _collect(self, last: int, count: int) -> list[Token]:
        pieces: list[tuple[Token, ...]] = []
        for commit in self._commits_backwards(last):
            if count == 0:
                break
            if commit.first <= count:
                pieces.append(commit.tokens[: count - commit.first + 1])
                count = commit.first - 1
        return [token for piece in reversed(pieces) for token in piece]

    def _commits_backwards(self, last: int) -> Iterator[Commit]:
        for log, used in reversed(self._segments):
            end = last + 1 if log is self.log else used
            for entry in reversed(log.spans[:end]):
                if entry.span.commit is not None:
                    yield entry.span.commit


def _before(log: LogFile, continues: Continued, find: Find) -> _Segment:
    """The log that `log` continues, up to where it does."""
    attempt = Attempt.of_file(continues.file)
    # The name comes from a file, and must not lead elsewhere.
    found = find(continues.file) if attempt and attempt.log == continues.file else None
    if found is None:
        raise CheckpointCorrupt(log.path, f"it continues {continues.file}, which is not readable")
    used = _spans_until(found, continues)
    if used is None:
        raise CheckpointCorrupt(
            log.path, f"it continues {continues.file} from a checkpoint that is not there"
        )
    ours, theirs = log.begin, found.begin
    same = (ours.job, ours.seed, ours.prompt_tokens) == (
        theirs.job,
        theirs.seed,
        theirs.prompt_tokens,
    )
    if not same or not _same_prompt(log, found):
        raise CheckpointCorrupt(log.path, f"it continues {continues.file}, of another run")
    return _Segment(found, used)


def _spans_until(log: LogFile, continues: Continued) -> int | None:
    at = bisect_left(log.spans, continues.offset, key=_end)
    found = at < len(log.spans) and _matches(log.spans[at], continues)
    return at + 1 if found else None


def _matches(entry: SpanEntry, continues: Continued) -> bool:
    span = entry.span
    theirs = (entry.record.end, entry.record.digest, span.generation, span.stop)
    return span.commit is not None and theirs == continues[1:]


def _same_prompt(ours: LogFile, theirs: LogFile) -> bool:
    """An earlier log may know less of it."""
    known, known_to_them = ours.begin.prompt, theirs.begin.prompt
    if len(known) == len(known_to_them):
        return ours.prompt_digest == theirs.prompt_digest
    return known[: len(known_to_them)] == known_to_them


def _offset(entry: SpanEntry) -> int:
    return entry.record.offset


def _end(entry: SpanEntry) -> int:
    return entry.record.end


@dataclass(frozen=True, slots=True, eq=False)
class StoredCommit:
    """A checkpoint in a log; ``assemble`` reads it.

    Attributes:
        chain: the logs that it is in and builds on.
        index: which of its log's spans it is.
    """

    chain: Chain
    index: int

    @property
    def log(self) -> LogFile:
        """The file that it is in."""
        return self.chain.log

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self.log.path

    @property
    def epoch(self) -> int:
        """The attempt that wrote it."""
        return self.log.begin.epoch

    @property
    def nonce(self) -> str:
        """The attempt's own."""
        return self.log.begin.nonce

    @property
    def seq(self) -> int:
        """Its record's number in the log."""
        return self.entry.record.seq

    @property
    def nbytes(self) -> int:
        """Bytes that its record takes in the log."""
        return self.entry.record.end - self.entry.record.offset

    @property
    def entry(self) -> SpanEntry:
        """Its record."""
        return self.log.spans[self.index]

    @property
    def commit(self) -> Commit:
        """What its record says, without state arrays."""
        commit = self.entry.span.commit
        assert commit is not None
        return commit

    @property
    def generation(self) -> int:
        """Records of the same one hold its positions."""
        return self.entry.span.generation

    @property
    def cache_length(self) -> int:
        """Tokens whose KV it holds."""
        return self.entry.span.stop

    @property
    def generated_tokens(self) -> int:
        """Generated ones among them."""
        return self.entry.generated

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of the prompt, as far as its log knows them."""
        return self.log.begin.prompt

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return self.log.begin.prompt_tokens

    @property
    def seed(self) -> int:
        """What the draws derive from."""
        return self.log.begin.seed

    @property
    def meta(self) -> Mapping[str, Any]:
        """The caller's own, of the whole log."""
        return self.log.begin.meta

    @property
    def created_at(self) -> float:
        """Seconds since 1970, by the writer's clock."""
        return self.entry.span.at

    @property
    def pending_token(self) -> int | None:
        """The sampled token whose KV it does not hold; None in a prefill."""
        return self.commit.pending_token

    @property
    def divergences(self) -> int:
        """Published tokens so far that differ from the computed ones."""
        return self.commit.divergences

    @property
    def state_path(self) -> Path | None:
        """The file with its state arrays, until a later commit overwrites it; None without any."""
        state = self.entry.span.state
        return None if state is None else self.log.state_path(state.file)

    def tokens(self) -> list[Token]:
        """The generated tokens whose KV it holds, in order."""
        return self.chain.tokens(self.index)

    def spans(self) -> Iterator[tuple[LogFile, SpanEntry]]:
        """The records that hold its positions, oldest first, each with its log."""
        generation = self.generation
        for log, entry in self.chain.spans(self.index):
            if entry.span.generation == generation:
                yield log, entry

    def needs(self, damage: CheckpointCorrupt) -> bool:
        """Whether what made another commit unreadable makes this one so too.

        Damage of a state file does not: the same file held another commit's state before.
        """
        if damage.offset is None:
            return damage.path in self.chain.paths
        found = self.chain.find(damage.path, damage.offset, self.index)
        return found is not None and found.span.generation == self.generation


def commits(log: LogFile, find: Find) -> list[StoredCommit]:
    """The checkpoints in `log`, oldest first. Only headers are read.

    Args:
        find: gives the log of that file name in the same folder; None if it is gone or damaged.

    Raises:
        CheckpointCorrupt: what the log continues is not there, so none of them can be read.
    """
    chain = Chain(log, find)
    return [
        StoredCommit(chain, index)
        for index, entry in enumerate(log.spans)
        if entry.span.commit is not None
    ]
