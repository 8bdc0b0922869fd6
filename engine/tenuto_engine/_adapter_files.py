"""``AdapterFiles``: a LoRA adapter as it stands on disk, checked and hashed. No MLX.

An adapter is a subfolder with the two files that mlx-lm's training writes. What is hashed is what
was read, so that a file which is replaced meanwhile never passes for the one before.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import xxhash

from tenuto_engine._errors import InvalidOption, UnsupportedAdapter
from tenuto_engine._remembered import Remembered

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapters.safetensors"
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_HINT: Final = "1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
LORA: Final = "lora"
DORA: Final = "dora"
DTYPE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}

_LENGTH_BYTES: Final = 8
_LONGEST_CONFIG: Final = 2**20
_LONGEST_HEADER: Final = 16 * 2**20
_LONGEST_WEIGHTS: Final = 8 * 2**30
_READ_BYTES: Final = 4 * 2**20
# Beyond it float32 is infinite.
_LARGEST_SCALE: Final = 1e38
_MOST_SHOWN: Final = 20
_DAMAGED: Final = "it is damaged, or was not written to its end"

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of both files: where it is the same, they are."""


class StoredTensor(NamedTuple):
    """A tensor of the weights file: its dtype as safetensors names it, and its bytes' place."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """What the files of an adapter say.

    Attributes:
        name: of the adapter, which is that of its subfolder.
        kind: ``lora`` or ``dora``.
        rank, scale: of all its layers.
        tensors: by name; their places count from the end of the header.
        hash: 32 hex digits over the bytes of both files.
        stamp: of the files when they were opened.
        payload: the bytes of all tensors; empty where only the header was read.
    """

    name: str
    kind: str
    rank: int
    scale: float
    tensors: Mapping[str, StoredTensor]
    hash: str
    stamp: Stamp
    payload: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.end - each.begin for each in self.tensors.values())


def check_folder(folder: Path) -> Path:
    """The same, if it is a folder.

    Raises:
        InvalidOption: it is not there, or is none.
    """
    if not folder.is_dir():
        raise InvalidOption("adapters", f"{folder}: no such folder")
    return folder


def ill_named(folder: Path) -> list[str]:
    """The subfolders that no adapter can be named as, sorted; hidden ones are none."""
    try:
        return sorted(
            path.name
            for path in folder.iterdir()
            if path.name[:1] != "." and not ADAPTER_NAME.fullmatch(path.name) and path.is_dir()
        )
    except OSError:
        return []


def adapter_names(folder: Path) -> list[str]:
    """The subfolders that may be adapters, sorted; those that no adapter can be named as are left
    out. A folder that cannot be read has none."""
    try:
        return sorted(
            path.name
            for path in folder.iterdir()
            if ADAPTER_NAME.fullmatch(path.name) and path.is_dir()
        )
    except OSError:
        return []


def unknown_adapter(folder: Path, name: str) -> InvalidOption:
    """What is raised where there is no adapter of that name."""
    names = adapter_names(folder)
    shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
    hint = f"there are: {shown}" if names else "the folder of adapters has none"
    # A name that cannot be one may hold anything.
    known = (
        f"there is no adapter {name}" if ADAPTER_NAME.fullmatch(name) else "is no adapter's name"
    )
    return InvalidOption("adapter", known, hint=hint)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def adapter_stamp(folder: Path, name: str) -> Stamp | None:
    """Of an adapter's files as they are now; None where there is no such adapter."""
    if not ADAPTER_NAME.fullmatch(name) or not _is_folder(folder / name):
        return None
    try:
        return tuple(_stamp((folder / name / file).stat()) for file in (CONFIG, WEIGHTS))
    except OSError:
        return ()


def read_adapter(folder: Path, name: str) -> AdapterFiles:
    """All of an adapter, its tensors included.

    Raises:
        InvalidOption: there is none of that name.
        UnsupportedAdapter: it cannot be read, or is of another kind than we know.
    """
    return _read(folder, name, None)


