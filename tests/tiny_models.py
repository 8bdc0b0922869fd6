"""Tiny random models, written as the folders that mlx-lm loads.

Weights are random but scaled so that greedy output wanders and sampled output varies. The
tokenizer is a byte-level BPE whose vocabulary holds every byte, two-byte halves of characters and
a few syllables, so generated text has whole words, split characters and invalid UTF-8 in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

Kind = Literal["llama", "gemma3_text", "lfm2"]
KINDS: tuple[Kind, ...] = get_args(Kind)

EOS = "<|end|>"
START = "<|start|>"
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SLIDING_WINDOW = 24
"""Window of the gemma3_text ring caches: small, so that a short test wraps them."""

# lfm2 has no head dimension of its own.
_WIDE: dict[Kind, dict[str, int]] = {
    "llama": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
}

_CONSONANTS = "bcdfghklmnprst"
_VOWELS = "aeiou"
_SPLIT_CHARACTERS = "éßжλ中文日本語한글€√🌊🎵"


def build_tiny_model(
    folder: Path | str,
    kind: Kind = "llama",
    *,
    seed: int = 0,
    context_length: int = 4096,
    vocab_size: int | None = None,
    dtype: str = "float32",
    wide: bool = False,
    layers: int | None = None,
) -> Path:
    """Write a random model with its tokenizer into `folder` (created) and return the folder.

    `vocab_size` is the number of rows of the embedding; by default, and at least, the size of the
    tokenizer's vocabulary (`len(tiny_vocabulary())`). The same arguments give the same bytes.
    Heads are 16 wide, or if `wide` 32, which is the least that can be quantized. `layers` is None
    for the few that the kind needs to have all its caches.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tiny_vocabulary()
    rows = vocab_size or len(vocabulary)
    if rows < len(vocabulary):
        raise ValueError(f"vocab_size={rows} is below the tokenizer's {len(vocabulary)}")
    config = tiny_config(kind, rows, context_length, vocabulary[EOS])
    if wide:
        config |= _WIDE[kind]
    if layers is not None:
        config |= {"num_hidden_layers": layers}
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, vocabulary, context_length)
    _write_weights(folder / "model.safetensors", config, seed, dtype)
    return folder


def tiny_config(kind: Kind, vocab_size: int, context_length: int, eos: int) -> dict[str, Any]:
    """The `config.json` of a tiny model."""
    shared = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "eos_token_id": eos,
        "rope_theta": 10000.0,
    }
    if kind == "llama":
        return shared | {
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    if kind == "gemma3_text":
        return shared | {
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 16,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
        }
    return shared | {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }


def tiny_vocabulary() -> dict[str, int]:
    """Token string -> id: 256 bytes, syllables, halves of characters, three special tokens."""
    alphabet = sorted(_byte_to_symbol().values())
    pieces = [*alphabet, *(left + right for left, right in _merges())]
    pieces += [PAD, START, EOS]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def _merges() -> list[tuple[str, str]]:
    symbols = _byte_to_symbol()
    space = symbols[ord(" ")]
    syllables = [(c, v) for c in _CONSONANTS for v in _VOWELS]
    words = [(space, c + v) for c, v in syllables]
    halves = []
    for character in _SPLIT_CHARACTERS:
        first, second = (symbols[byte] for byte in character.encode()[:2])
        halves.append((first, second))
    return [*syllables, *words, *dict.fromkeys(halves)]


def _byte_to_symbol() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(hidden)
    }


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], context_length: int) -> None:
    special = [
        {
            "id": vocabulary[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in (PAD, START, EOS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level | {"use_regex": True},
            "post_processor": None,
            "decoder": byte_level | {"use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocabulary,
                "merges": [list(pair) for pair in _merges()],
            },
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_weights(path: Path, config: dict[str, Any], seed: int, dtype: str) -> None:
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    key = mx.random.key(seed)

    def fill(name: str, old: mx.array) -> mx.array:
        nonlocal key
        key, drawn = mx.random.split(key)
        value = mx.random.normal(old.shape, key=drawn) * _scale(config["model_type"], name, old)
        if old.ndim == 1:
            value = value + 1.0
        return value.astype(getattr(mx, dtype))

    weights = dict(tree_flatten(tree_map_with_path(fill, model.parameters())))
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _scale(kind: Kind, name: str, old: mx.array) -> float:
    if old.ndim == 1:
        return 0.1
    if "embed" in name or "lm_head" in name:
        # gemma multiplies embeddings by sqrt(hidden) and norms by 1 + weight: more would repeat.
        return 0.1 if kind == "gemma3_text" else 0.25
    return 1.5 / float(old.shape[-1] ** 0.5)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
