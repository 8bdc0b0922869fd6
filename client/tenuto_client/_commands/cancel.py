"""`tenuto cancel`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._config import Settings
from tenuto_client._sync import SyncJob

from ._shared import add_jobs, with_jobs

HELP = "Stop a job at its next token; what it produced stays, and resume continues it."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = "Cancelling twice, or after the end, changes nothing and is no error."
    add_jobs(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Ask for the stop."""

    def cancel(job: SyncJob) -> str:
        record = job.cancel()
        if args.json:
            return lines.record_line(record)
        says = "stops at its next token" if record.cancelling else f"is {record.state}"
        return f"{record.id} {says}\n"

    return with_jobs(args, settings, cancel)
