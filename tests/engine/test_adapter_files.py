"""The files of an adapter: what is damaged, foreign or of another model is refused by name."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from adapter_shop import write_adapter
from engine_runs import GREEDY, run
from tenuto_engine import (
    AdapterFolder,
    Engine,
    GenerationOptions,
    InvalidOption,
    UnsupportedAdapter,
    _adapter_files,
    model_facts,
)
from tiny_models import Kind, build_tiny_model

IDS = [5, 6, 7, 8]
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(model_folders: dict[Kind, Path], tmp_path: Path) -> Path:
    """A folder with the adapter `poet` of the llama."""
    write_adapter(tmp_path / "adapters", "poet", model_folders["llama"])
    return tmp_path / "adapters"


@pytest.fixture
def lora(llama: Engine, folder: Path) -> Engine:
    return Engine(llama._loaded, slots=1, chunk_size=16, pipelined=False, adapters=folder)


@pytest.fixture
def looked(model_folders: dict[Kind, Path], folder: Path) -> AdapterFolder:
    return AdapterFolder(folder, model_folders["llama"])


def refusal(lora: Engine, looked: AdapterFolder, name: str = "poet") -> str:
    """Why an adapter is refused, by the engine and by who only looks; both say the same."""
    plain = run(lora, IDS, **GREEDY, max_tokens=3)
    with pytest.raises(UnsupportedAdapter) as caught:
        lora.add(IDS, GenerationOptions(adapter=name))
    assert caught.value.adapter == name
    assert caught.value.field == "adapter"
    assert looked.look()[name].problem == caught.value.reason
    assert not looked.look()[name].hash
    # The engine lives on.
    assert run(lora, IDS, **GREEDY, max_tokens=3) == plain
    return str(caught.value)


def tensors_of(own: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(own / "adapters.safetensors"))
    return dict(loaded)


def rewrite(own: Path, **changes: mx.array | None) -> None:
    """Change tensors of an adapter, or take them away; dots in names are written as __."""
    tensors: dict[str, Any] = tensors_of(own)
    mx.eval(tensors)
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    mx.save_safetensors(str(own / "adapters.safetensors"), kept)


def configure(own: Path, **changes: Any) -> None:
    path = own / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- another model, another form -------------------------------------------------------


TENSORS: Mapping[str, tuple[dict[str, mx.array | None], str]] = {
    "of another width": (
        {f"{Q0}.lora_a": mx.zeros((32, 4))},
        (
            f"adapter: poet: {Q0}.lora_a: has the shape (32, 4), and with this model and rank 4 it "
            "would be (64, 4) (was it trained on another model?)"
        ),
    ),
    "of another rank": (
        {f"{Q0}.lora_b": mx.zeros((8, 64))},
        (
            f"adapter: poet: {Q0}.lora_b: has the shape (8, 64), and with this model and rank 4 it "
            "would be (4, 64) (was it trained on another model?)"
        ),
    ),
    "of a layer that is not there": (
        {"model.layers.7.self_attn.q_proj.lora_a": mx.zeros((64, 4))},
        (
            "adapter: poet: model.layers.7.self_attn.q_proj.lora_a: the model has no layer there "
            "that can be changed"
        ),
    ),
    "of a norm": (
        {"model.norm.lora_a": mx.zeros((64, 4))},
        "adapter: poet: model.norm.lora_a: the model has no layer there that can be changed",
    ),
    "without its other half": (
        {f"{Q0}.lora_b": None},
        f"adapter: poet: {Q0}.lora_b: is missing (was it trained on another model?)",
    ),
    "without its first half": ({f"{Q0}.lora_a": None}, f"adapter: poet: {Q0}.lora_a: is missing"),
    "a magnitude without dora": (
        {f"{Q0}.m": mx.zeros((64,))},
        f"adapter: poet: {Q0}.m: is none of lora_a, lora_b",
    ),
    "a weight": (
        {f"{Q0}.weight": mx.zeros((64, 64))},
        f"adapter: poet: {Q0}.weight: is none of lora_a, lora_b",
    ),
    "of whole numbers": (
        {f"{Q0}.lora_a": mx.zeros((64, 4), mx.int32)},
        f"adapter: poet: {Q0}.lora_a: is not of float32, float16 or bfloat16",
    ),
    "flat": ({f"{Q0}.lora_a": mx.zeros((256,))}, "has the shape (256,), and with this model"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_has_no_place_in_the_model_is_refused_by_name_and_shape(
    lora: Engine, looked: AdapterFolder, folder: Path, case: str
) -> None:
    changes, says = TENSORS[case]
    rewrite(folder / "poet", **changes)
    assert says in refusal(lora, looked)


CONFIGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "full": ({"fine_tune_type": "full"}, "poet: fine_tune_type: full changes all weights"),
    "unknown": ({"fine_tune_type": "loha"}, "poet: fine_tune_type: loha (lora or dora)"),
    "no text": ({"fine_tune_type": [1]}, "poet: fine_tune_type: another (lora or dora)"),
    "dora without magnitudes": ({"fine_tune_type": "dora"}, ".m: is missing"),
    "peft": ({"peft_type": "LORA"}, "poet: adapter_config.json: is in PEFT's format"),
    "no parameters": ({"lora_parameters": None}, "adapter_config.json: has no lora_parameters"),
    "no rank": ({"lora_parameters": {"scale": 1.0}}, "lora_parameters.rank is no rank"),
    "rank of text": ({"lora_parameters": {"rank": "4", "scale": 1}}, "rank is no rank"),
    "rank true": ({"lora_parameters": {"rank": True, "scale": 1}}, "rank is no rank"),
    "no scale": ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is no number"),
    "no number": ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "scale is no number"),
    "infinite": ({"lora_parameters": {"rank": 4, "scale": 10**400}}, "scale is no number"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_no_lora_adapter_of_mlx_lm_is_refused_by_field(
    lora: Engine, looked: AdapterFolder, folder: Path, case: str
) -> None:
    changes, says = CONFIGS[case]
    configure(folder / "poet", **changes)
    assert says in refusal(lora, looked)


def test_dora_of_a_layer_that_cannot_have_it_is_refused(
    lora: Engine, looked: AdapterFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto_engine._adapter_layers import Site

    write_adapter(folder, "poet", lora._loaded.model, kind="dora")
    monkeypatch.setattr(Site, "takes", lambda site, kind: kind == "lora")
    assert "lora_a: there is no dora of a Linear" in refusal(lora, looked)


def test_the_adapter_of_a_model_of_another_shape_is_refused(
    lora: Engine,
    looked: AdapterFolder,
    folder: Path,
    model_folders: dict[Kind, Path],
    tmp_path: Path,
) -> None:
    # One of other layers, and one of more of them.
    others = {
        "lfm2": model_folders["lfm2"],
        "deeper": build_tiny_model(tmp_path / "deeper", "llama", layers=5),
    }
    for name, model in others.items():
        write_adapter(folder, name, model, suffixes=None)
        assert "was it trained on another model?" in refusal(lora, looked, name)


def test_a_folder_with_a_name_that_no_adapter_can_have_is_told(
    looked: AdapterFolder, folder: Path, model_folders: dict[Kind, Path]
) -> None:
    (folder / "poet").rename(folder / "the poet")
    (folder / ".hidden").mkdir()
    found = looked.look()
    assert "its name must be 1 to 64 letters" in found["the poet"].problem
    assert ".hidden" not in found


# -- damage ----------------------------------------------------------------------------


FILES: Mapping[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no config": ("adapter_config.json", lambda content: None, "has no adapter_config.json"),
    "no weights": ("adapters.safetensors", lambda content: None, "has no adapters.safetensors"),
    "half a config": (
        "adapter_config.json",
        lambda content: content[:9],
        "config.json: is no JSON",
    ),
    "a deep config": (
        "adapter_config.json",
        lambda content: b"[" * 9999,
        "config.json: is no JSON",
    ),
    "a list": ("adapter_config.json", lambda content: b"[]", "config.json: holds no object"),
    "a long config": (
        "adapter_config.json",
        lambda content: content + b" " * 2**20,
        "adapter_config.json: has",
    ),
    "empty weights": ("adapters.safetensors", lambda content: b"", "is no safetensors file"),
    "cut short": ("adapters.safetensors", lambda content: content[:-3], "belong to it"),
    "too long": ("adapters.safetensors", lambda content: content + b"\0", "belong to it"),
    "a long header": (
        "adapters.safetensors",
        lambda content: struct.pack("<Q", 2**62) + content[8:],
        "is no safetensors file",
    ),
    "no tensors": (
        "adapters.safetensors",
        lambda content: struct.pack("<Q", 2) + b"{}",
        "has no t",
    ),
    "a pickle": ("adapters.safetensors", lambda content: b"\x80\x04N." * 99, "is no safetensors"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused_by_name(
    lora: Engine, looked: AdapterFolder, folder: Path, case: str
) -> None:
    file, damage, says = FILES[case]
    path = folder / "poet" / file
    damaged = damage(path.read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    assert says in refusal(lora, looked)


SIZE = 1024
"""Bytes of the first tensor: of 64 numbers, at a rank of 4."""


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_offsets": [0, 10**12]}, "its bytes are not those of its shape"),
        ({"data_offsets": [-SIZE, 0]}, "its bytes are not those of its shape"),
        ({"data_offsets": [4, SIZE + 4]}, "its bytes are not where they belong"),
        ({"data_offsets": [0]}, "is no safetensors file"),
        ({"shape": [2**40, 2**40]}, "its bytes are not those of its shape"),
        ({"shape": [-64, -4]}, "has no shape"),
        ({"shape": "64"}, "is no safetensors file"),
        ({"dtype": "I64"}, "is not of float32"),
        ({"dtype": 4}, "is no safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(
    lora: Engine, looked: AdapterFolder, folder: Path, change: dict[str, Any], says: str
) -> None:
    path = folder / "poet" / "adapters.safetensors"
    header, payload = header_of(path)
    first = min(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"],
    )
    assert header[first]["data_offsets"] == [0, SIZE]
    header[first] |= change
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + payload)
    assert says in refusal(lora, looked)


def test_no_damage_of_any_byte_brings_the_engine_down(
    lora: Engine, folder: Path, model_folders: dict[Kind, Path]
) -> None:
    """A flipped bit of a weight cannot be told, but has another fingerprint."""
    path = folder / "poet" / "adapters.safetensors"
    whole = path.read_bytes()
    plain = lora.geometry_of("poet").fingerprint
    for place in [*range(0, len(whole) - len(header_of(path)[1]), 7), len(whole) - 1]:
        for damaged in (
            whole[:place],
            whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :],
        ):
            path.write_bytes(damaged)
            try:
                assert lora.geometry_of("poet").fingerprint != plain
            except UnsupportedAdapter:
                continue
    path.write_bytes(whole)
    assert lora.geometry_of("poet").fingerprint == plain


# -- names and places ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../adapters/poet", "poet/", "/etc", "p\0t", "a" * 65, "-x", "poèt"]
)
def test_what_is_no_name_reaches_no_file(lora: Engine, folder: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match=r"adapter: is no adapter's name \(there are: poet\)"):
        lora.add(IDS, GenerationOptions(adapter=name))


def test_an_unknown_name_is_told_the_known_ones(lora: Engine, folder: Path) -> None:
    (folder / ".hidden").mkdir()
    (folder / "a file").write_text("")
    with pytest.raises(
        InvalidOption, match=r"adapter: there is no adapter bard \(there are: poet\)"
    ):
        lora.add(IDS, GenerationOptions(adapter="bard"))


@pytest.mark.parametrize("link", ["folder", "file", "pipe", "loop", "socket folder"])
def test_nothing_outside_the_folder_is_read(
    lora: Engine, looked: AdapterFolder, folder: Path, tmp_path: Path, link: str
) -> None:
    outside = tmp_path / "outside"
    (folder / "poet").rename(outside)
    weights = folder / "poet" / "adapters.safetensors"
    if link == "folder":
        (folder / "poet").symlink_to(outside)
    else:
        (folder / "poet").mkdir()
        (folder / "poet" / "adapter_config.json").write_bytes(
            (outside / "adapter_config.json").read_bytes()
        )
    if link == "file":
        weights.symlink_to(outside / "adapters.safetensors")
    elif link == "pipe":
        os.mkfifo(weights)
    elif link == "loop":
        weights.symlink_to(weights)
    elif link == "socket folder":
        weights.mkdir()
    says = refusal(lora, looked)
    assert re.search("a link out of the folder|is no file|cannot be read|leads to itself", says)


def test_a_link_within_the_folder_is_followed(lora: Engine, folder: Path) -> None:
    (folder / "latest").symlink_to("poet")
    assert lora.geometry_of("latest") == lora.geometry_of("poet")


# -- looking without loading -----------------------------------------------------------


def test_a_look_tells_what_the_engine_has(
    lora: Engine, looked: AdapterFolder, folder: Path, model_folders: dict[Kind, Path]
) -> None:
    write_adapter(folder, "all", model_folders["llama"], suffixes=None, dtype="bfloat16")
    facts = model_facts(model_folders["llama"], chunk_size=16)
    found = looked.look()
    assert list(found) == ["all", "poet"]
    for name, each in found.items():
        loaded = lora.load_adapter(name)
        assert (each.hash, each.nbytes, each.problem) == (loaded.hash, loaded.nbytes, "")
        assert facts.geometry.with_adapter(each.hash) == lora.geometry_of(name)


def test_only_what_changed_is_looked_at_again_and_hashes_are_remembered(
    looked: AdapterFolder,
    folder: Path,
    model_folders: dict[Kind, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = AdapterFolder(folder, model_folders["llama"], hash_cache=tmp_path / "hashes.json")
    first = looked.look()
    (tmp_path / "no model").mkdir()
    monkeypatch.setattr(looked, "_model", tmp_path / "no model")
    assert looked.look() == first
    write_adapter(folder, "poet", model_folders["llama"], seed=4)
    assert looked.look()["poet"].problem.startswith("the model cannot be built")
    # The next process reads no weights again.
    whole = AdapterFolder(
        folder, model_folders["llama"], hash_cache=tmp_path / "hashes.json"
    ).look()
    monkeypatch.setattr(_adapter_files, "_digest_of_file", _never)
    again = AdapterFolder(folder, model_folders["llama"], hash_cache=tmp_path / "hashes.json")
    assert again.look() == whole
    (folder / "poet").rename(tmp_path / "gone")
    assert again.look() == {}


def _never(*args: object) -> str:
    raise AssertionError("weights were read")


def test_a_look_reads_no_weight_of_the_model(folder: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "large", "llama")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert not AdapterFolder(folder, model).look()["poet"].problem
    weights = (model / "model.safetensors").stat().st_size
    assert mx.get_peak_memory() - before < weights / 10
