"""The exceptions of the worker.

WorkerError
├── StartError             the worker cannot start, and starting again would not help
│   ├── ConfigError        a flag, a setting, a model or a folder is wrong (exit code 2)
│   └── RedisUnavailable   Redis cannot be reached or refuses us (exit code 3)
├── BadJob                 a job asks for what cannot be done; it ends `failed` with the message
├── NoMemory               there is no memory for a job's row now; it waits in its queue
├── LeftToOthers           the job is over a limit of this worker; it waits for another one
├── RedisAway              Redis cannot serve now; the same call may succeed later
└── Interrupted            waiting for Redis was given up because the worker or the attempt ends
"""

from __future__ import annotations

from typing import ClassVar

EXIT_CONFIG = 2
EXIT_REDIS = 3
EXIT_BROKEN = 70
EXIT_STUCK = 71
EXIT_MEMORY = 72


class WorkerError(Exception):
    """Root of everything the worker raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class StartError(WorkerError):
    """The worker cannot start. `exit_code` is what the process ends with."""

    exit_code: ClassVar[int] = EXIT_CONFIG


class ConfigError(StartError):
    """Something named by a flag or setting cannot be used."""

    def __init__(self, subject: object, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{subject}: {problem}", hint=hint)


class RedisUnavailable(StartError):
    """Redis cannot be reached, or refuses us."""

    exit_code = EXIT_REDIS


class BadJob(WorkerError):
    """A job asks for what cannot be done. The message names the field."""


class NoMemory(WorkerError):
    """There is no memory for a job's row now; the job waits in its queue."""


class LeftToOthers(WorkerError):
    """The job is over a limit of this worker, and another one may take it."""


class NoAdapter(WorkerError):
    """This worker does not have the job's adapter any more."""


class RedisAway(WorkerError):
    """Redis cannot serve now; the same call may succeed later."""


class Interrupted(WorkerError):
    """A wait was given up because what it was for is over."""
