"""`tenuto result`."""

from __future__ import annotations

import argparse
import asyncio

from tenuto_client import _lines as lines
from tenuto_client._client import Client
from tenuto_client._command import FAILED, INTERRUPTED, complain
from tenuto_client._config import Settings
from tenuto_client._errors import JobCancelled, JobNotCompleted
from tenuto_client._records import Result

from ._shared import add_job, out
from ._waiting import complain_of_changes, telling

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
    try:
        result = asyncio.run(_wait(settings, args.job, args.timeout))
    except JobNotCompleted as error:
        _print(error.result, as_json=args.json)
        complain(_why(error))
        return FAILED
    except KeyboardInterrupt:
        complain(f"the job goes on without you; to wait again: tenuto result {args.job}")
        return INTERRUPTED
    _print(result, as_json=args.json)
    return 0


async def _wait(settings: Settings, job_id: str, seconds: float | None) -> Result:
    async with Client(
        settings.redis_url, namespace=settings.namespace, data_dir=settings.data_dir
    ) as client:
        job = client.job(job_id)
        async with telling(settings, job_id, complain_of_changes):
            return await job.result(seconds)


def _why(error: JobNotCompleted) -> str:
    if isinstance(error, JobCancelled):
        return f"{error.message}; to go on: tenuto resume {error.result.job_id}"
    return str(error)


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        out(lines.result_line(result))
    elif result.text:
        out(result.text if result.text.endswith("\n") else f"{result.text}\n")
    if result.exactness != "exact":
        complain(f"{result.exactness}: {result.exactness_reason or 'no reason given'}")
