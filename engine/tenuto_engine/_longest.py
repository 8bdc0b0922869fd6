"""``longest_token``: how much text one token can stand for, which tells the fewest that a text has.

Only what is proved counts. Each step of a tokenizer is looked at: one that may drop text, or put
any amount of it into one token, or is not known here, makes that the answer: None.

What is proved: every character that counts goes into some token, and no token has more than so
many. Characters are counted by their first bytes, so that a token of half a character is no whole
one. Not counted are control characters but tab and line ends, and all above U+3FFFF: some
byte-level vocabularies lack their first bytes, and drop them (SmolLM2's does). Who counts a text
must leave them out, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from tenuto_engine._errors import ModelLoadError
from tenuto_engine._model import load_tokenizer
from tenuto_engine._remembered import read_remembered, write_remembered
from tenuto_engine._template import keeps_text

# One more whenever something else is proved.
_KEY: Final = "longest 1 "

# A character composed by NFC stands for at most four (U+1F82), and none is dropped by it.
_NFC: Final = 4
# A tokenizer with a way of its own in one of these may do anything.
_METHODS: Final = ("encode", "__call__", "_encode_plus", "apply_chat_template")
_KEEPING: Final = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_BYTES: Final = 256
_ABOVE: Final = 0x40000
_COUNTED: Final = (0x09, 0x0A, 0x0D, *range(0x20, 0x7F), *range(0xC2, 0xF1))
"""First bytes of the characters that count."""

_State = Mapping[str, Any]


def longest_of(
    folder: Path, config: Mapping[str, Any], fingerprint: str, cache_file: Path | None
) -> int | None:
    """As ``longest_token``, of the tokenizer of a model folder; None also where its chat template
    may leave text out.

    Args:
        fingerprint: of its geometry, under which ``cache_file`` remembers it.
    """
    packages = (f"{name}={version(name)}" for name in ("transformers", "tokenizers"))
    key = " ".join([_KEY + fingerprint, *packages])
    match read_remembered(cache_file).get(key):
        case [int(known)]:
            return known
        case [None]:
            return None
    try:
        wrapper = load_tokenizer(folder, config)
    except ModelLoadError:
        # A load tells.
        return None
    longest = longest_token(wrapper) if keeps_text(wrapper) else None
    if cache_file is not None:
        write_remembered(cache_file, read_remembered(cache_file) | {key: [longest]})
    return longest


def longest_token(wrapper: Any) -> int | None:
    """The most characters that count of which one token can be made by the tokenizer in mlx-lm's
    wrapper; None where that cannot be proved."""
    tokenizer = wrapper._tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
        for name in _METHODS
    ):
        return None
    backend = tokenizer.backend_tokenizer
    shrinks = _shrinks(_state(backend.normalizer))
    splits = _flat(_state(backend.pre_tokenizer), "pretokenizers")
    ends = _flat(_state(backend.post_processor), "processors")
    if shrinks is None or not all(map(_splits_all, splits)) or not all(map(_adds_only, ends)):
        return None
    is_byte_level = any(each["type"] == "ByteLevel" for each in splits)
    longest = _longest_piece(backend, is_byte_level=is_byte_level)
    added = [_added(backend, each) for each in backend.get_added_tokens_decoder().values()]
    if longest is None or None in added:
        return None
    return shrinks * max(1, longest, *(each for each in added if each is not None))


def _state(part: Any) -> _State | None:
    return None if part is None else json.loads(part.__getstate__())


def _flat(state: _State | None, parts: str) -> list[_State]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [each for part in state[parts] for each in _flat(part, parts)]


def _shrinks(normalizer: _State | None) -> int | None:
    """How many characters at most become one; None if some may be dropped."""
    factor = 1
    for each in _flat(normalizer, "normalizers"):
        kind = each["type"]
        if kind == "Replace":
            old, new = each["pattern"].get("String"), each["content"]
            counts = new.isprintable() and all(ord(character) < _ABOVE for character in new)
            if not old or not counts or len(new) < len(old):
                return None
        elif kind == "NFC":
            factor *= _NFC
        elif kind not in ("NFD", "Prepend"):
            return None
    return factor


def _splits_all(state: _State) -> bool:
    """Whether a step that splits text keeps all of it. What it adds makes no fewer tokens."""
    if state["type"] == "Split":
        return str(state["behavior"]) in _KEEPING
    return str(state["type"]) in ("ByteLevel", "Digits", "Metaspace")


def _adds_only(state: _State) -> bool:
    if state["type"] == "TemplateProcessing":
        return any("Sequence" in piece for piece in state["single"])
    return str(state["type"]) == "ByteLevel"


def _longest_piece(backend: Any, *, is_byte_level: bool) -> int | None:
    """Of the vocabulary of a BPE model with a token for each byte that counts: what is not in the
    vocabulary is dropped, or any amount of it is one token."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    symbols = _byte_symbols()
    if not is_byte_level:
        has_all = model.byte_fallback and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTES)
        )
        return max(map(len, vocabulary)) if has_all else None
    if not all(symbols[byte] in vocabulary for byte in _COUNTED):
        return None
    later = {symbol for byte, symbol in enumerate(symbols) if 0x80 <= byte < 0xC0}
    return max(sum(symbol not in later for symbol in piece) for piece in vocabulary)


def _byte_symbols() -> list[str]:
    """What stands for each byte in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(_BYTES)]


def _added(backend: Any, token: Any) -> int | None:
    """Of a token that is found in the text before all others; None if it takes in spaces beside
    it, which may be any number."""
    if token.lstrip or token.rstrip:
        return None
    as_found = token.content
    if token.normalized and backend.normalizer is not None:
        as_found = backend.normalizer.normalize_str(as_found)
    return max(len(token.content), len(as_found))
