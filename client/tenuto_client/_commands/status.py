"""`tenuto status`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings
from tenuto_client._findings import count
from tenuto_client._outlook import look
from tenuto_client._records import QUIET_PHASES, JobRecord, JobState

from ._shared import add_job, ask, out, when, with_job

HELP = "Show how a job is doing."
_SUSPECT = "until it progresses, since a worker died while it ran"
_EPILOG = """\
recompute (--json: tokens_at_risk) counts the published tokens that no checkpoint covers yet. They
stand in the stream and cannot be lost; a worker that takes the job over after a crash feeds them
once more, and goes on with the next one.

checkpoints (--json: checkpoint_error) says why the last checkpoint could not be saved, such as a
full disk or the disk budget. The job goes on; there is more to compute again after a crash.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_job(parser)
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the record."""
    record = with_job(args, settings, lambda job: job.status())
    if not args.json:
        outlook = None
        if not record.state.is_over:
            outlook = ask(settings, lambda connection, keys: look(connection, keys, record.id))
        waits = None if outlook is None else str(outlook)
        out("".join(f"{name:<14}{value}\n" for name, value in _rows(record, waits)))
    return 0


def _rows(record: JobRecord, waits: str | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, object]] = [
        ("job", record.id),
        ("model", record.model),
        ("state", f"{record.state}{', to be cancelled' if record.cancelling else ''}"),
        ("now", waits),
        ("tokens", f"{record.tokens} of at most {record.max_tokens}"),
        ("prompt", None if record.prompt_tokens is None else f"{record.prompt_tokens} tokens"),
        ("progress", _phase(record)),
        ("recompute", _recompute(record)),
        ("checkpoints", _checkpoints(record)),
        ("finish reason", record.finish_reason),
        ("error", record.error),
        ("exactness", record.exactness),
        ("because", record.exactness_reason),
        ("attempt", _attempt(record)),
        ("worker" if record.state is JobState.RUNNING else "last worker", record.worker),
        ("apart", _SUSPECT if record.suspect else None),
        ("made way", count(record.preemptions, "time") if record.preemptions else None),
        ("adapter", record.adapter),
        ("tenant", record.tenant),
        ("priority", record.priority),
        ("deadline", None if record.deadline is None else when(record.deadline)),
        ("queue ttl", None if record.queue_ttl is None else f"{record.queue_ttl:g} s"),
        ("max runtime", None if record.max_runtime is None else f"{record.max_runtime:g} s"),
        ("created", when(record.created_at)),
        ("started", when(record.started_at)),
        ("finished", when(record.finished_at)),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _phase(record: JobRecord) -> str | None:
    if record.phase not in QUIET_PHASES:
        return None
    return f"{record.phase} {record.phase_done or 0} of {record.phase_total or 0}"


def _recompute(record: JobRecord) -> str | None:
    if record.tokens_at_risk is None:
        return None
    tokens = count(record.tokens_at_risk, "token")
    when = "after a crash" if record.state is JobState.RUNNING else "when the job goes on"
    return f"{tokens} after the last checkpoint would be computed again {when}"


def _checkpoints(record: JobRecord) -> str | None:
    if record.checkpoint_error is None:
        return None
    word = "failing" if record.state is JobState.RUNNING else "failed"
    return f"{word}: {record.checkpoint_error}"


def _attempt(record: JobRecord) -> str:
    """Which one it is; resumes of a job that no worker had begun are none."""
    if record.state is JobState.QUEUED:
        before = f"; {count(record.attempts, 'attempt')} before it" if record.attempts else ""
        return f"{record.attempts + 1}, waits for a worker{before}"
    return str(record.attempts or "none: no worker had begun it")
