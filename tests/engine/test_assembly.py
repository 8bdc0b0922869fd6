"""From logs to checkpoints: exactly what was saved, or ``CheckpointCorrupt``, nothing else."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disks import CrashingDisk, PowerCut
from forged import Forgery, put_together, take_apart
from log_samples import JOB, PROMPT, Run, SampleLog, image, leaves, run_of, stored
from tenuto_engine._assembly import assemble
from tenuto_engine._chain import StoredCommit, commits
from tenuto_engine._delta import Blob, Delta, Layout, Member
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._headers import Continued
from tenuto_engine._inventory import newest_valid
from tenuto_engine._log import Attempt, LogFile

Change = Callable[[list[Forgery]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / JOB


@pytest.fixture
def rings(folder: Path) -> SampleLog:
    """Caches without recurrent state, so that every commit can be read; the rings turn."""
    log = SampleLog(folder)
    for stop, cuts in ((2, []), (3, []), (4, []), (9, [5, 7]), (10, []), (25, [17]), (26, [])):
        log.commit(run_of(stop, "rings"), cuts=cuts)
    return log


def read(commit: StoredCommit) -> tuple[object, ...]:
    return image(assemble(commit))


def expect(log: SampleLog) -> list[tuple[object, ...]]:
    return [run.image() for run in log.runs]


# -- one log ---------------------------------------------------------------------------


def test_every_commit_returns_as_it_was(rings: SampleLog) -> None:
    assert [read(commit) for commit in stored(rings.path)] == expect(rings)


def test_the_last_two_commits_of_caches_with_state_return_as_they_were(folder: Path) -> None:
    log = SampleLog(folder)
    for stop in range(1, 20):
        log.commit(run_of(stop), cuts=[stop - 1] if stop % 3 == 0 else [])
        *older, last = stored(log.path)
        assert read(last) == expect(log)[-1]
        for commit in older[-1:]:
            assert read(commit) == expect(log)[-2]
        for commit in older[:-1]:
            with pytest.raises(CheckpointCorrupt, match="another commit"):
                assemble(commit)


def test_headers_alone_tell_what_a_commit_is(rings: SampleLog) -> None:
    for commit, run in zip(stored(rings.path), rings.runs, strict=True):
        assert (commit.cache_length, commit.generated_tokens) == (run.stop, run.generated)
        assert tuple(commit.tokens()) == run.tokens()
        assert (commit.path, commit.epoch, commit.nonce) == (rings.path, 1, "a")
        assert (commit.prompt, commit.prompt_tokens) == (PROMPT, len(PROMPT))
        assert (commit.seed, commit.meta) == (rings.begin.seed, rings.begin.meta)
        assert commit.pending_token == (None if run.stop < len(PROMPT) else 777 + run.stop)
        assert (commit.created_at, commit.divergences) == (5.5, run.stop % 3)
    assert [commit.seq for commit in stored(rings.path)] == [1, 2, 3, 6, 7, 9, 10]


def test_a_checkpoint_knows_the_place_it_is_from(rings: SampleLog) -> None:
    origin = assemble(stored(rings.path)[-1]).origin
    base, _ = rings.continued()
    assert origin is not None
    assert origin.folder == rings.path.parent
    assert (
        Continued(origin.file, origin.offset, origin.digest, origin.generation, origin.position)
        == base
    )


def test_caches_that_hold_nothing_return(folder: Path) -> None:
    log = SampleLog(folder)
    log.commit(Run(0, (0,), "rings"))
    (commit,) = stored(log.path)
    checkpoint = assemble(commit)
    assert checkpoint.cache_tokens == ()
    assert [cache.arrays for cache in checkpoint.caches] == [(), (), (), ()]


def test_a_prompt_that_is_known_in_part_returns_in_a_prefill(folder: Path) -> None:
    log = SampleLog(folder, prompt=PROMPT[:2], prompt_tokens=100)
    log.commit(run_of(2, "plain"))
    checkpoint = assemble(stored(log.path)[-1])
    assert checkpoint.cache_tokens == PROMPT[:2]
    assert checkpoint.original_prompt_tokens == 100
    log.commit(run_of(3, "plain"))
    assert len(stored(log.path)) == 1


def test_a_new_generation_holds_everything_again(rings: SampleLog) -> None:
    rings.new_generation()
    for stop in (27, 28):
        rings.commit(Run(stop, (5, 5, 5) + (0,) * (stop - 3), "rings"))
    assert [read(commit) for commit in stored(rings.path)] == expect(rings)


def test_tokens_that_are_taken_back_are_replaced(folder: Path) -> None:
    log = SampleLog(folder)
    kept = (0, 0, 0, 0, 0)
    for stop, salt in ((9, 0), (7, 1), (8, 1), (6, 2), (12, 2)):
        run = Run(stop, kept + (salt,) * (stop - 5), "plain")
        if log.runs and stop <= log.position:
            log.position, log.first = 5, 3
        log.commit(run)
    assert [read(commit) for commit in stored(log.path)] == expect(log)


def test_the_later_of_two_records_wins_where_both_cover_a_position(folder: Path) -> None:
    log = SampleLog(folder)
    log.commit(run_of(20, "rings"))
    log.position, log.first = 7, 1
    log.commit(Run(21, (0,) * 7 + (1,) * 14, "rings"))
    assert [read(commit) for commit in stored(log.path)] == expect(log)


def test_slices_of_different_positions_may_share_a_blob(folder: Path) -> None:
    log = SampleLog(folder)
    run = run_of(4, "plain")
    blobs = tuple(
        Blob(
            "uint16",
            tuple(Member(0, array, start) for array, start in enumerate(starts)),
            np.stack([run.slice(0, a, start, start + 2) for a, start in enumerate(starts)]),
        )
        for starts in ((0, 2), (2, 0))
    )
    log.append(replace(run.delta(0, 1), blobs=blobs))
    (commit,) = stored(log.path)
    assert read(commit) == run.image()


# -- chains ----------------------------------------------------------------------------


def chain(folder: Path, model: str = "rings") -> list[SampleLog]:
    """Three logs; the second goes on from the middle of the first, which went on as well."""
    first = SampleLog(folder, Attempt(1, "a"))
    first.commit(run_of(8, model))
    base = first.continued()
    first.commit(run_of(12, model))
    second = SampleLog(folder, Attempt(2, "b"), continues=base)
    second.commit(Run(15, (0,) * 8 + (1,) * 7, model), cuts=[11])
    third = SampleLog(folder, Attempt(3, "c"), continues=second.continued())
    third.commit(Run(16, (0,) * 8 + (1,) * 7 + (2,), model))
    third.commit(Run(40, (0,) * 8 + (1,) * 7 + (2,) * 25, model))
    return [first, second, third]


@pytest.mark.parametrize("model", ["plain", "rings"])
def test_a_chain_of_logs_returns_every_commit_as_it_was(folder: Path, model: str) -> None:
    for log in chain(folder, model):
        found = stored(log.path)
        assert [read(commit) for commit in found] == expect(log)
        assert [tuple(c.tokens()) for c in found] == [run.tokens() for run in log.runs]


def test_a_log_with_state_goes_on_in_another(folder: Path) -> None:
    *_, third = chain(folder, "all")
    assert [read(commit) for commit in stored(third.path)] == expect(third)


def test_without_the_log_that_it_continues_a_log_has_no_checkpoint(folder: Path) -> None:
    logs = chain(folder)
    content = logs[1].path.read_bytes()
    for damaged in (b"", content[:200], content[:-1], flip(content, 20)):
        logs[1].path.write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt) as caught:
            stored(logs[2].path)
        assert caught.value.path == logs[2].path
    logs[1].path.unlink()
    with pytest.raises(CheckpointCorrupt, match="not readable"):
        stored(logs[2].path)
    assert len(stored(logs[0].path)) == 2


def test_damage_behind_the_place_that_a_log_continues_does_not_matter(folder: Path) -> None:
    first, second, _ = chain(folder)
    content = first.path.read_bytes()
    end = LogFile.scan(first.path).spans[0].record.end
    for damaged in (content[: end + 100], flip(content, len(content) - 1)):
        first.path.write_bytes(damaged)
        assert [read(commit) for commit in stored(second.path)] == expect(second)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 7},
        {"digest": bytes(16)},
        {"generation": 1},
        {"position": 9},
        {"file": "00000009-z.log"},
        {"file": "../j1/00000001-a.log"},
        {"file": "00000001-a.end"},
        {"file": "00000002-b.log"},
    ],
)
def test_a_place_to_go_on_from_that_is_not_there_is_refused(
    folder: Path, change: dict[str, Any]
) -> None:
    first = SampleLog(folder)
    first.commit(run_of(8, "plain"))
    base, run = first.continued()
    second = SampleLog(folder, Attempt(2, "b"), continues=(base._replace(**change), run))
    second.commit(run_of(9, "plain"))
    with pytest.raises(CheckpointCorrupt):
        stored(second.path)


def test_only_a_commit_can_be_continued(folder: Path) -> None:
    first = SampleLog(folder)
    part = run_of(8, "plain")
    first.append(Delta(0, 0, 8, part.blobs(0, 8), None))
    mark = first.writer.mark
    base = Continued(first.path.name, mark.end, mark.digest, 0, 8)
    second = SampleLog(folder, Attempt(2, "b"), continues=(base, part))
    second.commit(run_of(9, "plain"))
    with pytest.raises(CheckpointCorrupt, match="not there"):
        stored(second.path)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"prompt": (10, 11, 13)}, {"prompt": (10, 11), "prompt_tokens": 2}]
)
def test_a_log_that_continues_another_run_is_refused(folder: Path, change: dict[str, Any]) -> None:
    first = SampleLog(folder)
    first.commit(run_of(2, "plain"))
    second = SampleLog(folder, Attempt(2, "b"), continues=first.continued(), **change)
    with pytest.raises(CheckpointCorrupt, match="another run"):
        stored(second.path)


def test_a_log_that_continues_itself_is_refused(folder: Path) -> None:
    first, second, _ = chain(folder)
    theirs = LogFile.scan(second.path)
    last = theirs.spans[-1]
    base = Continued(second.path.name, last.record.end, last.record.digest, 0, last.span.stop)
    ours = LogFile.scan(first.path)
    circular = replace(ours, begin=replace(ours.begin, continues=base))
    with pytest.raises(CheckpointCorrupt, match="continues itself"):
        commits(theirs, {first.path.name: circular, second.path.name: theirs}.get)


# -- damage ----------------------------------------------------------------------------


def flip(content: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


def newest_of(path: Path) -> tuple[int, tuple[object, ...]] | None:
    """Number and image of the newest commit that can be read."""
    found = found_in(path)
    for number, commit in reversed(list(enumerate(found))):
        got = read_or_error(commit)
        if not isinstance(got, CheckpointCorrupt):
            return number, got
        assert got.path == path
        assert commit.needs(got)
    return None


def read_or_error(commit: StoredCommit) -> tuple[object, ...] | CheckpointCorrupt:
    try:
        return read(commit)
    except CheckpointCorrupt as error:
        return error


def test_a_flipped_bit_in_any_byte_gives_an_earlier_checkpoint_or_none(folder: Path) -> None:
    log = SampleLog(folder)
    for stop in (3, 4, 6):
        log.commit(run_of(stop, "plain"))
    content = log.path.read_bytes()
    expected = expect(log)
    marks = [entry.record.offset for entry in LogFile.scan(log.path).spans]
    for position in range(len(content)):
        log.path.write_bytes(flip(content, position, position % 8))
        found = newest_of(log.path)
        before = sum(1 for mark in marks if mark <= position) - 2
        assert found == ((before, expected[before]) if before >= 0 else None)


def test_damage_names_the_record_and_who_needs_it(rings: SampleLog) -> None:
    content = rings.path.read_bytes()
    entry = LogFile.scan(rings.path).spans[3]
    assert entry.span.commit is None
    rings.path.write_bytes(flip(content, entry.record.end - 1))
    found = stored(rings.path)
    with pytest.raises(CheckpointCorrupt) as caught:
        assemble(found[-1])
    assert (caught.value.path, caught.value.offset) == (rings.path, entry.record.offset)
    needing = [commit for commit in found if commit.needs(caught.value)]
    assert needing == found[3:]
    assert [read(commit) for commit in found[:3]] == expect(rings)[:3]
    for commit in needing:
        with pytest.raises(CheckpointCorrupt):
            assemble(commit)


def test_damage_of_another_log_or_generation_is_not_needed(folder: Path) -> None:
    first, second, third = chain(folder)
    third.new_generation()
    third.commit(Run(41, (0,) * 8 + (1,) * 7 + (2,) * 26, "rings"))
    logs = [LogFile.scan(log.path) for log in (first, second, third)]
    found = stored(third.path)
    for log, entry, needing in (
        (logs[0], logs[0].spans[0], [True, True, False]),
        (logs[0], logs[0].spans[1], [False, False, False]),
        (logs[1], logs[1].spans[1], [True, True, False]),
        (logs[2], logs[2].spans[1], [False, True, False]),
        (logs[2], logs[2].spans[2], [False, False, True]),
    ):
        damage = CheckpointCorrupt(log.path, "damaged", offset=entry.record.offset)
        assert [commit.needs(damage) for commit in found] == needing
    for damage, expected in (
        (CheckpointCorrupt(first.path, "gone"), True),
        (CheckpointCorrupt(folder / "00000003-c.0.state", "gone"), False),
        (CheckpointCorrupt(first.path, "damaged", offset=17), False),
    ):
        assert [commit.needs(damage) for commit in found] == [expected] * 3


def test_a_log_that_vanishes_between_its_headers_and_its_payloads_is_corrupt(
    rings: SampleLog,
) -> None:
    found = stored(rings.path)
    content = rings.path.read_bytes()
    rings.path.write_bytes(content[:300])
    with pytest.raises(CheckpointCorrupt, match="ends early"):
        assemble(found[-1])
    rings.path.unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        assemble(found[-1])


def test_what_no_cache_holds_any_more_is_not_read(folder: Path) -> None:
    log = SampleLog(folder)
    layout = Layout(
        "RotatingKVCache", {"offset": 6, "idx": 6, "keep": 0, "max_size": 6, "capacity": 6}
    )
    for stop in (6, 12):
        run = run_of(stop, "plain")
        data = np.stack([run.slice(0, a, stop - 6, stop) for a in range(2)])
        members = tuple(Member(0, array, stop - 6) for array in range(2))
        delta = run.delta(0, log.first)
        assert delta.commit is not None
        turned = replace(layout, meta={**layout.meta, "offset": stop})
        commit = replace(delta.commit, layouts=(turned,))
        log.append(Delta(0, stop - 6, stop, (Blob("uint16", members, data),), commit))
        log.first = run.generated + 1
    first, last = stored(log.path)
    position = first.entry.record.end - 1
    log.path.write_bytes(flip(log.path.read_bytes(), position))
    (cache,) = assemble(last).caches
    np.testing.assert_array_equal(cache.arrays[0].data, run_of(12).slice(0, 0, 6, 12))
    with pytest.raises(CheckpointCorrupt):
        assemble(first)


def test_a_commit_whose_state_file_is_gone_is_passed_over_for_an_older_log(folder: Path) -> None:
    older = SampleLog(folder, Attempt(1, "a"))
    older.commit(run_of(5))
    newer = SampleLog(folder, Attempt(2, "b"))
    for stop in (7, 8):
        newer.commit(run_of(stop))
    for number in range(2):
        (folder / newer.attempt.state(number)).unlink()
    found = newest_valid(folder)
    assert found is not None
    assert [image(found)] == expect(older)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_cut_at_any_call_the_newest_synced_commit_returns(
    folder: Path, seed: int
) -> None:
    calls = 0
    finished = False
    while not finished:
        shutil.rmtree(folder, ignore_errors=True)
        disk = CrashingDisk(calls, seed=1000 * seed + calls)
        calls += 1
        synced = 0
        try:
            log = SampleLog(folder, fs=disk)
            log.writer.sync()
            for stop in (4, 5, 7, 8):
                log.commit(run_of(stop), cuts=[stop - 1])
                log.writer.sync()
                synced = stop
            finished = True
        except PowerCut:
            pass
        disk.lose_power()
        found = newest_valid(folder)
        if synced or found is not None:
            assert found is not None
            assert len(found.cache_tokens) >= synced
            assert image(found) == run_of(len(found.cache_tokens)).image()


# -- records that do not fit together, with all digests right ---------------------------


def change_layout(records: list[Forgery], **meta: int) -> None:
    header = records[-1].header
    header["layouts"][0][1].update(meta)


def second_only(records: list[Forgery]) -> None:
    del records[1]
    for number, record in enumerate(records):
        record.header["seq"] = number


def reshape(records: list[Forgery]) -> None:
    blob = records[2].header["blobs"][0]
    count, batch, heads, positions, width = blob[1]
    blob[1] = [count, batch, width, positions, heads]


def members(records: list[Forgery], *owner: int) -> None:
    position = records[2].header["blobs"][0][3][0][2]
    records[2].header["blobs"][0][3][0] = [*owner, position]


@pytest.mark.parametrize(
    ("change", "offender"),
    [
        (lambda r: change_layout(r, offset=7), -1),
        (lambda r: change_layout(r, offset=2**31 - 1, capacity=2**31 - 1), -1),
        (lambda r: r[-1].header.update(caches=[0, 0]), -1),
        (lambda r: r[-1].header.update(generation=1), -1),
        (lambda r: r[1].header.update(generation=1), -1),
        (second_only, -1),
        (reshape, 1),
        (lambda r: r[2].header["blobs"][0].__setitem__(0, "float16"), 1),
        (lambda r: members(r, 5, 0), 1),
        (lambda r: members(r, 0, 2), 1),
    ],
)
def test_records_that_do_not_fit_together_are_refused(
    folder: Path, change: Change, offender: int
) -> None:
    log = SampleLog(folder)
    for stop in (3, 4, 6):
        log.commit(run_of(stop, "plain"))
    records = take_apart(log.path.read_bytes())
    change(records)
    log.path.write_bytes(put_together(records))
    scanned = LogFile.scan(log.path)
    assert len(scanned.spans) == len(records) - 1
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt) as caught:
            assemble(stored(log.path)[-1])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.offset == scanned.spans[offender].record.offset


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_is_missing_is_noticed(folder: Path, number: int) -> None:
    log = SampleLog(folder)
    log.commit(run_of(9, "rings"), cuts=[3, 5, 7])
    records = take_apart(log.path.read_bytes())
    del records[number]
    for seq, record in enumerate(records):
        record.header["seq"] = seq
    log.path.write_bytes(put_together(records))
    (commit,) = stored(log.path)
    with pytest.raises(CheckpointCorrupt, match="are missing"):
        assemble(commit)


def test_caches_that_hold_more_than_the_commit_covers_are_refused(folder: Path) -> None:
    log = SampleLog(folder)
    log.commit(run_of(6, "plain"))
    delta = run_of(4, "plain").delta(4, 1)
    assert delta.commit is not None
    commit = replace(delta.commit, layouts=run_of(6, "plain").layouts())
    log.append(replace(delta, commit=commit))
    with pytest.raises(CheckpointCorrupt, match="positions 0 to 6"):
        assemble(stored(log.path)[-1])


def test_spare_room_out_of_proportion_is_refused_before_it_is_allocated(folder: Path) -> None:
    log = SampleLog(folder)
    run = run_of(1, "plain")
    meta = {"offset": 1, "idx": 1, "keep": 0, "max_size": 60_000, "capacity": 60_000}
    data = np.zeros((2, 1, 1, 1, 100_000), np.uint8)
    members = (Member(0, 0, 0), Member(0, 1, 0))
    commit = run.delta(0, 1).commit
    assert commit is not None
    commit = replace(commit, layouts=(Layout("RotatingKVCache", meta),))
    log.append(Delta(0, 0, 1, (Blob("uint8", members, data),), commit))
    with pytest.raises(CheckpointCorrupt, match="more room"):
        assemble(stored(log.path)[-1])


def test_state_of_a_leaf_that_there_is_not_is_refused(folder: Path) -> None:
    log = SampleLog(folder)
    run = run_of(4)
    delta = run.delta(0, 1)
    assert delta.commit is not None
    count = len(leaves(run.layouts()))
    state = tuple(replace(array, leaf=array.leaf + count) for array in delta.commit.state)
    log.append(replace(delta, commit=replace(delta.commit, state=state)))
    with pytest.raises(CheckpointCorrupt, match="caches that there are not"):
        assemble(stored(log.path)[-1])


# -- cost ------------------------------------------------------------------------------


def test_reading_takes_the_memory_of_the_result_and_of_one_record(folder: Path) -> None:
    log = SampleLog(folder)
    layout = Layout("KVCache", {"offset": 0, "capacity": 0})
    data = np.ones((8, 1, 4, 64, 64), np.uint16)
    for stop in range(64, 64 * 9, 64):
        run = run_of(2, "plain")
        commit = run.delta(0, 1).commit
        assert commit is not None
        meta = {"offset": stop, "capacity": stop}
        tokens = tuple(run_of(stop).tokens(log.first))
        commit = replace(commit, layouts=(replace(layout, meta=meta),) * 4, tokens=tokens,
                         first=log.first, pending_token=1, pending_logprob=0.0)  # fmt: skip
        log.first += len(tokens)
        owners = tuple(Member(leaf, array, stop - 64) for leaf in range(4) for array in range(2))
        log.append(Delta(0, stop - 64, stop, (Blob("uint16", owners, data),), commit))
    commit_of = stored(log.path)[-1]
    tracemalloc.start()
    try:
        checkpoint = assemble(commit_of)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert checkpoint.nbytes == 8 * data.nbytes
    assert peak < checkpoint.nbytes + data.nbytes + 2**20


# -- everything at random --------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens to a job: commits, parts, new generations, and crashes back to a commit."""
    steps = st.tuples(
        st.sampled_from(["commit", "commit", "parts", "crash", "renew"]), st.integers(1, 9)
    )
    return draw(st.lists(steps, min_size=1, max_size=14))


