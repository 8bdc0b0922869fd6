"""`tenuto delete`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._config import Settings

from ._shared import add_job, open_client, out

HELP = "Remove a job with all it produced, whatever its state."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_job(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Remove it."""
    with open_client(settings) as client:
        client.job(args.job).delete()
    out(lines.dump({"id": args.job, "deleted": True}) if args.json else f"{args.job} is deleted\n")
    return 0
