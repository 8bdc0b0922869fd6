"""`--kv` and the flags beside it: how the KV of each model is quantized."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Final

from tenuto_engine import InvalidOption, KVScheme
from tenuto_worker._errors import ConfigError

_HELP: Final = (
    "quantize the KV of all models, or of one: BITS[:GROUP_SIZE[:START]] such as 8:64:0, "
    "config[:START] for the kv_config.json in the model's folder, or none; may be repeated (none)"
)
_NUMBERS: Final = (
    ("--kv-bits", "4|8", "quantize the KV of all models to so many bits (not at all)"),
    ("--kv-group-size", "N", "with --kv-bits: 32, 64 or 128 numbers share a scale (64)"),
    ("--kv-start", "N", "with --kv-bits: not before a job holds so many tokens (0)"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--kv", action="append", metavar="[NAME=]SCHEME", help=_HELP)
    for flag, metavar, text in _NUMBERS:
        parser.add_argument(flag, metavar=metavar, help=text)


def kv_schemes(
    args: argparse.Namespace, environ: Mapping[str, str], models: Collection[str]
) -> dict[str, str]:
    """Name of a model -> the canonical text of its scheme; one in full precision is left out.

    Raises:
        ConfigError: a scheme is none, is given twice, or for a model that is not served. It names
            the flag, or the variable.
    """
    for_all = _uniform(args, environ)
    subject, given = "--kv", args.kv
    if given is None:
        subject, given = "TENUTO_KV", environ.get("TENUTO_KV", "").split()
    for_one: dict[str, str] = {}
    for text in given:
        name, equals, scheme = text.partition("=")
        # A scheme by layers has equals signs, too.
        if equals and (name in models or not _is_scheme(text)):
            if name not in models:
                raise ConfigError(subject, f"no --model is named {name!r}")
            if name in for_one:
                raise ConfigError(subject, f"{name!r} is given twice")
            for_one[name] = _canonical(f"{subject} {name}", scheme)
        elif for_all is not None:
            raise ConfigError(subject, f"{text!r} is the second scheme for all models")
        else:
            for_all = _canonical(subject, text)
    found = dict.fromkeys(models, for_all or "none") | for_one
    return {name: scheme for name, scheme in found.items() if scheme != "none"}


def _uniform(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The scheme that `--kv-bits` and its neighbours make, if any."""
    scheme: str | None = None
    for flag, *_ in _NUMBERS:
        subject, text = flag, getattr(args, flag.lstrip("-").replace("-", "_"))
        if text is None:
            subject = "TENUTO_" + flag.lstrip("-").upper().replace("-", "_")
            text = environ.get(subject) or None
        if text is None:
            # Of those after it, each stands in a place of its own.
            scheme = scheme and (f"{scheme}:64" if flag == "--kv-group-size" else scheme)
            continue
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(subject, f"{text!r} is not a whole number")
        if scheme is None and flag != "--kv-bits":
            raise ConfigError(subject, "needs --kv-bits")
        scheme = text if scheme is None else f"{scheme}:{text}"
        _canonical(subject, scheme)
    return scheme and _canonical("--kv-bits", scheme)


def _is_scheme(text: str) -> bool:
    try:
        KVScheme.canonical_text(text)
    except InvalidOption:
        return False
    return True


def _canonical(subject: str, text: str) -> str:
    try:
        return KVScheme.canonical_text(text)
    except InvalidOption as error:
        raise ConfigError(subject, error.problem) from error
