"""`tenuto cancel`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings

from ._shared import add_job, out, with_job

HELP = "Stop a job at its next token; what it produced stays, and resume continues it."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = "Cancelling twice, or after the end, changes nothing and is no error."
    add_job(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Ask for the stop."""
    record = with_job(args, settings, lambda job: job.cancel())
    if not args.json:
        says = "stops at its next token" if record.cancelling else f"is {record.state}"
        out(f"{record.id} {says}\n")
    return 0
