"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from tenuto_client import _lines as lines
from tenuto_client._config import Settings
from tenuto_client._records import JobRecord
from tenuto_client._sync import SyncClient, SyncJob


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


def when(seconds: float | None) -> str:
    """A time for people, in their own zone."""
    if seconds is None:
        return "-"
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"
