"""`tenuto submit`."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tenuto_client import _lines as lines
from tenuto_client._command import complain
from tenuto_client._config import Settings
from tenuto_client._errors import InvalidRequest
from tenuto_client._sync import SyncClient

from ._shared import open_client, out
from ._watching import watch

HELP = "Submit a generation; prints the id of its job."

_EPILOG = """\
The job runs whether or not anybody watches, and survives crashes of everything.

examples:
  tenuto submit smollm2 'Write a long story.' --max-tokens 2000 --watch
  tenuto submit smollm2 - < prompt.txt                   the prompt as it is in the file
  tenuto submit smollm2 'Once upon' --raw --temperature 0.8 --seed 7
  tenuto submit smollm2 --max-tokens 9 -- '--help means'   a prompt that begins with a dash
  tenuto submit smollm2 --prompt-json '[{"role": "user", "content": "Hello!"}]'
  tenuto submit smollm2 'Three colours?' --json-schema colours.json
  tenuto submit smollm2 'Yes or no?' --regex 'yes|no'
  tenuto watch "$(tenuto submit smollm2 'Hello!')"

exit codes: 0 accepted (with --watch: completed), 1 with --watch: failed or cancelled; also
a limit of the queue, which may have room later (tenuto limits), 2 a bad parameter or more
than a job may ask for, 3 server not reachable
"""
# Options that go to the client's submit as they are: name, type, metavar, help.
_PLAIN: Final[tuple[tuple[str, type, str, str], ...]] = (
    ("max_tokens", int, "N", "tokens at most (512)"),
    ("min_tokens", int, "N", "do not end by itself before so many tokens (0)"),
    ("temperature", float, "T", "0 is greedy (0)"),
    ("top_p", float, "P", "keep the likeliest tokens that hold this probability (1: off)"),
    ("top_k", int, "K", "keep this many likeliest tokens (0: off)"),
    ("min_p", float, "P", "keep tokens this likely, relative to the likeliest (0: off)"),
    ("xtc_probability", float, "P", "how often top choices are excluded (0: off)"),
    ("xtc_threshold", float, "P", "above this probability a token is a top choice (0.1)"),
    ("seed", int, "S", "makes sampling repeatable (drawn, and kept with the job)"),
    ("logprobs", int, "K", "report the K likeliest tokens with each, at most 20 (0)"),
    ("repetition_penalty", float, "X", "divides the logits of recent tokens (1: off)"),
    ("presence_penalty", float, "X", "subtracted from those of recent tokens (0: off)"),
    ("frequency_penalty", float, "X", "the same for each time a token was seen (0: off)"),
    ("adapter", str, "NAME", "with this LoRA adapter of the model (tenuto models; none)"),
    ("priority", int, "P", "-100 to 100, higher goes first (0)"),
    ("idempotency_key", str, "K", "the same key of the same tenant gives the same job again"),
    ("tenant", str, "T", "whose job it is; tenants take turns (default)"),
    ("traceparent", str, "W3C", "the trace that it belongs to: its id is in the workers' logs"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="a name that a worker serves")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text, or - to read stdin")
    parser.add_argument(
        "--prompt-json", metavar="JSON", help="chat messages or token ids instead of PROMPT"
    )
    for name, kind, metavar, text in _PLAIN:
        parser.add_argument(f"--{_flag(name)}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop", action="append", metavar="STR", help="end at this text (may be repeated)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")
    _add_grammars(parser)
    parser.add_argument(
        "--jump-forward",
        action="store_true",
        help="tokens that the grammar forces go in one forward: quicker, not with --logprobs",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template around the prompt")
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="fail when not done in so many seconds from now"
    )
    parser.add_argument(
        "--queue-ttl", type=float, metavar="S", help="fail when not started in so many seconds"
    )
    parser.add_argument(
        "--max-runtime", type=float, metavar="S", help="fail after running for so many in all"
    )
    parser.add_argument(
        "--retention", metavar="S", help="seconds to keep it after its end, or forever (86400)"
    )
    parser.add_argument("--recovery", choices=("exact", "fast"), help="after a crash (exact)")
    parser.add_argument("--metadata", metavar="JSON", help="an object that comes back in records")
    parser.add_argument("--watch", action="store_true", help="print its text as it comes")


def _add_grammars(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--json-schema",
        metavar="FILE",
        help="the text is JSON of the schema in FILE; - is stdin, and {...} the schema itself",
    )
    one.add_argument("--regex", metavar="RE", help="the text matches this regular expression")
    one.add_argument(
        "--lark", metavar="FILE", help="the text matches the Lark grammar in FILE; - is stdin"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Submit, and watch where that is wanted."""
    with open_client(settings) as client:
        job = client.submit(args.model, _prompt(args), **_options(args))
        if args.json:
            out(lines.record_line(job.status()))
        elif not args.watch:
            out(f"{job.id}\n")
        _say_if_unserved(client, args.model)
    if not args.watch:
        return 0
    sys.stdout.flush()
    if not args.json:
        complain(f"job {job.id}")
    return watch(settings, job.id, 0, as_json=args.json)


def _say_if_unserved(client: SyncClient, model: str) -> None:
    if not any(model in worker.models for worker in client.workers()):
        complain(
            f"no worker serves {model} now; the job waits for one "
            f"(tenuto worker --model {model}=PATH_OR_REPO)"
        )


def _prompt(args: argparse.Namespace) -> Any:
    if (args.prompt is None) == (args.prompt_json is None):
        raise InvalidRequest("prompt", "give either PROMPT, - or --prompt-json")
    if args.prompt_json is not None:
        return _json("prompt-json", args.prompt_json)
    if args.prompt != "-":
        return args.prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"stdin is not UTF-8: {error.reason}") from None


def _options(args: argparse.Namespace) -> Any:
    options = {name: getattr(args, name) for name, *_ in _PLAIN}
    options["stop"] = args.stop
    options["raw"] = args.raw or None
    options["ignore_eos"] = args.ignore_eos or None
    options["grammar"] = _grammar(args)
    options["jump_forward"] = args.jump_forward or None
    options["recovery"] = args.recovery
    options["queue_ttl"] = args.queue_ttl
    options["max_runtime"] = args.max_runtime
    if args.deadline is not None:
        options["deadline"] = _after(args.deadline)
    if args.retention is not None:
        options["retention"] = _seconds("retention", args.retention)
    if args.metadata is not None:
        options["metadata"] = _json("metadata", args.metadata)
    return {name: value for name, value in options.items() if value is not None}


def _grammar(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.json_schema is not None:
        is_schema = args.json_schema.lstrip().startswith("{")
        text = args.json_schema if is_schema else _file("json-schema", args.json_schema, args)
        return {"json_schema": _json("json-schema", text)}
    if args.lark is not None:
        return {"lark": _file("lark", args.lark, args)}
    return None if args.regex is None else {"regex": args.regex}


def _file(name: str, path: str, args: argparse.Namespace) -> str:
    if path == "-" and args.prompt == "-":
        raise InvalidRequest(name, "stdin is the prompt already")
    try:
        read = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
        return read.decode()
    except OSError as error:
        raise InvalidRequest(name, f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"{path} is not UTF-8: {error.reason}") from None


def _after(seconds: float) -> timedelta:
    try:
        return timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        raise InvalidRequest("deadline", f"{seconds} seconds is out of range") from None


def _seconds(name: str, text: str) -> float | str:
    if text == "forever":
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(name, f"must be seconds or forever, is {text!r}") from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(name, f"is not JSON: {error}") from None


def _flag(name: str) -> str:
    return name.replace("_", "-")
