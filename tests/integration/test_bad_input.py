"""What cannot be done is refused by name: before anything is written, or in the job's stream."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import RealServer
from tenuto_client import (
    InvalidRequest,
    JobFailed,
    JobState,
    SyncClient,
    UnknownModel,
)
from tiny_models import build_tiny_model
from workers import MODEL, WorkerProcess

CONTEXT = 256


class Service:
    """A worker of one tiny model with a client, and the command with the same settings."""

    def __init__(self, url: str, namespace: str, data_dir: Path) -> None:
        self.client = SyncClient(url, namespace=namespace)
        self._where = ("--redis", url, "--namespace", namespace, "--data-dir", str(data_dir))

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `tenuto` against it."""
        return tenuto(*args, *self._where)

    def count(self) -> int:
        """How many jobs there are."""
        return len(self.client.list(limit=1000))


def tenuto(*args: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("tenuto")
    done = subprocess.run(
        [str(program), *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), context_length=CONTEXT)


@pytest.fixture(scope="module")
def service(
    model: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    namespace = f"t{secrets.token_hex(4)}:"
    data_dir = tmp_path_factory.mktemp("data")
    with WorkerProcess(model, redis_url, data_dir, namespace=namespace) as worker:
        worker.wait_ready()
        service = Service(redis_url, namespace, data_dir)
        yield service
        service.client.close()


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1, -1], {}, "prompt[1]"),
        ([{"role": "user", "content": ""}], {}, "prompt"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"max_tokens": CONTEXT + 1}, "max_tokens"),
        ([5] * (CONTEXT - 1), {"max_tokens": 2}, "max_tokens"),
        ([5] * CONTEXT, {"max_tokens": 1}, "prompt"),
        ("a bc" * 9 * CONTEXT, {"max_tokens": 1}, "prompt"),
        ("x", {"temperature": -0.1}, "temperature"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"top_p": 0}, "top_p"),
        ("x", {"logprobs": 21}, "logprobs"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"stop": [""]}, "stop[0]"),
        ("x", {"max_new_tokens": 5}, "max_new_tokens"),
    ],
)
def test_a_submit_that_cannot_be_is_refused_by_field_and_writes_nothing(
    service: Service, prompt: Any, options: dict[str, Any], field: str
) -> None:
    before = service.count()
    with pytest.raises(InvalidRequest) as caught:
        service.client.submit(MODEL, prompt, **options)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert service.count() == before


def test_a_model_that_nobody_serves_is_refused_with_those_that_are(service: Service) -> None:
    before = service.count()
    with pytest.raises(UnknownModel, match=rf"'nobodys'; known: {MODEL} ") as caught:
        service.client.submit("nobodys", "x")
    assert caught.value.field == "model"
    assert service.count() == before


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("nobodys", "x"), "model: "),
        ((MODEL, ""), "prompt: "),
        ((MODEL, "x", "--max-tokens", "0"), "max_tokens: "),
        ((MODEL, "x", "--temperature", "11"), "temperature: "),
        ((MODEL, "x", "--max-tokens", "many"), "--max-tokens"),
        ((MODEL, "x", "--no-such-flag"), "--no-such-flag"),
    ],
)
def test_the_command_refuses_what_the_client_does_with_exit_code_2(
    service: Service, args: tuple[str, ...], named: str
) -> None:
    done = service.command("submit", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert named in done.stderr


def test_a_text_over_the_context_fails_with_the_reason_in_its_stream_and_the_next_job_runs(
    service: Service,
) -> None:
    # How many tokens a text has, only the worker knows.
    bad = service.client.submit(MODEL, "sea " * 100, raw=True, max_tokens=100)
    good = service.client.submit(MODEL, "sea", max_tokens=5, ignore_eos=True)
    with pytest.raises(JobFailed, match=rf"max_tokens: 100 do not fit.*context {CONTEXT}"):
        bad.result(timeout=30)
    end = list(bad.events())[-1]
    assert "max_tokens: 100 do not fit" in str(getattr(end, "error", ""))
    assert bad.status().state is JobState.FAILED
    assert len(good.result(timeout=30).tokens) == 5


def test_the_command_tells_why_a_job_failed_and_exits_with_1(service: Service) -> None:
    done = service.command(
        "submit", MODEL, "sea " * 100, "--raw", "--max-tokens", "100", "--watch", "--json"
    )
    assert done.returncode == 1
    end = json.loads(done.stdout.splitlines()[-1])
    assert (end["type"], end["state"]) == ("end", "failed")
    assert "max_tokens: 100 do not fit" in end["error"]


def test_a_job_that_is_not_there_is_exit_code_4(service: Service) -> None:
    for command in ("status", "watch", "result", "cancel", "resume", "delete"):
        assert service.command(command, "no-such-job").returncode == 4


@pytest.mark.parametrize("command", [("submit", MODEL, "x"), ("status", "j"), ("watch", "j")])
def test_an_unreachable_redis_is_exit_code_3_and_its_address_is_named(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    url = f"unix://{tmp_path}/nobody-listens"
    done = tenuto(*command, "--redis", url)
    assert done.returncode == 3
    assert url in done.stderr


def test_a_worker_without_redis_ends_with_3(model: Path, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody-listens"
    done = tenuto(
        *("worker", "--model", f"m={model}", "--redis", url, "--data-dir", str(tmp_path / "d"))
    )
    assert done.returncode == 3
    assert url in done.stderr + done.stdout


@pytest.mark.parametrize("place", ["", "checkpoints", "workers"])
def test_a_data_dir_that_cannot_be_written_ends_the_worker_with_2_and_is_named(
    place: str, model: Path, shared_server: RealServer, tmp_path: Path
) -> None:
    # A file in the place of a folder stops root, too.
    blocked = tmp_path / "data" / place
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("not a folder")
    done = tenuto(
        *("worker", "--model", f"m={model}", "--redis", shared_server.url),
        *("--data-dir", str(tmp_path / "data")),
    )
    assert done.returncode == 2
    assert str(blocked) in done.stderr


@pytest.mark.parametrize("place", ["", "redis"])
def test_an_embedded_server_without_a_place_ends_the_command_with_2_and_names_it(
    place: str, tmp_path: Path
) -> None:
    blocked = tmp_path / "data" / place
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("not a folder")
    done = tenuto("submit", MODEL, "x", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2
    assert str(blocked) in done.stderr


def test_a_broken_model_folder_ends_the_worker_with_2_and_is_named(
    model: Path, shared_server: RealServer, tmp_path: Path
) -> None:
    """Whatever is broken; what there may be is in the engine's `test_model.py`."""
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = tenuto(
        *("worker", "--model", f"m={folder}", "--redis", shared_server.url),
        *("--data-dir", str(tmp_path / "d")),
    )
    assert done.returncode == 2
    assert str(folder) in done.stderr + done.stdout
