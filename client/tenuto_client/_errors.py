"""The exceptions of the client.

    TenutoError
    ├── InvalidRequest            a parameter is unknown or out of range; nothing was written
    │   └── UnknownModel          no worker has ever announced a model of this name
    ├── LimitExceeded             a limit of queue or workers forbids it; nothing was written
    ├── IdempotencyConflict       the key was used before, with another body
    ├── IllegalTransition         its state forbids it, such as resuming a completed job
    ├── JobGone                   it never existed, was deleted, or its retention ended
    ├── JobNotCompleted           the job ended otherwise; carries the result up to there
    │   ├── JobFailed
    │   └── JobCancelled
    ├── ResultTimeout             result(timeout=...) ran out of time; the job goes on
    ├── ProtocolError             Redis holds what this version cannot read
    ├── ServerUnavailable         no Redis answers
    │   └── ServerStartFailed     the embedded server could not be started
    └── DataDirError              the data dir cannot be made or written

Every error has a `hint`, what to do about it, where there is one; `str()` shows it in brackets.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._records import Result


class TenutoError(Exception):
    """Root of everything the client raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(TenutoError):
    """A parameter is unknown or out of range. Nothing was written."""

    def __init__(self, field: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{field}: {problem}", hint=hint)
        self.field = field


class UnknownModel(InvalidRequest):
    """No worker has ever announced a model of this name."""

    def __init__(self, model: str, known: list[str]) -> None:
        names = ", ".join(sorted(known)) or "none yet"
        close = difflib.get_close_matches(model, known, n=1)
        if close:
            hint = f"did you mean {close[0]}?"
        else:
            hint = (
                f"start one: tenuto worker --model {model}=PATH_OR_REPO; "
                "one that is starting says when it is ready"
            )
        super().__init__(
            "model",
            f"no worker has ever announced {model!r}; known: {names}",
            hint=hint,
        )
        self.model = model
        self.known = known


class LimitExceeded(TenutoError):
    """A submit is over a limit. Nothing was written.

    Attributes:
        limit: its name, such as `max_queued`.
        value: what the job asks for, or what there would be with it.
        maximum: the most that is allowed.
        retryable: whether waiting may help: it bounds what all jobs take together.
    """

    def __init__(
        self, limit: str, value: int, maximum: int, problem: str, *, hint: str, retryable: bool
    ) -> None:
        super().__init__(f"{limit}: {problem}", hint=hint)
        self.limit = limit
        self.value = value
        self.maximum = maximum
        self.retryable = retryable


class IdempotencyConflict(TenutoError):
    """The idempotency key belongs to a job that was submitted with another body."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency_key: {key!r} was used for job {job_id} with another body",
            hint="use a new key for a new request",
        )
        self.key = key
        self.job_id = job_id


class IllegalTransition(TenutoError):
    """The state of the job does not allow what was asked."""

    def __init__(self, job_id: str, problem: str) -> None:
        super().__init__(f"job {job_id}: {problem}")
        self.job_id = job_id


class JobGone(TenutoError):
    """No such job: it never existed, was deleted, or its retention ended."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no such job: {job_id}", hint="deleted, expired, or never submitted here")
        self.job_id = job_id


class JobNotCompleted(TenutoError):
    """The job ended without completing. `result` holds what it produced until then."""

    def __init__(self, message: str, result: Result, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.result = result


class JobFailed(JobNotCompleted):
    """The job ended `failed`; the message has the reason."""


class JobCancelled(JobNotCompleted):
    """The job was cancelled; `resume()` continues it exactly."""


class ResultTimeout(TenutoError, TimeoutError):
    """The job had not ended after the time that `result` was given. The job goes on."""

    def __init__(self, job_id: str, timeout: float) -> None:
        super().__init__(f"job {job_id} has not ended after {timeout:g} s", hint="it goes on")
        self.job_id = job_id


class ProtocolError(TenutoError):
    """What stands in Redis was not written by a version that this one can read."""


class ServerUnavailable(TenutoError):
    """No Redis or Valkey server answers at the address, or it refuses to serve.

    `transient` tells whether trying again may help.
    """

    def __init__(self, message: str, *, hint: str | None = None, transient: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient


class ServerStartFailed(ServerUnavailable):
    """The embedded server could not be started."""


class DataDirError(TenutoError):
    """The data dir cannot be made, read or written."""

    def __init__(self, path: object, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"data dir {path}: {problem}", hint=hint)
        self.path = path
