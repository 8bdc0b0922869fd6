"""The files in ops/ are ones that their readers accept."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import redis

from failover import Sentinel, free_port
from servers import RealServer
from tenuto_worker._commands.worker import models

OPS = Path(__file__).parents[2] / "ops"


def _settings(text: str) -> dict[str, str]:
    """`name value` lines, without comments."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split(maxsplit=1) for line in lines)


def test_redis_conf_is_accepted_and_keeps_every_write() -> None:
    settings = _settings((OPS / "redis.conf").read_text())
    # Where a test server lives and listens is its own affair.
    for elsewhere in ("dir", "port", "bind"):
        del settings[elsewhere]
    with RealServer(**settings) as server, server.client() as client:
        in_force = client.config_get("*")
    assert in_force["appendfsync"] == "always"
    assert in_force["maxmemory-policy"] == "noeviction"
    assert in_force["maxmemory"] == str(4 << 30)


def test_sentinel_conf_is_accepted_with_the_lines_for_users() -> None:
    text = (OPS / "sentinel.conf").read_text().replace("# sentinel auth-", "sentinel auth-")
    settings = text.replace("port 26379", "").replace("dir /var/lib/tenuto-sentinel", "")
    port = free_port()
    with Sentinel(port, settings), redis.Redis(port=port, socket_timeout=10) as client:
        assert client.sentinel_masters()["tenuto"]["quorum"] == 2


def test_the_launchd_agent_is_a_property_list_that_runs_a_worker() -> None:
    agent = plistlib.loads((OPS / "com.tenuto.worker.plist").read_bytes())
    assert agent["Label"] == "com.tenuto.worker"
    assert agent["ProgramArguments"][1:3] == ["worker", "--model"]
    assert models(agent["ProgramArguments"][3:]).keys() == {"smollm2"}
    assert agent["Umask"] == 0o077


def test_the_environment_of_the_unit_names_a_model_and_a_server() -> None:
    lines = (OPS / "worker.env").read_text().splitlines()
    words = shlex.split("\n".join(lines), comments=True)
    environment = dict(word.split("=", 1) for word in words)
    assert environment["TENUTO_REDIS_URL"].startswith("redis://")
    assert models(environment["TENUTO_MODEL"].split()).keys() == {"smollm2"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (OPS / "tenuto-worker.service").read_text()
    installed = tmp_path / "tenuto-worker.service"
    # It checks that the program is there.
    installed.write_text(unit.replace("/opt/tenuto/.venv/bin/tenuto", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(installed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