def look_at_adapter(folder: Path, name: str, remembered: Remembered) -> AdapterFiles:
    """All but the tensors. The weights file is read for its hash, unless that is remembered.

    Raises:
        InvalidOption, UnsupportedAdapter: as of ``read_adapter``.
    """
    return _read(folder, name, remembered)


def _read(folder: Path, name: str, remembered: Remembered | None) -> AdapterFiles:
    if not ADAPTER_NAME.fullmatch(name) or not _is_folder(folder / name):
        raise unknown_adapter(folder, name)
    try:
        with _open(folder, name, CONFIG) as config, _open(folder, name, WEIGHTS) as weights:
            stats = [os.fstat(each.fileno()) for each in (config, weights)]
            settings = _read_config(name, config, stats[0].st_size)
            header, head = _read_header(name, weights, stats[1].st_size)
            if remembered is None:
                payload = memoryview(weights.read(stats[1].st_size))
                digest = _digest_of(head, payload)
            else:
                payload = memoryview(b"")
                digest = _remembered_digest(folder / name / WEIGHTS, weights, stats[1], remembered)
    except OSError as error:
        raise UnsupportedAdapter(name, f"cannot be read: {error.strerror or error}") from error
    size = stats[1].st_size - len(head)
    kind, rank, scale = _settings_of(name, settings.parsed)
    total = xxhash.xxh3_128()
    for file, each in ((CONFIG, settings.digest), (WEIGHTS, digest)):
        total.update(f"{file}\0{each}\n".encode())
    return AdapterFiles(
        name=name,
        kind=kind,
        rank=rank,
        scale=scale,
        tensors=_tensors_of(name, header, size if remembered is not None else len(payload)),
        hash=total.hexdigest(),
        stamp=tuple(map(_stamp, stats)),
        payload=payload,
    )


# -- files -----------------------------------------------------------------------------


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _open(folder: Path, name: str, file: str) -> IO[bytes]:
    """A regular file inside the folder of adapters, wherever links lead."""
    try:
        path = (folder / name / file).resolve(strict=True)
    except FileNotFoundError:
        is_peft = (folder / name / _PEFT_WEIGHTS).exists()
        problem = "is in PEFT's format" if is_peft else f"has no {file}"
        raise UnsupportedAdapter(name, problem, hint=_FORMAT_HINT) from None
    except RuntimeError:
        raise UnsupportedAdapter(name, f"{file}: a link that leads to itself") from None
    if not path.is_relative_to(folder.resolve()):
        raise UnsupportedAdapter(name, f"{file}: a link out of the folder of adapters")
    # A pipe must not keep whoever opens it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsupportedAdapter(name, f"{file}: is no file")
    return os.fdopen(descriptor, "rb")


_PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_FORMAT_HINT: Final = f"an adapter has {CONFIG} and {WEIGHTS}, as mlx_lm.lora writes them"


class _Config(NamedTuple):
    parsed: Mapping[str, Any]
    digest: str


def _read_config(name: str, file: IO[bytes], size: int) -> _Config:
    if size > _LONGEST_CONFIG:
        raise UnsupportedAdapter(name, f"{CONFIG}: has {size} bytes")
    content = file.read(_LONGEST_CONFIG)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise UnsupportedAdapter(name, f"{CONFIG}: is no JSON", hint=_DAMAGED) from None
    if not isinstance(parsed, dict):
        raise UnsupportedAdapter(name, f"{CONFIG}: holds no object")
    return _Config(parsed, xxhash.xxh3_128_hexdigest(content))


