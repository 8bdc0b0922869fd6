"""`Story`: what the demo does, and tells while it does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from tenuto_client import Client, EndEvent, Event, Job, JobState, StateEvent, TenutoError, Token

from ._demo_home import DemoHome
from ._demo_reader import Reader
from ._demo_screen import Paragraph, Screen, Style
from ._demo_verdict import Heard, Kill
from ._demo_worker import DemoWorker

MODEL_NAME: Final = "smollm2"

_POLL_S: Final = 0.25
_PATIENCE_S: Final = 180.0
_LOGPROBS: Final = 3


class DemoFailed(TenutoError):
    """The story cannot be told to its end."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the model, and after how many tokens its worker is killed."""

    prompt: str
    max_tokens: int
    kill_after: int
    temperature: float
    top_p: float
    seed: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the two readers heard, and what the kill interrupted."""

    killed: Heard
    whole: Heard
    kill: Kill


class Story:
    """Runs one job under a worker that is killed, and the same job again in peace.

    Args:
        home: opened, with its server running.
    """

    def __init__(self, screen: Screen, home: DemoHome, request: Request) -> None:
        self._screen = screen
        self._home = home
        self._request = request
        self._workers: list[DemoWorker] = []

    async def tell(self) -> Outcome:
        """The whole story. Its workers have ended afterwards, whatever happens.

        Raises:
            DemoFailed: a worker does not work, or the model ended before the kill.
            TenutoError: the server does not.
        """
        home = self._home
        data_dir = home.folder
        try:
            async with Client(
                home.redis_url, namespace=home.namespace, data_dir=data_dir
            ) as client:
                outcome = await self._tell(client)
                self._workers[-1].stop()
                return outcome
        finally:
            # Nothing is lost by it, and it is quick; the one that was stopped is gone already.
            for worker in self._workers:
                worker.kill()

    async def _tell(self, client: Client) -> Outcome:
        worker = self._start_worker("A")
        self._screen.say("Worker A starts and loads the model.")
        # What reads checkpoints takes seconds to import; later the story would stand still for it.
        imported = asyncio.to_thread(import_module, "tenuto_engine._store")
        await asyncio.gather(self._until_ready(worker), imported)
        killed, kill = await self._killed_run(client, worker)
        whole = await self._peaceful_run(client, self._workers[-1])
        return Outcome(killed, whole, kill)

    # -- the job that is interrupted -------------------------------------------------------

    async def _killed_run(self, client: Client, worker: DemoWorker) -> tuple[Heard, Kill]:
        reader = Reader(await self._submit(client))
        try:
            self._screen.say(f"Worker A is ready. Submitted job {reader.job.id}; its text:")
            first_half = _Text(self._screen, self._request.max_tokens)
            await self._listen(reader, worker, first_half.show, until=self._request.kill_after)
            kill = await self._kill(worker, reader, first_half)
            await self._second_half(reader, kill.at)
        finally:
            await reader.close()
        return reader.heard, kill

    async def _kill(self, worker: DemoWorker, reader: Reader, text: _Text) -> Kill:
        worker.kill()
        killed_at = time.monotonic()
        record = await reader.job.status()
        # What it had published before it died, and this reader has not read yet.
        await self._listen(reader, None, text.show, until=record.tokens)
        if record.state.is_over:
            raise DemoFailed(
                f"the model ended after {record.tokens} tokens, before its worker was killed",
                hint="try another --seed or a smaller --kill-after",
            )
        text.mark(f"[{record.tokens}]")
        how_far = f"after token {record.tokens} of {record.max_tokens}"
        self._screen.say(f"SIGKILL to worker A, parent and child, {how_far}.", Style.BAD)
        self._screen.say(self._say_checkpoint(reader.job.id, record.tokens))
        return Kill(record.tokens, record.max_tokens, worker.signal, killed_at)

    def _say_checkpoint(self, job_id: str, published: int) -> str:
        covered = self._newest_checkpoint(job_id)
        if not covered:
            return "It left no checkpoint yet: all of them will be computed again, and compared."
        if published <= covered:
            return f"Its last checkpoint covers all {published}."
        return (
            f"Its last checkpoint covers {covered}. The {published - covered} after it will be "
            "computed again, and compared with those published."
        )

    def _newest_checkpoint(self, job_id: str) -> int:
        from tenuto_engine import list_jobs

        return max(
            (
                stored.generated_tokens
                for job in list_jobs(self._home.folder / "checkpoints")
                if job.job_id == job_id
                for stored in job.checkpoints
            ),
            default=0,
        )

    async def _second_half(self, reader: Reader, killed_at: float) -> None:
        worker = self._start_worker("B")
        self._screen.say("Worker B starts. Nobody tells it of the job; the reader just waits.")
        text = _Text(self._screen, self._request.max_tokens, resumed=True)

        def show(event: Event) -> None:
            if isinstance(event, StateEvent) and event.state is JobState.RUNNING:
                self._screen.say(f"Worker B has the model, and the job: attempt {event.epoch}.")
            elif isinstance(event, Token) and not text.has_begun:
                seconds = time.monotonic() - killed_at
                self._screen.say(f"Token {event.index} comes, {seconds:.1f} s after the kill:")
            text.show(event)

        await self._listen(reader, worker, show, waiting="the reader waits")
        self._say_end(reader.heard)

    # -- the same job in peace -------------------------------------------------------------

    async def _peaceful_run(self, client: Client, worker: DemoWorker) -> Heard:
        reader = Reader(await self._submit(client))
        self._screen.say("The same job again, with the same seed, and nobody is killed.")
        try:
            await self._listen(reader, worker, lambda event: None)
        finally:
            await reader.close()
        self._say_end(reader.heard)
        return reader.heard

    # -- what both need --------------------------------------------------------------------

    def _start_worker(self, name: str) -> DemoWorker:
        home = self._home
        flags = ["--model", f"{MODEL_NAME}={home.model}", "--data-dir", str(home.folder)]
        flags += ["--namespace", home.namespace]
        worker = DemoWorker(name, home.folder / f"worker-{name.lower()}.log", flags, home.redis_url)
        self._workers.append(worker)
        return worker

    async def _until_ready(self, worker: DemoWorker) -> None:
        began = time.monotonic()
        while not worker.is_ready:
            self._check(worker, began)
            self._screen.wait(f"worker {worker.name} starts", began)
            await asyncio.sleep(_POLL_S / 2)

    async def _submit(self, client: Client) -> Job:
        asked = self._request
        return await client.submit(
            MODEL_NAME,
            asked.prompt,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            ignore_eos=asked.ignore_eos,
            logprobs=_LOGPROBS,
        )

    async def _listen(
        self,
        reader: Reader,
        worker: DemoWorker | None,
        show: Callable[[Event], None],
        *,
        until: int | None = None,
        waiting: str = "the model reads the prompt",
    ) -> None:
        """Show what comes, up to token `until` or the end; `worker` must live meanwhile."""
        began = silent_since = time.monotonic()
        while reader.heard.end is None and (until is None or reader.index < until):
            event = await reader.next(_POLL_S)
            if event is None:
                self._check(worker, silent_since)
            else:
                silent_since = time.monotonic()
                show(event)
            if isinstance(event, Token):
                waiting = f"{reader.index} of {self._request.max_tokens} tokens"
            self._screen.wait(waiting, began)

    def _check(self, worker: DemoWorker | None, since: float) -> None:
        if worker is not None and not worker.is_alive:
            raise DemoFailed(f"worker {worker.name} has ended:\n{worker.last_words()}")
        if time.monotonic() - since > _PATIENCE_S:
            words = f"; the worker says:\n{worker.last_words()}" if worker else ""
            raise DemoFailed(f"nothing has happened for {_PATIENCE_S:.0f} s{words}")

    def _say_end(self, heard: Heard) -> None:
        assert heard.end is not None
        end = heard.end
        reason = end.finish_reason or end.error or "no reason given"
        attempts = "1 attempt" if end.epoch == 1 else f"{end.epoch} attempts"
        self._screen.say(
            f"The job is {end.state} ({reason}): {end.index} tokens, {attempts}, {end.exactness}."
        )


class _Text:
    """A piece of a job's text on the screen, from its first token on."""

    def __init__(self, screen: Screen, total: int, *, resumed: bool = False) -> None:
        self._screen = screen
        self._total = total
        self._resumed = resumed
        self._paragraph: Paragraph | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a token was shown."""
        return self._paragraph is not None

    def show(self, event: Event) -> None:
        """Show a token; other events are not text."""
        if isinstance(event, Token) or (isinstance(event, EndEvent) and event.text):
            self._begun(event.index).add(event.text, event.index)

    def mark(self, text: str) -> None:
        """Mark the place where it stops."""
        if self._paragraph is not None:
            self._paragraph.mark(text)

    def _begun(self, index: int) -> Paragraph:
        if self._paragraph is None:
            self._paragraph = self._screen.stream(self._total, index - 1)
            if self._resumed:
                self._paragraph.mark(f"[{index}]")
        return self._paragraph
