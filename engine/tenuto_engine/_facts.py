"""``ModelFacts``: what can be told of a model from its files, without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from tenuto_engine._compiled import check_plain
from tenuto_engine._errors import ModelLoadError
from tenuto_engine._fs import StrPath
from tenuto_engine._geometry import DECODE_WIDTH, Geometry, default_chunk, geometry_of
from tenuto_engine._kv_scheme import KVScheme, check_width, scheme_of, text_of
from tenuto_engine._longest import longest_of
from tenuto_engine._model import context_length_of, find_folder, vocab_size_of
from tenuto_engine._row_cost import RowCost
from tenuto_engine._sizes import sizes_of

_LENGTH_BYTES: Final = 8
_LONGEST_HEADER: Final = 100 * 2**20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that is not loaded.

    Attributes:
        folder: where it is.
        geometry: what it will have when it is loaded.
        weight_bytes: what it takes in memory without rows; where that is not known, what its
            weights take on disk, which is about as much.
        row_cost: what a row takes; None if that shows only when it is loaded.
        longest_token: a text has at least one token for so many of its characters, stripped and
            without control characters (``_longest`` has which); None where that cannot be proved.
        context_length: most tokens of prompt and answer together; None if it does not say.
        vocab_size: token ids are below it.
    """

    folder: Path
    geometry: Geometry
    weight_bytes: int
    context_length: int | None
    vocab_size: int
    row_cost: RowCost | None = None
    longest_token: int | None = None


def model_facts(
    path_or_repo: StrPath,
    *,
    chunk_size: int | None = None,
    hash_cache: StrPath | None = None,
    kv_scheme: KVScheme | str | None = None,
    compiled: bool = False,
) -> ModelFacts:
    """Look at a model folder, or at a Hugging Face repository by name, which is fetched.

    Args:
        chunk_size, hash_cache, kv_scheme, compiled: as of ``Engine.load``.

    Raises:
        ModelLoadError: it cannot be loaded, as far as this tells: a file is missing, cut
            short, or no JSON.
    """
    folder = find_folder(path_or_repo)
    config = _config(folder / "config.json")
    on_disk = weight_bytes(folder)
    chunk = default_chunk() if chunk_size is None else chunk_size
    cache_file = None if hash_cache is None else Path(hash_cache)
    scheme = scheme_of(kv_scheme, folder)
    check_width(scheme, DECODE_WIDTH)
    check_plain(scheme, compiled=compiled)
    geometry = geometry_of(
        folder,
        width=DECODE_WIDTH,
        chunk=chunk,
        compiled=compiled,
        kv_scheme=text_of(scheme),
        cache_file=cache_file,
    )
    sizes = sizes_of(
        folder,
        chunk,
        fingerprint=geometry.fingerprint,
        cache_file=cache_file,
        scheme=scheme,
        compiled=compiled,
    )
    return ModelFacts(
        folder=folder,
        weight_bytes=on_disk if sizes is None else sizes.weight_bytes,
        geometry=geometry,
        context_length=context_length_of(config),
        vocab_size=vocab_size_of(folder, config),
        row_cost=None if sizes is None else sizes.row_cost,
        longest_token=longest_of(folder, config, geometry.fingerprint, cache_file),
    )


def weight_bytes(folder: Path) -> int:
    """Bytes of all tensors in the weight files of a model folder, by their headers.

    Raises:
        ModelLoadError: a file cannot be read, is cut short, or is no safetensors file.
    """
    return sum(_tensor_bytes(path) for path in sorted(folder.glob("model*.safetensors")))


def _tensor_bytes(path: Path) -> int:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ModelLoadError(f"{path}: is no safetensors file", hint=_HINT)
            header = json.loads(stream.read(length))
            size = path.stat().st_size
        ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
        wanted = int(max(ends, default=0))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        *(ValueError, ArithmeticError, RecursionError),
        *(LookupError, TypeError, AttributeError),
    ) as error:
        raise ModelLoadError(f"{path}: is no safetensors file", hint=_HINT) from error
    if size < _LENGTH_BYTES + length + wanted:
        raise ModelLoadError(
            f"{path}: has {size} bytes, and {_LENGTH_BYTES + length + wanted} belong to it",
            hint=_HINT,
        )
    return wanted


_HINT: Final = "it is damaged, or its download was cut short; fetch it again"


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is no JSON: {error}", hint=_HINT) from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: holds no object", hint=_HINT)
    return cast(Mapping[str, Any], config)
