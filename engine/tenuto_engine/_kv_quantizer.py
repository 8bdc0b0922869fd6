"""Live caches and a ``KVScheme``: quantizing them, and what cannot be quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from tenuto_engine._cache_kinds import CACHE_LIST, entry
from tenuto_engine._cache_tree import children, kind_name, parts
from tenuto_engine._errors import ResumeMismatch, UnsupportedScheme
from tenuto_engine._kv_scheme import GROUP_SIZES, KVScheme, LayerQuantization
from tenuto_engine._quantized_ring import QuantizedRotatingKVCache

# Positions of a cache: of these there may be any number.
_ODD: Final = 513
_QUANTIZED: Final = {"KVCache": "QuantizedKVCache", "RotatingKVCache": "QuantizedRotatingKVCache"}


def quantize_caches(caches: list[Any], scheme: KVScheme, *, evaluate: bool = True) -> None:
    """Replace each cache in the list by a quantized one of the same positions, as the scheme says.

    Recurrent state stays as it is.

    Args:
        evaluate: compute them at once, one after the other, so that never more than one is held
            in both forms.
    """
    for layer in range(len(caches)):
        how = scheme.of_layer(layer)
        if how is not None:
            caches[layer] = _quantized(caches[layer], how)
            if evaluate:
                mx.eval([array for part in parts(caches[layer]) for array in _buffers(part)])
    if evaluate:
        # What they took before, and what was computed on the way.
        mx.clear_cache()


def _quantized(cache: Any, how: LayerQuantization) -> Any:
    kind = kind_name(cache)
    if kind == CACHE_LIST:
        cache.caches = tuple(_quantized(each, how) for each in cache.caches)
    elif kind == "KVCache":
        return cache.to_quantized(group_size=how.group_size, bits=how.bits)
    elif kind == "RotatingKVCache":
        return QuantizedRotatingKVCache.of(cache, group_size=how.group_size, bits=how.bits)
    return cache


def is_quantized_at(scheme: KVScheme, position: int) -> bool:
    """Whether the caches of a row that holds so many positions are quantized."""
    return position > 0 and position >= scheme.start


def check_quantized(caches: Sequence[Any], scheme: KVScheme, position: int) -> None:
    """Check that caches that are given with ``position`` tokens are as the scheme would have them.

    Raises:
        ResumeMismatch: one is not; the layer is named.
    """
    done = is_quantized_at(scheme, position)
    for layer, cache in enumerate(caches):
        how = scheme.of_layer(layer) if done else None
        for part in parts(cache):
            kind = kind_name(part)
            if kind in _QUANTIZED:
                found = None
            elif kind in _QUANTIZED.values():
                found = LayerQuantization(part.bits, part.group_size)
            else:
                continue
            if found != how:
                raise ResumeMismatch(
                    f"layer {layer} of the cache is {_described(found)} at {position} tokens, and "
                    f"by the engine's kv_scheme {scheme} it is {_described(how)}",
                    hint="it was written under another scheme",
                )


def check_possible(model: Any, caches: Sequence[Any], scheme: KVScheme) -> None:
    """Check that a model can have the scheme, as far as its caches and weights tell.

    Args:
        caches: the model's own, after a forward.

    Raises:
        UnsupportedScheme: it cannot; the layer and the reason are named.
    """
    _check_attention(model, scheme)
    layers = list(scheme.layers) or range(len(caches))
    beyond = [layer for layer in layers if layer >= len(caches)]
    if beyond:
        raise _refused(scheme, f"there is no layer {beyond[0]}, the model has {len(caches)} caches")
    found = False
    for layer in layers:
        how = scheme.of_layer(layer)
        assert how is not None
        attends = _check_layer(scheme, layer, caches[layer], how)
        if scheme.layers and not attends:
            raise _refused(scheme, f"layer {layer} has no KV, only recurrent state")
        found |= attends
    if not found:
        raise _refused(scheme, "the model has no KV, only recurrent state")


def probe(model: Callable[..., mx.array], caches: list[Any], scheme: KVScheme) -> None:
    """Build, and never evaluate, forwards of several tokens and of one behind quantized caches, and
    evaluate what such attention does with one head.

    Args:
        caches: as of `check_possible`, which was passed; they are quantized here.

    Raises:
        UnsupportedScheme: the model's attention does something else with what its caches give, or
            this device has no kernels for it.
    """
    quantize_caches(caches, scheme, evaluate=False)
    try:
        for tokens in ([0, 0], [0]):
            model(mx.array([tokens]), cache=caches)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _refused(scheme, f"its attention cannot read a quantized cache: {reason}") from error
    for cache in caches:
        for part in parts(cache):
            if kind_name(part) in _QUANTIZED.values():
                _try_on_device(part, scheme)


def _try_on_device(cache: Any, scheme: KVScheme) -> None:
    """Multiply with quantized K and V: some sizes MLX's CUDA backend lacks, and says so then."""
    how = {"group_size": cache.group_size, "bits": cache.bits}
    for packed, scales, _ in (cache.keys, cache.values):
        width = packed.shape[-1] * 32 // cache.bits
        held = mx.quantize(mx.zeros((1, 1, _ODD, width), scales.dtype), **how)
        try:
            for tokens in (1, 2):
                scores = mx.zeros((1, 1, tokens, width), scales.dtype)
                scores = mx.quantized_matmul(scores, *held, transpose=True, **how)
                mx.eval(mx.quantized_matmul(scores, *held, transpose=False, **how))
        except RuntimeError as error:
            raise _refused(
                scheme, f"this device cannot do it with heads of {width}: {error}"
            ) from error


