"""`tenuto status`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings
from tenuto_client._findings import count
from tenuto_client._outlook import look
from tenuto_client._records import QUIET_PHASES, JobRecord, JobState

from ._shared import add_job, ask, out, when, with_job

HELP = "Show how a job is doing."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_job(parser)


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
        ("at risk", _at_risk(record)),
        ("finish reason", record.finish_reason),
        ("error", record.error),
        ("exactness", record.exactness),
        ("because", record.exactness_reason),
        ("attempt", _attempt(record)),
        ("worker" if record.state is JobState.RUNNING else "last worker", record.worker),
        ("priority", record.priority),
        ("created", when(record.created_at)),
        ("started", when(record.started_at)),
        ("finished", when(record.finished_at)),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _phase(record: JobRecord) -> str | None:
    if record.phase not in QUIET_PHASES:
        return None
    return f"{record.phase} {record.phase_done or 0} of {record.phase_total or 0}"


def _at_risk(record: JobRecord) -> str | None:
    if record.tokens_at_risk is None:
        return None
    return f"{count(record.tokens_at_risk, 'token')} since the last checkpoint"


def _attempt(record: JobRecord) -> str:
    if record.state is JobState.QUEUED:
        before = f"; {count(record.attempts, 'attempt')} before it" if record.attempts else ""
        return f"{record.epoch}, waits for a worker{before}"
    return str(record.epoch)
