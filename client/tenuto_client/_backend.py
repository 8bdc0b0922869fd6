"""`Backend`: what a store of jobs does for the client. Redis is one, the in-memory fake another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ._announce import ModelInfo, WorkerInfo
from ._limits import Limits
from ._records import EndEvent, JobRecord, JobState, ProgressEvent, StateEvent, Token
from ._spec import Request

Event = Token | StateEvent | ProgressEvent | EndEvent
"""One line of a job's stream."""


@dataclass(frozen=True, slots=True)
class Page:
    """Which jobs to list: the newest `limit` that match, older than `before`."""

    state: JobState | None
    model: str | None
    tenant: str | None
    limit: int
    before: JobRecord | str | None


class Backend(Protocol):
    """Every method raises `ServerUnavailable` where there is a server that does not answer."""

    async def submit(self, request: Request) -> str:
        """Accept a job and return its id; raises `UnknownModel`, `IdempotencyConflict`,
        `LimitExceeded`."""

    async def status(self, job_id: str) -> JobRecord:
        """The job as it is; raises `JobGone`."""

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask for a stop; raises `JobGone`."""

    async def resume(self, job_id: str) -> JobRecord:
        """Let an ended job go on; raises `JobGone`, `IllegalTransition`."""

    async def delete(self, job_id: str) -> None:
        """Remove every trace of a job; raises `JobGone`."""

    def events(
        self, job_id: str, after: int, reconnect_timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        """What comes after token `after`, to the end; raises `JobGone`."""

    async def list(self, page: Page) -> list[JobRecord]:
        """Jobs, newest first."""

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model that was ever announced."""

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that are alive."""

    async def forget_model(self, model: str) -> None:
        """Remove what was announced of a model; raises `InvalidRequest` while it is in use."""

    async def limits(self) -> Limits:
        """What is set."""

    async def set_limits(self, model: str | None, values: Mapping[str, int]) -> None:
        """Set limits of one model, or of all."""

    async def clear_limits(self, model: str | None, names: Sequence[str]) -> None:
        """Unset limits of one model, or of all."""

    async def close(self) -> None:
        """Let go of connections."""
