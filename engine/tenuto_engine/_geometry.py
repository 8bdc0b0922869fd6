"""``Geometry``: everything that decides the bits of a logit, and its hash.

Two runs of equal geometry give equal bits. Pipelining, the number of slots and their
capacity are no part of it: they must not change a bit.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

import mlx.core as mx
import xxhash

from tenuto_engine._errors import ModelLoadError
from tenuto_engine._kv_scheme import PLAIN
from tenuto_engine._remembered import Remembered, read_remembered, write_remembered

CHUNK_GPU: Final = 512
CHUNK_CPU: Final = 32
# This version forwards each row alone.
DECODE_WIDTH: Final = 1
ATTENTION: Final = "mlx-sdpa/1"
NUMERIC_ENVIRONMENT: Final = (
    "MLX_CUDA_USE_CUDNN_SDPA",
    "MLX_ENABLE_TF32",
    "MLX_SDPA_BLOCKS",
)
# Config, weights, tokenizer, chat template and code; not the readme beside them.
_MODEL_FILES: Final = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.jinja",
    "*.py",
)
_READ_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Geometry:
    """All that a logit's bits depend on besides the tokens.

    Attributes:
        model_hash: of names and bytes of config, weights and tokenizer.
        adapter_hash: of an adapter; empty without one.
        mlx_version: as installed.
        mlx_lm_version: as installed.
        device_kind: ``cpu`` or ``gpu``.
        device_name: the chip, by its own name and architecture.
        environment: the variables of ``NUMERIC_ENVIRONMENT``; empty where unset.
        width: rows that a decode step forwards together.
        chunk_size: tokens of a prefill chunk.
        attention: the attention route and its version.
        compiled: whether the step is compiled.
        kv_scheme: how KV is quantized, the canonical text of a ``KVScheme``; ``none`` where it is
            not.
    """

    model_hash: str
    adapter_hash: str
    mlx_version: str
    mlx_lm_version: str
    device_kind: str
    device_name: str
    environment: Mapping[str, str] = field(hash=False)
    width: int
    chunk_size: int
    attention: str
    compiled: bool
    kv_scheme: str

    @property
    def fingerprint(self) -> str:
        """32 hex digits, equal for equal geometries and in every process."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(canonical.encode())

    def to_dict(self) -> dict[str, Any]:
        """As a map that JSON and msgpack can hold."""
        return asdict(self) | {"environment": dict(self.environment)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What ``to_dict`` gave; keys of later versions are ignored.

        Raises:
            KeyError: a field is missing.
        """
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    def with_adapter(self, adapter_hash: str) -> Geometry:
        """That of the same model with an adapter; "" is none."""
        return replace(self, adapter_hash=adapter_hash)

    def compatible_kv(self, other: Geometry) -> bool:
        """Whether KV of ``other`` may be used here, if not with equal bits."""
        mine = (self.model_hash, self.adapter_hash, self.kv_scheme)
        return mine == (other.model_hash, other.adapter_hash, other.kv_scheme)

    def differences(self, other: Geometry) -> list[str]:
        """Each field that differs, as ``chunk_size: 32 here, 512 there``; ``other`` is there."""
        here, there = _flat(self), _flat(other)
        return [
            f"{name}: {here.get(name, '') or 'unset'} here, {there.get(name, '') or 'unset'} there"
            for name in sorted({*here, *there})
            if here.get(name, "") != there.get(name, "")
        ]


def default_chunk() -> int:
    """Tokens of a prefill chunk on this device where nobody says otherwise."""
    return CHUNK_GPU if mx.default_device().type == mx.DeviceType.gpu else CHUNK_CPU


def geometry_of(
    folder: Path,
    *,
    width: int,
    chunk: int,
    compiled: bool = False,
    attention: str = ATTENTION,
    kv_scheme: str = PLAIN,
    cache_file: Path | None = None,
) -> Geometry:
    """The geometry of the model in ``folder`` on this machine, in this process.

    Raises:
        ModelLoadError: the model's files cannot be read.
    """
    device = mx.default_device()
    about = mx.device_info(device)
    return Geometry(
        model_hash=hash_model(folder, cache_file),
        adapter_hash="",
        mlx_version=version("mlx"),
        mlx_lm_version=version("mlx-lm"),
        device_kind="gpu" if device.type == mx.DeviceType.gpu else "cpu",
        device_name=" ".join(
            str(about[key]) for key in ("device_name", "architecture") if key in about
        ),
        environment={name: os.environ.get(name, "") for name in NUMERIC_ENVIRONMENT},
        width=width,
        chunk_size=chunk,
        attention=attention,
        compiled=compiled,
        kv_scheme=kv_scheme,
    )


def hash_model(folder: Path, cache_file: Path | None = None) -> str:
    """32 hex digits over names and bytes of config, weights and tokenizer in ``folder``.

    Args:
        folder: a model folder; its subfolders do not count.
        cache_file: remembers digests by path, size and time of change, so that weights
            are read once. A missing or damaged one only costs time.

    Raises:
        ModelLoadError: a file cannot be read, or there is none.
    """
    remembered = read_remembered(cache_file)
    try:
        paths = sorted(path for path in folder.iterdir() if _is_model_file(path))
        digests = {path: _digest_remembered(path, remembered) for path in paths}
    except OSError as error:
        raise ModelLoadError(f"{error.filename or folder}: cannot be read: {error.strerror}") from (
            error
        )
    if not digests:
        raise ModelLoadError(f"{folder}: no model files")
    if cache_file is not None and remembered != read_remembered(cache_file):
        write_remembered(cache_file, remembered)
    total = xxhash.xxh3_128()
    for path, file_digest in digests.items():
        total.update(f"{path.name}\0{file_digest}\n".encode())
    return total.hexdigest()


# -- helpers ---------------------------------------------------------------------------


def _flat(geometry: Geometry) -> dict[str, str]:
    values = geometry.to_dict()
    environment = values.pop("environment")
    return {name: str(value) for name, value in {**values, **environment}.items()}


def _is_model_file(path: Path) -> bool:
    plain = not path.name.startswith(".") and path.is_file()
    return plain and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _MODEL_FILES)


def _digest_remembered(path: Path, remembered: Remembered) -> str:
    facts = path.stat()
    match remembered.get(str(path.resolve())):
        case [facts.st_size, facts.st_mtime_ns, str(known)]:
            return known
    read = _digest(path)
    remembered[str(path.resolve())] = [facts.st_size, facts.st_mtime_ns, read]
    return read


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
