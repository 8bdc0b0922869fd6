"""Rows without a model, for the tests of store and writer: every bit is told by its place."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from log_samples import META, PROMPT, Run, image, run_of
from tenuto_engine._caches import CacheState
from tenuto_engine._checkpoint import Checkpoint, Origin
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._live import LiveCheckpoint, Moment
from tenuto_engine._sequence import Drawn
from tenuto_engine._store import CheckpointStore

SEED = 2**64 - 1


class SampleRow:
    """A row that stands wherever it is asked to.

    Args:
        model: what caches it has, as in ``Run``.
        salt: rows of different ones have different KV and tokens everywhere.
        origin: the place in a log that it goes on from.
    """

    def __init__(self, model: str = "all", *, salt: int = 0, origin: Origin | None = None) -> None:
        self.model = model
        self.salt = salt
        self.origin = origin

    def at(self, stop: int) -> LiveCheckpoint:
        """Its checkpoint when the caches hold so many tokens."""
        run = self.run(stop)
        return LiveCheckpoint(
            Moment(
                lineage=self,
                origin=self.origin,
                prompt=PROMPT,
                prompt_tokens=len(PROMPT),
                # A row may have settled a token whose KV is not in its caches yet.
                tokens=list(self.run(stop + 1).tokens()),
                position=stop,
                pending=_Pending(stop) if stop >= len(PROMPT) else None,
                caches=_caches(run),
                seed=SEED,
                divergences=stop % 3,
                first_divergence=2 if stop % 3 else None,
            )
        )

    def run(self, stop: int) -> Run:
        """What decides every bit of it then."""
        return run_of(stop, self.model, salt=self.salt)

    def image(self, stop: int) -> tuple[object, ...]:
        """What ``image`` of the loaded checkpoint must be."""
        return _image(self.run(stop))


class _Pending:
    def __init__(self, stop: int) -> None:
        self._stop = stop

    def read(self) -> Drawn:
        return Drawn(777 + self._stop, -0.125, ((777, -0.125), (3, -2.5)))


def whole(stop: int, model: str = "all", *, salt: int = 0) -> Checkpoint:
    """A checkpoint that depends on nothing; the meta is that of ``sample_store``."""
    return SampleRow(model, salt=salt).at(stop).whole()


def sample_store(folder: Path, epoch: int = 1, **how: Any) -> CheckpointStore:
    """A store of the sample rows' job, which tries again at once after a failure."""
    defaults: dict[str, Any] = {"nonce": "n", "meta": META, "retry_seconds": 0.0}
    return CheckpointStore(folder, epoch=epoch, **(defaults | how))


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint that is wholly undamaged. There must be one."""
    checkpoint = CheckpointStore(folder).newest_valid()
    assert checkpoint is not None
    return checkpoint


def assert_newest(folder: Path, row: SampleRow, stop: int) -> Checkpoint:
    """The newest checkpoint is, to the bit, that of `row` at `stop`."""
    checkpoint = newest(folder)
    assert len(checkpoint.cache_tokens) == stop
    assert image(checkpoint) == row.image(stop)
    return checkpoint


def assert_all_exact(folder: Path, *rows: SampleRow) -> list[int]:
    """Whatever loads is what one of `rows` had there; the lengths that do, newest first."""
    lengths = []
    for stored in CheckpointStore(folder).candidates():
        try:
            checkpoint = stored.load()
        except CheckpointCorrupt:
            continue
        length = len(checkpoint.cache_tokens)
        assert any(image(checkpoint) == row.image(length) for row in rows)
        lengths.append(length)
    return lengths


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def damage(path: Path, position: int = -1) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@cache
def _caches(run: Run) -> list[CacheState]:
    return run.caches()


@cache
def _image(run: Run) -> tuple[object, ...]:
    return run.image()
