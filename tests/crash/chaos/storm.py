"""`Storm`: faults by a seeded plan over jobs that keep coming; then calm, and all is checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from .crowd import Crowd
from .faults import WEIGHTS, Fault, Faults, name_of
from .leftovers import in_redis, of_deleted, on_disk
from .patron import Patron
from .pool import Piece
from .stage import Stage

_RETRY_S: Final = 0.1
_AT_MOST: Final = 1.5
_STARTING_S: Final = 20


@dataclass(frozen=True)
class Plan:
    """A storm before it happens. The same seed draws the same faults in the same order.

    Attributes:
        faults: how many shall hit.
        every: seconds between two, on average.
        calm: for how many seconds a job may get on by no token once all faults are over.
        patience: seconds in which files of ended jobs must be gone; None does not look.
    """

    seed: int
    faults: int
    every: float
    open_jobs: int = 16
    calm: float = 180.0
    patience: float | None = None

    @property
    def seconds(self) -> float:
        """How long it shall take."""
        return self.faults * self.every

    def draw(self) -> Iterator[tuple[float, Fault, random.Random]]:
        """Pauses in seconds, with the fault after each and its own source of chance."""
        chance = random.Random(self.seed)
        # Every kind comes once before any comes twice.
        bag = list(WEIGHTS)
        chance.shuffle(bag)
        while True:
            if not bag:
                bag = [fault for fault, weight in WEIGHTS.items() for _ in range(weight)]
                chance.shuffle(bag)
            pause = self.every * chance.uniform(0.2, 1.8)
            yield pause, bag.pop(), random.Random(chance.random())


@dataclass
class Outcomes:
    """What came of it.

    Attributes:
        hits: how often each fault hit something.
        misses: how often there was nothing to hit; these do not count.
        violations: what did not hold, each with its story.
        story: every fault with when it came and what it hit.
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    patrons: Sequence[Patron] = ()
    seconds: float = 0.0


class Storm:
    """One run of a plan.

    Args:
        say: gets a line now and then.
    """

    def __init__(
        self, plan: Plan, stage: Stage, pool: Sequence[Piece], say: Callable[[str], object]
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._pool = pool
        self._say = say
        self.outcomes = Outcomes()

    def run(self) -> Outcomes:
        """Storm, calm, and checks."""
        asyncio.run(self._run())
        return self.outcomes

    async def _run(self) -> None:
        chance = random.Random(self._plan.seed)
        self._crowd = Crowd(self._stage, self._pool, chance, self._plan.open_jobs)
        try:
            async with asyncio.timeout(60):
                await self._crowd.wait_models(len({each.case.model for each in self._pool}))
            await self._rage()
            await self._calm_down()
            self._check()
            await self._check_afterwards()
        finally:
            self.outcomes.patrons = self._crowd.patrons
            self.outcomes.events = self._stage.events()
            await self._crowd.close()

    async def _rage(self) -> None:
        faults = Faults(self._stage, self._crowd)
        self._began = time.monotonic()
        coming = asyncio.create_task(self._crowd.keep_coming())
        due = self._began
        try:
            for pause, fault, chance in self._plan.draw():
                if self.outcomes.hits.total() >= self._plan.faults:
                    break
                if time.monotonic() - self._began > _AT_MOST * self._plan.seconds + _STARTING_S:
                    self._violated("the storm itself", "too many faults had nothing to hit")
                    break
                due += pause
                await asyncio.sleep(due - time.monotonic())
                self._stage.revive()
                if not await self._strike(faults, fault, chance):
                    # What hit nothing took no time.
                    due = time.monotonic() - pause + _RETRY_S
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            self.outcomes.seconds = time.monotonic() - self._began
        self._say("no more faults; what they did is undone")
        await faults.settle()
        self._stage.revive()

    async def _strike(self, faults: Faults, fault: Fault, chance: random.Random) -> bool:
        name = name_of(fault)
        what = await fault(faults, chance)
        if what is None:
            self.outcomes.misses[name] += 1
            return False
        self.outcomes.hits[name] += 1
        at = time.monotonic() - self._began
        line = f"{at:7.1f} s  {self.outcomes.hits.total():3}  {name}: {what}"
        self.outcomes.story.append(line)
        self._say(line)
        return True

    # -- what must hold --------------------------------------------------------------------

    async def _calm_down(self) -> None:
        """G1: everything that was accepted, and not deleted, has an end.

        A machine with other things to do takes long for it; what counts is that each gets on.
        """
        calming = asyncio.create_task(self._crowd.calm_down())
        moved: dict[str, tuple[int, float]] = {}
        stuck: list[str] = []
        while not (calming.done() or stuck):
            await asyncio.wait([calming], timeout=1)
            now = time.monotonic()
            # With nobody open, what the server has forgotten is looked for again and again.
            waiting = self._crowd.waiting_for() or {"the crowd": 0}
            moved = {
                who: moved[who] if moved.get(who, (-1, now))[0] == tokens else (tokens, now)
                for who, tokens in waiting.items()
            }
            stuck = [who for who, (_, since) in moved.items() if now - since > self._plan.calm]
        calming.cancel()
        await asyncio.wait([calming])
        if not calming.cancelled():
            calming.result()
        for who in stuck:
            self._violated(
                "G1 no loss",
                f"{who} has no end, and for {self._plan.calm:g} s no token behind {moved[who][0]}",
            )
        for error in self._crowd.failed_acts:
            self._violated("what users asked for", error)
        for patron, broken in self._crowd.broken.items():
            self._violated("G1 no loss", f"{patron}: its reader failed: {broken!r}")

    def _check(self) -> None:
        """G2 to G5: what readers got is what the undisturbed run gives, each index once."""
        for patron in self._crowd.patrons:
            if patron in self._crowd.broken:
                continue
            try:
                patron.check_readings()
            except (AssertionError, IndexError) as error:
                self._violated("G2 to G5", f"{patron}: {error}")

    async def _check_afterwards(self) -> None:
        for patron in self._crowd.patrons:
            if patron in self._crowd.broken:
                continue
            try:
                async with asyncio.timeout(20):
                    await patron.check_afterwards()
            except Exception as error:  # noqa: BLE001 - each is told, and the others are checked
                self._violated("record and stream", f"{patron}: {error!r}")
        models = {each.case.model for each in self._pool}
        await self._none_left(5, lambda: in_redis(self._stage, models))
        await self._none_left(5, lambda: of_deleted(self._stage, self._crowd.patrons))
        if self._plan.patience is not None:
            self._say("waiting until the files of ended jobs are gone")
            await self._none_left(
                self._plan.patience, lambda: on_disk(self._stage, self._crowd.patrons)
            )

    async def _none_left(self, seconds: float, look: Callable[[], list[str]]) -> None:
        deadline = time.monotonic() + seconds
        while left := await asyncio.to_thread(look):
            if time.monotonic() > deadline:
                for each in left:
                    self._violated("leftovers", each)
                return
            await asyncio.sleep(0.5)

    def _violated(self, what: str, story: str) -> None:
        self.outcomes.violations.append(f"{what}: {story}")
        self._say(f"VIOLATION {what}: {story}")