@settings(max_examples=60, deadline=None)
@given(life=lives(), seed=st.integers(0, 2**32))
def test_whatever_a_job_went_through_every_checkpoint_returns_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, int]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("life") / JOB
    drawn = random.Random(seed)
    log = SampleLog(folder)
    logs = [log]
    bases: list[tuple[Continued, Run]] = []
    salts: tuple[int, ...] = ()
    for number, (what, count) in enumerate(life, 1):
        if what == "crash" and bases:
            base = drawn.choice(bases)
            salts = base[1].salts[: base[1].stop]
            log = SampleLog(folder, Attempt(number, "n"), continues=base)
            logs.append(log)
        elif what == "renew" and salts:
            log.new_generation()
            salts = (number, *salts[1:])
        salts += (number,) * count
        cuts = range(log.position + 2, len(salts), 3) if what == "parts" else ()
        log.commit(Run(len(salts), salts, "rings"), cuts=list(cuts))
        bases.append(log.continued())
    for log in logs:
        found = stored(log.path)
        assert [read(commit) for commit in found] == expect(log)
        assert [tuple(commit.tokens()) for commit in found] == [run.tokens() for run in log.runs]
    shutil.rmtree(folder.parent)


VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), "", "a", b"",
    bytes(16), [], [[]], {}, {"a": 1},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a header, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    keys = range(len(value)) if isinstance(value, list) else list(value)
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], list | dict):
            found += places(value[key])
    return found


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SampleLog:
    log = SampleLog(tmp_path_factory.mktemp("sound") / JOB)
    for stop, cuts in ((2, []), (5, []), (9, [7]), (10, [])):
        log.commit(run_of(stop, "rings"), cuts=cuts)
    return log


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_header_with_any_other_value_gives_a_checkpoint_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, sound: SampleLog, data: st.DataObject
) -> None:
    records = take_apart(sound.path.read_bytes())
    record = data.draw(st.sampled_from(records))
    container, key = data.draw(st.sampled_from(places(record.header)))
    what = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    if what == "replace":
        container[key] = data.draw(st.sampled_from(VALUES))
    elif what == "remove":
        del container[key]
    elif isinstance(container, list):
        container.append(container[key])
    assert_a_checkpoint_or_refused(tmp_path_factory, put_together(records))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_header_with_other_bytes_gives_a_checkpoint_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, sound: SampleLog, data: st.DataObject
) -> None:
    records = take_apart(sound.path.read_bytes())
    record = data.draw(st.sampled_from(records))
    packed = bytearray(msgpack.packb(record.header))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    record.header = bytes(packed)
    assert_a_checkpoint_or_refused(tmp_path_factory, put_together(records))


