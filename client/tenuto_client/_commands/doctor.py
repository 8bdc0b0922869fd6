"""`tenuto doctor`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points

from tenuto_client import _lines as lines
from tenuto_client._command import FAILED
from tenuto_client._config import Settings
from tenuto_client._findings import Finding, Level
from tenuto_client._health import check_data_dir, check_server

from ._shared import out

HELP = "Look at server, workers, jobs and disk, and say what is wrong and what mends it."

GROUP = "tenuto.doctor"
_EPILOG = """\
It does not read checkpoints through; `tenuto checkpoints verify` finds damaged ones.

exit codes: 0 no problem (there may be warnings), 1 a problem
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
    yield from asyncio.run(check_server(settings))
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        yield from _others(point, settings)


def _others(point: EntryPoint, settings: Settings) -> Iterable[Finding]:
    """What another distribution finds; its own bugs are findings too."""
    try:
        return list(point.load()(settings))
    except Exception as error:  # noqa: BLE001  whatever it is, the other checks still count
        return [Finding(Level.PROBLEM, point.name, f"this check fails: {error!r}")]


def _show(finding: Finding) -> str:
    fix = f"{'':<22}-> {finding.fix}\n" if finding.fix else ""
    return f"{_MARKS[finding.level]:<9}{finding.subject:<13}{finding.says}\n{fix}"
