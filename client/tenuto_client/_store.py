"""`JobStore`: the client's scripts and reads as typed async functions over one Redis."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, cast

import redis.exceptions

from ._announce import ALIVE_S, ModelInfo, WorkerInfo, unpack_model, unpack_worker
from ._backend import Event, Page
from ._errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    JobGone,
    ServerUnavailable,
    UnknownModel,
)
from ._findings import count
from ._limits import (
    MEANINGS,
    Limits,
    check_announced,
    field_of,
    least_prompt,
    refusal,
    unpack_limits,
)
from ._reader import StreamReader
from ._records import QUIET_PHASES, JobRecord, JobState, JobStats
from ._redis import Connection
from ._scripts import source, ticket_payload
from ._spec import JobSpec, Request, pack_spec
from ._tails import Tails
from ._wire import is_token_id, stats_of
from .keys import Keys

_FIELDS: Final = (
    "id", "model", "state", "epoch", "prompt_tokens", "tokens", "created_at", "started_at",
    "finished_at", "finish_reason", "exactness", "error", "priority", "metadata",
    "exactness_reason", "tenant", "worker", "attempts", "cancel", "max_tokens", "phase",
    "phase_done", "phase_total", "durable", "checkpoint_error", "queue_ttl", "max_runtime",
    "suspect", "preemptions", "deadline", "stats", "ran", "adapter",
)  # fmt: skip


# Inside the class, `list` is its method.
_Words = list[str]


class JobStore:
    """The jobs of one namespace.

    Args:
        wait_replicas: a submit waits until so many replicas have it.
        wait_fsync: a submit waits until the server has it on disk.
        wait_timeout: for how many seconds.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        *,
        wait_replicas: int = 0,
        wait_fsync: bool = False,
        wait_timeout: float = 5.0,
    ) -> None:
        self._redis = connection
        self._tails = Tails(connection)
        self._keys = keys
        self._wait_replicas = wait_replicas
        self._wait_fsync = wait_fsync
        self._wait_ms = int(wait_timeout * 1000)

    async def submit(self, request: Request) -> str:
        """Accept a job in one atomic step, once even when its answer is lost and it is repeated."""
        spec = request.spec.with_seed()
        least = 0
        if not await self._is_known(spec):
            model = await self._model(spec.model)
            check_announced(spec, model)
            least = least_prompt(spec, model)
        packed = pack_spec(spec)
        tried: set[str] = set()
        job_id = new_job_id()
        while True:
            arguments = self._submit_arguments(job_id, spec, packed, request.body_hash, least)

            async def once(job_id: str = job_id, arguments: Sequence[Any] = arguments) -> Any:
                again = job_id in tried
                tried.add(job_id)
                word, *rest = await self._submit_once(arguments)
                # Our own first try, whose answer was lost, is no stranger's job.
                return ["existing" if again and word == "duplicate_id" else word, *rest]

            word, *rest = await self._redis.retrying(once)
            if word != "duplicate_id":
                return await self._submitted(spec, word, rest)
            job_id = new_job_id()

    async def status(self, job_id: str) -> JobRecord:
        """The job as it is."""
        values, last = await self._redis.pipeline(
            [
                ("HMGET", self._keys.job(job_id), *_FIELDS),
                ("XREVRANGE", self._keys.stream(job_id), "+", "-", "COUNT", 1),
            ]
        )
        if values[0] is None:
            raise JobGone(job_id)
        return _without_past_phase(_record(values), last[0][0] if last else b"0-0")

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a stop."""
        await self._move("cancel", job_id)
        return await self.status(job_id)

    async def resume(self, job_id: str) -> JobRecord:
        """Let an ended job go on."""
        if await self._move("resume", job_id) == "completed":
            raise IllegalTransition(job_id, "it is completed, there is nothing left to resume")
        return await self.status(job_id)

    async def delete(self, job_id: str) -> None:
        """Remove every key of a job."""
        tries = 0

        async def once() -> bytes:
            nonlocal tries
            tries += 1
            return cast(bytes, await self._script("delete", job_id))

        # Gone at the second try: the first one did it, and its answer was lost.
        if await self._redis.retrying(once) == b"gone" and tries == 1:
            raise JobGone(job_id)

    def events(
        self, job_id: str, after: int, reconnect_timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        """What comes after token `after`, to the end."""
        reader = StreamReader(
            self._redis, self._tails, self._keys, job_id, after, reconnect_timeout
        )
        return reader.events()

    async def list(self, page: Page) -> list[JobRecord]:
        """Jobs, newest first."""
        found: list[JobRecord] = []
        ms, job_id = await self._cursor(page.before)
        while True:
            wanted = page.limit - len(found)
            ms, job_id, *rows = await self._redis.retrying(
                partial(
                    self._script, "list", ms, job_id, page.state or "", page.model or "",
                    page.tenant or "", wanted, *_FIELDS,
                )
            )  # fmt: skip
            found += [_record(row) for row in rows]
            if len(found) == page.limit or not job_id:
                return found

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model that was ever announced, with who serves it and how much waits."""
        entries = sorted(_pairs(await self._redis.call("HGETALL", self._keys.models())))
        known = [unpack_model(name.decode(), value) for name, value in entries]
        counts = await self._redis.pipeline(
            [("HGET", self._keys.queued(each.name), "*") for each in known]
        )
        workers = await self.workers()
        return tuple(
            replace(
                each,
                queued=int(queued or 0),
                workers=sum(each.name in worker.models for worker in workers),
            )
            for each, queued in zip(known, counts, strict=True)
        )

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that are alive."""
        (seconds, _), entries = await self._redis.pipeline(
            [("TIME",), ("HGETALL", self._keys.workers())]
        )
        known = [unpack_worker(name.decode(), value) for name, value in sorted(_pairs(entries))]
        return tuple(each for each in known if int(seconds) - each.seen_at <= ALIVE_S)

    async def forget_model(self, model: str) -> None:
        """Remove what was announced of a model that is not in use."""
        word, who = await self._redis.retrying(partial(self._script, "forget", model, ALIVE_S))
        if word == b"served":
            raise InvalidRequest(
                "model", f"worker {who.decode()} serves {model}", hint="stop its workers first"
            )
        if word == b"busy":
            raise InvalidRequest(
                "model",
                f"{count(int(who), 'job')} of {model} still queued or running",
                hint=f"cancel or delete them first: tenuto list --model {model}",
            )
        if word == b"unknown":
            raise UnknownModel(model, [info.name for info in await self.models()])

    async def limits(self) -> Limits:
        """What is set."""
        return unpack_limits(await self._redis.call("HGETALL", self._keys.limits()))

    async def set_limits(self, model: str | None, values: Mapping[str, int]) -> None:
        """Set limits of one model, or of all."""
        fields = [part for name, value in values.items() for part in (field_of(model, name), value)]
        if fields:
            await self._redis.call("HSET", self._keys.limits(), *fields)

    async def clear_limits(self, model: str | None, names: Sequence[str]) -> None:
        """Unset limits of one model, or of all."""
        await self._redis.call(
            "HDEL", self._keys.limits(), *(field_of(model, name) for name in names or MEANINGS)
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _is_known(self, spec: JobSpec) -> bool:
        """Whether the key was used before: then there is nothing to refuse."""
        if spec.idempotency_key is None:
            return False
        key = self._keys.idem(spec.tenant, spec.idempotency_key)
        return bool(await self._redis.call("EXISTS", key))

    async def _model(self, name: str) -> ModelInfo:
        packed = await self._redis.call("HGET", self._keys.models(), name)
        if packed is None:
            raise UnknownModel(name, [info.name for info in await self.models()])
        return unpack_model(name, packed)

    def _submit_arguments(
        self, job_id: str, spec: JobSpec, packed: bytes, body_hash: str, least: int
    ) -> tuple[str | bytes | int | float, ...]:
        key = spec.idempotency_key
        return (
            job_id,
            spec.model,
            spec.tenant,
            spec.priority,
            packed,
            spec.retention,
            "" if spec.deadline is None else spec.deadline,
            "" if key is None else self._keys.idem(spec.tenant, key),
            body_hash,
            spec.max_tokens,
            json.dumps(spec.metadata),
            len(spec.prompt) if spec.has_token_ids else -least,
            *_options(spec),
        )

    async def _submit_once(self, arguments: Sequence[Any]) -> _Words:
        # WAIT counts the writes of its own connection only.
        async with self._redis.session(pinned=self._waits) as client:
            word, *rest = await self._run(client, "submit", *arguments)
            if self._waits and word in (b"created", b"existing", b"duplicate_id"):
                await self._wait(client, rest[0].decode())
        return [each.decode() if isinstance(each, bytes) else str(each) for each in (word, *rest)]

    @property
    def _waits(self) -> bool:
        return self._wait_fsync or self._wait_replicas > 0

    async def _wait(self, client: Any, job_id: str) -> None:
        hint = "the job runs all the same; a failure now may lose it"
        if self._wait_replicas:
            count = await client.execute_command("WAIT", self._wait_replicas, self._wait_ms)
            if count < self._wait_replicas:
                raise ServerUnavailable(
                    f"job {job_id}: {count} of {self._wait_replicas} replicas confirmed it",
                    hint=hint,
                )
        if self._wait_fsync:
            synced, _ = await client.execute_command("WAITAOF", 1, 0, self._wait_ms)
            if synced < 1:
                raise ServerUnavailable(
                    f"job {job_id}: the server has not confirmed it on disk", hint=hint
                )

    async def _submitted(self, spec: JobSpec, word: str, rest: Sequence[str]) -> str:
        if word == "limit":
            name, value, maximum = rest
            raise refusal(spec, name, int(value), int(maximum))
        job_id = rest[0]
        if word == "conflict":
            raise IdempotencyConflict(spec.idempotency_key or "", job_id)
        if word == "unknown_model":
            raise UnknownModel(spec.model, [info.name for info in await self.models()])
        return job_id

    async def _move(self, name: str, job_id: str) -> str:
        word: bytes = await self._redis.retrying(partial(self._script, name, job_id))
        if word == b"gone":
            raise JobGone(job_id)
        return word.decode()

    async def _cursor(self, before: JobRecord | str | None) -> tuple[Any, Any]:
        if before is None:
            return "+inf", ""
        if isinstance(before, JobRecord):
            return round(before.created_at * 1000), before.id
        score = await self._redis.call("ZSCORE", self._keys.jobs(), before)
        if score is None:
            raise JobGone(before)
        return int(float(score)), before

    async def _script(self, name: str, *args: Any) -> Any:
        async with self._redis.session() as client:
            return await self._run(client, name, *args)

    async def _run(self, client: Any, name: str, *args: Any) -> Any:
        text, digest = _script(name)
        payload = ticket_payload(int(time.time() * 1000))
        arguments = (0, self._keys.namespace, payload, *args)
        try:
            return await client.execute_command("EVALSHA", digest, *arguments)
        except redis.exceptions.NoScriptError:
            return await client.execute_command("EVAL", text, *arguments)


def _options(spec: JobSpec) -> Iterator[str | float]:
    """Fields and values of the job's hash that not every job has."""
    for name in ("queue_ttl", "max_runtime", "traceparent", "adapter"):
        if (value := getattr(spec, name)) is not None:
            yield from (name, value)
    if spec.logprobs:
        yield from ("logprobs", spec.logprobs)


