"""Watching a job, for `watch` and `submit --watch`."""

from __future__ import annotations

import asyncio
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tenuto_client import _lines as lines
from tenuto_client._backend import Event
from tenuto_client._client import Client
from tenuto_client._command import FAILED, INTERRUPTED, complain
from tenuto_client._config import Settings
from tenuto_client._errors import ServerUnavailable
from tenuto_client._findings import count
from tenuto_client._progress import Progress
from tenuto_client._records import EndEvent, JobRecord, JobState, ProgressEvent, StateEvent, Token

from ._waiting import complain_of_changes, telling


def watch(settings: Settings, job_id: str, after: int, *, as_json: bool) -> int:
    """Print a job's text or its `--json` lines until its end; returns the exit code."""
    watcher = _JsonWatcher(job_id, after) if as_json else _TextWatcher(job_id, after)
    try:
        return asyncio.run(_follow(settings, watcher))
    except (KeyboardInterrupt, asyncio.CancelledError):
        watcher.leave()
        return INTERRUPTED
    except ServerUnavailable:
        if watcher.has_begun:
            watcher.leave()
        raise


async def _follow(settings: Settings, watcher: _Watcher) -> int:
    task = asyncio.current_task()
    assert task is not None
    # In its turn, and not in the middle of whatever runs, where a cancel may get lost.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    async with Client(
        settings.redis_url, namespace=settings.namespace, data_dir=settings.data_dir
    ) as client:
        job = client.job(watcher.job_id)
        # First of all this checks the index; it asks the server nothing yet.
        events = job.events(watcher.index)
        watcher.begin(await job.status())
        async with telling(settings, watcher.job_id, watcher.wait):
            return await _print_events(events, watcher)


async def _print_events(source: AsyncGenerator[Event, None], watcher: _Watcher) -> int:
    async with aclosing(source) as events:
        async for event in events:
            if isinstance(event, Token):
                watcher.index = event.index
            watcher.show(event)
            if isinstance(event, EndEvent):
                if event.index < watcher.index:
                    complain(f"it has {count(event.index, 'token')}; none is after {watcher.index}")
                return 0 if event.state is JobState.COMPLETED else FAILED
    raise AssertionError("a stream ends with an EndEvent")


class _Watcher(ABC):
    """What is printed; `index` is the last token that was."""

    def __init__(self, job_id: str, index: int) -> None:
        self.job_id = job_id
        self.index = index
        self.has_begun = False

    def begin(self, record: JobRecord) -> None:
        """The job as it is at the start."""
        self.has_begun = True

    def wait(self, line: str | None, is_new: bool) -> None:
        """Nobody works on the job now, and this is why; None is that somebody does."""
        complain_of_changes(line, is_new)

    @abstractmethod
    def show(self, event: Event) -> None:
        """Print an event."""

    def leave(self) -> None:
        """The user goes; the job goes on."""
        go_on = f"tenuto watch {self.job_id} --after {self.index}"
        complain(f"the job goes on without you; to go on watching: {go_on}")


class _JsonWatcher(_Watcher):
    def show(self, event: Event) -> None:
        sys.stdout.write(lines.event_line(event))
        sys.stdout.flush()


class _TextWatcher(_Watcher):
    def __init__(self, job_id: str, index: int) -> None:
        super().__init__(job_id, index)
        self._progress = Progress.on_stderr(0, 0)
        self._ends_in_newline = True
        self._attempts = 0
        # The newest epoch whose attempt, if there was one, is counted.
        self._epoch = 0

    def begin(self, record: JobRecord) -> None:
        super().begin(record)
        self._progress = Progress.on_stderr(record.max_tokens, record.tokens)
        self._attempts = record.attempts
        self._epoch = record.epoch - (record.state is JobState.QUEUED)
        self._progress.attempt(self._attempts)

    def show(self, event: Event) -> None:
        if isinstance(event, Token):
            self._write(event.text)
            self._progress.token(event.index)
        elif isinstance(event, StateEvent):
            self._count(event)
        elif isinstance(event, ProgressEvent):
            self._progress.phase(event)
        else:
            self._end(event)

    def wait(self, line: str | None, is_new: bool) -> None:
        if self._progress.is_on:
            self._progress.wait(line)
            return
        super().wait(line, is_new)

    def leave(self) -> None:
        self._close()
        super().leave()

    def _count(self, event: StateEvent) -> None:
        if event.state is JobState.RUNNING and event.epoch > self._epoch:
            self._epoch = event.epoch
            self._attempts += 1
        self._progress.attempt(self._attempts)

    def _write(self, text: str) -> None:
        self._progress.write(text)
        if text:
            self._ends_in_newline = text.endswith("\n")

    def _close(self) -> None:
        if not self._ends_in_newline:
            self._write("\n")
        self._progress.clear()

    def _end(self, event: EndEvent) -> None:
        self._write(event.text)
        self._close()
        if event.exactness != "exact":
            complain(f"{event.exactness}: {event.exactness_reason or 'no reason given'}")
        if event.state is JobState.FAILED:
            complain(f"job {self.job_id} failed: {event.error or 'no reason given'}")
        elif event.state is JobState.CANCELLED:
            complain(f"job {self.job_id} was cancelled; to go on: tenuto resume {self.job_id}")