def assert_a_checkpoint_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("forged") / JOB
    folder.mkdir()
    path = folder / Attempt(1, "a").log
    path.write_bytes(content)
    tracemalloc.start()
    try:
        for commit in found_in(path):
            commit.tokens()
            read_or_error(commit)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
        shutil.rmtree(folder.parent)


def found_in(path: Path) -> list[StoredCommit]:
    try:
        return stored(path)
    except CheckpointCorrupt:
        return []


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_other_bytes_anywhere_give_a_checkpoint_that_was_saved_or_none(
    tmp_path_factory: pytest.TempPathFactory, sound: SampleLog, data: st.DataObject
) -> None:
    content = bytearray(sound.path.read_bytes())
    begin = data.draw(st.integers(0, len(content) - 1))
    end = min(len(content), begin + data.draw(st.integers(1, 300)))
    length = end - begin
    kinds = [b"", bytes(length), random.Random(begin).randbytes(length), content[:length]]
    content[begin:end] = data.draw(st.sampled_from(kinds))
    folder = tmp_path_factory.mktemp("damaged") / JOB
    folder.mkdir()
    path = folder / sound.path.name
    path.write_bytes(content)
    found = newest_of(path)
    if found is not None:
        number, got = found
        assert got == expect(sound)[number]
    shutil.rmtree(folder.parent)
