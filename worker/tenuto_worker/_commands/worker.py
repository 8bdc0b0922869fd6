"""`tenuto worker`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tenuto_client import Settings
from tenuto_client._sizes import parse_size
from tenuto_client.keys import MODEL_NAME, MODEL_NAME_HINT
from tenuto_worker._commands import _adapter_flags, _kv_flags
from tenuto_worker._errors import ConfigError, StartError
from tenuto_worker._settings import BUDGET, MEMORY, SIZE, WorkerSettings, disk_budget, size

HELP = "take queued jobs of some models and decode them"
JSON = False


_DESCRIPTION = """\
Take queued jobs, decode them with MLX, publish every token, and keep checkpoints, so that a job
goes on where it was, bit for bit, after anything: this process may be killed at any moment.

A parent process stays small and starts the real worker again when it dies. The first SIGTERM or
Ctrl-C hands all running jobs back within the grace time; a second one ends at once. Nothing is
lost either way.
"""
_EPILOG = """\
examples:
  tenuto worker --model smollm2=/models/SmolLM2-135M-Instruct
  tenuto worker --model small=/models/a --model large=org/repo --slots 4 --redis redis://db:6379
  tenuto worker --model small=/models/a --model large=org/repo --kv large=8:64:0
  tenuto worker --model small=/models/a --adapters /adapters

Each flag can also be set as TENUTO_<FLAG>, such as TENUTO_SLOTS=4 or
TENUTO_MODEL="a=/models/a b=/models/b".

