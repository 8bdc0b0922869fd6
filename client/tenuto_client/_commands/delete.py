"""`tenuto delete`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._config import Settings
from tenuto_client._sync import SyncJob

from ._shared import add_jobs, with_jobs

HELP = "Remove a job with all it produced, whatever its state."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_jobs(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Remove it."""

    def delete(job: SyncJob) -> str:
        job.delete()
        if args.json:
            return lines.dump({"id": job.id, "deleted": True})
        return f"{job.id} is deleted\n"

    return with_jobs(args, settings, delete)
