"""Runs of tiny models that jump over forced tokens: what is asked for, and what is forwarded."""

from __future__ import annotations

from typing import Any, Final, cast

import mlx.core as mx

from engine_runs import PROMPT
from tenuto_engine import Engine, Token

# Of characters that the models in memory have tokens for, one each.
NAMES: Final = ("AB", "YEAR", "ID")
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "AB": {"type": "string", "minLength": 2, "maxLength": 4},
        "YEAR": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "ID": {"enum": ["XYZ-1", "XQQ-2"]},
    },
    "required": list(NAMES),
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "seed": 1}
SAMPLED: Final[dict[str, Any]] = {
    "temperature": 1.5,
    "top_p": 0.95,
    "seed": 20261130,
    "repetition_penalty": 1.2,
    "repetition_context_size": 7,
    "frequency_penalty": 0.3,
    "logit_bias": {40: 1.5},
    "xtc_probability": 0.5,
    "xtc_threshold": 0.02,
}
STYLES: Final = {"greedy": GREEDY, "sampled": SAMPLED}
END: Final = frozenset((93,))
"""The models in memory end with a tilde."""


def asked(style: str = "sampled", **more: Any) -> dict[str, Any]:
    """The options of a run that jumps."""
    return {
        "grammar": {"json_schema": SCHEMA},
        "jump_forward": True,
        "max_tokens": 90,
        **STYLES[style],
        **more,
    }


def spans(tokens: list[Token]) -> list[int]:
    """How many tokens jumped behind each drawn one."""
    found: list[int] = []
    for token in tokens:
        if token.jumped:
            found[-1] += 1
        else:
            found.append(0)
    return found


class Watched:
    """A model that notes the tokens of each of its forwards."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forwards: list[list[int]] = []

    def __call__(self, tokens: mx.array, **how: Any) -> mx.array:
        (ids,) = cast("list[list[int]]", tokens.tolist())
        self.forwards.append(ids)
        logits: mx.array = self._model(tokens, **how)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def watch(engine: Engine) -> Watched:
    """Note the forwards of an engine's model from now on."""
    engine._stepper._model = watched = Watched(engine._stepper._model)
    return watched


def forwards_of(tokens: list[Token]) -> list[list[int]]:
    """The ids that belong into each forward: a drawn token's, and those that jumped behind it."""
    found: list[list[int]] = []
    for token in tokens:
        if token.jumped:
            found[-1].append(token.token)
        else:
            found.append([token.token])
    return found


def prompt_of(engine: Engine) -> list[int]:
    return [byte % engine.vocab_size for byte in PROMPT.encode()][:21]
