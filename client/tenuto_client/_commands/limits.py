"""`tenuto limits`."""

from __future__ import annotations

import argparse
from typing import Final

from tenuto_client import _lines as lines
from tenuto_client._config import Settings
from tenuto_client._errors import InvalidRequest
from tenuto_client._limits import ALL_MODELS, MEANINGS, Limits, parse_value, show_value
from tenuto_client._sync import SyncClient

from ._shared import open_client, out

HELP = "Show, set and clear what submit refuses."

_NAMES: Final = "".join(f"  {name:<23}{meaning}\n" for name, meaning in MEANINGS.items())
_EPILOG: Final = f"""\
limits:
{_NAMES}
Without --model a limit is set for every model; of the two that hold for a model the narrower
counts. What was accepted before stays. Workers bound what they take themselves
(tenuto worker --max-prompt, --max-tokens).

examples:
  tenuto limits
  tenuto limits set max_queued=1000 max_stream_memory=8GiB
  tenuto limits set --model smollm2 max_tokens=4096
  tenuto limits clear --model smollm2 max_tokens
  tenuto limits clear                                  all of those for every model
"""
_HEAD: Final = f"{'MODEL':<25}{'LIMIT':<24}VALUE\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "action", nargs="?", choices=("show", "set", "clear"), default="show", help="show if absent"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME[=VALUE]", help="with set and clear: which, and its value"
    )
    parser.add_argument("--model", metavar="M", help="of this model only")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do it, and print the limits as they are then."""
    with open_client(settings) as client:
        if args.action == "set":
            client.set_limits(_values(args.names), model=args.model)
        elif args.action == "clear":
            client.clear_limits(*args.names, model=args.model)
        _show(client, args)
    return 0


def _values(given: list[str]) -> dict[str, int]:
    if not given:
        raise InvalidRequest("NAME=VALUE", "is missing", hint="tenuto limits --help has examples")
    values = {}
    for each in given:
        name, is_given, text = each.partition("=")
        if name in MEANINGS and not is_given:
            raise InvalidRequest(name, "needs a value", hint=f"{name}=NUMBER")
        # A name that there is not is refused by its name, whatever its value.
        values[name] = parse_value(name, text) if name in MEANINGS else 0
    return values


def _show(client: SyncClient, args: argparse.Namespace) -> None:
    limits = client.limits()
    if args.action == "show" and args.names:
        raise InvalidRequest(args.names[0], "show takes no names")
    if args.model is not None:
        limits = {m: named for m, named in limits.items() if m in (args.model, ALL_MODELS)}
    out(_json(limits) if args.json else _table(limits))


def _json(limits: Limits) -> str:
    return "".join(
        lines.dump({"model": model, "limit": name, "value": value})
        for model, named in limits.items()
        for name, value in named.items()
    )


def _table(limits: Limits) -> str:
    rows = [
        f"{'all' if model == ALL_MODELS else model:<25}{name:<24}{show_value(name, value)}\n"
        for model, named in limits.items()
        for name, value in named.items()
    ]
    return _HEAD + "".join(rows)
