"""LoRA adapters by hand, in the format of mlx-lm: random, and strong enough to be seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from tenuto_engine._adapter_layers import sites_of

ATTENTION = ("q_proj", "v_proj")


def write_adapter(
    folder: Path,
    name: str,
    model: Path | Any,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 2.0,
    kind: str = "lora",
    suffixes: tuple[str, ...] | None = ATTENTION,
    dtype: str = "float32",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter of a model (its folder, or the module) and return its own folder.

    It changes the layers whose paths end with one of `suffixes`, or (None) all that it can.
    """
    if isinstance(model, Path):
        model, _ = load_model(model, lazy=True)
    tensors: dict[str, mx.array] = {}
    key = mx.random.key(seed)
    changed = []
    for path, site in sites_of(model).items():
        if not site.takes(kind) or not (suffixes is None or path.endswith(suffixes)):
            continue
        changed.append(path)
        for leaf, shape in site.shapes(rank).items():
            if leaf == "m" and kind == "lora":
                continue
            key, drawn = mx.random.split(key)
            value = mx.random.normal(shape, key=drawn) * (0.5 if leaf == "m" else 0.3)
            value = mx.abs(value) + 0.5 if leaf == "m" else value
            tensors[f"{path}.{leaf}"] = value.astype(getattr(mx, dtype))
    assert changed, "the adapter would change nothing"
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(own / "adapters.safetensors"), tensors)
    written = {
        "fine_tune_type": kind,
        "num_layers": 100,
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.1,
            "keys": sorted({_key(path) for path in changed}),
        },
        **(config or {}),
    }
    (own / "adapter_config.json").write_text(json.dumps(written))
    return own


def _key(path: str) -> str:
    """As mlx-lm names a layer: within its block, or from the root."""
    head, layers, rest = path.partition("layers.")
    return rest.partition(".")[2] if layers else head
