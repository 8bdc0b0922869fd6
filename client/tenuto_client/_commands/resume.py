"""`tenuto resume`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings

from ._shared import add_job, out, with_job

HELP = "Let a cancelled or failed job go on, exactly as if it had not stopped."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = "A job that is queued or running stays so. A completed one is refused (exit 2)."
    add_job(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Put it back into the queue."""
    record = with_job(args, settings, lambda job: job.resume())
    if not args.json:
        out(f"{record.id} is {record.state}\n")
    return 0
