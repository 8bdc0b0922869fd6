"""`tenuto watch`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings

from ._shared import add_job
from ._watching import watch

HELP = "Print a job's text as it comes, from the beginning or from where you were."

_EPILOG = """\
Watching changes nothing: Ctrl-C leaves the job running, any number may watch, and a
watcher goes on through restarts of workers and server.

examples:
  tenuto watch 5f0c63a1b2d4e8f7
  tenuto watch 5f0c63a1b2d4e8f7 --after 120     only what comes after token 120
  tenuto watch 5f0c63a1b2d4e8f7 --json          tokens, states, progress and the end

exit codes: 0 completed, 1 failed or cancelled, 3 server not reachable, 4 no such job
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    add_job(parser)
    parser.add_argument(
        "--after", type=int, default=0, metavar="INDEX", help="index of the last token you have (0)"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Watch to the end."""
    return watch(settings, args.job, args.after, as_json=args.json)
