"""What may go wrong. Each fault says what it hit, or None if there was nothing to hit."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tenuto_client import SubmitOptions
from workers import WorkerProcess

from .crowd import Crowd
from .stage import Place, Stage

Hit = str | None
Fault = Callable[["Faults", random.Random], Awaitable[Hit]]

_EITHER_SIDE_OF_A_LEASE_S: Final = (0.3, 1.0, 2.5, 5.0)


class Faults:
    """The faults, over a stage and a crowd.

    Attributes:
        aftermath: what a fault has still to undo, such as to wake up who sleeps.
    """

    def __init__(self, stage: Stage, crowd: Crowd) -> None:
        self._stage = stage
        self._crowd = crowd
        self._server = asyncio.Lock()
        self.aftermath: set[asyncio.Task[None]] = set()

    # -- workers ---------------------------------------------------------------------------

    async def kill_child(self, chance: random.Random) -> Hit:
        """SIGKILL of the process that decodes; its supervisor starts another one."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        try:
            return f"{_label(place)} pid {place.process.kill_child()}"
        except ProcessLookupError:
            return None

    async def kill_machine(self, chance: random.Random) -> Hit:
        """SIGKILL of supervisor and child at once; started again there."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        place.process.kill()
        self._stage.restart(place)
        return _label(place)

    async def drain(self, chance: random.Random) -> Hit:
        """SIGTERM; started again there when it has ended."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        self._later(0, lambda: self._drain(place), place)
        return _label(place)

    async def freeze(self, chance: random.Random) -> Hit:
        """SIGSTOP, and SIGCONT before or long after the lease: a zombie."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        seconds = chance.choice(_EITHER_SIDE_OF_A_LEASE_S)
        process = place.process
        try:
            process.stop()
        except ProcessLookupError:
            return None
        self._later(seconds, lambda: _wake(process), place)
        return f"{_label(place)} for {seconds:g} s"

    # -- connections -----------------------------------------------------------------------

    async def cut_worker(self, chance: random.Random) -> Hit:
        """Every connection of a worker breaks, in mid word."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        await asyncio.to_thread(place.proxy.cut)
        return _label(place)

    async def partition_worker(self, chance: random.Random) -> Hit:
        """A worker does not reach the server, and others do."""
        place = await self._busy_place(chance)
        if place is None:
            return None
        seconds = chance.choice(_EITHER_SIDE_OF_A_LEASE_S)
        await asyncio.to_thread(place.proxy.refuse)
        self._later(seconds, lambda: _run(place.proxy.admit), place)
        return f"{_label(place)} for {seconds:g} s"

    async def cut_readers(self, chance: random.Random) -> Hit:
        """Every connection of the readers and submitters breaks."""
        reading = len(self._crowd.reading())
        if not reading:
            return None
        await asyncio.to_thread(self._stage.readers.cut)
        return f"{reading} readers"

    async def kill_readers(self, chance: random.Random) -> Hit:
        """Readers end, and come again with the last index that they saw."""
        reading = [each for each in self._crowd.reading() if each.count]
        if not reading:
            return None
        chosen = chance.sample(reading, max(1, len(reading) // 2))
        for patron in chosen:
            patron.drop_reader()
        return f"{len(chosen)} readers, after " + ", ".join(str(each.count) for each in chosen)

    # -- the server ------------------------------------------------------------------------

    async def restart_server(self, chance: random.Random) -> Hit:
        """SIGKILL of the server, and started again on what it has on disk."""
        if self._server.locked() or not await self._stage.busy_places():
            return None
        async with self._server:
            await asyncio.to_thread(self._stage.server.restart)
        return f"with {self._crowd.tokens} tokens read"

    async def pause_server(self, chance: random.Random) -> Hit:
        """SIGSTOP of the server: connections stay, and nothing answers."""
        if self._server.locked() or not await self._stage.busy_places():
            return None
        seconds = chance.choice((0.2, 1.0, 3.0))
        await self._server.acquire()
        self._stage.server.pause()
        self._later(seconds, self._resume_server)
        return f"for {seconds:g} s"

    async def bring_back_past(self, chance: random.Random) -> Hit:
        """The server knows no more than it did some seconds ago. Nobody submits meanwhile."""
        if self._server.locked() or not await self._stage.busy_places():
            return None
        seconds = chance.choice((0.5, 1.5, 3.0))
        await self._server.acquire()
        try:
            await self._crowd.hold()
            await asyncio.to_thread(self._stage.past.take)
        except BaseException:
            self._server.release()
            raise
        self._later(seconds, self._bring_back)
        return f"of {seconds:g} s ago"

    # -- disks -----------------------------------------------------------------------------

    async def fill_disk(self, chance: random.Random) -> Hit:
        """No checkpoint can be written for a while."""
        place = await self._busy_place(chance)
        if place is None or place.sign.exists():
            return None
        seconds = chance.choice((0.5, 2.0, 4.0))
        place.sign.touch()
        self._later(seconds, lambda: _run(lambda: place.sign.unlink(missing_ok=True)))
        return f"{place.data_dir.name} for {seconds:g} s"

    async def damage_checkpoints(self, chance: random.Random) -> Hit:
        """A bit flips in half of the files of jobs that have not ended."""
        jobs = {patron.job.id for patron in self._crowd.reading() if patron.job}
        files = sorted(self._stage.root.glob("*/checkpoints/*/*"))
        files = [path for path in files if path.parent.name in jobs]
        chosen = chance.sample(files, (len(files) + 1) // 2)
        flipped = [path for path in chosen if _flip_a_bit(path, chance)]
        self._stage.damaged.update(path.parent for path in flipped)
        return f"{len(flipped)} files" if flipped else None

    # -- users -----------------------------------------------------------------------------

    async def cancel_jobs(self, chance: random.Random) -> Hit:
        """Users cancel, and resume at the end that this makes."""
        reading = self._crowd.reading()
        if not reading:
            return None
        chosen = chance.sample(reading, min(3, len(reading)))
        for patron in chosen:
            self._crowd.act(patron.cancel())
        return ", ".join(f"{each} at {each.count}" for each in chosen)

    async def delete_jobs(self, chance: random.Random) -> Hit:
        """A user deletes a job, whatever it is at."""
        reading = [each for each in self._crowd.reading() if not each.poison]
        if not reading or self._crowd.held:
            return None
        patron = chance.choice(reading)
        self._crowd.act(patron.delete())
        return f"{patron} at {patron.count}"

    async def burst(self, chance: random.Random) -> Hit:
        """Jobs of a high priority for a model of which jobs wait already."""
        if self._crowd.held:
            return None
        model = await asyncio.to_thread(self._crowd.full_model)
        if model is None:
            return None
        for _ in range(4):
            self._crowd.submit(model=model, priority=chance.randint(50, 100))
        return f"4 jobs of {model}"

    async def hurry(self, chance: random.Random) -> Hit:
        """Jobs whose time is soon over, in the queue or while they run; they are resumed then."""
        if self._crowd.held:
            return None
        seconds = chance.choice((2.0, 4.0, 8.0))
        in_time = (
            SubmitOptions(queue_ttl=seconds),
            SubmitOptions(max_runtime=seconds),
            SubmitOptions(deadline=timedelta(seconds=seconds)),
        )
        for limits in in_time:
            self._crowd.submit_hurried(limits)
        return f"3 jobs with {seconds:g} s"

    async def poison(self, chance: random.Random) -> Hit:
        """A job that kills whoever runs it, three times."""
        if self._crowd.held or not await self._stage.busy_places():
            return None
        return str(self._crowd.submit_poison())

    # -- helpers ---------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until everything is undone."""
        while self.aftermath:
            await asyncio.gather(*self.aftermath)

    async def _busy_place(self, chance: random.Random) -> Place | None:
        places = await self._stage.busy_places()
        return chance.choice(places) if places else None

    def _later(
        self,
        seconds: float,
        undo: Callable[[], Coroutine[Any, Any, None]],
        place: Place | None = None,
    ) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(seconds)
                await undo()
            finally:
                if place is not None:
                    place.busy = False

        if place is not None:
            place.busy = True
        task = asyncio.create_task(work())
        self.aftermath.add(task)
        task.add_done_callback(self.aftermath.discard)

    async def _drain(self, place: Place) -> None:
        await asyncio.to_thread(place.process.term)
        self._stage.restart(place)

    async def _resume_server(self) -> None:
        self._stage.server.resume()
        self._server.release()

    async def _bring_back(self) -> None:
        await asyncio.to_thread(self._stage.past.bring_back)
        self._crowd.release()
        self._server.release()


WEIGHTS: Final[dict[Fault, int]] = {
    Faults.kill_child: 4,
    Faults.kill_machine: 3,
    Faults.drain: 3,
    Faults.freeze: 4,
    Faults.cut_worker: 3,
    Faults.partition_worker: 3,
    Faults.cut_readers: 2,
    Faults.kill_readers: 3,
    Faults.restart_server: 3,
    Faults.pause_server: 2,
    Faults.bring_back_past: 2,
    Faults.fill_disk: 2,
    Faults.damage_checkpoints: 2,
    Faults.cancel_jobs: 3,
    Faults.delete_jobs: 1,
    Faults.burst: 3,
    Faults.hurry: 2,
    Faults.poison: 1,
}
"""How often each comes, against the others."""


def name_of(fault: Fault) -> str:
    """As the report has it."""
    return str(getattr(fault, "__name__", fault)).replace("_", " ")


def _label(place: Place) -> str:
    return f"worker {place.number}"


async def _run(call: Callable[[], object]) -> None:
    call()


async def _wake(process: WorkerProcess) -> None:
    with suppress(ProcessLookupError):
        process.cont()


def _flip_a_bit(path: Path, chance: random.Random) -> bool:
    """In place, as a bad sector would: who writes the file goes on writing it."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        if length:
            place = chance.randrange(length)
            file.seek(place)
            old = file.read(1)[0]
            file.seek(place)
            file.write(bytes([old ^ 16]))
            return True
    return False
