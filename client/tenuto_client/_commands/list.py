"""`tenuto list`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._command import complain
from tenuto_client._config import Settings
from tenuto_client._outlook import without_lease
from tenuto_client._records import JobRecord, JobState

from ._shared import ask, open_client, out, when

HELP = "List jobs, newest first."

_EPILOG = """\
examples:
  tenuto list --state running
  tenuto list --limit 20 --before 5f0c63a1b2d4e8f7     the next page
"""
_HEAD = f"{'JOB':<18}{'STATE':<11}{'TOKENS':>14}  {'CREATED':<21}{'MODEL':<25}TENANT\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--state", choices=[str(state) for state in JobState], metavar="S", help=", ".join(JobState)
    )
    parser.add_argument("--model", metavar="M", help="only jobs of this model")
    parser.add_argument("--tenant", metavar="T", help="only jobs of this tenant")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="at most so many (100)")
    parser.add_argument("--before", metavar="JOB", help="only jobs older than this one")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the jobs."""
    with open_client(settings) as client:
        jobs = client.list(
            state=args.state,
            model=args.model,
            tenant=args.tenant,
            limit=args.limit,
            before=args.before,
        )
    if args.json:
        out("".join(map(lines.record_line, jobs)))
    else:
        out(_HEAD + "".join(map(_row, jobs)))
        _name_lost(settings, [job.id for job in jobs if job.state is JobState.RUNNING])
    return 0


def _name_lost(settings: Settings, running: list[str]) -> None:
    if lost := ask(settings, lambda connection, keys: without_lease(connection, keys, running)):
        runs = "runs" if len(lost) == 1 else "run"
        complain(
            f"{', '.join(lost)} {runs} without a worker; the next one takes over (tenuto doctor)"
        )


def _row(job: JobRecord) -> str:
    tokens = f"{job.tokens}/{job.max_tokens}"
    return (
        f"{job.id:<18}{job.state:<11}{tokens:>14}  {when(job.created_at):<21}"
        f"{job.model:<24} {job.tenant}\n"
    )
