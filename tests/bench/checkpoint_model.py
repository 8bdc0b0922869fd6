"""A random model of a chosen size, and checkpoints of it at any context, with no prompt read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from tenuto_engine import CacheState, Checkpoint, Engine
from tenuto_engine._cache_tree import HostArray
from tiny_models import build_tiny_model

# mlx-lm is not annotated.
get_classes: Any = mlx_lm_utils._get_classes

_HEAD_WIDTH = 64
_CAPACITY_STEP = 256


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a llama in float32 with 4 KV heads of 64."""

    hidden: int
    layers: int

    @property
    def name(self) -> str:
        """For the report."""
        return f"random llama, {self.layers} layers of {self.hidden}"


def build_model(folder: Path, size: ModelSize, context: int) -> Path:
    """Write the model with a tokenizer into `folder`, and return it."""
    build_tiny_model(folder, context_length=context)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": max(1, size.hidden // _HEAD_WIDTH // 4) * 4,
        "num_key_value_heads": 4,
        "head_dim": _HEAD_WIDTH,
        "intermediate_size": size.hidden * 11 // 4,
    }
    path.write_text(json.dumps(config), "utf-8")
    model_class, args_class = get_classes(config)
    mx.random.seed(1)
    weights = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


class SyntheticKV:
    """Random keys and values of all layers of a model, of which any beginning may be taken."""

    def __init__(self, layers: int, length: int) -> None:
        drawn = np.random.default_rng(1)
        shape = (1, 4, length, _HEAD_WIDTH)
        self._layers: list[tuple[npt.NDArray[np.float32], ...]] = [
            tuple(drawn.standard_normal(shape, np.float32) for _ in range(2)) for _ in range(layers)
        ]

    def caches(self, length: int) -> list[CacheState]:
        """Caches that cover the first `length` positions; nothing is copied."""
        capacity = -(-length // _CAPACITY_STEP) * _CAPACITY_STEP
        meta = {"offset": length, "capacity": capacity}
        return [
            CacheState(
                "KVCache",
                meta,
                tuple(
                    HostArray(name, "float32", array[:, :, :length])
                    for name, array in zip(("keys", "values"), pair, strict=True)
                ),
            )
            for pair in self._layers
        ]

    def checkpoint(self, prompt: tuple[int, ...]) -> Checkpoint:
        """As if `prompt` had just been read."""
        return Checkpoint(
            cache_tokens=prompt,
            original_prompt_tokens=len(prompt),
            generated=(),
            pending_token=7,
            pending_logprob=-1.0,
            pending_top_logprobs=(),
            seed=1,
            caches=self.caches(len(prompt)),
        )


def random_prompt(engine: Engine, length: int) -> tuple[int, ...]:
    """Ids of any tokens."""
    drawn = np.random.default_rng(1)
    return tuple(int(token) for token in drawn.integers(0, engine.vocab_size, length))
