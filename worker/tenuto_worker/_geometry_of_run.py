"""The geometry of a run, as it is stored with its job, and what another one means for its label."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import msgpack

from ._run import Run

if TYPE_CHECKING:
    from tenuto_engine import GenerationOptions, Geometry

_MATCHER: Final = "llguidance_version"


def describe_geometry(geometry: Geometry, options: GenerationOptions) -> dict[str, Any]:
    """The geometry that a run has here; with a grammar, what says which tokens may come is part
    of it."""
    matcher = {} if options.grammar is None else {_MATCHER: version("llguidance")}
    return geometry.to_dict() | matcher


def judge_geometry(run: Run, geometry: Geometry, described: Mapping[str, Any]) -> None:
    """Label the run `recomputed` if what it published came from another geometry."""
    claim = run.claim
    is_same = claim.fingerprint == geometry.fingerprint
    if claim.fingerprint is None or claim.tokens == 0 or (is_same and _MATCHER not in described):
        return
    try:
        stored = msgpack.unpackb(claim.geometry or b"\x80")
        if is_same:
            _judge_matcher(run, described[_MATCHER], stored.get(_MATCHER))
            return
        other = type(geometry).from_dict(stored)
    except (AttributeError, KeyError, TypeError, ValueError, msgpack.UnpackException):
        run.relabel("geometry changed: it was described by another version")
    else:
        run.relabel(f"geometry changed: {', '.join(geometry.differences(other))}")


def _judge_matcher(run: Run, here: str, there: object) -> None:
    if there not in (None, here):
        run.relabel(f"geometry changed: {_MATCHER}: {here} here, {there} there")
