"""Passwords and users' texts stay where they belong: a worker's whole life is searched for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxies import TlsProxy
from servers import RealServer
from tenuto_client import (
    Client,
    JobFailed,
    Keys,
    ServerUnavailable,
    SyncClient,
    UnknownModel,
)
from tenuto_client._command import main
from tiny_models import build_tiny_model
from workers import MODEL, WorkerProcess, poll_until

WORD = "sesame-opens"
CANARY = "yellow canary"
CONTEXT = 256


@pytest.fixture
def guarded() -> Iterator[RealServer]:
    """A server that also knows a user with a password."""
    with RealServer(user=f"me on >{WORD} ~* &* +@all") as server:
        yield server


def _arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def test_no_log_error_or_argument_has_a_password_or_a_text(
    guarded: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = build_tiny_model(tmp_path / "model", context_length=CONTEXT)
    with TlsProxy(guarded.socket, tmp_path) as tls:
        url = tls.url.replace("://", f"://me:{WORD}@")
        environ = {"TENUTO_REDIS_URL": url}
        shown = []
        with (
            WorkerProcess(model, None, tmp_path / "data", environ=environ) as worker,
            SyncClient(url, retry_for=60) as client,
            guarded.client() as admin,
        ):
            worker.wait_ready()
            told = client.submit(MODEL, CANARY, max_tokens=100, seed=3, ignore_eos=True).result()
            assert len(told.text) > 20
            # Longer than the context, and not so long that a submit can tell.
            asked = f"{CANARY} " * (CONTEXT // 2)
            failed = client.submit(MODEL, asked, max_tokens=10)
            with pytest.raises(JobFailed) as failure:
                failed.result()
            shown.append(str(failure.value))
            with pytest.raises(UnknownModel) as unknown:
                client.submit("tinny", CANARY)
            shown.append(str(unknown.value))
            # An outage, a crash and a stop are what most is said of.
            guarded.restart()
            worker.kill_child()
            worker.wait_ready(times=2)
            shown += [_arguments(worker.pid), _arguments(worker.child_pid)]
            shown += [repr(value) for value in admin.hgetall(Keys().workers()).values()]
            shown.append(client.submit(MODEL, CANARY, max_tokens=5).result().finish_reason or "")
            shown.append(failed.status().error or "")
            monkeypatch.setenv("TENUTO_REDIS_URL", url)
            monkeypatch.setenv("TENUTO_DATA_DIR", str(tmp_path / "data"))
            main(["doctor"])
            guarded.kill()
            main(["doctor"])
            main(["list"])
            poll_until(lambda: worker.lines("redis away"), "the outage")
            guarded.start()
            worker.term()
            shown.append(worker.log())
    printed = capsys.readouterr()
    for text in [*shown, printed.out, printed.err]:
        assert WORD not in text
        assert CANARY not in text
        for start in range(0, len(told.text) - 8, 8):
            assert told.text[start : start + 8] not in text


async def test_a_server_that_repeats_what_it_was_sent_does_not_put_it_into_an_error(
    tmp_path: Path,
) -> None:
    with RealServer(rename_command="EVALSHA ''") as server:
        async with Client(server.url, retry_for=0) as client:
            with pytest.raises(ServerUnavailable, match="unknown command") as refused:
                await asyncio.wait_for(client.job("0123456789abcdef").cancel(), 20)
    assert "args" not in str(refused.value)


def test_a_password_that_is_wrong_is_not_shown(guarded: RealServer) -> None:
    url = f"unix://me:{WORD}-not@{guarded.socket}"
    with (
        SyncClient(url, retry_for=0) as client,
        pytest.raises(ServerUnavailable, match="refuses") as refused,
    ):
        client.models()
    assert WORD not in str(refused.value)
