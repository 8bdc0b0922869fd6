"""Every feature of a generation, on every kind of cache, killed at every step.

Each new attempt has only what a crash leaves: a checkpoint that may be some tokens old, and the
tokens that a reader has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from adapter_shop import write_adapter
from cache_models import CacheModel, cache_model
from engine_runs import PROMPT, Run, engine_in_memory, run
from tenuto_engine import Checkpoint, Engine, GenerationOptions, Token, resume_options

LoadEngine = Callable[..., Engine]

TOKENS = 11
LEAST = 6
# One of each kind of cache; and those that differ in what is pending when a loop runs ahead.
MODELS: tuple[CacheModel, ...] = ("llama", "gemma3_text", "lfm2", "llama4", "deepseek_v3")
MODELS_AHEAD: tuple[CacheModel, ...] = ("llama", "gemma3_text", "lfm2")

WARM: dict[str, Any] = {"temperature": 2.5, "seed": 20261129, "max_tokens": TOKENS}
FEATURES: dict[str, dict[str, Any]] = {
    "filters": {"top_p": 0.7, "min_p": 0.02, "top_k": 3},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "penalties": {
        "repetition_penalty": 1.5,
        "repetition_context_size": 5,
        "presence_penalty": 0.7,
        "presence_context_size": 9,
        "frequency_penalty": 0.6,
        "frequency_context_size": 30,
        "logit_bias": {65: 3.0, 66: -2.0},
    },
    "min_tokens": {"min_tokens": LEAST, "stop_token_ids": tuple(range(0, 97, 2))},
    "stop": {"stop": ()},
    "stop and min_tokens": {"stop": (), "min_tokens": LEAST},
    "greedy min_tokens": {
        "temperature": 0.0,
        "min_tokens": LEAST,
        "stop_token_ids": tuple(range(0, 97, 2)),
    },
    "adapter": {"adapter": "poet"},
    "greedy adapter": {"adapter": "poet", "temperature": 0.0},
}
FEATURES["all"] = {
    **FEATURES["filters"],
    **FEATURES["xtc"],
    **FEATURES["penalties"],
    **FEATURES["min_tokens"],
    **FEATURES["adapter"],
    "logprobs": 20,
    "stop": (),
    "top_k": 40,
}


def test_all_the_models_are_kinds_of_cache() -> None:
    assert set(MODELS) <= set(get_args(CacheModel))


@pytest.fixture(params=[False, True], ids=["synchronous", "pipelined"])
def engines(
    load_engine: LoadEngine, request: pytest.FixtureRequest, tmp_path: Path
) -> dict[CacheModel, Engine]:
    other = load_engine("llama")
    made = {}
    for model in MODELS_AHEAD if request.param else MODELS:
        # Queries, keys and values, or what latent attention has instead, and experts.
        suffixes = ("q_proj", "v_proj", "q_a_proj", "q_b_proj", "down_proj")
        write_adapter(tmp_path / model, "poet", cache_model(model), suffixes=suffixes)
        made[model] = engine_in_memory(
            other, model, pipelined=request.param, adapters=tmp_path / model
        )
    return made


def prompt_of(engine: Engine) -> list[int]:
    return [byte % engine.vocab_size for byte in PROMPT.encode()][:21]


def with_stop_strings(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """Stop strings over several tokens, of which the first that may end the run does."""
    if "stop" not in options:
        return options
    text = run(engine, prompt_of(engine), **options).text
    too_soon = text[3:5] if "min_tokens" in options else "nowhere"
    return options | {"stop": (too_soon, text[-4:-1])}


class Killed:
    """A generation that is killed after every step, until it ends.

    Attributes:
        kills: how often that was.
        caught_up: how many tokens its attempts fed again.
    """

    def __init__(self, engine: Engine, options: dict[str, Any], behind: int) -> None:
        self._engine = engine
        self._options = GenerationOptions(**options)
        self._behind = behind
        self._published: list[Token] = []
        self._checkpoints: list[Checkpoint | None] = [None]
        self.kills = self.caught_up = 0

    def run(self) -> Run:
        while True:
            tokens, options = resume_options(
                self._checkpoints[max(0, len(self._checkpoints) - 1 - self._behind)],
                self._options,
                self._published,
                prompt_tokens=prompt_of(self._engine),
            )
            sequence = self._engine.add(tokens, options)
            known = len(self._published)
            # A prefill is killed elsewhere.
            while len(self._published) == known and not sequence.state.is_end:
                self._published += [event.token for event in self._engine.step()]
            assert sequence.error is None
            assert sequence.stats.divergences == 0
            self.caught_up += sequence.catch_up_done
            if sequence.state.is_end:
                return Run(self._published, sequence.end_text, sequence.finish_reason)
            self._checkpoints.append(self._engine.checkpoint(sequence))
            self._engine.close(sequence)
            self.kills += 1


@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_that_is_killed_at_every_step_is_the_undisturbed_one(
    engines: dict[CacheModel, Engine], feature: str
) -> None:
    for model, engine in engines.items():
        options = with_stop_strings(engine, WARM | FEATURES[feature])
        whole = run(engine, prompt_of(engine), **options)
        plain = run(engine, prompt_of(engine), **WARM)
        assert whole != plain, f"{feature} does nothing to {model}"
        # Two behind, each token is computed again by a catch-up; none behind, it never is.
        for behind in (0, 2):
            killed = Killed(engine, options, behind)
            assert killed.run() == whole, f"{feature} on {model}, {behind} behind"
            assert killed.kills >= len(whole.tokens) - 1
            # The pending token of the newest checkpoint may be published already.
            assert (killed.caught_up > killed.kills) == (behind > 0)
        if "min_tokens" in options:
            assert len(whole.tokens) > LEAST
