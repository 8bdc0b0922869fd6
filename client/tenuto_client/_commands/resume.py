"""`tenuto resume`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._config import Settings
from tenuto_client._sync import SyncJob

from ._shared import add_jobs, with_jobs

HELP = "Let a cancelled or failed job go on, exactly as if it had not stopped."


_EPILOG = """\
A job that is queued or running stays so. A completed one is refused (exit 2).

Limits of time: a deadline and a queue_ttl that have passed are dropped, or the job would fail at
once; those that have not passed hold on. What of max_runtime is left is left; where all of it was
used, the job may run for as long once more.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    add_jobs(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Put it back into the queue."""

    def resume(job: SyncJob) -> str:
        record = job.resume()
        return lines.record_line(record) if args.json else f"{record.id} is {record.state}\n"

    return with_jobs(args, settings, resume)
