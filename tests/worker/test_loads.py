"""Loads that hang, kill the process or raise what nobody expects: the other models are served."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_shop import NAMES, Shop, run_job, warm
from tenuto_client import SyncClient
from tenuto_worker._health import Health, Stage
from tenuto_worker._loads import Loads, note_of, was_asked_to_end
from tenuto_worker._redis import Outage
from workers import WorkerProcess, poll_until, with_site

SITE = Path(__file__).parent / "killer_site"


@pytest.fixture
def client(redis_url: str, namespace: str) -> Iterator[SyncClient]:
    with SyncClient(redis_url, namespace=namespace) as found:
        yield found


# -- real workers ------------------------------------------------------------------------


def test_a_load_that_hangs_at_the_start_ends_the_child_and_the_others_are_served(
    client: SyncClient, redis_url: str, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    shutil.copytree(tiny_model, stuck)
    (stuck / "tokenizer.json").unlink()
    os.mkfifo(stuck / "tokenizer.json")
    flags = ("--model", f"stuck={stuck}", "--stall-seconds", "1")
    with WorkerProcess(
        tiny_model, redis_url, tmp_path / "data", namespace=namespace, flags=flags
    ) as worker:
        death = worker.wait_for("child died", timeout=30)
        assert death["how"] == "exit code 71"
        assert death["why"].startswith("the load of model stuck has stood still for ")
        worker.wait_ready()
        job = client.submit("tiny", "Tell me.", max_tokens=5, ignore_eos=True)
        assert len(job.result(timeout=30).tokens) == 5
        (info,) = poll_until(client.workers, "the announcement")
        assert "exit code 71: the load of model stuck" in info.broken["stuck"]


def test_a_load_that_kills_the_process_keeps_no_other_model_from_being_served(
    client: SyncClient, redis_url: str, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    killer = tmp_path / "killer"
    shutil.copytree(tiny_model, killer)
    with WorkerProcess(
        tiny_model,
        redis_url,
        tmp_path / "data",
        namespace=namespace,
        flags=("--model", f"killer={killer}"),
        environ=with_site(SITE),
    ) as worker:
        worker.wait_for("child died")
        worker.wait_ready(timeout=30)
        job = client.submit("tiny", "Tell me.", max_tokens=5, ignore_eos=True)
        assert len(job.result(timeout=30).tokens) == 5
        assert [line["how"] for line in worker.lines("child died")] == ["SIGKILL"]
        (info,) = poll_until(client.workers, "the announcement")
        assert info.models == ("tiny",)
        assert info.broken == {
            "killer": "a process of this worker died while it loaded this model: SIGKILL"
        }
        assert worker.term() == 0


# -- what is left alone ------------------------------------------------------------------


@pytest.fixture
def die(shop: Shop) -> Callable[[str], None]:
    """As if the worker's process had died while it loaded a model."""
    note = note_of(shop._data, "host-dir-0")
    note.parent.mkdir(parents=True)

    def begin(model: str) -> None:
        with Loads(note).of(model):
            dead = note.read_bytes()
        note.write_bytes(dead)

    return begin


def test_a_model_in_whose_load_the_process_died_is_left_alone_and_then_tried(
    shop: Shop, die: Callable[[str], None]
) -> None:
    die("a")
    worker = shop.worker()
    assert set(worker.rooms.pool.broken()) == {"a"}
    assert warm(worker) == {"b", "c"}
    worker.rooms.pool.turn()  # its rest is over
    assert shop.state(run_job(shop, worker, "a")) == "completed"
    assert worker.rooms.pool.broken() == {}
    assert not note_of(shop._data, "host-dir-0").exists()


def test_each_death_in_its_load_makes_the_rest_of_a_model_longer(
    shop: Shop, die: Callable[[str], None]
) -> None:
    for _ in range(3):
        die("b")
    worker = shop.worker(load_retry_seconds=10)
    assert not worker.rooms.pool.may_claim("b")
    assert worker.rooms.pool._hosted["b"].failures == 3
    assert warm(worker) == {"a", "c"}


