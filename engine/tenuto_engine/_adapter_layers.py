"""The layers of a model that an adapter can change, and ``AdaptedModel``: a model with one bound.

The arithmetic is mlx-lm's: its own LoRA layers take the places of the plain ones while a forward is
built, and the plain ones come back after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tenuto_engine._adapter_files import DORA, LORA, AdapterFiles, StoredTensor
from tenuto_engine._errors import UnsupportedAdapter

# mlx's stubs know nothing of it.
nn: Any = mlx.nn

Shapes = dict[str, tuple[int, ...]]
LEAVES: Final = {LORA: ("lora_a", "lora_b"), DORA: ("lora_a", "lora_b", "m")}
# In numpy there is no bfloat16; its bits travel as uint16.
_DTYPES: Final[Mapping[str, tuple[str, mx.Dtype]]] = {
    "F32": ("<f4", mx.float32),
    "F16": ("<f2", mx.float16),
    "BF16": ("<u2", mx.bfloat16),
}
_WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A layer of a model that an adapter can change.

    Attributes:
        holder, key: where it stands: a module, a dict or a list, and the place in it.
        plain: the layer itself.
    """

    holder: Any
    key: Any
    plain: Any

    def put(self, layer: Any) -> None:
        """Have a layer stand there."""
        self.holder[self.key] = layer

    def shapes(self, rank: int) -> Shapes:
        """Those of an adapter's tensors here."""
        match self.plain:
            case nn.Linear() | nn.QuantizedLinear():
                outputs, inputs = self.plain.weight.shape
                inputs = _unpacked(self.plain, inputs)
                return {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (outputs,)}
            case nn.Embedding() | nn.QuantizedEmbedding():
                tokens, width = self.plain.weight.shape
                width = _unpacked(self.plain, width)
                return {"lora_a": (tokens, rank), "lora_b": (rank, width), "m": (tokens,)}
        experts, outputs = self.plain.num_experts, self.plain.output_dims
        return {
            "lora_a": (experts, rank, self.plain.input_dims),
            "lora_b": (experts, outputs, rank),
        }

    def layer(self, kind: str, scale: float, arrays: Mapping[str, mx.array]) -> Any:
        """mlx-lm's layer that changes this one. Dropout is for training, and off."""
        # What trains models is imported with it, which takes a while.
        from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
        from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

        parts = {**arrays, "scale": scale, "dropout": nn.Dropout(0.0)}
        if isinstance(self.plain, nn.Embedding | nn.QuantizedEmbedding):
            embedding = LoRAEmbedding if kind == LORA else DoRAEmbedding
            return _bare(embedding, embedding=self.plain, **parts)
        if isinstance(self.plain, nn.Linear | nn.QuantizedLinear):
            return _bare(LoRALinear if kind == LORA else DoRALinear, linear=self.plain, **parts)
        experts = self.plain.num_experts
        return _bare(LoRASwitchLinear, linear=self.plain, num_experts=experts, **parts)

    def takes(self, kind: str) -> bool:
        """Whether mlx-lm can change it so."""
        no_dora = nn.QuantizedEmbedding | SwitchLinear | QuantizedSwitchLinear
        return kind == LORA or not isinstance(self.plain, no_dora)


Sites = Mapping[str, Site]
"""The path of a layer in the model, as its tensors are named -> the layer."""


def sites_of(model: Any) -> Sites:
    """All layers of a model that an adapter can change; none of an adapter may be bound."""
    kinds = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding
    return {
        path: _site(model, path, module)
        for path, module in model.named_modules()
        # What has a LoRA layer of its own has tensors of another form.
        if isinstance(module, kinds | SwitchLinear | QuantizedSwitchLinear)
        and not hasattr(module, "to_lora")
    }


def _site(model: Any, path: str, module: Any) -> Site:
    holder, *rest = model, *path.split(".")
    for step in rest[:-1]:
        holder = holder[int(step)] if isinstance(holder, list) else holder[step]
    return Site(holder, int(rest[-1]) if isinstance(holder, list) else rest[-1], module)


def _unpacked(layer: Any, words: int) -> int:
    quantized = isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
    return words * _WORD_BITS // layer.bits if quantized else words


def _bare(kind: Any, **parts: Any) -> Any:
    """A layer without what its ``__init__`` would draw from MLX's global random state."""
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def fitting(files: AdapterFiles, sites: Sites) -> dict[str, Site]:
    """The layers that an adapter changes, by path.

    Raises:
        UnsupportedAdapter: a tensor has no place in the model, another shape than there, or is
            missing; it names the tensor.
    """
    changed: dict[str, Site] = {}
    for name, tensor in files.tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in LEAVES[files.kind]:
            known = ", ".join(LEAVES[files.kind])
            raise UnsupportedAdapter(files.name, f"{name}: is none of {known}", hint=_FORMAT_HINT)
        site = sites.get(path)
        if site is None:
            raise UnsupportedAdapter(
                files.name, f"{name}: the model has no layer there that can be changed", hint=_BASE
            )
        if not site.takes(files.kind):
            what = type(site.plain).__name__
            raise UnsupportedAdapter(files.name, f"{name}: there is no {files.kind} of a {what}")
        wanted = site.shapes(files.rank)[leaf]
        if tensor.shape != wanted:
            raise UnsupportedAdapter(
                files.name,
                f"{name}: has the shape {tensor.shape}, and with this model and rank {files.rank} "
                f"it would be {wanted}",
                hint=_BASE,
            )
        changed[path] = site
    for path in changed:
        for leaf in LEAVES[files.kind]:
            if f"{path}.{leaf}" not in files.tensors:
                raise UnsupportedAdapter(files.name, f"{path}.{leaf}: is missing", hint=_BASE)
    return changed


_BASE: Final = "was it trained on another model?"
_FORMAT_HINT: Final = "its tensors are named as mlx_lm.lora names them"


def array_of(payload: memoryview, tensor: StoredTensor) -> mx.array:
    """A tensor of a weights file, lazily copied."""
    kind, dtype = _DTYPES[tensor.dtype]
    host = np.frombuffer(payload[tensor.begin : tensor.end], np.dtype(kind)).reshape(tensor.shape)
    array = mx.array(host)
    return array.view(dtype) if dtype == mx.bfloat16 else array


def stand_in(tensor: StoredTensor) -> mx.array:
    """Zeros of its shape and dtype that take no memory."""
    return mx.broadcast_to(mx.zeros((), _DTYPES[tensor.dtype][1]), tensor.shape)


class AdaptedModel:
    """A model with an adapter: it is called as the model is.

    Other rows call the model itself, in between: the adapter is bound no longer than it takes to
    build a forward.
    """

    def __init__(self, model: Any, layers: tuple[tuple[Site, Any], ...]) -> None:
        self._model = model
        self._layers = layers

    def __call__(self, tokens: mx.array, *, cache: list[Any]) -> mx.array:
        with self._bound():
            logits: mx.array = self._model(tokens, cache=cache)
        return logits

    @contextmanager
    def _bound(self) -> Iterator[None]:
        try:
            for site, layer in self._layers:
                site.put(layer)
            yield
        finally:
            for site, _ in self._layers:
                site.put(site.plain)


def check_runs(name: str, model: AdaptedModel, caches: list[Any]) -> None:
    """Build a forward that is never evaluated.

    Raises:
        UnsupportedAdapter: code of the model's own cannot do with one of the changed layers.
    """
    try:
        model(mx.array([[0]]), cache=caches)
    except Exception as error:
        raise UnsupportedAdapter(
            name, f"the model cannot run with it: {type(error).__name__}: {error}"
        ) from error