def _check_attention(model: Any, scheme: KVScheme) -> None:
    """What its weights and modules tell."""
    names = [name for name, _ in cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))]
    sinks = [name for name in names if "sink" in name.rpartition(".")[2]]
    if sinks:
        raise _refused(
            scheme,
            f"its attention has sinks ({sinks[0]}), which quantized attention cannot do",
        )
    if any(hasattr(module, "kv_lora_rank") for module in model.modules()):
        raise _refused(
            scheme,
            "its attention is MLA (kv_lora_rank): its caches hold latents, no keys and values",
        )


def _check_layer(scheme: KVScheme, layer: int, cache: Any, how: LayerQuantization) -> bool:
    """Whether the layer has KV, all of which can be quantized."""
    leaves = [part for part in parts(cache) if not children(part) and entry(kind_name(part)).arrays]
    if len(leaves) > 1:
        raise _refused(scheme, f"layer {layer} has a CacheList of {len(leaves)} KV caches")
    for leaf in leaves:
        kind = kind_name(leaf)
        if kind not in _QUANTIZED:
            raise _refused(scheme, f"layer {layer} keeps its KV in a {kind}, which stays as it is")
        for name, array in zip(("keys", "values"), _buffers(leaf), strict=True):
            width = array.shape[-1]
            if width % how.group_size:
                raise _refused(
                    scheme,
                    f"the {name} of layer {layer} have a head dimension of {width}, "
                    f"no multiple of the group size {how.group_size}{_another(width)}",
                )
    return bool(leaves)


def _another(width: int) -> str:
    smaller = [size for size in GROUP_SIZES if width % size == 0]
    return f"; {max(smaller)} would do" if smaller else ""


def _buffers(cache: Any) -> Iterator[mx.array]:
    yield from entry(kind_name(cache)).buffers(cache)


def _refused(scheme: KVScheme, reason: str) -> UnsupportedScheme:
    return UnsupportedScheme(f"kv_scheme {scheme}: {reason}")


def _described(how: LayerQuantization | None) -> str:
    return "not quantized" if how is None else f"of {how.bits} bits in groups of {how.group_size}"