exit codes: 0 ended by a signal, 2 a flag, model or folder is wrong, 3 no Redis at the start
"""


@dataclass(frozen=True, slots=True)
class _Knob:
    """A flag of one value; `name` is the attribute of `WorkerSettings`."""

    flag: str
    name: str
    kind: Callable[[str], Any]
    metavar: str
    help: str


_KINDS: Final[Mapping[Callable[[str], Any], str]] = {
    int: "a whole number",
    float: "a number",
    disk_budget: BUDGET,
    size: MEMORY,
    parse_size: SIZE,
    str: "a text",
}
_KNOBS: Final = (
    _Knob("--slots", "slots", int, "N", "jobs of a model at once (1)"),
    _Knob(
        "--checkpoint-every", "checkpoint_every_tokens", int, "N", "save after so many tokens (256)"
    ),
    _Knob(
        "--checkpoint-seconds",
        "checkpoint_every_seconds",
        float,
        "S",
        "or after so many seconds (2)",
    ),
    _Knob(
        "--disk-budget",
        "disk_budget",
        disk_budget,
        "SIZE",
        "checkpoints take no more: 20GiB, 500MB, none (four fifths of what is free); where it is "
        "used up, first results of completed jobs go, which then cannot be recovered if Redis "
        "loses them, then checkpoints of jobs that wait or were stopped, which then replay from "
        "their prompts; running jobs lose nothing and go on without new checkpoints",
    ),
    _Knob(
        "--memory-budget",
        "memory_budget",
        size,
        "SIZE",
        "models and the caches of their jobs take no more: 20GiB, 500MB, none (what the device "
        "recommends; nine tenths of a CUDA device's memory; seven tenths of the machine's without "
        "a GPU); models are loaded and unloaded by need",
    ),
    _Knob(
        "--prefix-memory",
        "prefix_memory",
        parse_size,
        "SIZE",
        "keep what reading prompts computed in so much memory beside that, for prompts that begin "
        "alike; 0 is off (256MiB)",
    ),
    _Knob(
        "--prefix-disk",
        "prefix_disk",
        parse_size,
        "SIZE",
        "and in so much of the data dir, also for later and for other workers on it; 0 is off "
        "(1GiB)",
    ),
    _Knob(
        "--max-prompt", "max_prompt", int, "N", "leave jobs with a longer prompt to others (none)"
    ),
    _Knob("--max-tokens", "max_tokens", int, "N", "leave jobs that want more to others (none)"),
    _Knob("--chunk-size", "chunk_size", int, "N", "prefill chunk (512 on a GPU, 32 on a CPU)"),
    _Knob(
        "--lease-seconds",
        "lease_seconds",
        float,
        "S",
        "how long others wait for a silent worker (10)",
    ),
    _Knob(
        "--stall-seconds",
        "stall_seconds",
        float,
        "S",
        "without progress for so long, the worker's child is started anew (120)",
    ),
    _Knob(
        "--restart-pause",
        "restart_pause_max",
        float,
        "S",
        "a child that keeps dying waits no longer for the next one (30)",
    ),
    _Knob(
        "--exact-wait",
        "exact_wait_seconds",
        float,
        "S",
        "leave a begun job to its own geometry so long (30)",
    ),
    _Knob("--grace-seconds", "grace_seconds", float, "S", "how long a drain may take (30)"),
    _Knob(
        "--max-unsent-tokens",
        "max_unsent_tokens",
        int,
        "N",
        "pause when Redis lacks so many (4096)",
    ),
    _Knob(
        "--metrics-port",
        "metrics_port",
        int,
        "N",
        "serve /metrics (for Prometheus), /healthz and /readyz there (off)",
    ),
    _Knob("--metrics-host", "metrics_host", str, "ADDRESS", "on this address (127.0.0.1)"),
    _Knob(
        "--log-format", "log_format", str, "auto|json|pretty", "auto is pretty on a terminal (auto)"
    ),
)

_COMPILED: Final = (
    "run the decode steps of this model through mx.compile, where `make bench-features` shows that "
    "it pays; not with --kv, and only where all caches are plain ones; may be repeated (none)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME=PATH_OR_REPO",
        help="serve the model of this folder or hub repository under a name; may be repeated",
    )
    for knob in _KNOBS:
        parser.add_argument(
            knob.flag, dest=knob.name, type=_typed(knob), metavar=knob.metavar, help=knob.help
        )
    _kv_flags.configure(parser)
    parser.add_argument("--compiled", action="append", metavar="NAME", help=_COMPILED)
    _adapter_flags.configure(parser)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Work until a signal; returns the exit code."""
    from tenuto_worker._identity import take_identity
    from tenuto_worker._logging import set_up_logging
    from tenuto_worker._supervisor import Supervisor

    try:
        # First what is wrong with the flags, before a folder is made or a server started.
        values = _values(args, os.environ)
        WorkerSettings(redis_url="", data_dir=settings.data_dir, **values)
        refuse_missing(values["models"])
        identity = take_identity(settings.data_dir)
        url, embedded = _redis(settings)
        worker = WorkerSettings(
            redis_url=url,
            embedded=embedded,
            data_dir=settings.data_dir,
            namespace=settings.namespace,
            **values,
        )
    except StartError as error:
        print(f"tenuto worker: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    set_up_logging(worker.log_format, identity.name)
    return Supervisor(worker, identity).run()


def _redis(settings: Settings) -> tuple[str, bool]:
    if settings.redis_url is not None:
        return settings.redis_url, False
    from tenuto_client._server import ensure_server

    return ensure_server(settings.data_dir), True


def _values(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    given = args.model or environ.get("TENUTO_MODEL", "").split()
    values: dict[str, Any] = {"models": models(given)}
    for knob in _KNOBS:
        value = getattr(args, knob.name)
        if value is None:
            value = _from_environment(knob, environ)
        if value is not None:
            values[knob.name] = value
    values["kv_schemes"] = _kv_flags.kv_schemes(args, environ, values["models"])
    values["compiled"] = _compiled(args, environ, values["models"])
    values["adapter_folders"] = _adapter_flags.adapter_folders(args, environ, values["models"])
    return values


def _compiled(
    args: argparse.Namespace, environ: Mapping[str, str], models: Mapping[str, str]
) -> tuple[str, ...]:
    subject, given = "--compiled", args.compiled
    if given is None:
        subject, given = "TENUTO_COMPILED", environ.get("TENUTO_COMPILED", "").split()
    for name in given:
        if name not in models:
            raise ConfigError(subject, f"no --model is named {name!r}")
    return tuple(dict.fromkeys(given))


def _from_environment(knob: _Knob, environ: Mapping[str, str]) -> Any:
    variable = "TENUTO_" + knob.flag.lstrip("-").upper().replace("-", "_")
    text = environ.get(variable)
    if not text:
        return None
    try:
        return knob.kind(text)
    except ValueError:
        raise ConfigError(variable, _refusal(knob, text)) from None


def _typed(knob: _Knob) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return knob.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(_refusal(knob, text)) from None

    return convert


def _refusal(knob: _Knob, text: str) -> str:
    return f"{text!r} is not {_KINDS[knob.kind]}"


def models(given: list[str]) -> dict[str, str]:
    """Name -> path or repository of each `NAME=PATH_OR_REPO`.

    Raises:
        ConfigError: one is malformed, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError("--model", f"{text!r} is not NAME=PATH_OR_REPO")
        if not MODEL_NAME.fullmatch(name):
            raise ConfigError("--model", f"{name!r} is not a model's name", hint=MODEL_NAME_HINT)
        if name in found:
            raise ConfigError("--model", f"{name!r} is given twice")
        # Not every shell expands it after an equals sign.
        found[name] = str(Path(path).expanduser()) if path.startswith("~") else path
    return found


def refuse_missing(models: Mapping[str, str]) -> None:
    """Find what only a folder can be and is none. A repository is looked up when it is loaded.

    Raises:
        ConfigError: it names the model and the path.
    """
    for name, path in models.items():
        is_a_path = path.startswith((".", "/", "~")) or path.count("/") != 1
        if is_a_path and not Path(path).exists():
            raise ConfigError(
                f"--model {name}",
                f"{path}: no such folder",
                hint="give a model's folder, or a Hugging Face repository as org/name",
            )
