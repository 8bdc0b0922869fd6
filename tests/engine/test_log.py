"""A log: its longest prefix of whole records is what it holds, whatever became of the rest."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from disks import CrashingDisk, FailingDisk, FullDisk, PowerCut
from forged import put_together, take_apart
from log_samples import JOB, SampleLog, begin_of, run_of
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._fs import FileSystem
from tenuto_engine._headers import End
from tenuto_engine._log import Attempt, LogFile, SpanEntry, read_end, read_state
from tenuto_engine._log_writer import LogWriter, write_end, write_state
from tenuto_engine._parsing import HeaderParser
from tenuto_engine._records import BLOBS, HEAD_BYTES, Damaged, Reader, read_record

ATTEMPT = Attempt(1, "a")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / JOB


@pytest.fixture
def small(folder: Path) -> SampleLog:
    """Three commits of a single cache, the second in two parts."""
    log = SampleLog(folder)
    log.commit(run_of(2, "plain"))
    log.commit(run_of(6, "plain"), cuts=[4])
    log.commit(run_of(7, "plain"))
    return log


def stops(log: LogFile) -> list[int]:
    return [entry.span.stop for entry in log.spans]


def ends(log: LogFile) -> list[int]:
    return [log.first.end, *(entry.record.end for entry in log.spans)]


def split(content: bytes, log: LogFile) -> list[bytes]:
    """The head with BEGIN, then each record."""
    marks = ends(log)
    return [content[: marks[0]]] + [content[begin:end] for begin, end in pairwise(marks)]


# -- reading ---------------------------------------------------------------------------


def test_what_was_appended_is_found_in_order(small: SampleLog) -> None:
    log = LogFile.scan(small.path)
    assert log.begin == begin_of(ATTEMPT)
    assert stops(log) == [2, 4, 6, 7]
    assert [entry.generated for entry in log.spans] == [0, 0, 3, 4]
    assert [entry.span.commit is not None for entry in log.spans] == [True, False, True, True]
    assert [entry.record.seq for entry in log.spans] == [1, 2, 3, 4]
    assert (log.end_of_valid, log.size, log.tail) == (small.writer.mark.end,) * 2 + (None,)
    tokens = [token for entry in log.spans if (c := entry.span.commit) for token in c.tokens]
    assert tuple(tokens) == run_of(7).tokens()


def test_every_truncation_leaves_the_records_before_it(small: SampleLog) -> None:
    content = small.path.read_bytes()
    whole = ends(LogFile.scan(small.path))
    for length in range(len(content)):
        small.path.write_bytes(content[:length])
        if length < whole[0]:
            with pytest.raises(CheckpointCorrupt):
                LogFile.scan(small.path)
            continue
        log = LogFile.scan(small.path)
        assert ends(log) == [end for end in whole if end <= length]
        assert log.tail == (None if length in whole else "torn")


def test_a_flipped_bit_in_any_byte_of_a_header_ends_the_log_before_it(small: SampleLog) -> None:
    content = bytearray(small.path.read_bytes())
    whole = LogFile.scan(small.path)
    payloads = [
        range(blob.offset, blob.offset + blob.length)
        for entry in whole.spans
        for blob in entry.record.blobs
    ]
    places = [n for n in range(len(content)) if not any(n in payload for payload in payloads)]
    for position in places:
        for bit in range(8) if position < 64 else (position % 8,):
            content[position] ^= 1 << bit
            small.path.write_bytes(content)
            content[position] ^= 1 << bit
            if position < whole.first.end:
                with pytest.raises(CheckpointCorrupt):
                    LogFile.scan(small.path)
                continue
            log = LogFile.scan(small.path)
            assert log.end_of_valid == max(end for end in ends(whole) if end <= position)
            assert log.tail is not None


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ([0, 1, 2, 4, 3], [2, 4]),
        ([0, 2, 1, 3, 4], []),
        ([0, 1, 1, 2, 3, 4], [2]),
        ([0, 1, 2, 3, 4, 4], [2, 4, 6, 7]),
        ([0, 1, 3, 4], [2]),
        ([0, 2, 3, 4], []),
    ],
)
def test_swapped_repeated_and_missing_records_end_the_log(
    small: SampleLog, order: list[int], found: list[int]
) -> None:
    records = split(small.path.read_bytes(), LogFile.scan(small.path))
    small.path.write_bytes(b"".join(records[number] for number in order))
    log = LogFile.scan(small.path)
    assert stops(log) == found
    assert log.tail == "damaged: the record does not follow the one before it"


def test_a_record_of_another_log_ends_the_log(small: SampleLog, tmp_path: Path) -> None:
    other = SampleLog(tmp_path / "other" / JOB, seed=4)
    other.commit(run_of(2, "plain"))
    theirs = split(other.path.read_bytes(), LogFile.scan(other.path))
    ours = split(small.path.read_bytes(), LogFile.scan(small.path))
    small.path.write_bytes(ours[0] + theirs[1])
    assert stops(LogFile.scan(small.path)) == []


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (bytes(5), "torn"),
        (bytes(4096), "torn"),
        (b"TREC", "torn"),
        (b"garbage" * 20, "damaged: no record begins here"),
    ],
)
def test_what_follows_the_last_record_is_told_from_a_crash(
    small: SampleLog, tail: bytes, said: str
) -> None:
    with small.path.open("ab") as file:
        file.write(tail)
    log = LogFile.scan(small.path)
    assert (stops(log), log.tail) == ([2, 4, 6, 7], said)
    assert log.size - log.end_of_valid == len(tail)


def test_a_log_of_another_job_epoch_or_nonce_is_refused(small: SampleLog, tmp_path: Path) -> None:
    for job, name in (
        ("other", small.path.name),
        (JOB, "00000002-a.log"),
        (JOB, "00000001-b.log"),
        (JOB, "000000001-a.log"),
        (JOB, "1-a.log"),
        (JOB, "log"),
    ):
        path = tmp_path / "moved" / job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(small.path, path)
        with pytest.raises(CheckpointCorrupt, match="another job or attempt") as caught:
            LogFile.scan(path)
        assert caught.value.path == path


@pytest.mark.parametrize("version", [1, 3])
def test_a_log_of_another_version_is_refused(small: SampleLog, version: int) -> None:
    content = bytearray(small.path.read_bytes())
    content[8] = version
    small.path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=r"version 1|head of the file is damaged"):
        LogFile.scan(small.path)


def test_what_is_no_file_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "00000001-a.log")
    (folder / "00000001-b.log").mkdir()
    for nonce in "abc":
        with pytest.raises(CheckpointCorrupt, match="cannot be read"):
            LogFile.scan(folder / f"00000001-{nonce}.log")


def test_names_of_files_are_taken_only_as_they_are_written() -> None:
    attempt = Attempt(12, "a_1")
    names = [attempt.log, attempt.end, attempt.state(0), attempt.state(1), attempt.end + ".tmp"]
    assert names[0] == "00000012-a_1.log"
    assert [Attempt.of_file(name) for name in names] == [attempt] * 5
    for foreign in ("12-a.log", "00000012-a-b.log", "00000012-a.log.bak", "00000012-.log", "a.log",
                    "00000012-a.2.state", "00000012-a.log\n", "٠٠٠٠٠٠١٢-a.log", "0" * 12 + "-a.log",
                    "00000012-a.log.tmp", "../00000012-a.log"):  # fmt: skip
        assert Attempt.of_file(foreign) is None


# -- headers whose digests are right and whose content lies -----------------------------


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("seed"),
        lambda h: h.update(seed=-1),
        lambda h: h.update(seed=True),
        lambda h: h.update(job=None),
        lambda h: h.update(nonce=b"a"),
        lambda h: h.update(epoch="1"),
        lambda h: h.update(prompt=[1, -1, 2]),
        lambda h: h.update(prompt=[1, 2**32, 2]),
        lambda h: h.update(prompt=None),
        lambda h: h.update(prompt_tokens=2),
        lambda h: h.update(meta=[]),
        lambda h: h.update(created_at=float("nan")),
        lambda h: h.update(created_at=-1.0),
        lambda h: h.update(created_at=1e300),
        lambda h: h.update(continues=[]),
        lambda h: h.update(continues=["x", 1, b"short", 0, 0]),
        lambda h: h.update(continues=["x", -1, bytes(16), 0, 0]),
    ],
)
def test_a_lying_begin_is_refused(small: SampleLog, change: Change) -> None:
    assert_refused(small.path, 0, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("generation"),
        lambda h: h.update(start=8),
        lambda h: h.update(start=float("nan")),
        lambda h: h.update(stop=5),
        lambda h: h.update(stop=2**63),
        lambda h: h.update(first=0),
        lambda h: h.update(first=2),
        lambda h: (h.update(first=2), h["tokens"].pop(0)),
        lambda h: h.update(tokens=None),
        lambda h: h["tokens"][0].pop(),
        lambda h: h["tokens"][0].append(1),
        lambda h: h["tokens"][0].append(False),
        lambda h: h["tokens"][0].extend([True, True]),
        lambda h: h["tokens"].reverse(),
        lambda h: h["tokens"].pop(0),
        lambda h: h["tokens"].__setitem__(0, 7),
        lambda h: h["tokens"][0].__setitem__(0, 2**32),
        lambda h: h["tokens"][0].__setitem__(2, b"bytes"),
        lambda h: h["tokens"][0].__setitem__(3, None),
        lambda h: h["tokens"][0].__setitem__(4, [[1]]),
        lambda h: h["tokens"][0].__setitem__(4, [[1, 2]]),
        lambda h: h.update(pending=[1, 0.5]),
        lambda h: h.update(pending=[-1, 0.5, []]),
        lambda h: h.update(pending=[1, 5, []]),
        lambda h: h.update(divergences=-1),
        lambda h: h.update(first_divergence="1"),
        lambda h: h.update(at=float("inf")),
        lambda h: h.update(layouts=[]),
        lambda h: h.update(layouts=[["KVCache"]]),
        lambda h: h.update(layouts=[["os.system", {}]]),
        lambda h: h.update(layouts=[["CacheList", {}]]),
        lambda h: h.update(layouts=[["KVCache", {"offset": 6}]]),
        lambda h: h.update(layouts=[["KVCache", {"offset": 6, "capacity": 2**40}]]),
        lambda h: h.update(layouts=[["KVCache", {"offset": 6, "capacity": 256, "more": 1}]]),
        lambda h: h.update(caches=[1]),
        lambda h: h.update(caches=[-1]),
        lambda h: h.update(caches=[0] * 70_000),
        lambda h: h.update(caches=[nested(40)]),
        lambda h: h.update(caches=[nested(900)]),
        lambda h: h.update(state=[2, bytes(16)]),
        lambda h: h.update(state=[0, bytes(15)]),
        lambda h: h.update(state=[0]),
        lambda h: h[BLOBS][0][3].pop(),
        lambda h: h[BLOBS][0][3].__setitem__(0, [0, 0]),
        lambda h: h[BLOBS][0][3].__setitem__(0, [0, 0, 5]),
        lambda h: h[BLOBS][0][3].__setitem__(0, [0, 0, 3]),
        lambda h: h[BLOBS][0][3].__setitem__(0, [0, 0, -1]),
        lambda h: h[BLOBS][0][3].__setitem__(0, [-1, 0, 4]),
        lambda h: h[BLOBS][0][3].__setitem__(0, [2**40, 0, 4]),
        lambda h: h[BLOBS][0][3].__setitem__(1, [0, True, 4]),
        lambda h: h[BLOBS][0][3].__setitem__(0, h[BLOBS][0][3][1]),
        lambda h: h[BLOBS][0][3].__setitem__(0, None),
        lambda h: h[BLOBS][0][3].__setitem__(0, [0, 0, 4, 4]),
        lambda h: h[BLOBS][0][3].__setitem__(1, [0, 1.0, 4]),
        lambda h: h[BLOBS][0][3].__setitem__(1, [0, 1, 4.0]),
        lambda h: h[BLOBS][0][3].__setitem__(0, "abc"),
    ],
)
def test_a_lying_commit_is_refused(small: SampleLog, change: Change) -> None:
    assert_refused(small.path, 3, change)


def nested(depth: int) -> object:
    entry: object = 0
    for _ in range(depth):
        entry = [entry]
    return entry


def assert_refused(path: Path, number: int, change: Change) -> None:
    """The log ends before the record, though all digests are right."""
    records = take_apart(path.read_bytes())
    change(records[number].header)
    path.write_bytes(put_together(records))
    if number == 0:
        with pytest.raises(CheckpointCorrupt):
            LogFile.scan(path)
        return
    log = LogFile.scan(path)
    assert len(log.spans) == number - 1
    assert log.tail is not None
    assert log.tail.startswith("damaged: ")


def test_a_forged_log_without_a_lie_is_read(small: SampleLog) -> None:
    content = small.path.read_bytes()
    assert put_together(take_apart(content)) == content


def test_a_record_that_does_not_belong_into_a_log_ends_it(small: SampleLog) -> None:
    records = take_apart(small.path.read_bytes())
    for kind in (1, 4, 5):
        records[3].kind = kind
        small.path.write_bytes(put_together(records))
        assert stops(LogFile.scan(small.path)) == [2, 4]
    records[0], records[1] = records[1], records[0]
    small.path.write_bytes(put_together(records))
    with pytest.raises(CheckpointCorrupt):
        LogFile.scan(small.path)


def test_a_record_with_another_number_ends_the_log(small: SampleLog) -> None:
    for seq in (0, 2, 4):
        records = take_apart(small.path.read_bytes())
        records[3].header["seq"] = seq
        small.path.write_bytes(put_together(records))
        assert stops(LogFile.scan(small.path)) == [2, 4]


# -- writing ---------------------------------------------------------------------------


def test_files_are_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        log = SampleLog(folder)
        log.commit(run_of(4))
        write_end(log.fs, folder / ATTEMPT.end, log.begin, End({}, (), 1.0))
    finally:
        os.umask(before)
    assert len(list(folder.iterdir())) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_log_of_somebody_else_is_never_written_to(small: SampleLog) -> None:
    content = small.path.read_bytes()
    with pytest.raises(FileExistsError):
        LogWriter.create(FileSystem(), small.path, small.begin)
    assert small.path.read_bytes() == content


def test_a_log_that_could_not_be_begun_is_not_left_behind(folder: Path) -> None:
    folder.mkdir()
    for fs in (FullDisk(100), FailingDisk("write_at")):
        with pytest.raises(OSError):  # noqa: PT011 - each has its own
            LogWriter.create(fs, folder / ATTEMPT.log, begin_of(ATTEMPT))
    with pytest.raises(ValueError, match="read back"):
        LogWriter.create(FileSystem(), folder / ATTEMPT.log, begin_of(ATTEMPT, meta={"a": {1: 2}}))
    assert list(folder.iterdir()) == []


def fill(log: SampleLog) -> None:
    for stop in range(3, 99):
        log.commit(run_of(stop, "plain"))


def test_a_full_disk_leaves_the_log_as_it_was_and_it_goes_on(folder: Path) -> None:
    for room in range(400, 1600, 37):
        shutil.rmtree(folder, ignore_errors=True)
        fs = FullDisk(room)
        log = SampleLog(folder, fs=fs)
        with pytest.raises(OSError, match="space"):
            fill(log)
        mark = log.writer.mark
        log.writer.truncate_to(mark)
        assert log.path.stat().st_size == mark.end
        before = stops(LogFile.scan(log.path))
        fs.room = 10_000
        log.commit(run_of(99, "plain"))
        found = LogFile.scan(log.path)
        assert (stops(found), found.tail) == ([*before, 99], None)


def test_what_a_failed_append_left_is_no_record_even_if_it_is_not_cut_off(folder: Path) -> None:
    fs = FailingDisk(after=True)
    log = SampleLog(folder, fs=fs)
    log.commit(run_of(3, "plain"))
    fs.failing = {"write_at"}
    with pytest.raises(OSError, match="Input/output"):
        log.commit(run_of(30, "plain"))
    fs.failing = set()
    log.commit(run_of(4, "plain"))
    assert stops(LogFile.scan(log.path)) == [3, 4]


def test_a_log_can_go_back_by_several_records(small: SampleLog) -> None:
    content = small.path.read_bytes()
    mark = small.writer.mark
    small.commit(run_of(12, "plain"), cuts=[8, 10])
    small.writer.truncate_to(mark)
    assert small.path.read_bytes() == content
    small.position, small.first = 7, 5
    small.commit(run_of(8, "plain"))
    assert stops(LogFile.scan(small.path)) == [2, 4, 6, 7, 8]


def test_a_log_that_somebody_removed_is_noticed(small: SampleLog) -> None:
    small.path.unlink()
    with pytest.raises(FileNotFoundError):
        small.commit(run_of(9, "plain"))
    with pytest.raises(FileNotFoundError):
        small.writer.sync()
    assert not small.path.exists()


def test_the_first_sync_makes_the_name_durable_and_later_ones_spare_it(folder: Path) -> None:
    fs = CrashingDisk()
    log = SampleLog(folder, fs=fs)
    fs.made.clear()
    for _ in range(2):
        log.writer.sync()
    assert fs.made == ["sync", "sync_folder", "sync"]


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_cut_at_any_call_every_synced_record_is_there(
    folder: Path, seed: int
) -> None:
    calls = 0
    finished = False
    while not finished:
        shutil.rmtree(folder, ignore_errors=True)
        disk = CrashingDisk(calls, seed=seed * 1000 + calls)
        synced = -1
        try:
            log = SampleLog(folder, fs=disk)
            log.writer.sync()
            for synced in range(5):
                log.commit(run_of(4 + synced, "plain"))
                log.writer.sync()
            synced = 5
            finished = True
        except PowerCut:
            pass
        disk.lose_power()
        calls += 1
        if synced >= 0:
            found = LogFile.scan(folder / ATTEMPT.log)
            assert stops(found)[:synced] == [4 + number for number in range(synced)]


# -- state files -----------------------------------------------------------------------


def state_of(log: SampleLog, entry: SpanEntry) -> list[tuple[int, str, str, bytes]]:
    assert entry.span.state is not None
    path = log.path.with_name(log.attempt.state(entry.span.state.file))
    return [(leaf, a.name, a.dtype, a.data.tobytes()) for leaf, a in read_state(path, entry)]


def expected_state(stop: int) -> list[tuple[int, str, str, bytes]]:
    commit = run_of(stop).delta(0, 1).commit
    assert commit is not None
    return [(a.leaf, a.name, a.dtype, a.host().tobytes()) for a in commit.state]


@pytest.fixture
def stateful(folder: Path) -> SampleLog:
    log = SampleLog(folder)
    for stop in (4, 5, 6):
        log.commit(run_of(stop))
    return log


def test_the_states_of_the_last_two_commits_are_there(stateful: SampleLog) -> None:
    first, *others = LogFile.scan(stateful.path).spans
    assert [state_of(stateful, entry) for entry in others] == [expected_state(5), expected_state(6)]
    with pytest.raises(CheckpointCorrupt, match="another commit"):
        state_of(stateful, first)


def test_every_truncation_of_a_state_file_and_a_flipped_bit_in_any_byte_is_seen(
    stateful: SampleLog,
) -> None:
    entry = LogFile.scan(stateful.path).spans[-1]
    path = stateful.path.with_name(stateful.attempt.state(0))
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))] + [content + b"\0"]
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        damaged.append(bytes(changed))
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(CheckpointCorrupt) as caught:
            state_of(stateful, entry)
        assert caught.value.path == path


def test_a_state_file_of_another_log_is_refused(stateful: SampleLog, tmp_path: Path) -> None:
    other = SampleLog(tmp_path / "other" / JOB, seed=3)
    for stop in (4, 5, 6):
        other.commit(run_of(stop))
    name = stateful.attempt.state(0)
    shutil.copy(other.path.with_name(name), stateful.path.with_name(name))
    with pytest.raises(CheckpointCorrupt, match="another commit"):
        state_of(stateful, LogFile.scan(stateful.path).spans[-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h[BLOBS][0].__setitem__(3, [[0]]),
        lambda h: h[BLOBS][0].__setitem__(3, [[-1, "state.0"]]),
        lambda h: h[BLOBS][0].__setitem__(3, [[0, 1]]),
        lambda h: h[BLOBS][0].__setitem__(3, [[0, "a"], [0, "b"]]),
        lambda h: h[BLOBS][0].__setitem__(3, h[BLOBS][1][3]),
    ],
)
def test_a_lying_state_is_refused(stateful: SampleLog, change: Change) -> None:
    path = stateful.path.with_name(stateful.attempt.state(0))
    records = take_apart(path.read_bytes())
    change(records[0].header)
    path.write_bytes(put_together(records))
    with Reader(path) as reader, pytest.raises(Damaged):
        HeaderParser().parse(*read_record(reader, HEAD_BYTES))


def test_a_state_that_is_shorter_than_the_one_before_it_is_read(folder: Path) -> None:
    log = SampleLog(folder)
    path = folder / log.attempt.state(0)
    commit = run_of(4).delta(0, 1).commit
    assert commit is not None
    for arrays in (commit.state, commit.state[:1]):
        write_state(log.fs, path, arrays, seq=1, prev=log.writer.mark.digest)
    with Reader(path) as reader:
        assert read_record(reader, HEAD_BYTES)[0].end == reader.size


@pytest.mark.parametrize("seed", range(4))
def test_after_a_power_cut_while_a_state_is_replaced_the_other_is_there(
    folder: Path, seed: int
) -> None:
    calls = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        log = SampleLog(folder)
        for stop in (4, 5, 6):
            log.commit(run_of(stop))
        log.fs = disk = CrashingDisk(calls, seed=seed * 1000 + calls)
        calls += 1
        try:
            log.commit(run_of(7))
        except PowerCut:
            disk.lose_power()
            assert state_of(log, LogFile.scan(log.path).spans[2]) == expected_state(6)
        else:
            return


# -- the end ---------------------------------------------------------------------------


def test_an_end_returns_as_it_was_and_replaces_an_older_one(folder: Path) -> None:
    folder.mkdir()
    path = folder / ATTEMPT.end
    path.with_name(path.name + ".tmp").write_bytes(b"left by a crash")
    for reason in ("length", "stop"):
        end = End({"reason": reason, "more": [None]}, run_of(9).tokens(), 2.5)
        write_end(FileSystem(), path, begin_of(ATTEMPT), end)
        assert read_end(path) == (begin_of(ATTEMPT), end)
    assert [each.name for each in folder.iterdir()] == [ATTEMPT.end]


def test_every_truncation_of_an_end_and_a_flipped_bit_in_any_byte_is_seen(folder: Path) -> None:
    folder.mkdir()
    path = folder / ATTEMPT.end
    write_end(FileSystem(), path, begin_of(ATTEMPT), End({}, run_of(4).tokens(), 2.5))
    content = path.read_bytes()
    damaged = [content[:length] for length in range(len(content))] + [content + b"\0"]
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        damaged.append(bytes(changed))
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(CheckpointCorrupt):
            read_end(path)


def test_a_log_is_no_end_and_an_end_no_log_with_records(small: SampleLog, folder: Path) -> None:
    end = folder / ATTEMPT.end
    shutil.copy(small.path, end)
    with pytest.raises(CheckpointCorrupt, match="how the job ended"):
        read_end(end)
    write_end(FileSystem(), end, begin_of(ATTEMPT), End({}, (), 2.5))
    shutil.copy(end, small.path)
    assert LogFile.scan(small.path).spans == ()


@pytest.mark.parametrize("seed", range(10))
def test_after_a_power_cut_an_end_is_whole_or_the_one_before(folder: Path, seed: int) -> None:
    calls = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / ATTEMPT.end
        old = End({"n": 1}, (), 2.5)
        if seed % 2:
            write_end(FileSystem(), path, begin_of(ATTEMPT), old)
        disk = CrashingDisk(calls, seed=seed * 1000 + calls)
        calls += 1
        new = End({"n": 2}, run_of(5).tokens(), 2.5)
        try:
            write_end(disk, path, begin_of(ATTEMPT), new)
        except PowerCut:
            disk.lose_power()
            if seed % 2 or path.exists():
                assert read_end(path)[1] in ([old, new] if seed % 2 else [new])
        else:
            disk.lose_power()
            assert read_end(path)[1] == new
            return
