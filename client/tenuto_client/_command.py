"""The `tenuto` command: finds the command that was typed, and turns errors into exit codes.

DESIGN.md, "The command", has the protocol by which other distributions add commands.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Final, NoReturn, Protocol

from ._config import Settings
from ._errors import (
    DataDirError,
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    JobGone,
    LimitExceeded,
    ServerUnavailable,
    TenutoError,
)

GROUP: Final = "tenuto.commands"
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
NO_SUCH_JOB: Final = 4
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

_OURS: Final = (
    "submit", "watch", "status", "cancel", "resume", "result", "delete", "list", "models", "limits",
    "server", "doctor",
)  # fmt: skip
_INTRODUCTION: Final = """\
usage: tenuto COMMAND ...

Long LLM generations that survive everything. A job is submitted to a queue, workers
decode it, and its tokens stand in a stream that can be read from anywhere, again and
again; whatever dies in between, it goes on where it was.

First steps:
  tenuto worker --model NAME=PATH_OR_REPO    serve a model (leave it running)
  tenuto submit NAME 'Write a story.' --watch
{absent}
Commands:
"""
_INSTALL: Final = "pip install ./client ./engine ./worker"
_WORKER_ABSENT: Final = f"""
This is the client alone: `tenuto worker`, `demo` and `checkpoints`
come with the package tenuto-worker (in the checkout: {_INSTALL}).
"""
_ENDING: Final = """
`tenuto COMMAND --help` tells more. Without a Redis URL (--redis or TENUTO_REDIS_URL) all
commands share one embedded server, which starts by itself.

Exit codes: 0 done, 1 the job failed or was cancelled, 2 usage, 3 server not reachable,
4 no such job.
"""
_CONNECTION_HELP: Final = """where the jobs are (else TENUTO_REDIS_URL, TENUTO_NAMESPACE and
TENUTO_DATA_DIR)"""


_ELSEWHERE: Final = dict.fromkeys(("worker", "demo", "checkpoints"), "tenuto-worker")


class Command(Protocol):
    """What an entry point of `tenuto.commands` names: a module with these, or an object."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""

    def run(self, args: argparse.Namespace, settings: Settings) -> int:
        """Do it, and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the script `tenuto`; returns the exit code."""
    _fill_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Models write any character; a terminal that lacks one is no reason to stop.
            stream.reconfigure(errors="replace")
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except TenutoError as error:
        complain(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        # A full disk behind stdout, most likely.
        complain(str(error))
        _drop_output()
        return FAILED
    return code


def _fill_standard_streams() -> None:
    """Whoever started us may have closed some; what we open must not take their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _drop_output() -> None:
    """Python flushes stdout once more at its end; let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str) -> None:
    """Say something on stderr, under the command's name."""
    sys.stderr.write(f"tenuto: {message}\n")


def _dispatch(argv: list[str]) -> int:
    commands = _find_commands()
    if not argv or argv[0] in ("-h", "--help", "help"):
        return _help(commands, asked_for=bool(argv))
    if argv[0] == "--version":
        sys.stdout.write(f"tenuto {version('tenuto-client')}\n")
        return 0
    name, *rest = argv
    if name not in commands:
        return _unknown(name, list(commands))
    command = commands[name]()
    args = _parse(_parser(name, command), rest)
    settings = Settings.load(redis_url=args.redis, namespace=args.namespace, data_dir=args.data_dir)
    return command.run(args, settings)


def _find_commands() -> Mapping[str, Callable[[], Command]]:
    """Commands by name, each loaded only when it is called for."""
    ours: dict[str, Callable[[], Command]] = {name: partial(_our_command, name) for name in _OURS}
    others = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {**{point.name: point.load for point in others}, **ours}


def _our_command(name: str) -> Command:
    # A module is a Command as it stands, which a type checker cannot see through its name.
    module: Command = import_module(f"tenuto_client._commands.{name}")
    return module


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"tenuto {name}",
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation that works today would change its meaning with the next option.
        allow_abbrev=False,
    )
    command.configure(parser)
    if getattr(command, "JSON", True):
        parser.add_argument("--json", action="store_true", help="one JSON object a line")
    group = parser.add_argument_group("connection", _CONNECTION_HELP)
    urls = "redis://, rediss://, unix:// or redis+sentinel://"
    group.add_argument("--redis", metavar="URL", help=urls)
    group.add_argument("--namespace", metavar="PREFIX", help="prefix of all keys (tenuto:)")
    group.add_argument("--data-dir", metavar="DIR", help="embedded server and checkpoints")
    return parser


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of all that might be typed."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} ({self.prog} --help)\n")


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments; options may stand between them, and what follows `--` is no option."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # An optional argument that stands apart from those before it is found only so.
        args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(_unknown_argument(unknown[0], parser))
    return args


def _unknown_argument(given: str, parser: argparse.ArgumentParser) -> str:
    name = given.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    if not name.startswith("-"):
        return f"one argument too many: {given!r}{_advice(name, known, parser)}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"no such option: {name}" + (f"; did you mean {close[0]}?" if close else "")


def _advice(given: str, known: list[str], parser: argparse.ArgumentParser) -> str:
    if f"--{given}" in known:
        return f"; did you mean --{given}?"
    if any(action.dest == "prompt" for action in parser._actions):
        return "; quote a text that has spaces"
    return ""


def _help(commands: Mapping[str, Callable[[], Command]], *, asked_for: bool) -> int:
    lines = "".join(f"  {name:<13}{load().HELP}\n" for name, load in commands.items())
    out = sys.stdout if asked_for else sys.stderr
    absent = "" if "worker" in commands else _WORKER_ABSENT
    out.write(_INTRODUCTION.format(absent=absent) + lines + _ENDING)
    return 0 if asked_for else USAGE


def _unknown(name: str, known: list[str]) -> int:
    if (package := _ELSEWHERE.get(name)) is not None:
        complain(
            f"{name} comes with the package {package}, which is not installed here "
            f"(in the checkout: {_INSTALL})"
        )
        return USAGE
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]}?" if close else "tenuto --help lists them"
    complain(f"no such command: {name} ({guess})")
    return USAGE


def exit_code(error: TenutoError) -> int:
    """What the command ends with for an error."""
    if isinstance(error, ServerUnavailable):
        return UNREACHABLE
    if isinstance(error, JobGone):
        return NO_SUCH_JOB
    if isinstance(error, LimitExceeded):
        return FAILED if error.retryable else USAGE
    usage = (InvalidRequest, IdempotencyConflict, IllegalTransition, DataDirError)
    return USAGE if isinstance(error, usage) else FAILED