def _read_header(name: str, file: IO[bytes], size: int) -> tuple[Mapping[str, Any], bytes]:
    """The header of a safetensors file, and all bytes before its payload."""
    if size > _LONGEST_WEIGHTS:
        raise UnsupportedAdapter(name, f"{WEIGHTS}: has {size} bytes, at most 8 GiB are read")
    prefix = file.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or not 0 < length <= _LONGEST_HEADER:
        raise UnsupportedAdapter(name, f"{WEIGHTS}: is no safetensors file", hint=_DAMAGED)
    head = file.read(length)
    try:
        header = json.loads(head)
    except (ValueError, RecursionError):
        header = None
    if len(head) < length or not isinstance(header, dict):
        raise UnsupportedAdapter(name, f"{WEIGHTS}: is no safetensors file", hint=_DAMAGED)
    return header, prefix + head


def _digest_of(*parts: bytes | memoryview) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def _remembered_digest(
    path: Path, file: IO[bytes], facts: os.stat_result, remembered: Remembered
) -> str:
    match remembered.get(key := str(path.resolve())):
        case [facts.st_size, facts.st_mtime_ns, str(known)]:
            return known
    read = _digest_of_file(file)
    remembered[key] = [facts.st_size, facts.st_mtime_ns, read]
    return read


def _digest_of_file(file: IO[bytes]) -> str:
    state = xxhash.xxh3_128()
    file.seek(0)
    while block := file.read(_READ_BYTES):
        state.update(block)
    return state.hexdigest()


# -- what they say ---------------------------------------------------------------------


def _settings_of(name: str, config: Mapping[str, Any]) -> tuple[str, int, float]:
    """Kind, rank and scale."""
    if "peft_type" in config:
        raise UnsupportedAdapter(name, f"{CONFIG}: is in PEFT's format", hint=_FORMAT_HINT)
    kind = config.get("fine_tune_type", LORA)
    if kind not in (LORA, DORA):
        shown = kind if isinstance(kind, str) and len(kind) <= _MOST_SHOWN else "another"
        why = " changes all weights of a model: serve that as a model" if kind == "full" else ""
        raise UnsupportedAdapter(name, f"fine_tune_type: {shown}{why}", hint="lora or dora")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise UnsupportedAdapter(name, f"{CONFIG}: has no lora_parameters", hint=_FORMAT_HINT)
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if type(rank) is not int or rank < 1:
        raise UnsupportedAdapter(name, f"{CONFIG}: lora_parameters.rank is no rank")
    if type(scale) is not int and type(scale) is not float:
        scale = math.nan
    if not abs(scale) <= _LARGEST_SCALE:
        raise UnsupportedAdapter(name, f"{CONFIG}: lora_parameters.scale is no number")
    return kind, rank, float(scale)


def _tensors_of(name: str, header: Mapping[str, Any], size: int) -> dict[str, StoredTensor]:
    tensors = {
        key: _tensor_of(name, key, value) for key, value in header.items() if key != "__metadata__"
    }
    if not tensors:
        raise UnsupportedAdapter(name, f"{WEIGHTS}: has no tensors")
    # As safetensors wants it: one after the other, nothing between them, nothing behind.
    place = 0
    for key, tensor in sorted(tensors.items(), key=lambda each: each[1].begin):
        if tensor.begin != place:
            raise UnsupportedAdapter(name, f"{key}: its bytes are not where they belong")
        place = tensor.end
    if place != size:
        raise UnsupportedAdapter(
            name, f"{WEIGHTS}: has {size} bytes of tensors, and {place} belong to it", hint=_DAMAGED
        )
    return tensors


def _tensor_of(name: str, key: str, value: object) -> StoredTensor:
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise UnsupportedAdapter(name, f"{WEIGHTS}: is no safetensors file", hint=_DAMAGED)
    if dtype not in DTYPE_BYTES:
        raise UnsupportedAdapter(name, f"{key}: is not of float32, float16 or bfloat16")
    if not all(type(each) is int and each > 0 for each in shape):
        raise UnsupportedAdapter(name, f"{key}: has no shape")
    if begin < 0 or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise UnsupportedAdapter(name, f"{key}: its bytes are not those of its shape")
    return StoredTensor(dtype, tuple(shape), begin, end)
