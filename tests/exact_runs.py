"""Jobs that are run twice: once undisturbed, once through whatever a test does to them.

    with Scene(url, namespace, cases) as scene:      # readers follow every job from its first token
        scene.submit()
        scene.wait_tokens(100)                       # of all jobs together
        worker.kill()
        scene.assert_exact(references)               # waits for the ends, and compares everything

Jobs come in three cache kinds, greedy and sampled, all with logprobs and a stop string that comes
up late; the sampled ones have penalties, whose history is one more thing that has to survive.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine_runs import run
from servers import RealServer
from tenuto_client import (
    Client,
    EndEvent,
    Event,
    JobState,
    SubmitOptions,
    SyncClient,
    SyncJob,
    Token,
    Usage,
)
from tenuto_engine import Engine, GenerationOptions
from tiny_models import KINDS, Kind
from workers import WorkerProcess, poll_until

PROMPT = "Tell me of the sea, of the café on its shore and of 日本語."
LENGTH = 120
"""Tokens of a job if nothing stopped it; its stop string comes up after some nine tenths."""

Models = Mapping[Kind, Path]
References = Mapping[str, "Outcome"]


@dataclass(frozen=True)
class Case:
    """A job to be submitted."""

    name: str
    model: Kind
    prompt: str | tuple[int, ...]
    options: SubmitOptions


@dataclass(frozen=True)
class Outcome:
    """All that a user gets of a job. Two that are equal are equal in every bit."""

    tokens: tuple[Token, ...]
    state: JobState
    finish_reason: str | None
    end_text: str
    usage: Usage
    exactness: str

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.end_text


def make_cases(models: Models, *, length: int = LENGTH) -> tuple[Case, ...]:
    """A greedy and a sampled job of each model."""
    found = []
    for kind, folder in models.items():
        engine = Engine.load(folder)
        ids = tuple(engine.encode_prompt(PROMPT))
        for name, prompt, options in (
            ("greedy", PROMPT, GREEDY),
            ("sampled", ids[::-1], SAMPLED),
        ):
            case = Case(f"{kind}-{name}", kind, prompt, options | SubmitOptions(max_tokens=length))
            found.append(with_late_stop(case, engine))
    return tuple(found)


DECOYS = tuple(f"{vowel}~never~" for vowel in "aeiou")
"""Stop strings that never come, but begin so often that text is held back at most crashes."""

GREEDY = SubmitOptions(logprobs=5, ignore_eos=True)
SAMPLED = SubmitOptions(
    logprobs=5,
    ignore_eos=True,
    temperature=0.9,
    top_p=0.95,
    top_k=80,
    seed=1234567,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
)


def with_late_stop(case: Case, engine: Engine) -> Case:
    """The same job with a stop string that its text has for the first time near its end."""
    given: dict[str, Any] = dict(case.options)
    generation = engine.generate(engine.encode_prompt(case.prompt), GenerationOptions(**given))
    text = "".join(token.text for token in generation)
    for start in range(len(text) * 9 // 10, len(text) - 2):
        for end in range(start + 2, min(start + 6, len(text))):
            stop = text[start:end]
            if "\ufffd" not in stop and text.find(stop) == start:
                return replace(case, options=case.options | SubmitOptions(stop=[stop, *DECOYS]))
    raise AssertionError(f"{case.name}: no string comes up late for the first time")


def outcome_of(case: Case, engine: Engine) -> Outcome:
    """What a reader gets of the job when nothing happens, made by the engine alone."""
    given: dict[str, Any] = dict(case.options)
    prompt = engine.encode_prompt(case.prompt)
    done = run(engine, prompt, **given)
    tokens = tuple(
        Token(each.token, each.index, each.text, each.logprob, each.top_logprobs)
        for each in done.tokens
    )
    usage = Usage(len(prompt), len(tokens))
    return Outcome(tokens, JobState.COMPLETED, done.finish_reason, done.end_text, usage, "exact")


class Reading:
    """What one subscription to one job has brought so far."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.done = threading.Event()

    @property
    def tokens(self) -> list[Token]:
        if self.error is not None:
            raise self.error
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def end(self) -> EndEvent:
        """The one end, which must be the last of what was read."""
        ends = [event for event in self.events if isinstance(event, EndEvent)]
        assert len(ends) == 1, f"{len(ends)} ends"
        assert ends[0] is self.events[-1]
        return ends[0]

    def assert_gapless(self) -> None:
        """Every index after `after` came once, in order."""
        indexes = [token.index for token in self.tokens]
        assert indexes == list(range(self.after + 1, self.after + 1 + len(indexes)))


