"""What the commands share."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from tenuto_client import _lines as lines
from tenuto_client._command import complain, exit_code
from tenuto_client._config import Settings
from tenuto_client._errors import ServerUnavailable, TenutoError
from tenuto_client._records import JobRecord
from tenuto_client._redis import Connection
from tenuto_client._sync import SyncClient, SyncJob
from tenuto_client.keys import Keys

_T = TypeVar("_T")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The argument JOB, once or more."""
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="ids that `tenuto submit` printed")


def add_job(parser: argparse.ArgumentParser) -> None:
    """The argument JOB."""
    parser.add_argument("job", metavar="JOB", help="the id that `tenuto submit` printed")


def out(text: str) -> None:
    """Write to stdout."""
    sys.stdout.write(text)


def open_client(settings: Settings) -> SyncClient:
    """A client as the settings say."""
    return SyncClient(settings.redis_url, namespace=settings.namespace, data_dir=settings.data_dir)


def with_job(
    args: argparse.Namespace, settings: Settings, act: Callable[[SyncJob], JobRecord]
) -> JobRecord:
    """Do something to the job that was named, and print it as it is then, with `--json`."""
    with open_client(settings) as client:
        record = act(client.job(args.job))
    if args.json:
        out(lines.record_line(record))
    return record


def with_jobs(args: argparse.Namespace, settings: Settings, act: Callable[[SyncJob], str]) -> int:
    """Do something to each job that was named, and print what it says; returns the exit code.

    What one of them forbids is said, and keeps none of the others from it.
    """
    code = 0
    with open_client(settings) as client:
        for job_id in args.jobs:
            try:
                out(act(client.job(job_id)))
            except ServerUnavailable:
                raise
            except TenutoError as error:
                complain(str(error))
                code = code or exit_code(error)
    return code


def ask(settings: Settings, question: Callable[[Connection, Keys], Awaitable[_T]]) -> _T:
    """What the server itself says."""

    async def answer() -> _T:
        connection = Connection(settings.redis_url, settings.data_dir, retry_for=0)
        try:
            return await question(connection, Keys(settings.namespace))
        finally:
            await connection.close()

    return asyncio.run(answer())


def when(seconds: float | None) -> str:
    """A time for people, in their own zone."""
    if seconds is None:
        return "-"
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"
