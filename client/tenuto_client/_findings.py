"""What `tenuto doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but a guarantee is weaker than it could be."""
    PROBLEM = "problem"
    """It does not work, or work may be lost; `tenuto doctor` exits 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at, such as `redis`.
        says: what is the case.
        fix: lines to type that mend it, as they stand.
        note: what else mends it, or what to know of the lines, in words.
    """

    level: Level
    subject: str
    says: str
    fix: str | None = None
    note: str | None = None


def count(number: int, noun: str) -> str:
    """`1 job`, `2 jobs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """`1.5 GiB`, `3.0 MiB`, `1.2 KiB`, `512 bytes`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return count(round(nbytes), "byte")
