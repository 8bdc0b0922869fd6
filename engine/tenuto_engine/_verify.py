"""``verify``: whether every byte of the checkpoint files is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._fs import StrPath
from tenuto_engine._inventory import OLD, OLD_NAME, is_ours, listed, stored_checkpoints
from tenuto_engine._log import Attempt, LogFile, read_end, unreadable
from tenuto_engine._records import (
    HEAD_BYTES,
    BadRecord,
    Reader,
    Record,
    check_head,
    read_blob,
    read_record,
)

# A running attempt overwrites its state files: one that is read meanwhile is read again.
_READS: Final = 3


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: the file.
        ok: every byte of it was checked and is as it was written.
        reason: what is wrong, and where; None if ok.
        note: what is worth saying though it is no damage, as that a write was cut short.
        cache_length: tokens whose KV its newest checkpoint holds; 0 if it has none.
        generated_tokens: generated ones among them, or those of an end.
    """

    path: Path
    ok: bool
    reason: str | None = None
    note: str | None = None
    cache_length: int = 0
    generated_tokens: int = 0


def verify_job(folder: StrPath) -> Iterator[VerifyReport]:
    """Check every byte of every file in a job's folder, in the order of their names.

    And that the newest checkpoint can be loaded, with all that it builds on.

    Raises:
        CheckpointError: it cannot be listed.
    """
    folder = Path(folder)
    useless = {error.path: error.reason for error in _useless_logs(folder)}
    for name in sorted(listed(folder)):
        if is_ours(name):
            report = verify(folder / name)
            if report.ok and report.path in useless:
                report = replace(report, ok=False, reason=useless[report.path])
            yield report


def _useless_logs(folder: Path) -> list[CheckpointCorrupt]:
    """Logs from which nothing, or not the newest checkpoint, can be loaded, whole as they are."""
    errors: list[CheckpointCorrupt] = []
    for _ in range(_READS):
        found = stored_checkpoints(folder)
        errors = [CheckpointCorrupt(s.path, s.damage) for s in found if s.damage is not None]
        newest = next((each for each in found if each.commit), None)
        if newest is None:
            break
        try:
            newest.load()
        except CheckpointCorrupt as error:
            says = f"its newest checkpoint, of {newest.cache_length} tokens, is not readable: "
            why = f"{says}{error.path.name}: {error.reason}"
            errors.append(CheckpointCorrupt(newest.path, why))
        else:
            break
    return errors


def verify(path: StrPath) -> VerifyReport:
    """Check every byte of one file. Raises nothing."""
    path = Path(path)
    for _ in range(_READS):
        report = _verify(path)
        if report.ok or not path.name.endswith(".state"):
            break
    return report


def _verify(path: Path) -> VerifyReport:
    attempt = Attempt.of_file(path.name)
    if attempt is None:
        old = OLD_NAME.fullmatch(path.name)
        return VerifyReport(path, ok=False, reason=OLD if old else "not a checkpoint file")
    try:
        if path.name == attempt.log:
            return _verify_log(path)
        if path.name == attempt.end:
            return VerifyReport(path, ok=True, generated_tokens=len(read_end(path)[1].tokens))
        if path.name.endswith(".state"):
            return _verify_state(path)
    except CheckpointCorrupt as error:
        where = "" if error.offset is None else f", at byte {error.offset}"
        return VerifyReport(path, ok=False, reason=f"{error.reason}{where}")
    return VerifyReport(path, ok=True, note="not whole: it was being written")


def _verify_log(path: Path) -> VerifyReport:
    log = LogFile.scan(path)
    with _opened(path) as reader:
        for entry in log.spans:
            _read_payload(reader, entry.record)
    saved = [entry for entry in log.spans if entry.span.commit is not None]
    report = VerifyReport(path, ok=True)
    if saved:
        report = replace(
            report, cache_length=saved[-1].span.stop, generated_tokens=saved[-1].generated
        )
    if log.tail == "torn":
        rest = log.size - log.end_of_valid
        return replace(report, note=f"it ends in a write that was cut short ({rest} bytes)")
    if log.tail is not None:
        return replace(report, ok=False, reason=f"{log.tail}, at byte {log.end_of_valid}")
    return report


def _verify_state(path: Path) -> VerifyReport:
    with _opened(path) as reader:
        try:
            check_head(reader)
            record, _ = read_record(reader, HEAD_BYTES)
        except BadRecord as error:
            raise CheckpointCorrupt(path, str(error), offset=0) from error
        _read_payload(reader, record)
        if record.end != reader.size:
            raise CheckpointCorrupt(path, "more follows", offset=record.end)
    return VerifyReport(path, ok=True)


def _read_payload(reader: Reader, record: Record) -> None:
    try:
        for blob in record.blobs:
            read_blob(reader, blob)
    except BadRecord as error:
        raise CheckpointCorrupt(reader.path, str(error), offset=record.offset) from error


@contextmanager
def _opened(path: Path) -> Iterator[Reader]:
    try:
        with Reader(path) as reader:
            yield reader
    except OSError as error:
        raise unreadable(path, error) from error
