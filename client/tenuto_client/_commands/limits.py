"""`tenuto limits`."""

from __future__ import annotations

import argparse
import difflib
from typing import Final

from tenuto_client import _lines as lines
from tenuto_client._command import complain
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
counts. A job is judged by what holds when it is submitted, a text, too, though its tokens are
counted at its first start only: what is over max_prompt then fails. Workers bound what they take
themselves (tenuto worker --max-prompt, --max-tokens). Units: KB, MB, GB, TB are powers of 1000,
KiB, MiB, GiB, TiB of 1024.

clear unsets what stands for every model, and leaves limits of single models; with --model it
unsets those of that model alone; with --all all there are.

examples:
  tenuto limits
  tenuto limits set max_queued=1000 max_stream_memory=8GiB
  tenuto limits set --model smollm2 max_tokens=4096
  tenuto limits clear --model smollm2 max_tokens
  tenuto limits clear                                  those that stand for every model
  tenuto limits clear --all                            those of single models, too
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
    parser.add_argument(
        "--all", action="store_true", help="clear: for every model, and those of single models"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do it, and print the limits as they are then."""
    if args.all and (args.action != "clear" or args.model is not None):
        raise InvalidRequest("--all", "goes with clear, and without --model")
    with open_client(settings) as client:
        if args.action == "set":
            client.set_limits(_values(args.names), model=args.model)
        elif args.action == "clear":
            for model in _whose(client, args):
                client.clear_limits(*args.names, model=model)
        _show(client, args)
        if args.action == "set" and args.model is not None:
            _note_unknown(client, args.model)
        elif args.action == "clear":
            _note_left(client, args)
    return 0


def _whose(client: SyncClient, args: argparse.Namespace) -> list[str | None]:
    """The models whose limits are to be cleared; None is what stands for every model."""
    if not args.all:
        return [args.model]
    return [None, *(model for model in client.limits() if model != ALL_MODELS)]


def _note_unknown(client: SyncClient, model: str) -> None:
    known = [each.name for each in client.models()]
    if model in known:
        return
    close = difflib.get_close_matches(model, known, n=1)
    guess = f" (did you mean {close[0]}? tenuto limits clear --model {model})" if close else ""
    complain(f"no worker has ever announced {model!r}; its limits hold once one does{guess}")


def _note_left(client: SyncClient, args: argparse.Namespace) -> None:
    """Say what still holds, where a reader of the table may take it for what was cleared."""
    left = set(client.limits()) - {args.model or ALL_MODELS}
    if args.model is not None and ALL_MODELS in left:
        complain(f"what stands for all models holds for {args.model}, too (tenuto limits clear)")
    elif args.model is None and left:
        complain(f"limits of {', '.join(sorted(left))} alone stand (tenuto limits clear --all)")


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
