"""``Sizes``: what a model and its rows take of memory, found out without loading it.

mlx-lm builds a model of arrays that nobody evaluates: they have shapes and types, and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, cast

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tenuto_engine._compiled import check_compiles
from tenuto_engine._errors import ModelLoadError
from tenuto_engine._kv_scheme import KVScheme
from tenuto_engine._model import bytes_of
from tenuto_engine._remembered import read_remembered, write_remembered
from tenuto_engine._row_cost import RowCost, row_cost

# One more whenever `row_cost` counts otherwise.
_KEY: Final = "sizes 1 "


@dataclass(frozen=True, slots=True)
class Sizes:
    """The very numbers that the loaded engine has.

    Attributes:
        weight_bytes: what the model takes without rows.
        row_cost: what a row takes, by its length.
    """

    weight_bytes: int
    row_cost: RowCost

    def pack(self) -> list[Any]:
        """As JSON can hold it."""
        return [self.weight_bytes, *_packed(self.row_cost)]

    @classmethod
    def unpack(cls, packed: object) -> Self | None:
        """The inverse; None if it is something else."""
        match packed:
            case [int(weights), *cost]:
                found = _unpacked(cost)
                return None if found is None else cls(weights, found)
        return None


def _packed(cost: RowCost) -> list[Any]:
    plain = [] if cost.plain is None else [cost.plain_tokens, _packed(cost.plain)]
    return [cost.fixed, cost.per_token, list(map(list, cost.windows)), *plain]


def _unpacked(packed: object) -> RowCost | None:
    match packed:
        case [int(fixed), int(per_token), [*windows], *plain]:
            pass
        case _:
            return None
    pairs = []
    for each in windows:
        match each:
            case [int(most), int(size)]:
                pairs.append((most, size))
            case _:
                return None
    quantized = RowCost(fixed, per_token, tuple(pairs))
    match plain:
        case []:
            return quantized
        case [int(until), [*before]]:
            found = _unpacked(before)
            return found and replace(quantized, plain=found, plain_tokens=until)
    return None


def sizes_of(
    folder: Path,
    chunk: int,
    *,
    fingerprint: str,
    cache_file: Path | None,
    scheme: KVScheme | None = None,
    compiled: bool = False,
) -> Sizes | None:
    """The sizes of the model in ``folder``; None where it cannot be built or run, which a load then
    tells.

    Args:
        chunk: tokens of a prefill chunk.
        fingerprint: of its geometry, under which ``cache_file`` remembers them.
        scheme: how its KV is quantized.
        compiled: whether its decode steps are compiled.

    Raises:
        ModelLoadError: one of these cannot be; ``UnsupportedScheme`` is of those.
    """
    key = _KEY + fingerprint
    known = Sizes.unpack(read_remembered(cache_file).get(key))
    if known is not None:
        return known
    try:
        measured = _measure(folder, chunk, scheme, compiled=compiled)
    except ModelLoadError as error:
        raise type(error)(f"{folder}: {error}") from error
    except Exception:  # noqa: BLE001 - any code of mlx-lm's models may run here
        return None
    if cache_file is not None:
        write_remembered(cache_file, read_remembered(cache_file) | {key: measured.pack()})
    return measured


def _measure(folder: Path, chunk: int, scheme: KVScheme | None, *, compiled: bool) -> Sizes:
    model, _ = load_model(folder, lazy=True)
    weights = bytes_of(model)
    hollow(model)
    if compiled:
        check_compiles(model, lambda: make_prompt_cache(model))
    return Sizes(weights, row_cost(model, lambda: make_prompt_cache(model), chunk, scheme))


def hollow(model: Any) -> None:
    """Have zeros for weights, all of one element each: some models look at values on the way, and
    that must not read the real ones into memory."""

    def empty(array: mx.array) -> mx.array:
        return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)

    replace_all = cast(Callable[..., Any], tree_map)
    model.update(replace_all(empty, model.parameters()))
