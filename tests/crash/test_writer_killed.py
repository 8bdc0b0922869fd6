"""A process that saves is killed, two hundred times: nothing that it called durable is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from log_samples import image
from sample_rows import SampleRow, newest

ROOT = Path(__file__).parent.parent
KILLS = 200
LONGEST = 60
"""Tokens in the caches when a job is done, and another begins."""

# Imports take longer than a life, so one process imports, and forks those that are to be killed.
# It has one thread when it forks; the children have a writer's thread besides.
NURSERY = """
import json, os, signal, sys
from pathlib import Path
from sample_rows import SampleRow, sample_store
from tenuto_engine import CheckpointWriter


def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())


def live(folder, epoch, steps, longest, part_bytes):
    store = sample_store(Path(folder), epoch, part_bytes=part_bytes)
    found = store.newest_valid()
    row = SampleRow("all", origin=found.origin if found else None)
    position = len(found.cache_tokens) if found else 1
    say(began=position if found else 0)
    writer = CheckpointWriter(lambda _, durable: say(durable=durable.position))
    while position < longest:
        position += next(steps)
        while not writer.submit(store, row.at(position)):
            writer.wait(store)
    while not (writer.submit(store, row.at(position), final=True) and writer.wait(store)):
        pass
    writer.finish(store, {}, row.run(position).tokens(), keep_caches=False)
    writer.wait(store)
    say(ended=position)
    signal.pause()


def cycle(steps):
    while True:
        yield from steps


SampleRow().at(40)
for line in sys.stdin:
    order = json.loads(line)
    steps = cycle(order.pop("steps"))
    child = os.fork()
    if child == 0:
        say(child=os.getpid())
        live(steps=steps, **order)
    os.waitpid(child, 0)
    say(dead=child)
"""


class Nursery:
    """Starts processes that save, kills them, and tells what they said."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def live_and_die(self, then: float, **order: Any) -> list[dict[str, int]]:
        """What a child said until it was killed, `then` seconds after its first word."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        child = self._hear()["child"]
        said = [self._hear()]
        # Not to wait for anything: kills are to fall into any part of a save.
        time.sleep(then)
        os.kill(child, signal.SIGKILL)
        while "dead" not in (word := self._hear()):
            said.append(word)
        return said

    def _hear(self) -> dict[str, int]:
        assert self._process.stdout is not None
        word: dict[str, int] = json.loads(self._process.stdout.readline())
        return word

    def close(self) -> None:
        self._process.communicate(timeout=20)


def word(said: list[dict[str, int]], which: str) -> int:
    """The last number that was said with this word."""
    return max((each[which] for each in said if which in each), default=0)


@pytest.mark.timeout(180)
def test_two_hundred_kills_lose_no_durable_checkpoint_and_invent_none(tmp_path: Path) -> None:
    drawn = random.Random(11)
    nursery = Nursery()
    row = SampleRow("all")
    reached, epoch, ended, chained = 0, 0, 0, 0
    folder = tmp_path / "0" / "j1"
    # Seconds of the longest life: on a busy machine more, so that lives come to something.
    longest_life = 0.06
    for kill in range(KILLS):
        epoch += 1
        said = nursery.live_and_die(
            drawn.random() ** 2 * longest_life,
            folder=str(folder),
            epoch=epoch,
            steps=[drawn.randrange(1, 5) for _ in range(7)],
            longest=LONGEST,
            part_bytes=drawn.choice([600, 2**20]),
        )
        assert word(said, "began") >= reached
        longest_life = min(longest_life * (0.97 if word(said, "durable") else 1.04), 2.0)
        reached = max(reached, word(said, "durable"), word(said, "began"))
        if (folder / f"{epoch:08d}-n.end").exists() or word(said, "ended"):
            assert [entry.name for entry in folder.glob("*.end")] == [f"{epoch:08d}-n.end"]
            folder, reached, epoch, ended = tmp_path / str(kill + 1) / "j1", 0, 0, ended + 1
            continue
        if reached:
            found = newest(folder)
            # It may have become durable just before the kill.
            assert len(found.cache_tokens) >= reached
            assert image(found) == row.image(len(found.cache_tokens))
            reached = len(found.cache_tokens)
            chained = max(chained, len(list(folder.glob("*.log"))))
    nursery.close()
    print(f"{ended} jobs came to their end, through up to {chained} logs")
    assert ended >= 1
    assert chained >= 3
