"""The engine and mlx-lm, on every way to build a model that there is: the same bits."""

from __future__ import annotations

from typing import Any, Final, cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from architectures import ARCHITECTURES, CHUNK, engine_of, model_of
from engine_runs import run
from tenuto_engine import Engine
from tiny_models import KINDS

TOKENS = 60
PROMPT = [3 + (7 * place) % 89 for place in range(45)]
PENALTIES: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "repetition_context_size": 30,
    "presence_penalty": 0.4,
    "presence_context_size": 15,
    "frequency_penalty": 0.2,
    "frequency_context_size": 10,
    "logit_bias": {5: 2.0, 6: -1.0},
}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(pytest.param(name, {}, id=f"{name}-plain") for name in ARCHITECTURES),
        # They see no more of a model than its logits.
        *(pytest.param(name, PENALTIES, id=f"{name}-penalties") for name in KINDS),
    ],
)
def test_tokens_and_logprobs_are_those_of_generate_step(
    llama: Engine, name: str, asked: dict[str, Any]
) -> None:
    model = model_of(name)
    made = list(
        generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=TOKENS,
            prefill_step_size=CHUNK,
            logits_processors=make_logits_processors(**asked),
        )
    )
    ids = [int(token) for token, _ in made]
    rows = [cast(list[float], row.tolist()) for _, row in made]
    assert len(set(ids)) > 3, "the model says the same thing all the time"
    for pipelined in (False, True):
        engine = engine_of(name, model, llama, pipelined=pipelined)
        told = run(engine, PROMPT, max_tokens=TOKENS, logprobs=5, **asked)
        assert told.ids == ids
        for token, row in zip(told.tokens, rows, strict=True):
            likeliest = sorted(range(len(row)), key=lambda i: (-row[i], i))[:5]
            assert token.logprob == row[token.token]
            assert token.top_logprobs == tuple((i, row[i]) for i in likeliest)
