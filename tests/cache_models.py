"""Tiny random models in memory, one for each way that mlx-lm keeps its caches.

No tokenizer and no files: these are for tests that call a model's forward pass themselves.
Weights are scaled up, so that greedy output wanders and a wrong bit in a cache is soon seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, Literal

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import cache as cache_module

from tenuto_engine._caches import settle_after_prefill
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache
from tiny_models import SLIDING_WINDOW, tiny_config

# mlx-lm is not annotated.
mlx_caches: Any = cache_module
get_classes: Any = mlx_lm_utils._get_classes

VOCABULARY: Final = 97
ATTENTION_CHUNK: Final = 32
"""Positions that the chunked caches of llama4 keep."""

CacheModel = Literal[
    "llama",
    "llama_wide",
    "gemma3_text",
    "lfm2",
    "mamba2",
    "qwen3_next",
    "falcon_h1",
    "llama4",
    "deepseek_v3",
    "deepseek_v32",
]


@cache
def cache_model(kind: CacheModel, dtype: str = "float32", head_dim: int | None = None) -> Any:
    """The model of that kind; the same arguments give the same weights."""
    config = _CONFIGS[kind]()
    if head_dim is not None:
        config |= {"head_dim": head_dim}
    model_class, args_class = get_classes(config)
    mx.random.seed(7)
    model = model_class(args_class.from_dict(config))
    wanted = getattr(mx, dtype)
    model.update(tree_map(lambda p: (p * 3).astype(wanted), model.parameters()))
    mx.eval(model.parameters())
    return model


def fresh_caches(model: Any) -> list[Any]:
    """The model's own caches, empty."""
    made: list[Any] = mlx_caches.make_prompt_cache(model)
    return made


def _config(model_type: str, layers: int, **more: object) -> dict[str, object]:
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_scaling": None,
        **more,
    }


def _mamba2() -> dict[str, object]:
    return {
        "model_type": "mamba2",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
        "layer_norm_epsilon": 1e-5,
    }


def _qwen3_next() -> dict[str, object]:
    return _config(
        "qwen3_next",
        4,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=32,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        partial_rotary_factor=0.5,
        norm_topk_prob=True,
    )


def _falcon_h1() -> dict[str, object]:
    return _config(
        "falcon_h1",
        2,
        mamba_d_conv=4,
        mamba_d_head=8,
        mamba_d_ssm=32,
        mamba_d_state=8,
        mamba_n_heads=4,
        mamba_n_groups=1,
    )


def _llama4() -> dict[str, object]:
    text = _config(
        "llama4_text",
        4,
        attention_chunk_size=ATTENTION_CHUNK,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        num_local_experts=2,
        use_qk_norm=True,
    )
    return {"model_type": "llama4", "text_config": text}


def _deepseek(model_type: str, **more: object) -> dict[str, object]:
    return _config(
        model_type,
        3,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=8,
        qk_nope_head_dim=8,
        first_k_dense_replace=1,
        **more,
    )


_CONFIGS: Final[Mapping[CacheModel, Callable[[], dict[str, Any]]]] = {
    "llama": lambda: tiny_config("llama", VOCABULARY, 4096, 0),
    # Heads wide enough for the groups of a quantized cache.
    "llama_wide": lambda: tiny_config("llama", VOCABULARY, 4096, 0) | {"head_dim": 64},
    # Two rings and a cache that keeps all.
    "gemma3_text": lambda: (
        tiny_config("gemma3_text", VOCABULARY, 4096, 0) | {"num_hidden_layers": 3}
    ),
    "lfm2": lambda: tiny_config("lfm2", VOCABULARY, 4096, 0),
    "mamba2": _mamba2,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "llama4": _llama4,
    "deepseek_v3": lambda: _deepseek("deepseek_v3"),
    "deepseek_v32": lambda: _deepseek(
        "deepseek_v32", index_head_dim=16, index_n_heads=2, index_topk=40
    ),
}

SMALL_CACHES: Final[Mapping[str, Callable[[], Any]]] = {
    "KVCache": mlx_caches.KVCache,
    "QuantizedKVCache": lambda: mlx_caches.QuantizedKVCache(32, 4),
    "ConcatenateKVCache": mlx_caches.ConcatenateKVCache,
    "RotatingKVCache": lambda: mlx_caches.RotatingKVCache(SLIDING_WINDOW, keep=3),
    "QuantizedRotatingKVCache": lambda: QuantizedRotatingKVCache(
        SLIDING_WINDOW, 3, group_size=32, bits=4
    ),
    "ChunkedKVCache": lambda: mlx_caches.ChunkedKVCache(SLIDING_WINDOW),
}


def grown_cache(kind: str, lengths: list[int]) -> Any:
    """A cache with random content after updates of those lengths."""
    live = SMALL_CACHES[kind]()
    for number, length in enumerate(lengths):
        both = mx.random.normal((2, 1, 2, length, 64), key=mx.random.key(number))
        if kind == "ChunkedKVCache":
            live.maybe_trim_front()
        live.update_and_fetch(both[0], both[1])
    settle_after_prefill([live])
    return live
