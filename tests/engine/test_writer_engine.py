"""Rows of an engine whose checkpoints go through the writer: decoding never waits for the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disks import FailingDisk, Gate
from engine_runs import PROMPT, STYLES, finish, run
from sample_rows import (
    newest,
    sample_store,
)
from tenuto_engine import (
    CheckpointStore,
    CheckpointWriter,
    Durable,
    Engine,
    GenerationOptions,
    LiveCheckpoint,
    Token,
    resume_options,
)
from tenuto_engine._errors import CheckpointWriteError

PATIENCE = 20.0


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    made = CheckpointWriter()
    yield made
    assert made.close(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open_up()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "j1"


def submitting(
    writer: CheckpointWriter, store: CheckpointStore
) -> Callable[[LiveCheckpoint], object]:
    return lambda live: writer.submit(store, live)


def test_tokens_flow_while_the_disk_hangs_and_all_becomes_durable_afterwards(
    folder: Path, writer: CheckpointWriter, gate: Gate, llama: Engine
) -> None:
    prompt = llama.encode_prompt(PROMPT, raw=True)
    options = STYLES["sampled"] | {"max_tokens": 300}
    undisturbed = run(llama, prompt, **options)
    store = sample_store(folder, fs=gate, meta={})
    sequence = llama.add(
        prompt,
        GenerationOptions(
            **options, checkpoint_every_tokens=2, on_decode_checkpoint=submitting(writer, store)
        ),
    )
    most = 0
    tokens: list[Token] = []
    while len(tokens) < 200:
        tokens += [event.token for event in llama.step()]
        most = max(most, writer.pending_bytes)
    # What began as the prompt was read, and one delta behind it.
    per_token = 2 * 2 * 2 * 16 * 4
    assert most <= (len(prompt) + 8) * per_token
    assert store.durable == Durable()
    assert gate.reached.is_set()
    gate.open_up()
    assert writer.flush(PATIENCE)
    while len(tokens) < 250:
        tokens += [event.token for event in llama.step()]
    llama.checkpoint_to(sequence, lambda live: writer.submit(store, live, final=True))
    llama.close(sequence)
    assert writer.flush(PATIENCE)
    saved = newest(folder)
    assert saved.generated_tokens >= 249
    assert list(saved.generated) == undisturbed.tokens[: saved.generated_tokens]
    resumed = resume_options(saved, GenerationOptions(**options), tokens)
    rest = finish(llama, llama.add(*resumed))
    assert tokens + rest.tokens == undisturbed.tokens
    assert (rest.end_text, rest.finish_reason) == undisturbed[1:]


def test_a_dead_disk_costs_a_row_next_to_nothing(folder: Path, llama: Engine) -> None:
    errors: list[CheckpointWriteError] = []
    writer = CheckpointWriter(on_error=lambda _, error: errors.append(error))
    prompt = llama.encode_prompt(PROMPT, raw=True)
    disk = FailingDisk("write_at", "create")
    store = sample_store(folder, fs=disk, meta={}, retry_seconds=60.0)
    calls = []

    def submit(live: LiveCheckpoint) -> None:
        calls.append(writer.submit(store, live))

    options = STYLES["greedy"] | {"max_tokens": 100, "checkpoint_every_tokens": 1}
    run(llama, prompt, **options, on_decode_checkpoint=submit)
    assert writer.flush(PATIENCE)
    assert len(calls) == 100
    assert sum(calls) <= 2
    assert len(errors) == 1
    assert writer.pending_bytes == 0
    assert writer.close(PATIENCE)
