"""`tenuto result`."""

from __future__ import annotations

import argparse

from tenuto_client import _lines as lines
from tenuto_client._command import FAILED, complain
from tenuto_client._config import Settings
from tenuto_client._errors import JobNotCompleted
from tenuto_client._records import Result

from ._shared import add_job, open_client, out

HELP = "Wait for a job's end and print its text."

_EPILOG = """\
With --json: text, state, finish_reason, usage, exactness, and every token.

exit codes: 0 completed, 1 failed, cancelled (what there is is printed) or out of time,
3 server not reachable, 4 no such job
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    add_job(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="give up waiting after so many seconds"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print what there is at the end."""
    with open_client(settings) as client:
        try:
            result = client.job(args.job).result(args.timeout)
        except JobNotCompleted as error:
            _print(error.result, as_json=args.json)
            complain(str(error))
            return FAILED
    _print(result, as_json=args.json)
    return 0


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        out(lines.result_line(result))
    elif result.text:
        out(result.text if result.text.endswith("\n") else f"{result.text}\n")
    if result.exactness != "exact":
        complain(f"{result.exactness}: {result.exactness_reason or 'no reason given'}")
