"""A JSON file of what was found out about model files once, and would be found again."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

Remembered = dict[str, list[Any]]
"""The path of a model file -> [size, mtime_ns, digest]; `sizes 1 <fingerprint>` of a geometry ->
what `Sizes` packs; `longest 1 <fingerprint> <packages>` -> what `longest_of` found."""


def read_remembered(file: Path | None) -> Remembered:
    """What stands there; nothing if there is no file, or it is damaged."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_remembered(file: Path, remembered: Remembered) -> None:
    """Replace what stands there, if that can be done."""
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    # Only time is lost without it.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(remembered), encoding="utf-8")
        temporary.replace(file)
