"""The report of a storm, in Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version

from .storm import Outcomes, Plan

_TELLING = (
    "child died",
    "job claimed",
    "job taken back",
    "job reaped",
    "job handed back",
    "attempt makes way",
    "attempt fenced",
    "job trusted again",
    "job recomputed",
    "checkpoint passed over",
    "checkpoint not saved",
    "redis away",
    "decoding paused",
)


def report(plan: Plan, done: Outcomes) -> str:
    """What happened, and whether everything held."""
    parts = [
        "# Chaos: what a storm of faults did to the jobs",
        f"`make chaos` with seed {plan.seed}, {_now()} UTC, on {_machine()}.",
        f"**{_summary(done)}**",
        _table("fault that hit something", done.hits),
        _table("jobs", _jobs(done)),
        _table("what the workers logged", {name: done.events[name] for name in _TELLING}),
        "## Violations",
        "\n".join(f"- {each}" for each in done.violations) or "None.",
    ]
    if done.violations:
        parts += ["## The story", "```text\n" + "\n".join(done.story) + "\n```"]
    return "\n\n".join(parts) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def _summary(done: Outcomes) -> str:
    minutes = done.seconds / 60
    return (
        f"{done.hits.total()} faults in {minutes:.1f} minutes, {len(done.violations)} violations."
    )


def _jobs(done: Outcomes) -> Mapping[str, int]:
    patrons = done.patrons
    ordinary = [each for each in patrons if not each.poison and not each.deleted]
    return {
        "run to their end, each compared with its undisturbed run": len(ordinary),
        "deleted by their users": sum(each.deleted for each in patrons),
        "poison, ended failed": sum(each.poison for each in patrons),
        "tokens that readers got": sum(each.count for each in patrons),
        "subscriptions": sum(len(each.readings) for each in patrons),
        "resumes": sum(each.resumes for each in patrons),
        "given up after three attempts without progress, and resumed": sum(
            each.given_up for each in patrons
        ),
        "failed as their time was over, and resumed": sum(each.late for each in patrons),
    }


def _table(title: str, numbers: Mapping[str, int]) -> str:
    rows = [f"| {title} | |", "|---|---:|", *(f"| {k} | {n:,} |" for k, n in numbers.items())]
    return "\n".join(rows)


def _machine() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.system()} {platform.machine()}), "
        f"Python {platform.python_version()}, MLX {version('mlx')}"
    )
