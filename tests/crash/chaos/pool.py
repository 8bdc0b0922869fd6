"""What jobs may be submitted, and what each of them comes to when nothing happens to it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exact_runs import GREEDY, PROMPT, SAMPLED, Case, Models, Outcome, outcome_of, with_late_stop
from tenuto_client import SubmitOptions
from tenuto_engine import Engine
from tiny_models import KINDS, build_tiny_model

SLOTS = 2
"""Of each model in each worker; part of the geometry, so the undisturbed runs have it too."""


@dataclass(frozen=True)
class Piece:
    """A job and its undisturbed run."""

    case: Case
    outcome: Outcome


def build_models(folder: Path) -> Models:
    """A tiny model of each cache kind."""
    return {kind: build_tiny_model(folder / kind, kind) for kind in KINDS}


def make_pool(models: Models, lengths: Sequence[int], chance: random.Random) -> tuple[Piece, ...]:
    """Jobs of each model in these lengths, greedy and sampled, run by the engine in one go."""
    found = []
    for kind, folder in models.items():
        engine = Engine.load(folder, slots=SLOTS)
        ids = engine.encode_prompt(PROMPT)
        for number, length in enumerate(lengths):
            limit = SubmitOptions(max_tokens=length)
            seed = SubmitOptions(seed=chance.randrange(1, 2**31))
            long = tuple(chance.choices(ids, k=chance.randint(30, 200)))
            greedy = Case(f"{kind}-greedy-{length}", kind, PROMPT, GREEDY | limit)
            if number == 0:
                greedy = with_late_stop(greedy, engine)
            sampled = Case(f"{kind}-sampled-{length}", kind, long, SAMPLED | limit | seed)
            found += [Piece(case, outcome_of(case, engine)) for case in (greedy, sampled)]
    return tuple(found)


def in_turn(pool: Sequence[Piece], chance: random.Random) -> Iterator[Piece]:
    """Pieces for ever; each comes as often as any other."""
    while True:
        yield from chance.sample(pool, len(pool))
