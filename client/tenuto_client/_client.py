"""`Client`: submits jobs and finds them again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self, Unpack

from . import _checks as check
from ._announce import ModelInfo, WorkerInfo
from ._asked import Prompt, SubmitOptions
from ._backend import Backend, Page
from ._config import Settings
from ._errors import InvalidRequest
from ._job import Job
from ._limits import check_names, check_values
from ._records import JobRecord, JobState
from ._redis import Connection
from ._spec import make_request
from ._store import JobStore
from .keys import Keys

_MAX_LIMIT = 100_000
# Inside the class, `list` is its method.
_Records = list[JobRecord]


class BaseClient:
    """What `Client` and `FakeClient` share; an async context manager."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def submit(self, model: str, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Job:
        """Accept a job; from then on it is run to an end, whatever dies in between.

        `options` are the attributes of `JobSpec`. Tried again after a lost connection, and even
        then accepted once.

        Args:
            model: the name under which workers serve it; see `models()`.
            prompt: text, chat messages (dicts with `role` and `content`), or token ids.

        Raises:
            InvalidRequest: names the parameter that is unknown or bad. Nothing was written.
            UnknownModel: no worker ever announced it. Nothing was written.
            LimitExceeded: names the limit, and whether waiting may help. Nothing was written.
            IdempotencyConflict: the key was used with another body. Nothing was written.
            ServerUnavailable: no server answers, or it did not confirm what was asked for.
        """
        if options.get("grammar") is None:
            request = make_request(model, prompt, options)
        else:
            # A large one takes seconds to check.
            request = await asyncio.to_thread(make_request, model, prompt, options)
        return self.job(await self._backend.submit(request))

    def job(self, job_id: str) -> Job:
        """The handle of a job that was submitted before. Asks the server nothing."""
        return Job(self._backend, job_id)

    async def status(self, job_id: str) -> JobRecord:
        """A job as it is now. Raises `JobGone`."""
        return await self.job(job_id).status()

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model that a worker has ever announced, by name; with how many living workers
        serve it, and how many jobs wait for it."""
        return await self._backend.models()

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that are alive, by name."""
        return await self._backend.workers()

    async def forget_model(self, model: str) -> None:
        """Forget what was announced of a model; submit then refuses it.

        Raises:
            UnknownModel: there is none.
            InvalidRequest: a living worker serves it, or jobs of it are queued or running.
        """
        await self._backend.forget_model(check.text("model", model, 128))

    async def limits(self) -> dict[str, dict[str, int]]:
        """The limits that are set, by model or `*`, and by name."""
        return await self._backend.limits()

    async def set_limits(self, values: Mapping[str, int], *, model: str | None = None) -> None:
        """Set limits for one model, or for every model.

        Args:
            values: `max_tokens`, `max_prompt`, `max_queued_per_tenant`, `max_queued`, and, for
                all models together, `max_stream_memory` in bytes.

        Raises:
            InvalidRequest: no such limit, or no such value.
        """
        await self._backend.set_limits(model, check_values(values, model))

    async def clear_limits(self, *names: str, model: str | None = None) -> None:
        """Unset limits of one model, or, without `model`, those that stand for every model; limits
        of single models stay then. All of them, if none is named.

        Raises:
            InvalidRequest: no such limit.
        """
        check_names(names)
        await self._backend.clear_limits(model, names)

    async def close(self) -> None:
        """Let go of the connections. Jobs go on."""
        await self._backend.close()

    async def list(
        self,
        *,
        state: JobState | str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        before: JobRecord | str | None = None,
    ) -> _Records:
        """Jobs, newest first.

        Args:
            before: only jobs older than this one; give the last one of a page to get the next.

        Raises:
            InvalidRequest: no such state, a limit out of range, or what can be no model, tenant or
                job.
            JobGone: `before` is an id, and there is no such job. A record is taken in any case.
        """
        if state is not None:
            state = JobState(check.choice("state", state, tuple(JobState)))
        if model is not None:
            model = check.text("model", model, 128)
        if tenant is not None:
            tenant = check.text("tenant", tenant, 64)
        if isinstance(before, str):
            before = check.text("before", before, 255)
        limit = check.integer("limit", limit, 1, _MAX_LIMIT)
        return await self._backend.list(Page(state, model, tenant, limit, before))


class Client(BaseClient):
    """Jobs on a Redis or Valkey server.

        async with Client("redis://localhost:6379") as tenuto:
            job = await tenuto.submit("smollm2", "Write a long story.", max_tokens=8192)
            async for token in job.stream():
                print(token.text, end="")

    Args:
        url: `redis://`, `rediss://` or `unix://`. None is `TENUTO_REDIS_URL`, else the embedded
            server of the data dir, which is found or started.
        namespace: prefix of all keys; None is `TENUTO_NAMESPACE`, else `tenuto:`.
        data_dir: None is `TENUTO_DATA_DIR`, else the user's data folder.
        retry_for: for how many seconds a call is tried again when the server is lost that earlier
            calls reached. A client's first call fails at once where no server answers.
        wait_replicas: how many replicas must have a job before `submit` returns.
        wait_fsync: whether the server must have it on disk before (Redis 7.2); of use where
            `appendfsync` is not `always`.
        wait_timeout: how many seconds to wait for either; then `submit` raises
            `ServerUnavailable`.
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
        if url is not None and not isinstance(url, str):
            raise InvalidRequest("redis", f"not a URL: a {type(url).__name__}")
        settings = Settings.load(redis_url=url, namespace=namespace, data_dir=data_dir)
        connection = Connection(settings.redis_url, settings.data_dir, retry_for)
        super().__init__(
            JobStore(
                connection,
                Keys(settings.namespace),
                wait_replicas=check.integer("wait_replicas", wait_replicas, 0, 100),
                wait_fsync=check.flag("wait_fsync", wait_fsync),
                # 0 would mean "for ever" to Redis.
                wait_timeout=check.number("wait_timeout", wait_timeout, 0.001, 3600),
            )
        )