def new_job_id() -> str:
    """A random id of 16 hex digits."""
    return secrets.token_hex(8)


@cache
def _script(name: str) -> tuple[str, str]:
    text = source("tenuto_client", name)
    # Redis names scripts by their SHA-1; it protects nothing.
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _pairs(reply: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return list(reply.items())


def _without_past_phase(record: JobRecord, last_entry: bytes) -> JobRecord:
    """Workers tell their progress now and then, and after its first token an attempt prefills no
    more: nothing but tokens follows the event that it runs."""
    if record.phase in QUIET_PHASES and is_token_id(last_entry):
        return replace(record, phase=None, phase_done=None, phase_total=None)
    return record


def _at_risk(state: str | None, tokens: int, durable: int | None) -> int | None:
    if durable is None or state == JobState.COMPLETED:
        return None
    # A checkpoint may be ahead of the stream.
    return max(0, tokens - durable)


def _record(values: Sequence[bytes | None]) -> JobRecord:
    text = {
        name: None if value is None else value.decode()
        for name, value in zip(_FIELDS, values, strict=True)
    }

    def number(name: str) -> float | None:
        value = text[name]
        return None if value is None else float(value)

    def counted(name: str) -> int | None:
        value = text[name]
        return None if value is None else int(value)

    return JobRecord(
        id=text["id"] or "",
        model=text["model"] or "",
        state=JobState(text["state"] or ""),
        epoch=counted("epoch") or 0,
        prompt_tokens=counted("prompt_tokens"),
        tokens=counted("tokens") or 0,
        created_at=number("created_at") or 0.0,
        started_at=number("started_at"),
        finished_at=number("finished_at"),
        finish_reason=text["finish_reason"],
        exactness=text["exactness"] or "exact",
        error=text["error"],
        priority=counted("priority") or 0,
        metadata=json.loads(text["metadata"] or "{}"),
        exactness_reason=text["exactness_reason"],
        tenant=text["tenant"] or "",
        worker=text["worker"],
        attempts=counted("attempts") or 0,
        cancelling=text["cancel"] is not None,
        max_tokens=counted("max_tokens") or 0,
        phase=text["phase"],
        phase_done=counted("phase_done"),
        phase_total=counted("phase_total"),
        tokens_at_risk=_at_risk(text["state"], counted("tokens") or 0, counted("durable")),
        checkpoint_error=text["checkpoint_error"],
        queue_ttl=number("queue_ttl"),
        max_runtime=number("max_runtime"),
        suspect=text["suspect"] is not None,
        preemptions=counted("preemptions") or 0,
        deadline=number("deadline"),
        stats=_stats(text["stats"], counted("attempts") or 0, number("ran") or 0.0),
        adapter=text["adapter"],
    )


def _stats(told: str | None, attempts: int, ran: float) -> JobStats | None:
    if told is None:
        return None
    try:
        return stats_of(json.loads(told), attempts=attempts, seconds=ran)
    except (KeyError, TypeError, ValueError):
        # Somebody damaged them; the record is worth more than they are.
        return None
