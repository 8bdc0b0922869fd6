"""``KVScheme``: how the KV of an engine is quantized; its text, and a model's ``kv_config.json``.

No MLX here, so that a scheme can be read and checked before a device is started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tenuto_engine._errors import InvalidOption, ModelLoadError

BITS: Final = (4, 8)
GROUP_SIZES: Final = (32, 64, 128)
DEFAULT_GROUP_SIZE: Final = 64
KV_CONFIG: Final = "kv_config.json"
PLAIN: Final = "none"
SCHEME_TEXT: Final = (
    "BITS[:GROUP_SIZE[:START]] such as 8:64:0, config[:START] for the model's kv_config.json, "
    "or none"
)

_FIELD: Final = "kv_scheme"
_MOST_POSITIONS: Final = 2**31 - 1
_MOST_LAYERS: Final = 2**12
_UNIFORM: Final = re.compile(r"(\d{1,10})(?::(\d{1,10})(?::(\d{1,10}))?)?", re.ASCII)
_CONFIG: Final = re.compile(r"config(?::(\d{1,10}))?", re.ASCII)
_LAYERS: Final = re.compile(r"([^@]+)@(\d{1,10})", re.ASCII)
_RUN: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?=(\d{1,10}):(\d{1,10})", re.ASCII)


class LayerQuantization(NamedTuple):
    """Of one layer.

    Attributes:
        bits: of a quantized number, 4 or 8.
        group_size: numbers along the head dimension that share a scale and a bias: 32, 64 or 128.
    """

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScheme:
    """How the KV of all rows of an engine is quantized: as mlx-lm does it.

    After each forward that leaves at least ``start`` positions in a row's caches, those that are
    not quantized yet are: all their positions at once. New positions are quantized as they come. So
    the first forward of a row attends in full precision, also where ``start`` is 0.

    ``str()`` is the canonical text, equal for equal schemes; ``parse`` reads it.

    Attributes:
        bits: of every layer, 4 or 8; None where ``layers`` says it.
        group_size: of every layer; 32, 64 or 128.
        start: how many positions a row holds before it is quantized.
        layers: index in the model's list of caches -> of that layer; one that is not named keeps
            its precision. Not together with ``bits``.

    Raises:
        InvalidOption: by the name ``kv_scheme``, what is wrong.
    """

    bits: int | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    start: int = 0
    layers: Mapping[int, LayerQuantization] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if (self.bits is None) != bool(self.layers):
            raise InvalidOption(_FIELD, "needs either bits, or bits of some layers")
        if self.layers and self.group_size != DEFAULT_GROUP_SIZE:
            raise InvalidOption(_FIELD, "the group size stands beside the bits of each layer")
        _require_integer("start", self.start, 0, _MOST_POSITIONS)
        if self.bits is not None:
            _check_quantization(LayerQuantization(self.bits, self.group_size))
        for layer, how in self.layers.items():
            _require_integer("layer", layer, 0, _MOST_LAYERS - 1)
            _check_quantization(how, f"layer {layer}: ")
        ordered = {layer: LayerQuantization(*self.layers[layer]) for layer in sorted(self.layers)}
        object.__setattr__(self, "layers", ordered)

    def of_layer(self, layer: int) -> LayerQuantization | None:
        """How the caches of the layer at that index are quantized; None: they are not."""
        if self.bits is not None:
            return LayerQuantization(self.bits, self.group_size)
        return self.layers.get(layer)

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits}:{self.group_size}:{self.start}"
        return f"{','.join(_runs_of(self.layers))}@{self.start}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """``BITS[:GROUP_SIZE[:START]]``, or per layer ``FIRST-LAST=BITS:GROUP_SIZE,...@START``.

        Raises:
            InvalidOption: it is neither, or a number is out of range.
        """
        if match := _UNIFORM.fullmatch(text):
            bits, group_size, start = match.groups()
            return cls(
                bits=int(bits),
                group_size=int(group_size or DEFAULT_GROUP_SIZE),
                start=int(start or 0),
            )
        if match := _LAYERS.fullmatch(text):
            runs, start = match.groups()
            return cls(layers=_layers_of(runs.split(",")), start=int(start))
        raise InvalidOption(_FIELD, f"{text!r} is not {SCHEME_TEXT}")

    @classmethod
    def canonical_text(cls, text: str) -> str:
        """Of what an operator gives: of a scheme, ``config:START``, or ``none``.

        Raises:
            InvalidOption: it is none of these.
        """
        if text == PLAIN:
            return PLAIN
        if match := _CONFIG.fullmatch(text):
            start = int(match[1] or 0)
            _require_integer("start", start, 0, _MOST_POSITIONS)
            return f"config:{start}"
        return str(cls.parse(text))

    @classmethod
    def of_config(cls, folder: Path, start: int = 0) -> Self:
        """What the ``kv_config.json`` of a model's folder says: a list of objects, one a layer,
        with ``layer_idx`` (index in the model's list of caches), ``bits``, and ``group_size``
        (64); further keys are ignored. A layer that is not there keeps its precision.

        Raises:
            ModelLoadError: there is none, or it says something else.
            InvalidOption: ``start`` is out of range.
        """
        path = folder / KV_CONFIG
        _require_integer("start", start, 0, _MOST_POSITIONS)
        layers = _read_config(path)
        try:
            return cls(layers=layers, start=start)
        except InvalidOption as error:
            raise ModelLoadError(f"{path}: {error.problem}") from error


def scheme_of(given: KVScheme | str | None, folder: Path) -> KVScheme | None:
    """The scheme that is meant for the model in ``folder``; None is full precision.

    Raises:
        InvalidOption: the text is none.
        ModelLoadError: the folder's ``kv_config.json`` is asked for and cannot be used.
    """
    if given is None or isinstance(given, KVScheme):
        return given
    text = KVScheme.canonical_text(given)
    if text == PLAIN:
        return None
    if match := _CONFIG.fullmatch(text):
        return KVScheme.of_config(folder, int(match[1]))
    return KVScheme.parse(text)


def text_of(scheme: KVScheme | None) -> str:
    """As it stands in a geometry."""
    return PLAIN if scheme is None else str(scheme)


def check_width(scheme: KVScheme | None, width: int) -> None:
    """Rows that decode together may not change the class of their caches one by one.

    Raises:
        InvalidOption: the scheme has a start, and the decode width is above 1.
    """
    if scheme is not None and scheme.start > 0 and width > 1:
        raise InvalidOption(
            _FIELD,
            f"a start position of {scheme.start} needs a decode width of 1, and it is {width}",
            hint="give start 0",
        )


def _check_quantization(how: LayerQuantization, where: str = "") -> None:
    for name, value, known in (("bits", how[0], BITS), ("group_size", how[1], GROUP_SIZES)):
        if type(value) is not int or value not in known:
            known_text = " or ".join(map(str, known))
            raise InvalidOption(_FIELD, f"{where}{name} must be {known_text}, is {value!r}")


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidOption(_FIELD, f"{name} must be from {low} to {high}, is {value!r}")


def _runs_of(layers: Mapping[int, LayerQuantization]) -> list[str]:
    """Equal neighbours as one: ``0-3=4:64``."""
    runs = []
    # Layers of a run have a constant distance to their place in the order.
    placed = [(layer - place, how, layer) for place, (layer, how) in enumerate(layers.items())]
    for (_, how), members in groupby(placed, key=lambda each: each[:2]):
        numbers = [layer for *_, layer in members]
        first, last = numbers[0], numbers[-1]
        named = str(first) if first == last else f"{first}-{last}"
        runs.append(f"{named}={how.bits}:{how.group_size}")
    return runs


def _layers_of(runs: Sequence[str]) -> dict[int, LayerQuantization]:
    layers: dict[int, LayerQuantization] = {}
    for run in runs:
        match = _RUN.fullmatch(run)
        if match is None:
            raise InvalidOption(_FIELD, f"{run!r} is not FIRST-LAST=BITS:GROUP_SIZE")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise InvalidOption(_FIELD, f"{run!r} ends before it begins")
        for layer in range(first, last + 1):
            if layer in layers:
                raise InvalidOption(_FIELD, f"layer {layer} is named twice")
            layers[layer] = LayerQuantization(int(match[3]), int(match[4]))
    return layers


def _read_config(path: Path) -> dict[int, LayerQuantization]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path}: no such file, and the KV scheme is to be read from it",
            hint='it is a list of {"layer_idx": 0, "bits": 4, "group_size": 64}',
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is no JSON: {error}") from error
    if not isinstance(content, list) or not content:
        raise ModelLoadError(f"{path}: holds no list of layers")
    layers: dict[int, LayerQuantization] = {}
    for place, each in enumerate(content):
        layer, how = _read_layer(f"{path}: entry {place}", each)
        if layer in layers:
            raise ModelLoadError(f"{path}: layer_idx {layer} is there twice")
        layers[layer] = how
    return layers


def _read_layer(where: str, entry: Any) -> tuple[int, LayerQuantization]:
    if not isinstance(entry, dict):
        raise ModelLoadError(f"{where} is no object")
    values = {"group_size": DEFAULT_GROUP_SIZE} | entry
    for name in ("layer_idx", "bits", "group_size"):
        if type(values.get(name)) is not int:
            raise ModelLoadError(f"{where}: {name} is no whole number")
    return values["layer_idx"], LayerQuantization(values["bits"], values["group_size"])
