"""What `tenuto doctor` says to type, and how long it takes to say it."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from consulting import Doctor
from proxies import TlsProxy
from servers import RealServer
from tenuto_client._command import main


def _on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).touch(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_all_that_persistence_needs_is_said_at_once(doctor: Doctor) -> None:
    with RealServer(appendonly="no", appendfsync="everysec") as weak:
        found = doctor("--redis", weak.url)["durability"]
    start = ["redis-cli", "-s", str(weak.socket), "CONFIG", "SET"]
    assert [shlex.split(line) for line in found["fix"].splitlines()] == [
        [*start, "appendonly", "yes"],
        [*start, "appendfsync", "always"],
    ]
    # Its settings came on stdin.
    assert "--appendonly yes --appendfsync always" in found["note"]


def test_the_client_that_is_there_is_named(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RealServer(appendfsync="everysec") as weak:
        _on_path(monkeypatch, tmp_path / "none")
        assert (
            "neither redis-cli nor valkey-cli is on the PATH"
            in (doctor("--redis", weak.url)["durability"]["note"])
        )
        _on_path(monkeypatch, tmp_path / "valkey", "valkey-cli")
        found = doctor("--redis", weak.url)["durability"]
        assert found["fix"].startswith("valkey-cli -s ")
        assert "on the PATH" not in found["note"]
        _on_path(monkeypatch, tmp_path / "both", "valkey-cli", "redis-cli")
        assert doctor("--redis", weak.url)["durability"]["fix"].startswith("redis-cli -s ")


def test_a_password_is_asked_for_and_not_shown(doctor: Doctor, tmp_path: Path) -> None:
    with (
        RealServer(appendfsync="everysec", user="me on >sesame ~* &* +@all") as guarded,
        TlsProxy(guarded.socket, tmp_path) as tls,
    ):
        found = doctor("--redis", tls.url.replace("://", "://me:sesame@"))
        line = found["durability"]["fix"]
        assert line.startswith("redis-cli -h localhost -p ")
        assert f"--tls --cacert {tmp_path}" in line
        assert "--user me CONFIG SET appendfsync always" in line
        assert "REDISCLI_AUTH" in found["durability"]["note"]
        assert "sesame" not in json.dumps(found)
        # What is to be started needs the URL, which is not shown.
        assert "with the same --redis" in found["workers"]["note"]


def test_a_refusal_says_where_the_password_belongs(doctor: Doctor) -> None:
    with RealServer() as guarded:
        with guarded.client() as admin:
            admin.config_set("requirepass", "sesame")
        found = doctor("--redis", guarded.url)["server"]
        assert found["fix"] is None
        assert "belong into the URL" in found["note"]
        assert "the URL has no password" in found["note"]
        wrong = guarded.url.replace("unix://", "unix://:open@")
        assert "the URL has a password" in doctor("--redis", wrong)["server"]["note"]


def test_what_was_given_by_flags_is_in_the_lines(doctor: Doctor, tmp_path: Path) -> None:
    with RealServer() as server:
        flags = ["--redis", server.url, "--namespace", "a:", "--data-dir", str(tmp_path / "a b")]
        assert doctor(*flags)["workers"]["note"].endswith(shlex.join(flags))


def test_prose_stands_on_lines_of_its_own(
    doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    with RealServer(appendfsync="everysec") as weak:
        main(["doctor", "--redis", weak.url])
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"-> redis-cli -s {weak.socket} CONFIG SET appendfsync always" in shown
    assert "or have submits wait for the disk: Client(wait_fsync=True)" in shown


def test_a_server_that_hangs_is_given_up_soon(doctor: Doctor) -> None:
    with RealServer() as server:
        server.pause()
        began = time.monotonic()
        found = doctor("--redis", server.url)
        # About 3 s, on a machine with something else to do; it took more than 20.
        assert time.monotonic() - began < 12
        server.resume()
    assert found["server"]["level"] == "problem"
    assert "no answer" in found["server"]["says"]
    assert shlex.split(found["server"]["fix"]) == ["redis-cli", "-s", str(server.socket), "ping"]


def test_help_says_what_a_missing_worker_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "no worker is alive is a warning" in capsys.readouterr().out
