"""The users of ops/users.conf: everything works under them, and nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from failover import Group
from servers import RealServer
from tenuto_client import Client
from tenuto_client._command import main
from tiny_models import build_tiny_model
from workers import MODEL, WorkerProcess, poll_until

ROOT = Path(__file__).parents[2]
USERS = ROOT / "ops" / "users.conf"
SCRIPTS = {
    "tenuto-client": ROOT / "client" / "tenuto_client" / "lua",
    "tenuto-worker": ROOT / "worker" / "tenuto_worker" / "lua",
}
COMMON = SCRIPTS["tenuto-client"] / "_common.lua"
WORD = "sesame"

Tenuto = Callable[..., str]


def _users() -> list[str]:
    """The lines of the file, as a server of a test gets them."""
    lines = USERS.read_text().replace("CHANGE-ME", WORD).splitlines()
    return [line for line in lines if line.startswith("user ")]


def _rights(user: str) -> set[str]:
    (line,) = [line for line in _users() if line.startswith(f"user {user} ")]
    return {word[1:] for word in line.split() if word.startswith("+")}


@pytest.fixture
def users(tmp_path: Path) -> str:
    """The file as a server of a test includes it: without a word, a test may do everything."""
    file = tmp_path / "users.conf"
    file.write_text("\n".join(line for line in _users() if "default" not in line) + "\n")
    return str(file)


@pytest.fixture
def guarded(users: str) -> Iterator[RealServer]:
    """A server with these users."""
    with RealServer(include=users) as server:
        yield server


@pytest.fixture
def tenuto(
    guarded: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Tenuto:
    """Runs a command, and returns what it printed. It must succeed."""
    monkeypatch.setenv("TENUTO_DATA_DIR", str(tmp_path / "data"))

    def run(*args: str, user: str = "tenuto-client", code: int | None = 0) -> str:
        monkeypatch.setenv("TENUTO_REDIS_URL", _url(guarded, user))
        found = main(args)
        printed = capsys.readouterr()
        assert code in (None, found), printed.err
        return printed.out.strip()

    return run


def _url(server: RealServer, user: str) -> str:
    return f"unix://{user}:{WORD}@{server.socket}"


def test_nobody_comes_in_without_a_name() -> None:
    assert "user default off" in _users()


@pytest.mark.parametrize("user", SCRIPTS)
def test_the_rights_have_every_command_of_the_scripts(user: str) -> None:
    sources = [COMMON.read_text(), *(path.read_text() for path in SCRIPTS[user].glob("*.lua"))]
    called = {
        name.lower()
        for source in sources
        for name in re.findall(r"redis\.p?call\(\s*['\"]([A-Za-z]+)['\"]", source)
    }
    assert len(called) > 15
    assert called - _rights(user) == set()


def test_every_command_and_a_worker_run_with_these_rights(
    guarded: RealServer, tenuto: Tenuto, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "model")
    worker = WorkerProcess(model, _url(guarded, "tenuto-worker"), tmp_path / "data")
    with worker, guarded.client() as admin:
        worker.wait_ready()
        done = tenuto("submit", MODEL, "hi", "--max-tokens", "20", "--seed", "1")
        tenuto("result", done)
        tenuto("watch", done, "--json")
        assert json.loads(tenuto("status", done, "--json"))["state"] == "completed"
        long = tenuto("submit", MODEL, "hi", "--max-tokens", "3000", "--idempotency-key", "k")
        poll_until(lambda: json.loads(tenuto("status", long, "--json"))["tokens"] > 0, "tokens")
        tenuto("cancel", long)
        tenuto("result", long, code=1)
        tenuto("resume", long)
        worker.kill_child()
        worker.wait_ready(times=2)
        tenuto("cancel", long)
        tenuto("result", long, code=1)
        tenuto("list", "--json")
        tenuto("models", "--json")
        tenuto("limits", "set", "max_queued=10")
        tenuto("limits", "clear")
        # It may find the disk of this machine too small, but must be let see everything.
        looked = [json.loads(line) for line in tenuto("doctor", "--json", code=None).splitlines()]
        (durability,) = [each["says"] for each in looked if each["subject"] == "durability"]
        assert durability.startswith("appendonly yes, appendfsync always")
        tenuto("checkpoints", "list", user="tenuto-worker")
        tenuto("checkpoints", "verify", user="tenuto-worker")
        tenuto("delete", long)
        tenuto("checkpoints", "gc", user="tenuto-worker")
        worker.term()
        for key in admin.scan_iter("tenuto:*"):
            admin.delete(key)
        looked = [json.loads(line) for line in tenuto("doctor", "--json", code=None).splitlines()]
        (lost,) = [each["says"] for each in looked if each["subject"] == "lost"]
        assert lost.startswith("1 job with checkpoints")
        tenuto("checkpoints", "recover", user="tenuto-worker")
        assert json.loads(tenuto("status", done, "--json"))["state"] == "completed"
        assert not worker.lines("thread died")
        assert not worker.lines("ticket reader died")
        denied = admin.acl_log()
    # redis-py asks for these where a server has them, and does without.
    assert {entry["object"] for entry in denied} <= {"client|maint_notifications"}


@pytest.mark.parametrize("user", ["tenuto-client", "tenuto-worker"])
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "SET", "appendonly", "no"),
        ("ACL", "LIST"),
        ("GET", "somebody-elses"),
        ("EVAL", "return redis.call('GET', 'somebody-elses')", "0"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
        ("PUBLISH", "somebody-elses", "x"),
        ("MONITOR",),
        ("SHUTDOWN",),
    ],
)
def test_what_is_none_of_their_business_is_denied(
    user: str, command: tuple[str, ...], guarded: RealServer
) -> None:
    with (
        redis.Redis.from_url(_url(guarded, user), socket_timeout=10) as client,
        pytest.raises(redis.ResponseError, match=r"permission"),
    ):
        client.execute_command(*command)


async def test_replication_and_sentinels_work_with_rights_of_their_own(users: str) -> None:
    with Group(
        user=f"tenuto-client:{WORD}",
        sentinel=f"sentinel auth-user jobs tenuto-sentinel\nsentinel auth-pass jobs {WORD}\n",
        include=users,
        masteruser="tenuto-replica",
        masterauth=WORD,
    ) as group:
        async with Client(group.url, retry_for=60) as client:
            assert not await client.models()
            master = group.master
            master.kill()
            group.wait_failover(master)
            assert not await client.models()
            assert not await client.list()
        with group.master.client() as admin:
            assert {entry["object"] for entry in admin.acl_log()} <= set()
