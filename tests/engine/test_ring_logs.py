"""A log keeps every position, a ring only the newest: reading does not depend on the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_runs import PROMPT, STYLES
from log_samples import image
from tenuto_engine import (
    Checkpoint,
    CheckpointStore,
    Engine,
    GenerationOptions,
    LiveCheckpoint,
    verify,
)
from tenuto_engine._log import LogFile
from tiny_models import SLIDING_WINDOW


def test_what_no_ring_holds_any_more_is_not_read(
    load_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = load_engine("gemma3_text")
    store = CheckpointStore(tmp_path / "j1")
    wholes: list[Checkpoint] = []

    def save(live: LiveCheckpoint) -> None:
        wholes.append(live.whole())
        store.save(live)

    options = GenerationOptions(
        **STYLES["greedy"],
        max_tokens=130,
        checkpoint_every_tokens=8,
        checkpoint_every_seconds=None,
        on_decode_checkpoint=save,
    )
    for _ in engine.generate(engine.encode_prompt(PROMPT, raw=True), options):
        pass
    (path,) = (tmp_path / "j1").glob("*.log")
    assert damage_forgotten_positions(path) > 10
    assert not verify(path).ok
    found = store.newest_valid()
    assert found is not None
    assert image(found) == image(wholes[-1])


def damage_forgotten_positions(path: Path) -> int:
    """Flip a bit in each blob of the rings alone that they hold no more; how many those were."""
    log = LogFile.scan(path)
    newest = log.spans[-1].span
    assert newest.commit is not None
    rings = {n for n, each in enumerate(newest.commit.layouts) if each.kind == "RotatingKVCache"}
    content = bytearray(path.read_bytes())
    damaged = 0
    for entry in log.spans:
        for slices, blob in zip(entry.span.slices, entry.record.blobs, strict=True):
            of_rings = {leaf for leaf, _ in slices.owners} <= rings
            if of_rings and entry.span.stop <= newest.stop - SLIDING_WINDOW:
                content[blob.offset] ^= 1
                damaged += 1
    path.write_bytes(content)
    return damaged
