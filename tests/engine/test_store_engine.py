"""Rows of an engine, saved as they go: what it costs, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine_runs import PROMPT, STYLES, engine_in_memory, finish, run
from log_samples import image
from tenuto_engine import (
    Checkpoint,
    CheckpointStore,
    Engine,
    GenerationOptions,
    LiveCheckpoint,
    Sequence,
    Token,
    resume_options,
)
from tenuto_engine._log import LogFile
from tiny_models import Kind

LoadEngine = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "j1"


def prompt_of(engine: Engine, tokens: int | None = None) -> list[int]:
    prompt = engine.encode_prompt(PROMPT, raw=True)
    return prompt if tokens is None else (prompt * (1 + tokens // len(prompt)))[:tokens]


def begin(engine: Engine, store: CheckpointStore, prompt: list[int], **options: Any) -> Sequence:
    """A row that is saved at every token."""
    how = {"checkpoint_every_tokens": 1, "on_decode_checkpoint": store.save, "max_tokens": 100}
    return engine.add(prompt, GenerationOptions(**(STYLES["greedy"] | how | options)))


def step(engine: Engine, sequence: Sequence, tokens: int) -> list[Token]:
    """Until so many tokens are settled."""
    fresh = []
    while len(sequence.tokens) < tokens:
        fresh += [event.token for event in engine.step()]
    assert sequence.error is None
    assert sequence.stats.checkpoint_errors == 0
    return fresh


def spans(folder: Path, epoch: int = 0) -> list[tuple[int, int, int]]:
    """Generation, start and stop of each record of the log of that epoch."""
    (path,) = folder.glob(f"{epoch:08d}-*.log")
    return [(e.span.generation, e.span.start, e.span.stop) for e in LogFile.scan(path).spans]


def newest(folder: Path) -> Checkpoint:
    found = CheckpointStore(folder).newest_valid()
    assert found is not None
    return found


# -- what it costs ---------------------------------------------------------------------


def growth(engine: Engine, folder: Path, position: int) -> list[int]:
    """Bytes that the log grows by at each of ten checkpoints from that position on."""
    store = CheckpointStore(folder, epoch=position)
    sequence = begin(engine, store, prompt_of(engine, position))
    step(engine, sequence, 2)
    sizes = []
    for tokens in range(3, 14):
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
        step(engine, sequence, tokens)
    engine.close(sequence)
    store.delete()
    return [after - before for before, after in pairwise(sizes)]


def test_a_checkpoint_writes_as_much_at_position_3000_as_at_200(
    load_engine: LoadEngine, kind: Kind, folder: Path
) -> None:
    engine = load_engine(kind, chunk_size=512)
    early, late = growth(engine, folder, 200), growth(engine, folder, 3000)
    # Integers, as offsets, take a few bytes more.
    assert max(late) <= max(early) + 64
    assert max(late) < 8 * 1024


def test_a_live_checkpoint_that_a_store_took_from_copies_no_whole_cache(
    llama: Engine, folder: Path
) -> None:
    store = CheckpointStore(folder)
    kept: list[LiveCheckpoint] = []

    def save(live: LiveCheckpoint) -> None:
        store.save(live)
        kept.append(live)

    sequence = begin(llama, store, prompt_of(llama), on_decode_checkpoint=save)
    step(llama, sequence, 4)
    llama.close(sequence)
    assert kept
    for live in kept:
        assert live._caches is None
        assert live.generated_tokens == len(live.generated)


# -- what comes back -------------------------------------------------------------------


def test_what_was_saved_as_it_went_is_what_a_whole_copy_holds(
    load_engine: LoadEngine, kind: Kind, folder: Path
) -> None:
    engine = load_engine(kind)
    store = CheckpointStore(folder)
    copies: dict[int, Checkpoint] = {}

    def save(live: LiveCheckpoint) -> None:
        copies[len(live.cache_tokens)] = live.whole()
        store.save(live)
        found = store.newest_valid()
        assert found is not None
        assert image(found) == image(copies[len(live.cache_tokens)])

    sequence = begin(engine, store, prompt_of(engine), on_decode_checkpoint=save)
    step(engine, sequence, 40)
    engine.close(sequence)
    assert len(copies) == 40
    for stored in store.candidates():
        if kind != "lfm2":
            assert image(stored.load()) == image(copies[stored.cache_length])


def test_parts_follow_at_the_next_steps_without_being_asked_for(
    llama: Engine, folder: Path
) -> None:
    store = CheckpointStore(folder, part_bytes=20_000)

    def save(live: LiveCheckpoint) -> None:
        taken = store.take(live)
        assert taken is not None
        store.write(taken)

    prompt = prompt_of(llama, 200)
    sequence = begin(
        llama,
        store,
        prompt,
        on_decode_checkpoint=save,
        checkpoint_every_tokens=None,
        checkpoint_every_seconds=None,
    )
    step(llama, sequence, 30)
    llama.close(sequence)
    found = spans(folder)
    assert len(found) > 3
    assert [start for _, start, _ in found] == [0, *(stop for *_, stop in found[:-1])]
    assert store.durable.position == found[-1][2] > len(prompt)
    assert sequence.stats.checkpoints == 1
    assert len(newest(folder).cache_tokens) == store.durable.position


@pytest.mark.parametrize("resumes", [False, True])
def test_caches_that_are_quantized_in_mid_generation_begin_a_new_generation(
    llama: Engine, folder: Path, resumes: bool
) -> None:
    engine = engine_in_memory(llama, "llama_wide")
    prompt = [byte % engine.vocab_size for byte in PROMPT.encode()]
    options = STYLES["greedy"] | {"max_tokens": 60}
    store = CheckpointStore(folder, epoch=1)
    sequence = begin(engine, store, prompt, **options)
    tokens = step(engine, sequence, 10)
    if resumes:
        engine.close(sequence)
        store = CheckpointStore(folder, epoch=2)
        ids, resumed = resume_options(newest(folder), GenerationOptions(**options), tokens)
        sequence = begin(engine, store, ids, **(_fields(resumed) | saving(store)))
    row = engine._slots.rows[0]
    row.caches = [cache.to_quantized(group_size=32, bits=8) for cache in row.caches]
    tokens += step(engine, sequence, 30)
    generations = [generation for generation, *_ in spans(folder, store.epoch)]
    assert generations == [0] * generations.count(0) + [1] * 20
    saved = newest(folder)
    assert {cache.kind for cache in saved.caches} == {"QuantizedKVCache"}
    whole = [*tokens, *finish(engine, sequence).tokens]
    ids, resumed = resume_options(saved, GenerationOptions(**options))
    again = finish(engine, engine.add(ids, resumed))
    assert [*saved.generated, *again.tokens] == whole


def saving(store: CheckpointStore) -> dict[str, Any]:
    return {"checkpoint_every_tokens": 1, "on_decode_checkpoint": store.save}


def _fields(options: GenerationOptions) -> dict[str, Any]:
    names = GenerationOptions.__dataclass_fields__
    return {name: getattr(options, name) for name in names}


# -- going on --------------------------------------------------------------------------


def test_a_resumed_row_adds_to_the_log_it_came_from_and_one_that_replays_writes_all(
    load_engine: LoadEngine, kind: Kind, folder: Path
) -> None:
    engine = load_engine(kind)
    prompt = prompt_of(engine)
    options = STYLES["sampled"] | {"max_tokens": 50}
    whole = run(engine, prompt, **options)
    first = CheckpointStore(folder, epoch=1)
    sequence = begin(engine, first, prompt, **options)
    published = step(engine, sequence, 20)
    engine.close(sequence)

    def go_on(epoch: int, ids: list[int], resumed: GenerationOptions) -> Sequence:
        store = CheckpointStore(folder, epoch=epoch)
        return engine.add(ids, GenerationOptions(**(_fields(resumed) | saving(store))))

    saved = newest(folder)
    heir = go_on(2, *resume_options(saved, GenerationOptions(**options), published))
    fresh = finish(engine, heir)
    assert published + fresh.tokens == whole.tokens
    assert {generation for generation, *_ in spans(folder, 2)} == {0}
    assert spans(folder, 2)[0][1] == len(saved.cache_tokens)
    replay = GenerationOptions(**options, published_tokens=tuple(published))
    assert finish(engine, go_on(3, prompt, replay)).tokens == fresh.tokens
    assert spans(folder, 3)[0][1] == 0
    assert image(newest(folder))[2] == tuple(whole.tokens[:-1])


def test_two_rows_that_run_at_once_are_saved_apart(load_engine: LoadEngine, folder: Path) -> None:
    engine = load_engine("llama", slots=2)
    stores = [CheckpointStore(folder.parent / name) for name in ("j1", "j2")]
    prompts = [prompt_of(engine), prompt_of(engine)[::-1]]
    rows = [begin(engine, *each) for each in zip(stores, prompts, strict=True)]
    while any(len(row.tokens) < 20 for row in rows):
        engine.step()
    for row in rows:
        engine.close(row)
    for store, prompt, row in zip(stores, prompts, rows, strict=True):
        found = newest(store.folder)
        assert list(found.cache_tokens[: len(prompt)]) == prompt
        assert list(found.generated) == row.tokens[: found.generated_tokens]
