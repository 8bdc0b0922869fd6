"""`Hosted`: one model of a worker, loaded or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

from ._model_adapters import ModelAdapters

if TYPE_CHECKING:
    from tenuto_engine import Engine, ModelFacts, RowCost

    from ._run import Run
    from ._settings import WorkerSettings

_LONGEST_PAUSE_S: Final = 300.0


class ModelState(StrEnum):
    """Where a model stands in this worker."""

    COLD = "cold"
    """Not in memory. Left by a claim; entered at the start, and when others need its memory."""
    LOADING = "loading"
    """Its memory is reserved; jobs may be claimed, and wait. Left when it is loaded, or is not."""
    WARM = "warm"
    """In memory; left when it has no runs and its memory is needed."""
    BROKEN = "broken"
    """It could not be loaded. Nothing is claimed for it until `retry_at`, then as of a cold one."""


@dataclass(slots=True, eq=False)
class Hosted:
    """A model under the name by which it is served.

    Attributes:
        adapters: its LoRA adapters here.
        facts: what its files tell; None if they could not be read.
        engine: there while it is warm.
        cost: what a row takes; None if its files do not tell, before it was loaded once.
        used_at: when it last had a run, by the monotonic clock.
        failures: attempts in a row in which it could not be loaded; `reason` is why.
        retry_at: when the next may be made, by the monotonic clock.
        waiting: claimed runs that wait until it is loaded.
    """

    name: str
    path: str
    adapters: ModelAdapters = field(default_factory=ModelAdapters)
    state: ModelState = ModelState.COLD
    facts: ModelFacts | None = None
    engine: Engine | None = None
    cost: RowCost | None = None
    weight_bytes: int = 0
    used_at: float = 0.0
    failures: int = 0
    reason: str = ""
    retry_at: float = 0.0
    waiting: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, settings: WorkerSettings) -> Self:
        """One of the models of a worker."""
        folder = settings.adapter_folders.get(name)
        adapters = ModelAdapters(name, folder, settings.hash_cache)
        return cls(name, settings.models[name], adapters)

    @property
    def in_memory(self) -> bool:
        """Whether its memory is taken, or is about to be."""
        return self.state in (ModelState.LOADING, ModelState.WARM)

    @property
    def fingerprint(self) -> str:
        """Of its geometry; "" if it is not known."""
        return "" if self.facts is None else self.facts.geometry.fingerprint

    def learn(self, facts: ModelFacts) -> None:
        """Take what its files tell."""
        if facts != self.facts:
            self.facts, self.weight_bytes, self.cost = facts, facts.weight_bytes, facts.row_cost

    def warmed(self, engine: Engine) -> None:
        """It is loaded."""
        self.state, self.engine = ModelState.WARM, engine
        # Where the files did not tell it, the arrays do.
        self.weight_bytes, self.cost = engine.weight_bytes, engine.row_cost
        self.failures, self.reason = 0, ""

    def cooled(self) -> Engine:
        """It is not in memory once the engine, which is returned, is dropped."""
        engine, self.engine, self.state = self.engine, None, ModelState.COLD
        assert engine is not None, "only a warm model is unloaded"
        return engine

    def broke(self, reason: str, now: float, first_pause: float) -> float:
        """It could not be loaded; returns after how many seconds it may be tried again: after
        `first_pause`, and after twice as long each time."""
        self.state, self.engine, self.reason = ModelState.BROKEN, None, reason
        pause = min(first_pause * 2.0 ** min(self.failures, 16), _LONGEST_PAUSE_S)
        self.failures += 1
        self.retry_at = now + pause
        return pause

    def rests(self, now: float) -> bool:
        """Whether it failed so lately that it is not tried."""
        return self.state is ModelState.BROKEN and now < self.retry_at

    def need(self, tokens: int) -> int:
        """Bytes of a row of so many tokens; 0 as long as nobody knows."""
        if self.cost is None or tokens <= 0:
            return 0
        return self.cost.of(tokens) + self.adapters.largest

    def tokens_in(self, size: float) -> int | None:
        """The most tokens of a row in so many bytes; None if memory sets no limit."""
        return None if self.cost is None else self.cost.tokens_in(size - self.adapters.largest)
