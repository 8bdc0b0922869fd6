"""``LogFile``: one attempt's file of records as it is read, and the files beside it.

Each attempt (epoch and nonce) has names of its own, so nobody ever writes into another's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np

from tenuto_engine._cache_tree import HostArray
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._headers import STATE_FILES, Begin, Content, End, Span, State
from tenuto_engine._parsing import HeaderParser
from tenuto_engine._records import (
    HEAD_BYTES,
    NO_DIGEST,
    BadRecord,
    Damaged,
    Reader,
    Record,
    Torn,
    check_head,
    digest,
    read_blob,
    read_record,
)

NONCE: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
TEMPORARY: Final = ".tmp"
_MAX_EPOCH_DIGITS: Final = 10
_ENDINGS: Final = (
    *("log", "end", f"end{TEMPORARY}"),
    *(f"{number}.state" for number in range(STATE_FILES)),
)
_NAME: Final = re.compile(rf"([0-9]+)-({NONCE.pattern})\.({'|'.join(map(re.escape, _ENDINGS))})")


class Attempt(NamedTuple):
    """Whose files they are, and what these are called. Ordered by epoch.

    Attributes:
        epoch: which attempt at the job.
        nonce: the attempt's own, of ``NONCE``.
    """

    epoch: int
    nonce: str

    @classmethod
    def of_file(cls, name: str) -> Self | None:
        """The attempt that a file of this name belongs to; None if it is not one of ours."""
        match = _NAME.fullmatch(name)
        if match is None or len(match[1]) > _MAX_EPOCH_DIGITS:
            return None
        found = cls(int(match[1]), match[2])
        return found if f"{found}.{match[3]}" == name else None

    def __str__(self) -> str:
        return f"{self.epoch:08d}-{self.nonce}"

    @property
    def log(self) -> str:
        """Name of the log."""
        return f"{self}.log"

    @property
    def end(self) -> str:
        """Name of the file that says how the job ended."""
        return f"{self}.end"

    def state(self, number: int) -> str:
        """Name of one of the two files that hold state arrays."""
        return f"{self}.{number}.state"


class Entry(NamedTuple):
    """A record with what its header says."""

    record: Record
    content: Content


class SpanEntry(NamedTuple):
    """A PART or COMMIT record with what its header says.

    Attributes:
        record, span: the two.
        generated: generated tokens of the job up to and with this record.
    """

    record: Record
    span: Span
    generated: int


@dataclass(frozen=True, slots=True)
class LogFile:
    """The longest prefix of whole, chained records of a log. Only headers were read.

    Attributes:
        path: the file.
        begin: what the attempt started from.
        prompt_digest: of the prompt in it, so that a long chain is quickly compared.
        first: the record of it.
        spans: the records after it.
        end_of_valid: byte after the last of them.
        size: bytes of the file.
        tail: None if nothing follows; "torn" if what follows is what a crash leaves; else
            "damaged: " and why.
    """

    path: Path
    begin: Begin
    prompt_digest: bytes
    first: Record
    spans: tuple[SpanEntry, ...]
    end_of_valid: int
    size: int
    tail: str | None

    @classmethod
    def scan(cls, path: Path) -> LogFile:
        """Read all headers of the log at `path`, in a folder named as the job.

        Raises:
            CheckpointCorrupt: it cannot be read, is not a log, or is that of another attempt.
        """
        try:
            with Reader(path) as reader:
                return _scan(reader)
        except OSError as error:
            raise unreadable(path, error) from error

    @property
    def attempt(self) -> Attempt:
        """Whose it is."""
        return Attempt(self.begin.epoch, self.begin.nonce)

    def state_path(self, number: int) -> Path:
        """One of the two files beside it that hold state arrays."""
        return self.path.with_name(self.attempt.state(number))


def _scan(reader: Reader) -> LogFile:
    parser = HeaderParser()
    first, begin = _read_begin(reader, parser)
    spans: list[SpanEntry] = []
    before, generated = first, _generated_before(begin)
    tail = None
    while before.end < reader.size:
        try:
            entry = _read_next(reader, parser, before)
            span, generated = _check_span(entry, begin, generated)
        except Torn:
            tail = "torn"
            break
        except Damaged as error:
            tail = f"damaged: {error}"
            break
        spans.append(SpanEntry(entry.record, span, generated))
        before = entry.record
    prompt = digest(np.array(begin.prompt, np.uint32).tobytes())
    return LogFile(reader.path, begin, prompt, first, tuple(spans), before.end, reader.size, tail)


def _read_begin(reader: Reader, parser: HeaderParser) -> tuple[Record, Begin]:
    offset = 0
    try:
        check_head(reader)
        offset = HEAD_BYTES
        record, header = read_record(reader, offset)
        begin = parser.parse(record, header)
    except BadRecord as error:
        raise CheckpointCorrupt(reader.path, str(error), offset=offset) from error
    if not isinstance(begin, Begin) or record.seq != 0:
        raise CheckpointCorrupt(reader.path, "it does not begin with BEGIN", offset=offset)
    prev = begin.continues.digest if begin.continues else NO_DIGEST
    own = Attempt.of_file(reader.path.name) == (begin.epoch, begin.nonce)
    if record.prev != prev:
        raise CheckpointCorrupt(reader.path, "its BEGIN contradicts itself", offset=offset)
    if not own or begin.job != reader.path.parent.name:
        raise CheckpointCorrupt(reader.path, "it belongs to another job or attempt", offset=offset)
    return record, begin


def _read_next(reader: Reader, parser: HeaderParser, before: Record) -> Entry:
    record, header = read_record(reader, before.end)
    if record.seq != before.seq + 1 or record.prev != before.digest:
        raise Damaged("the record does not follow the one before it")
    return Entry(record, parser.parse(record, header))


def _generated_before(begin: Begin) -> int:
    return max(0, begin.continues.position - begin.prompt_tokens) if begin.continues else 0


def _check_span(entry: Entry, begin: Begin, generated: int) -> tuple[Span, int]:
    """Check a record against the tokens so far, and count on."""
    span = entry.content
    if not isinstance(span, Span):
        raise Damaged("no such record belongs into a log")
    commit = span.commit
    if commit is None:
        return span, generated
    if commit.first > generated + 1:
        raise Damaged("tokens are missing before the record's first")
    generated = commit.first - 1 + len(commit.tokens)
    in_prefill = generated == 0 and commit.pending_token is None
    known, prompt = len(begin.prompt), begin.prompt_tokens
    whole = known == prompt and span.stop == prompt + generated
    if not (whole or (in_prefill and span.stop <= known)):
        raise Damaged("the record's positions are not those of its tokens")
    return span, generated


def read_state(path: Path, commit: SpanEntry) -> list[tuple[int, HostArray]]:
    """Read the state file of a commit: each array with the number of its leaf.

    Raises:
        CheckpointCorrupt: it cannot be read, is damaged, or is of another commit by now.
    """
    try:
        with Reader(path) as reader:
            record, state = _read_state_header(reader)
            wanted = commit.span.state
            theirs = (record.digest, record.seq, record.prev)
            if wanted is None or theirs != (wanted.digest, commit.record.seq, commit.record.prev):
                raise Damaged("it holds the state of another commit")
            return [
                (leaf, HostArray(name, info.dtype, read_blob(reader, info)))
                for (leaf, name), info in zip(state.members, record.blobs, strict=True)
            ]
    except BadRecord as error:
        raise CheckpointCorrupt(path, str(error), offset=0) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _read_state_header(reader: Reader) -> tuple[Record, State]:
    check_head(reader)
    record, header = read_record(reader, HEAD_BYTES)
    state = HeaderParser().parse(record, header)
    if not isinstance(state, State) or record.end != reader.size:
        raise Damaged("it is not a state file")
    return record, state


def read_end(path: Path) -> tuple[Begin, End]:
    """Read a file that says how a job ended.

    Raises:
        CheckpointCorrupt: it cannot be read, is damaged, or is that of another attempt.
    """
    try:
        with Reader(path) as reader:
            parser = HeaderParser()
            first, begin = _read_begin(reader, parser)
            entry = _read_next(reader, parser, first)
            if not isinstance(entry.content, End) or entry.record.end != reader.size:
                raise Damaged("it does not say how the job ended")
            return begin, entry.content
    except BadRecord as error:
        raise CheckpointCorrupt(path, str(error), offset=0) from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointCorrupt:
    """What is raised when the disk does not give a file."""
    return CheckpointCorrupt(path, f"cannot be read: {error.strerror or error}")
