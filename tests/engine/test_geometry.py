"""The geometry: one hash for all that decides a logit's bits, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tenuto_engine import _geometry
from tenuto_engine._errors import ModelLoadError
from tenuto_engine._geometry import Geometry, geometry_of, hash_model

SAMPLE = Geometry(
    model_hash="ab" * 16,
    adapter_hash="",
    mlx_version="0.32.4",
    mlx_lm_version="0.32.2",
    device_kind="cpu",
    device_name="a chip",
    environment={"MLX_ENABLE_TF32": "", "MLX_CUDA_USE_CUDNN_SDPA": "0", "MLX_SDPA_BLOCKS": ""},
    width=1,
    chunk_size=32,
    attention="mlx-sdpa/1",
    compiled=False,
    kv_scheme="none",
)
OTHER_VALUES = {
    "environment": {**SAMPLE.environment, "MLX_ENABLE_TF32": "0"},
    "width": 8,
    "chunk_size": 512,
    "compiled": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(5000))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("hello")
    return folder


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    assert SAMPLE.fingerprint == "d773676264759373b338f2ed2eb0cb29"


def test_the_fingerprint_does_not_depend_on_the_order_of_a_dict() -> None:
    backwards = dict(reversed(list(SAMPLE.environment.items())))
    values = dict(reversed(list(SAMPLE.to_dict().items())))
    assert replace(SAMPLE, environment=backwards).fingerprint == SAMPLE.fingerprint
    assert Geometry.from_dict(values).fingerprint == SAMPLE.fingerprint


@pytest.mark.parametrize("name", [each.name for each in fields(Geometry)])
def test_every_field_changes_the_fingerprint_and_is_named_as_a_difference(name: str) -> None:
    other = Geometry.from_dict({**SAMPLE.to_dict(), name: OTHER_VALUES.get(name, "other")})
    assert other.fingerprint != SAMPLE.fingerprint
    shown = "MLX_ENABLE_TF32" if name == "environment" else name
    [difference] = SAMPLE.differences(other)
    assert difference.startswith(f"{shown}: ")


def test_equal_geometries_have_no_differences() -> None:
    assert SAMPLE.differences(Geometry.from_dict(SAMPLE.to_dict())) == []


def test_a_difference_reads_as_here_and_there() -> None:
    other = replace(SAMPLE, chunk_size=512, adapter_hash="cd")
    assert SAMPLE.differences(other) == [
        "adapter_hash: unset here, cd there",
        "chunk_size: 32 here, 512 there",
    ]


def test_a_geometry_returns_from_json_as_it_was() -> None:
    assert Geometry.from_dict(json.loads(json.dumps(SAMPLE.to_dict()))) == SAMPLE


def test_kv_may_be_used_across_chunk_sizes_and_not_across_models_or_schemes() -> None:
    assert SAMPLE.compatible_kv(replace(SAMPLE, chunk_size=512, device_name="another"))
    for change in ({"model_hash": "x"}, {"adapter_hash": "x"}, {"kv_scheme": "q8"}):
        assert not SAMPLE.compatible_kv(Geometry.from_dict({**SAMPLE.to_dict(), **change}))


def test_the_geometry_of_a_loaded_model_names_this_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
    geometry = geometry_of(folder, width=1, chunk=32)
    assert geometry.environment["MLX_CUDA_USE_CUDNN_SDPA"] == "0"
    assert geometry.device_name
    assert (geometry.width, geometry.chunk_size) == (1, 32)
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "1")
    again = geometry_of(folder, width=1, chunk=32)
    assert again.differences(geometry) == ["MLX_CUDA_USE_CUDNN_SDPA: 1 here, 0 there"]


# -- the hash of a model's files -------------------------------------------------------


def test_the_hash_follows_names_and_bytes_and_not_the_readme_or_the_place(
    folder: Path, tmp_path: Path
) -> None:
    before = hash_model(folder)
    (folder / "README.md").write_text("changed")
    (folder / ".cache.json").write_text("changed")
    moved = folder.rename(tmp_path / "moved")
    assert hash_model(moved) == before
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        content = bytearray((moved / name).read_bytes())
        content[0] ^= 1
        (moved / name).write_bytes(content)
        assert hash_model(moved) != before
        content[0] ^= 1
        (moved / name).write_bytes(content)
    (moved / "config.json").rename(moved / "other.json")
    assert hash_model(moved) != before


def test_files_behind_links_are_read(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert hash_model(linked) == hash_model(folder)


def test_weights_are_read_once_and_again_after_a_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_file = tmp_path / "state" / "hashes.json"
    read: list[str] = []
    real = _geometry._digest

    def counting(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(_geometry, "_digest", counting)
    first = hash_model(folder, cache_file)
    assert len(read) == 3
    assert hash_model(folder, cache_file) == first
    assert len(read) == 3
    (folder / "model.safetensors").write_bytes(b"\1" * 5000)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert hash_model(folder, cache_file) != first
    assert read[3:] == ["model.safetensors"]
    assert [path.name for path in cache_file.parent.iterdir()] == ["hashes.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "null", '{"%s": [1]}', '{"%s": 5}', "\0"])
def test_a_damaged_hash_cache_only_costs_time(folder: Path, tmp_path: Path, content: str) -> None:
    cache_file = tmp_path / "hashes.json"
    path = str(folder / "config.json")
    cache_file.write_text(content % path if "%s" in content else content)
    assert hash_model(folder, cache_file) == hash_model(folder)


def test_a_hash_cache_that_cannot_be_written_only_costs_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert hash_model(folder, tmp_path / "file" / "hashes.json") == hash_model(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no model files"):
        hash_model(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        hash_model(tmp_path / "none")


def test_another_process_computes_the_same_hash(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tenuto_engine._geometry import hash_model; "
        "print(hash_model(Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    said = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert said.stdout.strip() == hash_model(folder)
