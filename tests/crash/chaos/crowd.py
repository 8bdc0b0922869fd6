"""`Crowd`: all who have jobs; as many are open as are wanted, as long as the storm lasts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import redis

from tenuto_client import Client, JobGone, SubmitOptions

from .patron import Patron
from .pool import SLOTS, Piece, in_turn
from .stage import POISON_SEED, Stage

_TENANTS = ("anna", "ben", "cleo")
_EVERY_S = 0.1


class Crowd:
    """Submits, and keeps count of what went wrong with whom.

    Args:
        open_jobs: how many there are at once.

    Attributes:
        patrons: all that there ever were.
        broken: whose reading or resuming failed.
        failed_acts: cancels, deletes and the like that failed, each as it said.
        held: nobody submits or deletes now.
    """

    def __init__(
        self, stage: Stage, pool: Sequence[Piece], chance: random.Random, open_jobs: int
    ) -> None:
        self._stage = stage
        self._chance = chance
        self._pool = pool
        self._pieces = in_turn(pool, chance)
        self._wanted = open_jobs
        self._client = Client(stage.readers.url, namespace=stage.namespace, retry_for=60)
        self._lives: dict[Patron, asyncio.Task[None]] = {}
        self._acts: set[asyncio.Task[None]] = set()
        self.patrons: list[Patron] = []
        self.broken: dict[Patron, BaseException] = {}
        self.failed_acts: list[str] = []
        self.held = False

    async def close(self) -> None:
        tasks = [*self._lives.values(), *self._acts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def wait_models(self, count: int) -> None:
        """Wait until workers have announced so many models."""
        while len(await self._client.models()) < count:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(_EVERY_S)

    async def keep_coming(self) -> None:
        """Submit whenever one has ended, until cancelled."""
        while True:
            if not self.held and len(self._open()) < self._wanted:
                self.submit(priority=self._chance.randint(-10, 10))
            await asyncio.sleep(_EVERY_S)

    def submit(self, *, priority: int, model: str | None = None) -> Patron:
        """Somebody comes with a job."""
        piece = next(each for each in self._pieces if model in (None, each.case.model))
        extra = SubmitOptions(priority=priority, tenant=self._chance.choice(_TENANTS))
        return self._begin(Patron(self._client, piece, extra, poison=False))

    def submit_hurried(self, limits: SubmitOptions) -> Patron:
        """Somebody comes with a job that has little time."""
        return self._begin(Patron(self._client, next(self._pieces), limits, poison=False))

    def submit_poison(self) -> Patron:
        """Somebody comes with a job that kills whoever runs it."""
        extra = SubmitOptions(seed=POISON_SEED, tenant=self._chance.choice(_TENANTS))
        return self._begin(Patron(self._client, next(self._pieces), extra, poison=True))

    def act(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a user do something, however long the server takes to hear of it."""

        async def quietly() -> None:
            try:
                await work
            except JobGone:
                return
            except Exception as error:  # noqa: BLE001 - told at the end, with all others
                self.failed_acts.append(repr(error))

        task = asyncio.create_task(quietly())
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

    async def hold(self) -> None:
        """Nobody submits or deletes until `release`; what is on its way arrives first."""
        self.held = True
        while self._acts or any(each.job is None for each in self._open()):  # noqa: ASYNC110
            await asyncio.sleep(_EVERY_S)

    def release(self) -> None:
        """Undo `hold`."""
        self.held = False

    def reading(self) -> list[Patron]:
        """Those that read a job which has not ended."""
        return [each for each in self._open() if each.job and each.is_reading and not each.deleted]

    @property
    def tokens(self) -> int:
        """How many tokens readers have, of all jobs together."""
        return sum(patron.count for patron in self.patrons)

    def full_model(self) -> str | None:
        """A model of which jobs wait for those that run, if there is one."""
        stage = self._stage
        try:
            ids = stage.raw.zrange(stage.keys.running(), 0, -1)
            models = Counter(stage.raw.hget(stage.keys.job(each), "model") for each in ids)
            waiting = {each for each in models if stage.raw.exists(stage.keys.queued(each))}
        except redis.RedisError:
            return None
        return next(
            (name for name, n in models.most_common() if name in waiting and n >= SLOTS), None
        )

    async def calm_down(self) -> None:
        """Wait until every job has an end to stay: also those whose end the server forgot."""
        while True:
            await self._all_lives()
            pending = [each for each in self.patrons if await self._goes_on(each)]
            if not pending and not self._acts:
                return
            await asyncio.sleep(_EVERY_S)

    def waiting_for(self) -> dict[str, int]:
        """Who has no end yet, and how many tokens they have."""
        return {str(each): each.count for each in self._open()}

    async def _goes_on(self, patron: Patron) -> bool:
        """Whether a job that its user took for ended has not; it is taken up again."""
        if patron in self.broken or patron.job is None:
            return False
        record = await patron.record()
        if record is None:
            return False
        if patron.deleted:
            await patron.delete()
            return True
        if record.state is patron.last_state:
            return False
        self._lives[patron] = asyncio.create_task(patron.read_again(record.state))
        return True

    async def _all_lives(self) -> None:
        for patron, task in list(self._lives.items()):
            # Not awaited: a time that is over must not end the life that is late.
            await asyncio.wait([task])
            try:
                task.result()
            except Exception as error:  # noqa: BLE001 - told at the end, with all others
                self.broken[patron] = error
            del self._lives[patron]

    def _open(self) -> list[Patron]:
        return [patron for patron, task in self._lives.items() if not task.done()]

    def _begin(self, patron: Patron) -> Patron:
        self.patrons.append(patron)
        self._lives[patron] = asyncio.create_task(patron.live())
        return patron
