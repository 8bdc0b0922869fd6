"""`SyncClient` and `SyncJob`: the surface of `Client` and `Job`, blocking.

One event loop in a daemon thread runs the asynchronous client; each call hands it a coroutine and
waits. A call that is interrupted (Ctrl-C) cancels its coroutine and waits for that first, so that
the client stays usable.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from ._announce import ModelInfo, WorkerInfo
from ._asked import Prompt, SubmitOptions
from ._backend import Event
from ._client import BaseClient, Client
from ._job import Job
from ._records import JobRecord, JobState, Result, Token

_T = TypeVar("_T")
_Records = list[JobRecord]
_CLOSE_S: Final = 5.0


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tenuto-client", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run it in the loop and wait for what it returns."""
        if self.is_closed:
            work.close()
            raise RuntimeError("this client is closed")
        call = _Call(self._loop, work)
        try:
            call.done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(call.cancel)
            call.done.wait(_CLOSE_S)
            raise
        return call.outcome.result()

    def iterate(self, source: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
        """The items of an asynchronous generator, which is closed when this one is."""
        try:
            while True:
                try:
                    item = self.call(_next_of(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self.is_closed:
                self.call(source.aclose())

    def close(self) -> None:
        """End the loop and its thread."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class _Call(Generic[_T]):
    """One coroutine on its way through the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> None:
        self.done = threading.Event()
        self._task: asyncio.Task[_T] | None = None
        loop.call_soon_threadsafe(self._start, loop, work)

    @property
    def outcome(self) -> asyncio.Task[_T]:
        """The finished task."""
        assert self._task is not None
        return self._task

    def cancel(self) -> None:
        """To be called in the loop."""
        if self._task is not None:
            self._task.cancel()

    def _start(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> None:
        self._task = loop.create_task(work)
        self._task.add_done_callback(lambda _: self.done.set())


async def _next_of(source: AsyncGenerator[_T, None]) -> _T:
    """`anext` as a coroutine, which is what a task takes."""
    return await anext(source)


class SyncJob:
    """A job that was submitted, here or elsewhere; see `Job`, whose methods these are."""

    def __init__(self, loop: _Loop, job: Job) -> None:
        self._loop = loop
        self._job = job

    @property
    def id(self) -> str:
        """Its id, to find it again with `client.job(id)`, also from another process."""
        return self._job.id

    def __repr__(self) -> str:
        return f"SyncJob({self.id!r})"

    def stream(
        self, after: int = 0, *, reconnect_timeout: float | None = None
    ) -> Generator[Token, None, None]:
        """The tokens after index `after`, as they come; see `Job.stream`."""
        return self._loop.iterate(self._job.stream(after, reconnect_timeout=reconnect_timeout))

    def events(
        self, after: int = 0, *, reconnect_timeout: float | None = None
    ) -> Generator[Event, None, None]:
        """Everything that happens after token `after`, to the end; see `Job.events`."""
        return self._loop.iterate(self._job.events(after, reconnect_timeout=reconnect_timeout))

    def status(self) -> JobRecord:
        """The job as it is now; see `Job.status`."""
        return self._loop.call(self._job.status())

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return everything; see `Job.result`."""
        return self._loop.call(self._job.result(timeout))

    def cancel(self) -> JobRecord:
        """Ask the job to stop; see `Job.cancel`."""
        return self._loop.call(self._job.cancel())

    def resume(self) -> JobRecord:
        """Let a cancelled or failed job go on; see `Job.resume`."""
        return self._loop.call(self._job.resume())

    def delete(self) -> None:
        """Remove the job with all it produced; see `Job.delete`."""
        self._loop.call(self._job.delete())


class SyncClient:
    """`Client` for code without asyncio: the same arguments, methods and errors, blocking.

    with SyncClient("redis://localhost:6379") as tenuto:
        for token in tenuto.submit("smollm2", "Write a long story.").stream():
            print(token.text, end="")

    Threads may share one.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        retry_for: float = 10.0,
        wait_replicas: int = 0,
        wait_fsync: bool = False,
        wait_timeout: float = 5.0,
    ) -> None:
        self._over(
            Client(
                url,
                namespace=namespace,
                data_dir=data_dir,
                retry_for=retry_for,
                wait_replicas=wait_replicas,
                wait_fsync=wait_fsync,
                wait_timeout=wait_timeout,
            )
        )

    @classmethod
    def over(cls, client: BaseClient) -> Self:
        """A blocking surface over a client, such as `FakeClient`, that no event loop uses yet."""
        self = cls.__new__(cls)
        self._over(client)
        return self

    def _over(self, client: BaseClient) -> None:
        self._client = client
        self._loop = _Loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, model: str, prompt: Prompt, **options: Unpack[SubmitOptions]) -> SyncJob:
        """Accept a job; see `Client.submit`."""
        return SyncJob(self._loop, self._loop.call(self._client.submit(model, prompt, **options)))

    def job(self, job_id: str) -> SyncJob:
        """The handle of a job that was submitted before. Asks the server nothing."""
        return SyncJob(self._loop, self._client.job(job_id))

    def status(self, job_id: str) -> JobRecord:
        """A job as it is now. Raises `JobGone`."""
        return self._loop.call(self._client.status(job_id))

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model that a worker has ever announced, by name."""
        return self._loop.call(self._client.models())

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that are alive, by name."""
        return self._loop.call(self._client.workers())

    def forget_model(self, model: str) -> None:
        """As `Client.forget_model`."""
        self._loop.call(self._client.forget_model(model))

    def limits(self) -> dict[str, dict[str, int]]:
        """The limits that are set, by model or `*`, and by name."""
        return self._loop.call(self._client.limits())

    def set_limits(self, values: Mapping[str, int], *, model: str | None = None) -> None:
        """As `Client.set_limits`."""
        self._loop.call(self._client.set_limits(values, model=model))

    def clear_limits(self, *names: str, model: str | None = None) -> None:
        """As `Client.clear_limits`."""
        self._loop.call(self._client.clear_limits(*names, model=model))

    def close(self) -> None:
        """Let go of the connections and end the thread. Jobs go on."""
        if not self._loop.is_closed:
            self._loop.call(self._client.close())
            self._loop.close()

    def list(
        self,
        *,
        state: JobState | str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        before: JobRecord | str | None = None,
    ) -> _Records:
        """Jobs, newest first; see `Client.list`."""
        return self._loop.call(
            self._client.list(state=state, model=model, tenant=tenant, limit=limit, before=before)
        )
