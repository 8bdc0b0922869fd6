"""A log that continues what its writer never synced: it must not be durable before that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from disks import CrashingDisk, PowerCut
from engine_runs import PROMPT, STYLES
from log_samples import image
from tenuto_engine import Checkpoint, CheckpointStore, Engine, GenerationOptions, resume_options

T = TypeVar("T")


class Killed(CrashingDisk):
    """A disk whose user can be killed, while the machine lives on.

    Attributes:
        syncs: it is killed before the next one after so many syncs of files; None for never.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.syncs: int | None = None

    def around(self, name: str, call: Callable[[], T]) -> T:
        if name == "sync" and self.syncs is not None:
            if self.syncs == 0:
                raise PowerCut
            self.syncs -= 1
        return super().around(name, call)


def run_to(
    engine: Engine, store: CheckpointStore, options: GenerationOptions, count: int
) -> Checkpoint:
    """Save at token `count` of the run that begins anew or goes on from the newest checkpoint."""
    prompt = engine.encode_prompt(PROMPT, raw=True)
    found = store.newest_valid()
    ids, resumed = (prompt, options) if found is None else resume_options(found, options)
    sequence = engine.add(ids, resumed)
    while len(sequence.tokens) < count:
        engine.step()
    whole = engine.checkpoint(sequence)
    assert whole is not None
    try:
        engine.checkpoint_to(sequence, store.save)
    finally:
        engine.close(sequence)
    return whole


@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_reported_durable_survives_though_what_it_continues_was_never_synced(
    llama: Engine, tmp_path: Path, seed: int
) -> None:
    disk = Killed(seed)
    folder = tmp_path / "j1"
    options = GenerationOptions(**STYLES["sampled"], max_tokens=60)
    run_to(llama, CheckpointStore(folder, epoch=1, fs=disk), options, 10)
    disk.syncs = 2  # of the log continued, and of its own BEGIN
    with pytest.raises(PowerCut):
        run_to(llama, CheckpointStore(folder, epoch=1, nonce="late", fs=disk), options, 20)
    disk.syncs = None
    heir = CheckpointStore(folder, epoch=2, fs=disk)
    unsynced = heir.newest_valid()
    assert unsynced is not None
    assert unsynced.origin is not None
    assert unsynced.origin.file == "00000001-late.log"
    saved = run_to(llama, heir, options, 30)
    assert heir.durable.generated == saved.generated_tokens
    disk.lose_power()
    found = CheckpointStore(folder).newest_valid()
    assert found is not None
    assert image(found) == image(saved)
