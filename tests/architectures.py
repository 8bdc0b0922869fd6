"""Every way to build a model that there is: tiny ones with random weights, by architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, get_args

import mlx.core as mx
from mlx.utils import tree_map

from cache_models import VOCABULARY, CacheModel, cache_model, get_classes
from tenuto_engine import Engine
from tenuto_engine._model import LoadedModel

CHUNK = 16
WINDOW = 24
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


def engine_of(
    name: str, model: Any, other: Engine, *, pipelined: bool, compiled: bool = False
) -> Engine:
    """An engine of one that has no folder; the tokenizer is that of `other`."""
    loaded = LoadedModel(
        path=Path(name),
        model=model,
        tokenizer=other.tokenizer,
        config={},
        vocab_size=VOCABULARY,
        context_length=4096,
        eos_token_ids=frozenset(),
    )
    return Engine(loaded, slots=1, chunk_size=CHUNK, pipelined=pipelined, compiled=compiled)