def test_where_all_models_killed_a_process_one_is_tried_all_the_same(
    shop: Shop, die: Callable[[str], None]
) -> None:
    for name in ("a", "a", "b", "c", "c"):
        die(name)
    worker = shop.worker(load_retry_seconds=60)
    assert warm(worker) == {"b"}
    assert set(worker.rooms.pool.broken()) == {"a", "c"}


def test_a_process_that_was_told_to_end_blames_no_load(
    shop: Shop, die: Callable[[str], None]
) -> None:
    die("a")
    was_asked_to_end(note_of(shop._data, "host-dir-0"))
    assert warm(shop.worker()) == set(NAMES)


@pytest.mark.parametrize("note", [b"", b"[]", b"\xff", b'{"loading": "a", "deaths": {"a": "x"}}'])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "note").write_bytes(note)
    loads = Loads(tmp_path / "note")
    assert (loads.last, loads.deaths) == ("", {})


def test_without_a_disk_for_the_note_models_are_loaded_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loads = Loads(tmp_path / "file" / "note")
    with loads.of("a"):
        assert loads.since is not None


# -- how long a load stands still --------------------------------------------------------


def test_a_load_that_stands_still_is_told_while_the_worker_starts(shop: Shop) -> None:
    worker = shop.worker()
    loads = worker.rooms.pool.loads
    gate = shop.folders["b"] / "generation_config.json"
    os.mkfifo(gate)
    starter = threading.Thread(target=worker.rooms.load)
    starter.start()
    opened = os.open(gate, os.O_WRONLY)  # returns once the loader reads
    try:
        assert loads.trouble(0.0).startswith("the load of model b has stood still for 0 s")
        assert loads.trouble(60.0) == worker.rooms.trouble() == ""
        health = Health(Outage())
        health.stage, health.trouble = Stage.LOADING, lambda: loads.trouble(0.0)
        assert health.unwell() == health.unready() == loads.trouble(0.0)
        gate.unlink()
    finally:
        os.write(opened, b"{}")
        os.close(opened)
    starter.join(20)
    assert loads.trouble(0.0) == ""


def test_a_download_does_not_stand_still_but_what_follows_may(tmp_path: Path) -> None:
    loads = Loads(tmp_path / "note")
    with loads.of("a"):
        loads.downloads()
        assert loads.trouble(-1.0) == ""
        loads.got_on()
        assert loads.trouble(-1.0)


# -- odd files ---------------------------------------------------------------------------


def _config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _header(folder: Path, header: bytes) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)


ODD: dict[str, Callable[[Path], object]] = {
    "config-deep": lambda folder: (folder / "config.json").write_bytes(b"[" * 100_000),
    "config-part-list": lambda folder: _config(folder, text_config=[1], vocab_size=None),
    "weights-deep": lambda folder: _header(folder, b"[" * 100_000),
    "weights-infinite": lambda folder: _header(
        folder, b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,Infinity]}}'
    ),
    "vocab-huge": lambda folder: _config(folder, vocab_size=10**400),
}


@pytest.mark.parametrize("odd", ODD)
def test_files_that_raise_anything_break_their_own_model_only(shop: Shop, odd: str) -> None:
    ODD[odd](shop.folders["b"])
    worker = shop.worker()
    assert set(worker.rooms.pool.broken()) == {"b"}
    assert warm(worker) == {"a", "c"}
    assert shop.state(run_job(shop, worker, "a")) == "completed"


@pytest.mark.parametrize("length", [10**400, -5, 0, True])
def test_a_context_that_is_no_number_of_tokens_breaks_no_announcement(
    shop: Shop, length: int
) -> None:
    _config(shop.folders["b"], max_position_embeddings=length)
    worker = shop.worker()
    assert worker.rooms.pool.facts["b"].context_length is None
    assert shop.state(run_job(shop, worker, "a")) == "completed"
