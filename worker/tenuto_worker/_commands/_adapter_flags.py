"""`--adapters`: where the LoRA adapters of each model are."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from tenuto_worker._errors import ConfigError

_HELP: Final = (
    "the LoRA adapters of all models, or of one: a folder that has a subfolder for each, as "
    "mlx_lm.lora writes it, named as jobs ask for it; may be repeated; a new one needs no restart "
    "(none)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--adapters", action="append", metavar="[NAME=]DIR", help=_HELP)


def adapter_folders(
    args: argparse.Namespace, environ: Mapping[str, str], models: Collection[str]
) -> dict[str, str]:
    """Name of a model -> the folder of its adapters, for each that has one.

    Raises:
        ConfigError: a folder is not there, is given twice, or for a model that is not served. It
            names the flag, or the variable.
    """
    subject, given = "--adapters", args.adapters
    if given is None:
        subject, given = "TENUTO_ADAPTERS", environ.get("TENUTO_ADAPTERS", "").split()
    for_all: str | None = None
    for_one: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        # A path may have an equals sign, too.
        if equals and (name in models or "/" not in name):
            if name not in models:
                raise ConfigError(subject, f"no --model is named {name!r}")
            if name in for_one:
                raise ConfigError(subject, f"{name!r} is given twice")
            for_one[name] = _folder(f"{subject} {name}", path)
        elif for_all is not None:
            raise ConfigError(subject, f"{text!r} is the second folder for all models")
        else:
            for_all = _folder(subject, text)
    found = {} if for_all is None else dict.fromkeys(models, for_all)
    return found | for_one


def _folder(subject: str, text: str) -> str:
    path = Path(text).expanduser()
    if not text or not path.is_dir():
        raise ConfigError(subject, f"{text}: no such folder")
    # The worker may be started anew from elsewhere.
    return str(path.absolute())
