"""Checks of single values; each refuses by the name of the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from ._errors import InvalidRequest

MAX_METADATA_BYTES: Final = 16 * 1024
MAX_TOKEN_ID: Final = 2**31 - 1
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENANT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_integer(value: object) -> bool:
    """Whether it is an int, which a bool is not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(field: str, value: object, low: int, high: int) -> int:
    """A whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(field, f"must be a whole number, is {show(value)}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be {low} to {high}, is {show(value)}")
    return value


def number(field: str, value: object, low: float, high: float) -> float:
    """A finite number within bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(field, f"must be a number, is {show(value)}")
    # Compared before it is converted: an int may be too large for a float. NaN fails it too.
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be {low:g} to {high:g}, is {show(value)}")
    return float(value)


def above_zero(field: str, value: object, high: float, hint: str) -> float:
    """A finite number above 0."""
    checked = number(field, value, 0, high)
    if checked == 0:
        raise InvalidRequest(field, "must be above 0", hint=hint)
    return checked


def flag(field: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"must be True or False, is {show(value)}")
    return value


def text(field: str, value: object, longest: int) -> str:
    """A non-empty string that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be a string, is {show(value)}")
    if not value:
        raise InvalidRequest(field, "is empty")
    if len(value) > longest:
        raise InvalidRequest(field, f"has {len(value)} characters, at most {longest} are allowed")
    encodable(field, value)
    return value


def encodable(field: str, value: str) -> int:
    """The length in UTF-8 bytes; lone surrogates have none and are refused."""
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"character {error.start} is half of a surrogate pair, not text"
        ) from None


def choice(field: str, value: object, allowed: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequest(field, f"must be one of {', '.join(allowed)}, is {show(value)}")
    return value


def tenant(field: str, value: object) -> str:
    """The name of a tenant."""
    if not isinstance(value, str) or not _TENANT.fullmatch(value):
        raise InvalidRequest(
            field, f"{value!r} is not a tenant's name", hint="1 to 64 letters, digits, _ and -"
        )
    return value


def adapter(field: str, value: object) -> str:
    """The name of an adapter."""
    if not isinstance(value, str) or not ADAPTER_NAME.fullmatch(value):
        raise InvalidRequest(
            field,
            f"{show(value)} is not an adapter's name",
            hint="1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit",
        )
    return value


def items(field: str, value: object, most: int) -> list[Any]:
    """The items of a list or another sequence that is not text."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise InvalidRequest(field, f"must be a list, is {show(value)}")
    if len(value) > most:
        raise InvalidRequest(field, f"has {len(value)} entries, at most {most} are allowed")
    return list(value)


def token_ids(field: str, value: Sequence[object]) -> tuple[int, ...]:
    """Ids of tokens."""
    for place, token in enumerate(value):
        # Written out, not by `integer`, because a prompt may have a million.
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest(f"{field}[{place}]", f"{show(token)} is not a token id")
    return tuple(token for token in value if isinstance(token, int))


def logit_bias(field: str, value: object, most: int) -> dict[int, float]:
    """A map of token ids to what is added to their logits. Ids may be digits, as in JSON."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"must map token ids to numbers, is {show(value)}")
    if len(value) > most:
        raise InvalidRequest(field, f"has {len(value)} entries, at most {most} are allowed")
    checked = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        (token,) = token_ids(f"{field} key", [token])
        checked[token] = number(f"{field}[{token}]", bias, -100, 100)
    return dict(sorted(checked.items()))


def metadata(field: str, value: object) -> str:
    """A JSON object, as JSON."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(field, f"must be a dict with strings as keys, is {show(value)}")
    try:
        packed = json.dumps(dict(value), allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from None
    if len(packed) > MAX_METADATA_BYTES:
        raise InvalidRequest(
            field,
            f"is {len(packed)} bytes of JSON, at most {MAX_METADATA_BYTES} are allowed",
            hint="keep large things elsewhere and put their address here",
        )
    return packed


def seconds(field: str, value: object, low: float, high: float) -> float:
    """A duration in seconds, also given as a timedelta."""
    return number(
        field, value.total_seconds() if isinstance(value, timedelta) else value, low, high
    )


def show(value: object) -> str:
    """A value for a message, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a very large number"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
