"""The engine and mlx-lm, on every way to build a model that there is: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast, get_args

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from cache_models import VOCABULARY, CacheModel, cache_model, get_classes
from engine_runs import run
from tenuto_engine import Engine
from tenuto_engine._model import LoadedModel
from tiny_models import KINDS

TOKENS = 60
CHUNK = 16
PROMPT = [3 + (7 * place) % 89 for place in range(45)]
WINDOW = 24
PENALTIES: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "repetition_context_size": 30,
    "presence_penalty": 0.4,
    "presence_context_size": 15,
    "frequency_penalty": 0.2,
    "frequency_context_size": 10,
    "logit_bias": {5: 2.0, 6: -1.0},
}

_DENSE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 2, "num_local_experts": 4}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {},
    "qwen2": {},
    "phi3": {},
    "olmo2": {"attention_bias": False},
    "smollm3": {},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 8,
    },
    # Ring and full caches by turns, no norm before the attention of some.
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "logit_scale": 0.5,
        "attention_bias": False,
        "layer_norm_bias": False,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
    },
    # Attention sinks and experts.
    "gpt_oss": {
        **_EXPERTS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": None,
    },
    "mixtral": _EXPERTS,
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    # Learned positions.
    "gpt2": {
        "n_ctx": 4096,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 4096,
        "layer_norm_epsilon": 1e-5,
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    # Attention, recurrent layers and experts by turns.
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
}
ARCHITECTURES: Final = (*get_args(CacheModel), *CONFIGS)


def model_of(name: str) -> Any:
    """A model of an architecture, with random weights that make its output wander."""
    if name not in CONFIGS:
        return cache_model(name)
    config = {"model_type": name, **_DENSE, **CONFIGS[name]}
    model_class, args_class = get_classes(config)
    mx.random.seed(7)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda p: (p * 3).astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model


def engine_of(name: str, model: Any, other: Engine, *, pipelined: bool) -> Engine:
    loaded = LoadedModel(
        path=Path(name),
        model=model,
        tokenizer=other.tokenizer,
        config={},
        vocab_size=VOCABULARY,
        context_length=4096,
        eos_token_ids=frozenset(),
    )
    return Engine(loaded, slots=1, chunk_size=CHUNK, pipelined=pipelined)


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