class Readers:
    """Clients that stream jobs, on an event loop of their own."""

    def __init__(self, url: str, namespace: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="readers", daemon=True)
        self._thread.start()
        self._client = Client(url, namespace=namespace)
        self._tasks: list[Any] = []
        # A client waits for a server that it has reached before, and for no other.
        asyncio.run_coroutine_threadsafe(self._client.models(), self._loop).result(20)

    def follow(self, job_id: str, after: int = 0) -> Reading:
        """Subscribe, and read until the end."""
        reading = Reading(after)
        work = self._read(job_id, reading)
        self._tasks.append(asyncio.run_coroutine_threadsafe(work, self._loop))
        return reading

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()
        await self._loop.shutdown_asyncgens()

    async def _read(self, job_id: str, reading: Reading) -> None:
        try:
            events = self._client.job(job_id).events(reading.after)
            async with aclosing(events):
                async for event in events:
                    reading.events.append(event)
        except Exception as error:  # noqa: BLE001 - raised where the test looks at it
            reading.error = error
        finally:
            reading.done.set()


@dataclass
class Performance:
    """A submitted case, and all that was read of it."""

    case: Case
    job: SyncJob
    readings: list[Reading] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return [token for reading in self.readings for token in reading.tokens]

    @property
    def count(self) -> int:
        return sum(len(reading.tokens) for reading in self.readings)

    def outcome(self) -> Outcome:
        """What a reader has, having checked that it has everything once and in order."""
        for reading in self.readings:
            reading.assert_gapless()
        end = self.readings[-1].end
        tokens = tuple(self.tokens)
        assert [token.index for token in tokens] == list(range(1, end.index + 1))
        return Outcome(tokens, end.state, end.finish_reason, end.text, end.usage, end.exactness)


class Scene:
    """Jobs of one namespace with their readers; a context manager."""

    def __init__(self, url: str, namespace: str, cases: Iterable[Case]) -> None:
        self.client = SyncClient(url, namespace=namespace, retry_for=60)
        self._readers = Readers(url, namespace)
        self._cases = tuple(cases)
        self.jobs: list[Performance] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readers.close()
        self.client.close()

    def submit(self) -> None:
        """Submit every case, and follow it."""
        for case in self._cases:
            self.submit_one(case)

    def submit_one(self, case: Case) -> Performance:
        """Submit one case, and follow it."""
        job = self.client.submit(case.model, case.prompt, **case.options)
        performance = Performance(case, job)
        self.jobs.append(performance)
        self.follow(performance)
        return performance

    def follow(self, performance: Performance) -> Reading:
        """Subscribe from the first token that no reader has."""
        reading = self._readers.follow(performance.job.id, performance.count)
        performance.readings.append(reading)
        return reading

    @property
    def tokens(self) -> int:
        """How many tokens readers have, of all jobs together."""
        return sum(performance.count for performance in self.jobs)

    @property
    def unfinished(self) -> list[Performance]:
        return [each for each in self.jobs if not each.readings[-1].done.is_set()]

    def wait_tokens(self, count: int, *, timeout: float = 60) -> None:
        """Wait until readers have so many."""
        poll_until(lambda: self.tokens >= count, f"{count} tokens", timeout=timeout, every=0.005)

    def wait_more(self, count: int, *, timeout: float = 60) -> None:
        """Wait until readers have so many more than now, or all there are."""
        wanted = self.tokens + count
        poll_until(
            lambda: self.tokens >= wanted or not self.unfinished,
            f"{wanted} tokens",
            timeout=timeout,
            every=0.005,
        )

    def wait_ends(self, *, timeout: float = 90) -> None:
        """Wait until every reader has read an end."""
        poll_until(lambda: not self.unfinished, "the ends", timeout=timeout)

    def assert_exact(self, references: References, *, timeout: float = 90) -> None:
        """Wait for the ends; every job must be what it is when nothing happens.

        That is so for who followed it through everything, for who comes afterwards, and in
        the job's record.
        """
        self.wait_ends(timeout=timeout)
        for performance in self.jobs:
            expected = references[performance.case.name]
            assert_same(performance.outcome(), expected, performance.case.name)
            self._assert_later_view(performance, expected)

    def _assert_later_view(self, performance: Performance, expected: Outcome) -> None:
        late = self._readers.follow(performance.job.id)
        assert late.done.wait(20)
        read = Performance(performance.case, performance.job, [late])
        assert_same(read.outcome(), expected, f"{performance.case.name}, read afterwards")
        record = performance.job.status()
        assert (record.state, record.tokens) == (expected.state, len(expected.tokens))
        assert (record.exactness, record.exactness_reason) == ("exact", None)


