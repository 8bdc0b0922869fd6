"""Crash after crash at random moments, through store and writer: the run that nobody disturbed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cache_models import CacheModel
from engine_runs import PROMPT, STYLES, Run, engine_in_memory, run
from sample_rows import damage
from tenuto_engine import (
    CheckpointStore,
    CheckpointWriter,
    Engine,
    GenerationOptions,
    Sequence,
    Token,
    resume_options,
)
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

TOKENS = 190
"""With the prompt more than the 256 positions after which a cache grows."""
PATIENCE = 20.0


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job, and the crash that ends it.

    Attributes:
        steps: steps that it makes.
        every: tokens between checkpoints.
        part_bytes: most of a delta.
        extra: a checkpoint is asked for after so many steps, too.
        flushed: whether all that was submitted reaches the disk before the crash.
        unpublished: tokens that were handed out and reached no reader.
        harm: what becomes of the files after the crash.
    """

    steps: int
    every: int
    part_bytes: int = 2**26
    extra: int = 10**9
    flushed: bool = True
    unpublished: int = 0
    harm: str = "none"


attempts = st.builds(
    Attempt,
    steps=st.integers(1, 90),
    every=st.sampled_from([1, 2, 7, 16]),
    part_bytes=st.sampled_from([2**26, 20_000]),
    extra=st.integers(1, 90),
    flushed=st.booleans(),
    unpublished=st.sampled_from([0, 0, 1, 3]),
    harm=st.sampled_from(["none", "none", "none", "bit", "cut", "state", "all"]),
)


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power stays on here."""
    monkeypatch.setattr("tenuto_engine._fs._sync", lambda handle: None)


class Job:
    """A generation that outlives the processes that run it."""

    def __init__(self, engine: Engine, folder: Path, options: dict[str, Any]) -> None:
        self.engine = engine
        self.folder = folder
        self.options = GenerationOptions(**options)
        self.prompt = prompt_of(engine)
        self.published: list[Token] = []
        self.epoch = 0
        self.resumed_at: list[int] = []
        self._drawn = random.Random(len(options))

    def begin(self, part_bytes: int) -> tuple[CheckpointStore, list[int], GenerationOptions]:
        """What a new process does before its first step."""
        self.epoch += 1
        store = CheckpointStore(self.folder, epoch=self.epoch, part_bytes=part_bytes)
        found = store.newest_valid()
        self.resumed_at.append(len(found.cache_tokens) if found else 0)
        if found is None:
            tokens = self.prompt
            options = replace(self.options, published_tokens=tuple(self.published))
        else:
            tokens, options = resume_options(
                found, self.options, self.published, prompt_tokens=self.prompt
            )
        store.open(self.prompt, self.options.seed or 0, options.cache_origin)
        return store, tokens, options

    def live_and_crash(self, attempt: Attempt) -> None:
        store, tokens, options = self.begin(attempt.part_bytes)
        writer = CheckpointWriter()
        options = replace(
            options,
            checkpoint_every_tokens=attempt.every,
            checkpoint_every_seconds=None,
            on_decode_checkpoint=lambda live: writer.submit(store, live),
        )
        sequence = self.engine.add(tokens, options)
        for step in range(attempt.steps):
            self.step(sequence)
            if step == attempt.extra:
                self.engine.checkpoint_to(sequence, lambda live: writer.submit(store, live))
            if sequence.state.is_end:
                break
        if attempt.flushed:
            assert writer.flush(PATIENCE)
        store.close()
        assert writer.close(PATIENCE)
        self.engine.close(sequence)
        assert sequence.stats.divergences == 0
        if attempt.unpublished and not sequence.state.is_end:
            del self.published[-attempt.unpublished :]
        self.harm(attempt.harm)

    def step(self, sequence: Sequence) -> None:
        fresh = [event.token for event in self.engine.step()]
        if sequence.error is not None:
            raise sequence.error
        self.published += fresh

    def end(self) -> Run:
        """Go on to the end, undisturbed."""
        _, tokens, options = self.begin(2**26)
        sequence = self.engine.add(tokens, options)
        while not sequence.state.is_end:
            self.step(sequence)
        assert sequence.stats.divergences == 0
        return Run(self.published, sequence.end_text, sequence.finish_reason)

    def harm(self, what: str) -> None:
        """Do to a file what disks and people do."""
        logs = sorted(self.folder.glob("*.log"))
        states = sorted(self.folder.glob("*.state"))
        if what == "all":
            shutil.rmtree(self.folder)
        elif what == "state" and states:
            self._drawn.choice(states).unlink()
        elif what == "bit":
            path = self._drawn.choice(logs + states)
            damage(path, self._drawn.randrange(path.stat().st_size))
        elif what == "cut":
            content = logs[-1].read_bytes()
            logs[-1].write_bytes(content[: self._drawn.randrange(len(content))])


def prompt_of(engine: Engine) -> list[int]:
    return [byte % engine.vocab_size for byte in PROMPT.encode()]


def assert_chain_is_exact(
    engine: Engine, root: Path, chain: list[Attempt], options: dict[str, Any], whole: Run
) -> Job:
    folder = root / "j1"
    shutil.rmtree(folder, ignore_errors=True)
    job = Job(engine, folder, options)
    for attempt in chain:
        job.live_and_crash(attempt)
    assert job.end() == whole
    return job


def test_any_chain_of_crashes_gives_the_undisturbed_run(
    load_engine: LoadEngine, kind: Kind, tmp_path: Path
) -> None:
    engines = {style: load_engine(kind, pipelined=style == "sampled") for style in STYLES}
    options = {style: STYLES[style] | {"max_tokens": TOKENS} for style in STYLES}
    wholes = {s: run(engines[s], prompt_of(engines[s]), **options[s]) for s in STYLES}

    @settings(
        max_examples=3,
        derandomize=True,
        database=None,
        deadline=None,
        # Shrinking a chain takes minutes; those that are drawn are short.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(attempts, min_size=2, max_size=4), st.sampled_from(sorted(STYLES)))
    def check(chain: list[Attempt], style: str) -> None:
        assert_chain_is_exact(engines[style], tmp_path, chain, options[style], wholes[style])

    check()


def test_a_long_chain_of_undamaged_attempts_replays_nothing(
    load_engine: LoadEngine, kind: Kind, tmp_path: Path
) -> None:
    engine = load_engine(kind, pipelined=kind != "lfm2")
    options = STYLES["sampled"] | {"max_tokens": TOKENS}
    whole = run(engine, prompt_of(engine), **options)
    chain = [Attempt(steps=17, every=4) for _ in range(8)]
    job = assert_chain_is_exact(engine, tmp_path, chain, options, whole)
    assert job.resumed_at == sorted(set(job.resumed_at))
    assert len(list(job.folder.glob("*.log"))) == 9


OTHER_MODELS: list[CacheModel] = [
    "mamba2",
    "qwen3_next",
    "falcon_h1",
    "llama4",
    "deepseek_v3",
    "deepseek_v32",
]


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_a_chain_of_crashes_of_every_other_kind_of_model(
    load_engine: LoadEngine, model: CacheModel, tmp_path: Path
) -> None:
    engine = engine_in_memory(load_engine("llama"), model)
    options = STYLES["sampled"] | {"max_tokens": TOKENS}
    whole = run(engine, prompt_of(engine), **options)
    chain = [
        Attempt(steps=4, every=1),
        Attempt(steps=12, every=3, part_bytes=20_000, unpublished=2),
        Attempt(steps=9, every=1, flushed=False, harm="cut"),
        Attempt(steps=20, every=5, extra=13),
    ]
    job = assert_chain_is_exact(engine, tmp_path, chain, options, whole)
    assert job.resumed_at[0] == 0
    assert job.resumed_at[-1] > len(job.prompt)
