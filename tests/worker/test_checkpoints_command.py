"""`tenuto checkpoints`, and the worker's part of `tenuto doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client._command import main
from tenuto_client._config import Settings
from tenuto_client._findings import Finding, Level
from tenuto_worker._doctor import check

Say = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def stopped(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, Path]]:
    """A cancelled job with two checkpoints, and their data dir."""
    job = jobs.submit()
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as worker:
        worker.claim()
        worker.decode(17)
        worker.save()
        jobs.cancel(job)
        worker.publish()
        worker.settle()
        worker.save()
        yield job, tmp_path


@pytest.fixture
def say(jobs: JobQueue, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `tenuto checkpoints --json` and returns its exit code and lines."""

    def run(*words: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]
        code = main(["checkpoints", *words, "--json", *where, "--data-dir", str(tmp_path)])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def _log_of(stopped: tuple[str, Path]) -> Path:
    job, data_dir = stopped
    (log,) = (data_dir / "checkpoints" / job).glob("*.log")
    return log


def test_list_folds_what_a_job_has_into_a_line(stopped: tuple[str, Path], say: Say) -> None:
    code, (line,) = say("list")

    assert code == 0
    assert line["job"] == stopped[0]
    assert (line["epochs"], line["logs"], line["end"]) == ([1], 1, "cancelled")
    assert line["checkpoints"] >= 3
    assert line["tokens"] == 17
    files = (stopped[1] / "checkpoints" / stopped[0]).iterdir()
    assert line["bytes"] == sum(file.stat().st_size for file in files)
    assert line["damage"] is None
    assert say("list", stopped[0])[1] == [line]


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_job_that_is_not_there_is_exit_code_4_and_told(
    stopped: tuple[str, Path], action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", action, "another-job", "--data-dir", str(stopped[1])]) == 4
    said = capsys.readouterr()
    assert f"nothing of job another-job in {stopped[1]}" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "--dry-run"], "--dry-run: list changes nothing"),
        (["verify", "--dry-run"], "--dry-run: verify changes nothing"),
        (["gc", "a-job"], "job: gc takes none"),
        (["gc", "a-job", "--dry-run"], "job: gc takes none"),
    ],
)
def test_what_an_action_has_no_use_for_is_refused_before_anything_is_done(
    stopped: tuple[str, Path],
    jobs: JobQueue,
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, data_dir = stopped
    jobs.delete(job)
    assert main(["checkpoints", *words, "--data-dir", str(data_dir)]) == 2
    assert told in capsys.readouterr().err
    assert (data_dir / "checkpoints" / job).exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "all that jobs,\nstreams and results can be brought back from"),
        (["list"], "how many tokens can be read back"),
        (["verify"], "Read every byte"),
        (["gc"], "It takes no JOB"),
        (["recover"], "Jobs that no worker had begun are not on disk"),
    ],
)
def test_help_after_an_action_is_about_that_action(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoints", *words, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(" ".join(["usage: tenuto checkpoints", *words]))
    assert told in said


def test_what_takes_little_is_shown_in_kib(
    stopped: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job, data_dir = stopped
    nbytes = sum(file.stat().st_size for file in (data_dir / "checkpoints" / job).iterdir())
    assert main(["checkpoints", "list", "--data-dir", str(data_dir)]) == 0
    assert 1024 < nbytes < 2**20
    assert f"  {nbytes / 1024:.1f} KiB  " in capsys.readouterr().out


def test_list_shows_a_job_that_has_only_begun(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path, say: Say
) -> None:
    job = jobs.submit()
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as worker:
        worker.claim()
        (line,) = say("list")[1]

    assert (line["job"], line["tokens"], line["checkpoints"]) == (job, 0, 0)
    assert line["prompt_tokens"] > 0


def test_verify_names_the_damaged_file_and_exits_with_1(
    stopped: tuple[str, Path], say: Say
) -> None:
    assert say("verify")[0] == 0
    log = _log_of(stopped)
    data = bytearray(log.read_bytes())
    data[-1] ^= 4
    log.write_bytes(data)
    code, lines = say("verify")

    assert code == 1
    (bad,) = [line for line in lines if not line["ok"]]
    assert bad["file"] == log.name
    assert "at byte" in bad["reason"]


def test_a_write_that_was_cut_short_is_told_and_is_no_damage(
    stopped: tuple[str, Path], say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _log_of(stopped)
    log.write_bytes(log.read_bytes()[:-1])
    code, lines = say("verify")

    assert code == 0
    (line,) = [line for line in lines if line["file"] == log.name]
    assert "ends in a write that was cut short" in line["note"]
    assert main(["checkpoints", "verify", "--data-dir", str(stopped[1])]) == 0
    assert f"{log.name}  ok, it ends in a write" in capsys.readouterr().out


def test_gc_removes_only_what_is_gone_and_a_dry_run_nothing(
    stopped: tuple[str, Path], say: Say, jobs: JobQueue
) -> None:
    job, data_dir = stopped
    assert say("gc") == (0, [])
    jobs.delete(job)
    assert [line["job"] for line in say("gc", "--dry-run")[1]] == [job]
    assert (data_dir / "checkpoints" / job).exists()
    assert [line["job"] for line in say("gc")[1]] == [job]
    assert not (data_dir / "checkpoints" / job).exists()


def test_the_list_has_a_head_and_says_when_there_is_nothing(
    stopped: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, data_dir = stopped
    assert main(["checkpoints", "list", "--data-dir", str(data_dir)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "EPOCHS", "TOKENS", "SIZE", "SAVED", "END"]
    assert row.split()[0] == job
    empty = tmp_path / "empty"
    assert main(["checkpoints", "list", "--data-dir", str(empty)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {empty / 'checkpoints'}\n"
    assert main(["checkpoints", "list", "--json", "--data-dir", str(empty)]) == 0
    assert capsys.readouterr().out == ""


def test_an_object_a_line_is_as_compact_as_those_of_other_commands(
    stopped: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "list", "--json", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith('{"type":"checkpoints","job":"')


def test_without_an_action_the_actions_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints"]) == 2
    assert "list, verify, gc or recover" in capsys.readouterr().err


def test_gc_says_that_there_is_nothing_to_do(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--redis", redis_url, "--data-dir", str(tmp_path)]
    assert main(["checkpoints", "gc", *where]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_gc_without_redis_is_exit_code_3_though_nothing_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"unix://{tmp_path}/nobody"
    assert main(["checkpoints", "gc", "--redis", url, "--data-dir", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert url in said
    assert "start it, or set --redis" in said


def test_gc_says_what_it_could_not_remove(
    jobs: JobQueue, stopped: tuple[str, Path], say: Say
) -> None:
    job, data_dir = stopped
    jobs.delete(job)
    (data_dir / "checkpoints" / job / "00000000-a.log").mkdir()
    code, (line,) = say("gc")

    assert (code, line["type"], line["job"]) == (1, "refused", job)
    assert "cannot be deleted" in line["reason"]
    (data_dir / "checkpoints" / job / "00000000-a.log").rmdir()
    code, (line,) = say("gc")
    assert (code, line["type"]) == (0, "removed")


# -- doctor ----------------------------------------------------------------------------


def _found(data_dir: Path) -> dict[str, Finding]:
    settings = Settings.load(data_dir=data_dir)
    return {finding.subject: finding for finding in check(settings)}


def test_doctor_names_the_device_and_counts_checkpoints(stopped: tuple[str, Path]) -> None:
    found = _found(stopped[1])

    assert found["device"].level is Level.OK
    assert "mlx-lm" in found["device"].says
    assert found["checkpoints"].says.startswith("1 job, ")


def test_doctor_counts_files_that_are_plainly_damaged(stopped: tuple[str, Path]) -> None:
    log = _log_of(stopped)
    log.write_bytes(log.read_bytes()[:10])
    found = _found(stopped[1])["checkpoints"]

    assert found.level is Level.WARNING
    assert found.says.endswith("damaged: 1")
    assert "tenuto checkpoints verify" in str(found.fix)


def test_doctor_advises_no_collection_where_nothing_can_be_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("tenuto_worker._doctor._LITTLE_DISK", 2**80)
    found = _found(tmp_path)["checkpoints"]

    assert found.level is Level.OK
    assert found.says.startswith("no jobs, 0 bytes")


def test_doctor_names_a_model_folder_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_MODEL", f"m={tmp_path}/nothing")
    found = _found(tmp_path)["models"]

    assert found.level is Level.PROBLEM
    assert f"{tmp_path}/nothing" in found.says
