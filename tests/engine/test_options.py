"""A bad option is refused by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tenuto_engine import GenerationOptions, InvalidOption, PendingLogprobs, Token

PENDING: dict[str, Any] = {
    "initial_pending_token": 3,
    "initial_pending_logprobs": PendingLogprobs(-1.0),
    "seed": 1,
    "cache": [],
}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 2.5}),
        ("max_tokens", {"max_tokens": True}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 1.0}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("xtc_probability", {"xtc_probability": 1.01}),
        ("xtc_probability", {"xtc_probability": "often"}),
        ("xtc_threshold", {"xtc_threshold": -0.1}),
        ("xtc_threshold", {"xtc_threshold": 0.51}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": 1.5}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("seed", {"seed": 1.0}),
        ("stop", {"stop": "one string"}),
        ("stop", {"stop": ("",)}),
        ("stop", {"stop": (5,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("stop_token_ids", {"stop_token_ids": ("x",)}),
        ("ignore_eos", {"ignore_eos": 1}),
        ("logprobs", {"logprobs": 21}),
        ("logit_bias", {"logit_bias": [1]}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {1: math.inf}}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_context_size", {"repetition_context_size": 0}),
        ("presence_penalty", {"presence_penalty": math.inf}),
        ("frequency_penalty", {"frequency_penalty": None}),
        ("checkpoint_every_tokens", {"checkpoint_every_tokens": 0}),
        ("checkpoint_every_seconds", {"checkpoint_every_seconds": -1}),
        ("on_decode_checkpoint", {"on_decode_checkpoint": 5}),
        ("initial_generated_tokens", {"initial_generated_tokens": 1, "cache": []}),
        ("initial_generated_tokens", PENDING | {"initial_generated_tokens": 512}),
        ("initial_pending_token", PENDING | {"initial_pending_token": -3}),
        ("initial_pending_logprobs", PENDING | {"initial_pending_logprobs": None}),
        ("seed", PENDING | {"seed": None}),
        ("cache", PENDING | {"cache": None}),
        ("original_prompt_tokens", {"original_prompt_tokens": 0}),
        ("initial_tokens", {"initial_tokens": (Token(1, 1, "", -1.0),)}),
        ("published_tokens", {"published_tokens": (Token(1, 2, "", -1.0),)}),
        (
            "published_tokens",
            PENDING
            | {
                "initial_generated_tokens": 2,
                "initial_published_tokens": 1,
                "published_tokens": (Token(1, 3, "", -1.0),),
            },
        ),
    ],
)
def test_the_error_names_the_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption) as caught:
        GenerationOptions(**options)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        GenerationOptions(temprature=1.0)  # type: ignore[call-arg]


def test_lists_become_tuples_and_the_bias_cannot_change() -> None:
    bias = {5: 1.0}
    options = GenerationOptions(stop=["a", "b"], logit_bias=bias)  # type: ignore[arg-type]
    bias[5] = 2.0
    assert options.stop == ("a", "b")
    assert options.logit_bias == {5: 1.0}
