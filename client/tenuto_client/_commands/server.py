"""`tenuto server`."""

from __future__ import annotations

import argparse

from tenuto_client._config import Settings
from tenuto_client._server import run_foreground, stop_server

from ._shared import out

HELP = "Run the embedded server of the data dir in the foreground, or stop it."
JSON = False

_EPILOG = """\
It starts by itself where no Redis URL is given, so this is for service managers, and for
seeing it work. Stopping it loses nothing; jobs go on when it is back.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("--stop", action="store_true", help="stop the one that runs, and wait")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Become the server, or stop it."""
    if not args.stop:
        run_foreground(settings.data_dir)
    out("stopped\n" if stop_server(settings.data_dir) else "no server was running\n")
    return 0
