"""`tenuto models`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from tenuto_client import _lines as lines
from tenuto_client._announce import MODEL_LIMITS, ModelInfo
from tenuto_client._config import Settings
from tenuto_client._errors import InvalidRequest

from ._shared import open_client, out, when

HELP = "List the models that workers have announced."

_EPILOG: Final = """\
A model stays known when its workers are gone; jobs for it are accepted, and wait.

examples:
  tenuto models
  tenuto models forget smollm2     submit refuses it from then on, until a worker announces it;
                                   only when nobody serves it and none of its jobs wait or run
"""
_HEAD: Final = (
    f"{'MODEL':<25}{'CONTEXT':>9}{'WORKERS':>9}{'QUEUED':>9}  {'ANNOUNCED':<21}WORKERS TAKE\n"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("action", nargs="?", choices=("list", "forget"), default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="with forget: which")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the models, or forget one."""
    if (args.name is None) == (args.action == "forget"):
        raise InvalidRequest("NAME", "is missing" if args.name is None else "list takes none")
    with open_client(settings) as client:
        if args.action == "forget":
            client.forget_model(args.name)
            return 0
        models = client.models()
    if args.json:
        out("".join(lines.dump(_line(model)) for model in models))
    else:
        out(_HEAD + "".join(map(_row, models)))
    return 0


def _line(model: ModelInfo) -> dict[str, Any]:
    limits = {name: getattr(model, name) for name in MODEL_LIMITS}
    return {
        "name": model.name,
        "context_length": model.context_length,
        "workers": model.workers,
        "queued": model.queued,
        "announced_at": model.announced_at,
        **{name: value for name, value in limits.items() if value is not None},
        **({} if model.adapters is None else {"adapters": sorted(model.adapters)}),
    }


def _row(model: ModelInfo) -> str:
    context = "-" if model.context_length is None else str(model.context_length)
    said = when(model.announced_at)
    return (
        f"{model.name:<25}{context:>9}{model.workers:>9}{model.queued:>9}  {said:<21}"
        f"{_limits(model)}{_adapters(model)}\n"
    )


def _adapters(model: ModelInfo) -> str:
    return f"; adapters {', '.join(sorted(model.adapters))}" if model.adapters else ""


def _limits(model: ModelInfo) -> str:
    named = ((name, getattr(model, name)) for name in MODEL_LIMITS)
    return ", ".join(f"{name} {value}" for name, value in named if value is not None) or "all"
