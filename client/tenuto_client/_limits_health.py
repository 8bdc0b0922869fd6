"""Whether the limits are near."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ._announce import unpack_model
from ._config import Settings
from ._findings import Finding, Level, count
from ._limits import ALL_MODELS, MEMORY, Limits, limit_of, show_value, unpack_limits
from ._redis import Connection
from ._to_type import tenuto_lines
from .keys import Keys

_NEAR: Final = 0.8


async def check_limits(connection: Connection, keys: Keys, settings: Settings) -> list[Finding]:
    """A finding for each limit of which more than four fifths are used."""
    set_ones, used, models = await connection.pipeline(
        [
            ("HGETALL", keys.limits()),
            ("HGET", keys.usage(), "bytes"),
            ("HGETALL", keys.models()),
        ]
    )
    limits = unpack_limits(set_ones)
    names = [unpack_model(name.decode(), packed).name for name, packed in sorted(models.items())]
    queued = await connection.pipeline([("HGETALL", keys.queued(name)) for name in names])
    findings = list(_memory(limits, int(used or 0), settings))
    for name, counts in zip(names, queued, strict=True):
        waiting = {field.decode(): int(number) for field, number in counts.items()}
        findings += _queue(limits, name, waiting, settings)
    return findings


def _memory(limits: Limits, used: int, settings: Settings) -> Iterator[Finding]:
    most = limits.get(ALL_MODELS, {}).get(MEMORY)
    if most is not None and used > _NEAR * most:
        says = f"all jobs may come to {show_value(MEMORY, used)} in Redis"
        otherwise = "or delete ended jobs, or keep them shorter"
        yield _finding(MEMORY, says, used, most, otherwise, [ALL_MODELS], settings)


def _queue(
    limits: Limits, model: str, waiting: Mapping[str, int], settings: Settings
) -> Iterator[Finding]:
    for field, number in waiting.items():
        is_all = field == "*"
        name = "max_queued" if is_all else "max_queued_per_tenant"
        most = limit_of(limits, model, name)
        if most is not None and number > _NEAR * most:
            whose = "" if is_all else f" of tenant {field}"
            says = f"{count(number, 'job')}{whose} waiting for {model}"
            # The narrower counts: both where both are as narrow, that of all where none is set.
            set_by = [
                each for each in (model, ALL_MODELS) if limits.get(each, {}).get(name) == most
            ]
            whose_limit = set_by or [ALL_MODELS]
            yield _finding(name, says, number, most, "or start more workers", whose_limit, settings)


def _finding(
    name: str,
    says: str,
    used: int,
    most: int,
    otherwise: str,
    models: list[str],
    settings: Settings,
) -> Finding:
    is_full = used >= most
    what = "submits are refused" if is_full else "beyond it submits are refused"
    share = 100 if most == 0 else 100 * used // most
    return Finding(
        Level.PROBLEM if is_full else Level.WARNING,
        "limits",
        f"{says}, {share} % of {name} ({show_value(name, most)}); {what}",
        **_raise(name, 2 * max(used, most, 1), otherwise, models, settings),
    )


def _raise(
    name: str, value: int, otherwise: str, models: list[str], settings: Settings
) -> dict[str, str | None]:
    lines = []
    for model in models:
        own = [] if model == ALL_MODELS else ["--model", model]
        found = tenuto_lines(settings, "limits", "set", f"{name}={value}", *own, note=otherwise)
        lines.append(found)
    fixes = [found["fix"] for found in lines if found["fix"]]
    return {"fix": "\n".join(fixes) or None, "note": lines[0]["note"]}
