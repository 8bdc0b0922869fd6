"""`FakeClient`: the surface of `Client` in memory, for users' own tests.

    async with FakeClient() as tenuto:
        tenuto.reply(["Once", " upon", " a time"], pause_after=2)
        job = await tenuto.submit("any-model", "Tell me a story.")
        ...                                    # two tokens stand in its stream, and it is running
        tenuto.proceed(job.id)                 # the rest, and its end

Nothing takes time: a job runs as far as its reply says within `submit`, `resume` and `proceed`.
Requests are checked as the real client checks them, and so are limits
(`set_limits`). `SyncClient.over(FakeClient())` blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ._announce import ModelInfo, WorkerInfo
from ._backend import Event, Page
from ._client import BaseClient
from ._errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    JobGone,
    UnknownModel,
)
from ._limits import (
    ALL_MODELS,
    MEANINGS,
    MEMORY,
    Limits,
    check_announced,
    least_prompt,
    limit_of,
    refusal,
)
from ._records import EndEvent, JobRecord, JobState, StateEvent, Token, Usage
from ._spec import JobSpec, Request, pack_spec
from ._store import new_job_id

_WORKER: Final = "fake"
# As the scripts account for memory: a job, a token of it, a top logprob of a token.
_JOB_BYTES: Final = 8192
_TOKEN_BYTES: Final = 64
_LOGPROB_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class FakeReply:
    """What a job will produce.

    Attributes:
        texts: one a token. Those beyond the job's max_tokens are left out.
        error: fail with this reason after the last text, instead of completing.
        start: False leaves the job queued until `proceed`.
        pause_after: stay running after so many tokens until `proceed`, or a cancel.
        checkpoint_error: why its checkpoints cannot be saved, until a resume or its completion.
    """

    texts: tuple[str, ...] = ("Hello", " from", " the", " fake", ".")
    error: str | None = None
    start: bool = True
    pause_after: int | None = None
    checkpoint_error: str | None = None


class FakeClient(BaseClient):
    """Jobs in memory, with scripted replies.

    Args:
        models: names that may be submitted to; None takes every name. A `ModelInfo` also bounds
            the context, as a worker's announcement does.
    """

    def __init__(self, models: Sequence[str | ModelInfo] | None = None) -> None:
        self._store = _FakeStore(models)
        super().__init__(self._store)

    def reply(
        self,
        texts: Sequence[str] | str,
        *,
        error: str | None = None,
        start: bool = True,
        pause_after: int | None = None,
        checkpoint_error: str | None = None,
    ) -> None:
        """Add the reply of the next job that has none yet; see `FakeReply`.

        Jobs submitted when no reply is waiting get `FakeReply()`.
        """
        listed = (texts,) if isinstance(texts, str) else tuple(texts)
        self._store.replies.append(FakeReply(listed, error, start, pause_after, checkpoint_error))

    def proceed(self, job_id: str) -> None:
        """Let a job that is queued or paused run to its end. Raises `JobGone`."""
        self._store.proceed(job_id)


@dataclass(slots=True)
class _FakeJob:
    record: JobRecord
    spec: JobSpec
    reply: FakeReply
    entries: list[Token | StateEvent | EndEvent] = field(default_factory=list)


# Inside the class, `list` is its method.
_FakeJobs = list[_FakeJob]


class _FakeStore:
    """The in-memory `Backend`."""

    def __init__(self, models: Sequence[str | ModelInfo] | None) -> None:
        self.replies: deque[FakeReply] = deque()
        self._jobs: dict[str, _FakeJob] = {}
        self._keys: dict[tuple[str, str], tuple[str, str]] = {}
        self._any_model = models is None
        self._models = {info.name: info for info in map(_model_info, models or ())}
        self._changed = asyncio.Event()
        # Creation times grow, since they order the list.
        self._clock = 0.0
        self._limits: Limits = {}

    async def submit(self, request: Request) -> str:
        spec = request.spec.with_seed()
        key = (spec.tenant, spec.idempotency_key or "")
        if spec.idempotency_key is not None and (known := self._keys.get(key)) is not None:
            if known[1] != request.body_hash:
                raise IdempotencyConflict(spec.idempotency_key, known[0])
            return known[0]
        if self._any_model:
            self._models.setdefault(spec.model, _model_info(spec.model))
        if (model := self._models.get(spec.model)) is None:
            raise UnknownModel(spec.model, list(self._models))
        check_announced(spec, model)
        self._check_limits(spec)
        reply = self.replies.popleft() if self.replies else FakeReply()
        self._clock = max(time.time(), self._clock + 0.001)
        job = _FakeJob(_new_record(spec, self._clock), spec, reply)
        self._jobs[job.record.id] = job
        if spec.idempotency_key is not None:
            self._keys[key] = (job.record.id, request.body_hash)
        job.entries.append(StateEvent(JobState.QUEUED, 1, 0))
        if reply.start:
            self._run(job, reply.pause_after)
        return job.record.id

    async def status(self, job_id: str) -> JobRecord:
        return self._find(job_id).record

    async def cancel(self, job_id: str) -> JobRecord:
        job = self._find(job_id)
        if not job.record.state.is_over:
            self._end(job, JobState.CANCELLED, None, None)
        return job.record

    async def resume(self, job_id: str) -> JobRecord:
        job = self._find(job_id)
        if job.record.state is JobState.COMPLETED:
            raise IllegalTransition(job_id, "it is completed, there is nothing left to resume")
        if job.record.state.is_over:
            self._requeue(job)
        return job.record

    async def delete(self, job_id: str) -> None:
        job = self._find(job_id)
        del self._jobs[job_id]
        self._keys.pop((job.spec.tenant, job.spec.idempotency_key or ""), None)
        self._wake()

    async def events(
        self, job_id: str, after: int, reconnect_timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        place = 0
        while True:
            job = self._find(job_id)
            changed = self._changed
            while place < len(job.entries):
                entry = job.entries[place]
                place += 1
                is_last = place == len(job.entries)
                if isinstance(entry, EndEvent) and is_last:
                    yield entry
                    return
                if entry.index > after or (entry.index == after and not isinstance(entry, Token)):
                    yield _history(entry)
                    job = self._find(job_id)
            await changed.wait()

    async def list(self, page: Page) -> list[JobRecord]:
        records = [job.record for job in reversed(self._jobs.values())]
        if page.before is not None:
            before = self._find(page.before).record if isinstance(page.before, str) else page.before
            records = [r for r in records if r.created_at < before.created_at]
        return [
            record
            for record in records
            if page.state in (None, record.state)
            and page.model in (None, record.model)
            and page.tenant in (None, record.tenant)
        ][: page.limit]

    async def models(self) -> tuple[ModelInfo, ...]:
        return tuple(
            replace(info, workers=1, queued=len(self._queued(name)))
            for name, info in sorted(self._models.items())
        )

    async def workers(self) -> tuple[WorkerInfo, ...]:
        names = tuple(sorted(self._models))
        return (WorkerInfo(_WORKER, names, 1, 0, started_at=0.0, seen_at=time.time()),)

    async def forget_model(self, model: str) -> None:
        if model not in self._models:
            raise UnknownModel(model, list(self._models))
        raise InvalidRequest("model", f"worker {_WORKER} serves {model}")

    async def limits(self) -> Limits:
        return {model: dict(named) for model, named in sorted(self._limits.items())}

    async def set_limits(self, model: str | None, values: Mapping[str, int]) -> None:
        self._limits.setdefault(model or ALL_MODELS, {}).update(values)

    async def clear_limits(self, model: str | None, names: Sequence[str]) -> None:
        named = self._limits.setdefault(model or ALL_MODELS, {})
        for name in names or MEANINGS:
            named.pop(name, None)
        if not named:
            del self._limits[model or ALL_MODELS]

    async def close(self) -> None:
        pass

    def proceed(self, job_id: str) -> None:
        """Run a job to its end."""
        job = self._find(job_id)
        if not job.record.state.is_over:
            self._run(job, None)

    def _check_limits(self, spec: JobSpec) -> None:
        waiting = self._queued(spec.model)
        held = sum(map(_held_bytes, self._jobs.values()))
        would_be = {
            "max_tokens": spec.max_tokens,
            "max_prompt": least_prompt(spec, self._models[spec.model]),
            "max_queued_per_tenant": 1 + sum(job.spec.tenant == spec.tenant for job in waiting),
            "max_queued": 1 + len(waiting),
            MEMORY: held + _most_bytes(spec),
        }
        for name, value in would_be.items():
            maximum = limit_of(self._limits, spec.model, name)
            if maximum is not None and value > maximum:
                raise refusal(spec, name, value, maximum)

    def _queued(self, model: str) -> _FakeJobs:
        jobs = (job for job in self._jobs.values() if job.spec.model == model)
        return [job for job in jobs if job.record.state is JobState.QUEUED]

    def _find(self, job_id: str) -> _FakeJob:
        if (job := self._jobs.get(job_id)) is None:
            raise JobGone(job_id)
        return job

    def _run(self, job: _FakeJob, pause_after: int | None) -> None:
        if job.record.state is JobState.QUEUED:
            self._start(job)
        texts = job.reply.texts[: job.spec.max_tokens]
        stop = len(texts) if pause_after is None else pause_after
        for index in range(job.record.tokens + 1, min(stop, len(texts)) + 1):
            job.entries.append(Token(index, index, texts[index - 1], 0.0))
            job.record = replace(job.record, tokens=index, tokens_at_risk=index)
        self._wake()
        if pause_after is not None:
            return
        if job.reply.error is not None:
            self._end(job, JobState.FAILED, None, job.reply.error)
        else:
            is_full = len(texts) == job.spec.max_tokens
            self._end(job, JobState.COMPLETED, "length" if is_full else "stop", None)

    def _start(self, job: _FakeJob) -> None:
        record = job.record
        job.record = replace(
            record,
            state=JobState.RUNNING,
            prompt_tokens=job.spec.least_prompt_tokens,
            started_at=record.started_at or time.time(),
            worker=_WORKER,
            attempts=record.attempts + 1,
            tokens_at_risk=record.tokens_at_risk or 0,
            checkpoint_error=job.reply.checkpoint_error,
        )
        job.entries.append(
            StateEvent(JobState.RUNNING, record.epoch, record.tokens, worker=_WORKER)
        )

    def _requeue(self, job: _FakeJob) -> None:
        record = job.record
        job.record = replace(
            record,
            state=JobState.QUEUED,
            epoch=record.epoch + 1,
            finished_at=None,
            finish_reason=None,
            error=None,
            checkpoint_error=None,
        )
        # It failed once; what comes after a resume is the rest, and its end.
        job.reply = replace(job.reply, error=None, checkpoint_error=None)
        job.entries.append(
            StateEvent(JobState.QUEUED, job.record.epoch, record.tokens, reason="resume")
        )
        self._run(job, None)

    def _end(
        self, job: _FakeJob, state: JobState, finish_reason: str | None, error: str | None
    ) -> None:
        record = job.record
        is_completed = state is JobState.COMPLETED
        job.record = replace(
            record,
            state=state,
            finished_at=time.time(),
            finish_reason=finish_reason,
            error=error,
            tokens_at_risk=None if is_completed else record.tokens_at_risk,
            checkpoint_error=None if is_completed else record.checkpoint_error,
        )
        job.entries.append(
            EndEvent(
                index=record.tokens,
                state=state,
                epoch=record.epoch,
                finish_reason=finish_reason,
                text="",
                usage=Usage(record.prompt_tokens or 0, record.tokens),
                exactness=record.exactness,
                error=error,
            )
        )
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _held_bytes(job: _FakeJob) -> int:
    if not job.record.state.is_over:
        return _most_bytes(job.spec)
    return _JOB_BYTES + len(pack_spec(job.spec)) + job.record.tokens * _TOKEN_BYTES


def _most_bytes(spec: JobSpec) -> int:
    a_token = _TOKEN_BYTES + _LOGPROB_BYTES * spec.logprobs
    return _JOB_BYTES + 2 * len(pack_spec(spec)) + spec.max_tokens * a_token


def _history(entry: Token | StateEvent | EndEvent) -> Event:
    if not isinstance(entry, EndEvent):
        return entry
    return StateEvent(entry.state, entry.epoch, entry.index, reason=entry.error)


def _model_info(model: str | ModelInfo) -> ModelInfo:
    if isinstance(model, ModelInfo):
        return model
    return ModelInfo(model, None, None, "fake", announced_at=0.0)


def _new_record(spec: JobSpec, created_at: float) -> JobRecord:
    return JobRecord(
        id=new_job_id(),
        model=spec.model,
        state=JobState.QUEUED,
        epoch=1,
        prompt_tokens=None,
        tokens=0,
        created_at=created_at,
        started_at=None,
        finished_at=None,
        finish_reason=None,
        exactness="exact",
        error=None,
        priority=spec.priority,
        metadata=spec.metadata,
        tenant=spec.tenant,
        max_tokens=spec.max_tokens,
        queue_ttl=spec.queue_ttl,
        max_runtime=spec.max_runtime,
        deadline=spec.deadline,
        adapter=spec.adapter,
    )