def assert_same(actual: Outcome, expected: Outcome, name: str) -> None:
    """Equal in every bit; a difference names the first token that differs."""
    for ours, theirs in zip(actual.tokens, expected.tokens, strict=False):
        assert ours == theirs, f"{name}: token {theirs.index}"
    assert len(actual.tokens) == len(expected.tokens), name
    assert actual == expected, name


def perform(url: str, namespace: str, cases: Iterable[Case]) -> dict[str, Outcome]:
    """Run the cases with nobody disturbing them. Workers must be there."""
    with Scene(url, namespace, cases) as scene:
        scene.submit()
        scene.wait_ends()
        return {each.case.name: each.outcome() for each in scene.jobs}


def worker_of(
    models: Models,
    url: str,
    namespace: str,
    data_dir: Path,
    *flags: str,
    slots: int = 2,
    lease: float = 2.0,
    environ: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """A worker of all the models, with checkpoints often enough to matter."""
    (first, folder), *others = models.items()
    more = [part for kind, path in others for part in ("--model", f"{kind}={path}")]
    more += ["--slots", str(slots), "--checkpoint-every", "16", "--exact-wait", "0.5"]
    return WorkerProcess(
        folder,
        url,
        data_dir,
        name=first,
        namespace=namespace,
        lease=lease,
        flags=(*more, *flags),
        environ=environ,
    )


class Past:
    """What a server has on disk at one moment, to come back later."""

    def __init__(self, server: RealServer) -> None:
        self._server = server
        self._files = server.folder / "aof"
        self._copy = server.folder / "past"

    def take(self) -> None:
        """Remember this moment. The server is killed for it, so that its files hold still."""
        self._server.kill()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._files, self._copy)
        self._server.start()

    def bring_back(self) -> None:
        """Let the server know no more than it did then."""
        self._server.kill()
        shutil.rmtree(self._files)
        shutil.copytree(self._copy, self._files)
        self._server.start()


def prepared(workers: Iterable[WorkerProcess]) -> list[dict[str, Any]]:
    """What the workers logged about the attempts they prepared."""
    return [line for worker in workers for line in worker.lines("attempt prepared")]


__all__ = [
    "KINDS",
    "LENGTH",
    "Case",
    "Models",
    "Outcome",
    "Past",
    "Performance",
    "Reading",
    "References",
    "Scene",
    "assert_same",
    "make_cases",
    "outcome_of",
    "perform",
    "prepared",
    "with_late_stop",
    "worker_of",
]
