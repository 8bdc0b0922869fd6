"""Sizes as people write them, the same in every flag, limit and setting."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = "KB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB of 1024"

_SIZE: Final = re.compile(
    r"\s*(?:(\d+)\s*B?|(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?)\s*", re.IGNORECASE | re.ASCII
)


def parse_size(text: str) -> float:
    """Bytes of `20GiB`, `1.5 GB` or `4096`.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 20GiB or 500MB")
    whole, number, letter, binary = match.groups()
    if whole is not None:
        return float(whole)
    unit: int = (1024 if binary else 1000) ** (1 + "KMGT".index(letter.upper()))
    return float(number) * unit
