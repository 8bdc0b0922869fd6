"""What `tenuto doctor` says where a worker is installed, too."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import redis

from consulting import Doctor
from servers import RealServer
from tenuto_client import Keys


def leave_checkpoint(data_dir: Path, job: str) -> None:
    """Put down a file as a worker would, of a job that this server has never had."""
    folder = data_dir / "checkpoints" / job
    folder.mkdir(parents=True)
    (folder / "00000001-a.log").write_bytes(b"x")


def test_jobs_on_disk_that_redis_lost_are_counted(
    doctor: Doctor, namespace: str, redis_url: str, tmp_path: Path
) -> None:
    for job in ("lost", "deleted"):
        leave_checkpoint(tmp_path, job)
    (tmp_path / "checkpoints" / "empty").mkdir()
    with redis.Redis.from_url(redis_url) as raw:
        raw.zadd(Keys(namespace).removed(), {"deleted": 1})
    flags = ["--redis", redis_url, "--namespace", namespace, "--data-dir", str(tmp_path)]
    assert doctor(*flags)["lost"]["says"].startswith("1 job with checkpoints")


def test_what_was_given_by_flags_is_in_the_lines(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "a data dir"
    leave_checkpoint(data_dir, "job")
    with RealServer() as server:
        flags = ["--redis", server.url, "--namespace", "a:", "--data-dir", str(data_dir)]
        lost = doctor(*flags)["lost"]["fix"]
        assert shlex.split(lost) == ["tenuto", "checkpoints", "recover", *flags]
        monkeypatch.setenv("TENUTO_REDIS_URL", server.url)
        monkeypatch.setenv("TENUTO_NAMESPACE", "a")
        monkeypatch.setenv("TENUTO_DATA_DIR", str(data_dir))
        assert doctor()["lost"]["fix"] == "tenuto checkpoints recover"


def test_the_device_is_looked_at_while_the_server_hangs(doctor: Doctor) -> None:
    with RealServer() as server:
        server.pause()
        found = doctor("--redis", server.url)
        server.resume()
    assert found["server"]["level"] == "problem"
    assert found["device"]["level"] == "ok"
