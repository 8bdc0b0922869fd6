"""A worker's name is its own as long as somebody holds the lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tenuto_worker import ConfigError, take_identity
from tenuto_worker._identity import dead_sibling


def test_two_workers_of_one_data_dir_have_two_names_and_one_reach(tmp_path: Path) -> None:
    first, second = take_identity(tmp_path), take_identity(tmp_path)

    assert first.name.endswith("-0")
    assert second.name.endswith("-1")
    assert first.reach == second.reach
    assert first.holds_lock()
    os.close(first.lock)
    assert take_identity(tmp_path).name == first.name
    os.close(second.lock)


def test_a_name_is_taken_as_long_as_a_child_has_the_lock(tmp_path: Path) -> None:
    identity = take_identity(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[identity.lock]
    ) as child:
        os.close(identity.lock)
        other = take_identity(tmp_path)
        assert other.name != identity.name
        child.communicate(b"\n")
    again = take_identity(tmp_path)
    assert again.name == identity.name
    os.close(other.lock)
    os.close(again.lock)


def test_another_data_dir_is_another_reach(tmp_path: Path) -> None:
    first, second = take_identity(tmp_path / "a"), take_identity(tmp_path / "b")
    assert first.reach != second.reach
    os.close(first.lock)
    os.close(second.lock)


def test_a_data_dir_that_is_made_is_for_its_owner_only(tmp_path: Path) -> None:
    identity = take_identity(tmp_path / "data")
    os.close(identity.lock)
    folders = [
        tmp_path / "data",
        *(each for each in (tmp_path / "data").iterdir() if each.is_dir()),
    ]
    assert [each.stat().st_mode & 0o077 for each in folders] == [0] * len(folders)


def test_a_data_dir_that_is_a_file_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match=str(path)):
        take_identity(path)


def test_a_sibling_is_dead_when_nobody_holds_its_lock_and_its_name_stays_free_of_others(
    tmp_path: Path,
) -> None:
    mine, sibling = take_identity(tmp_path), take_identity(tmp_path)
    with dead_sibling(tmp_path, mine, sibling.name) as dead:
        assert not dead
    os.close(sibling.lock)
    with dead_sibling(tmp_path, mine, sibling.name) as dead:
        assert dead
        other = take_identity(tmp_path)
        assert other.name != sibling.name
        os.close(other.lock)
    # Neither itself, nor a worker of another host or data dir, nor one that never was.
    for name in (mine.name, "other-host-1", f"{mine.name[:-1]}7", "nonsense", f"{mine.name}x"):
        with dead_sibling(tmp_path, mine, name) as dead:
            assert not dead
    os.close(mine.lock)


def test_in_a_copy_of_a_data_dir_nobody_has_a_name_of_the_first_or_is_taken_for_dead(
    tmp_path: Path,
) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    workers = [take_identity(first) for _ in range(2)]
    shutil.copytree(first, copy)
    other = take_identity(copy)
    # The copy has the checkpoints, too.
    assert other.reach == workers[0].reach
    assert other.name not in {each.name for each in workers}
    for each in workers:
        with dead_sibling(copy, other, each.name) as dead:
            assert not dead
    for each in [*workers, other]:
        os.close(each.lock)
    # Each is the same again where it was.
    assert take_identity(first).name == workers[0].name
    assert take_identity(copy).name == other.name


def test_a_worker_whose_lock_file_was_removed_is_not_taken_for_dead(tmp_path: Path) -> None:
    mine, sibling = take_identity(tmp_path), take_identity(tmp_path)
    (tmp_path / "workers" / "1.lock").unlink()
    third = take_identity(tmp_path)
    assert third.name not in (mine.name, sibling.name)
    os.close(third.lock)
    with dead_sibling(tmp_path, mine, sibling.name) as dead:
        assert not dead
    os.close(mine.lock)
    os.close(sibling.lock)
