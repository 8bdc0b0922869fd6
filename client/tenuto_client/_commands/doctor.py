"""`tenuto doctor`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.metadata import EntryPoint, entry_points

from tenuto_client import _lines as lines
from tenuto_client._command import FAILED
from tenuto_client._config import Settings
from tenuto_client._findings import Finding, Level
from tenuto_client._health import check_data_dir, check_server

from ._shared import out

HELP = "Look at server, workers, jobs and disk, and say what is wrong and what mends it."

GROUP = "tenuto.doctor"
_ALONE_S = 0.5
_EPILOG = """\
It does not read checkpoints through; `tenuto checkpoints verify` finds damaged ones.

A line after -> can be typed as it stands; where it needs more, the next one says so. What the
environment does not say (--redis, --namespace, --data-dir) is repeated in it, but no password.

exit codes: 0 no problem (there may be warnings), 1 a problem. That no worker is alive is a warning
while nothing waits for one, as on a machine that only submits, or before workers are started;
jobs that wait for a model that nobody serves, or that nobody runs on, are a problem.
"""
_MARKS = {Level.OK: "ok", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print what is found."""
    has_problem = False
    for finding in _findings(settings):
        has_problem |= finding.level is Level.PROBLEM
        out(lines.finding_line(finding) if args.json else _show(finding))
    return FAILED if has_problem else 0


def _findings(settings: Settings) -> Iterator[Finding]:
    yield from check_data_dir(settings)
    points = sorted(entry_points(group=GROUP), key=lambda each: each.name)
    with ThreadPoolExecutor(1) as asker:
        server = asker.submit(lambda: asyncio.run(check_server(settings)))
        # One that answers is looked at before anything else takes the processor; one that does not
        # is waited for while the others look.
        wait([server], timeout=_ALONE_S)
        others = [_others(point, settings) for point in points]
        yield from server.result()
    for findings in others:
        yield from findings


def _others(point: EntryPoint, settings: Settings) -> Iterable[Finding]:
    """What another distribution finds; its own bugs are findings too."""
    try:
        return list(point.load()(settings))
    except Exception as error:  # noqa: BLE001  whatever it is, the other checks still count
        return [Finding(Level.PROBLEM, point.name, f"this check fails: {error!r}")]


def _show(finding: Finding) -> str:
    lines = [f"-> {line}" for line in (finding.fix or "").splitlines()]
    lines += [f"   {line}" for line in (finding.note or "").splitlines()]
    below = "".join(f"{'':<22}{line}\n" for line in lines)
    return f"{_MARKS[finding.level]:<9}{finding.subject:<13}{finding.says}\n{below}"
