"""Text: whole characters only, nothing of a stop string, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine_runs import PROMPT, run
from tenuto_engine import Engine
from tenuto_engine._text import Detokenizer, StopMatcher, TextStream
from tiny_models import tiny_vocabulary

Decode = Callable[[list[int]], str]

SENTENCE = "sol 中文 and 日本語, 한글 🌊🎵 é ß жλ √ €; "


@pytest.fixture(scope="module")
def tokenizer(model_folders: dict[str, Path]) -> Any:
    return cast(Any, AutoTokenizer).from_pretrained(model_folders["llama"])


def pieces(decode: Decode, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_a_character_comes_out_whole_with_its_last_byte(tokenizer: Any) -> None:
    ids = tokenizer.encode("a中b")
    assert len(ids) == 4
    assert pieces(tokenizer.decode, ids) == ["a", "", "中", "b", ""]


def test_valid_text_never_shows_a_replacement_and_is_whole(tokenizer: Any) -> None:
    ids = tokenizer.encode(SENTENCE * 20)
    made = pieces(tokenizer.decode, ids)
    assert not any("\ufffd" in piece for piece in made)
    assert "".join(made) == SENTENCE * 20
    assert made[-1] == ""


def test_any_tokens_give_the_text_of_all_of_them_decoded_together(tokenizer: Any) -> None:
    draw = random.Random(7)
    for _ in range(60):
        ids = draw.choices(range(len(tiny_vocabulary())), k=draw.randrange(1, 150))
        assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)


def test_invalid_utf8_is_held_for_three_characters_at_most(tokenizer: Any) -> None:
    # 0x80 alone is never the start of a character.
    lone = tokenizer.convert_tokens_to_ids("Ģ")
    assert tokenizer.decode([lone]) == "\ufffd"
    detokenizer = Detokenizer(tokenizer.decode)
    out = ""
    for count in range(1, 200):
        out += detokenizer.push(lone)
        assert count - len(out) <= 3
    assert out + detokenizer.flush() == "\ufffd" * 199


def test_the_window_stays_short_however_long_the_text(tokenizer: Any) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return cast(str, tokenizer.decode(ids))

    ids = tokenizer.encode(SENTENCE * 100)
    assert "".join(pieces(decode, ids)) == SENTENCE * 100
    assert longest < 40


def test_a_decoder_that_drops_the_first_space_keeps_all_others() -> None:
    words = ["▁la", "▁sol", "▁mi", "▁re", "!"]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    ids = [0, 1, 2, 4, 3] * 30
    assert "".join(pieces(decode, ids)) == decode(ids)


def test_a_decoder_that_judges_bytes_by_their_neighbours_loses_no_place() -> None:
    def decode(ids: list[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    ids = [0xFF] * 4 + list("🌊".encode() * 20)
    assert "".join(pieces(decode, ids)) == decode(ids)


def feed(stops: list[str], text: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in text:
        found = matcher.push(piece)
        out += found.text
        if found.stopped:
            return out, True
    return out + matcher.flush(), False


@settings(deadline=None, max_examples=300)
@given(
    text=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_before_a_stop_string_wherever_it_was_split(
    text: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    out, seen = "", ""
    for piece in text:
        seen += piece
        found = matcher.push(piece)
        out += found.text
        places = [seen.find(stop) for stop in stops if stop in seen]
        assert found.stopped == bool(places)
        if found.stopped:
            assert out == seen[: min(places)]
            return
        assert seen.startswith(out)
        # Nothing is held that cannot be the start of a stop string.
        held = seen[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert out + matcher.flush() == seen


def test_a_stop_string_over_three_pieces_is_found_and_nothing_of_it_shows() -> None:
    assert feed(["STOP"], ["go S", "TO", "P on"]) == ("go ", True)
    assert feed(["STOP"], ["go S", "TO", "L on"]) == ("go STOL on", False)
    assert feed(["STOP", "TO"], ["go S", "TO"]) == ("go S", True)


def test_a_flush_gives_what_was_held(tokenizer: Any) -> None:
    stream = TextStream(tokenizer.decode, ["END"])
    ids = tokenizer.encode("the EN中")[:-1]
    shown = "".join(stream.push(token).text for token in ids)
    assert shown == "the "
    assert stream.flush() == ("EN\ufffd", False)


@settings(deadline=None, max_examples=300)
@given(
    text=st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_only_where_it_is_complete_with_a_piece_that_may_stop(
    text: list[tuple[str, bool]], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    out, seen = "", ""
    for piece, may_stop in text:
        before, seen = len(seen), seen + piece
        found = matcher.push(piece, may_stop=may_stop)
        out += found.text
        ends = [
            (at, at + len(s)) for s in stops for at in range(len(seen)) if seen[at:].startswith(s)
        ]
        places = [at for at, end in ends if end > before]
        assert found.stopped == (may_stop and bool(places))
        if found.stopped:
            assert out == seen[: min(places)]
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert out + matcher.flush() == seen


def test_a_stop_string_that_half_a_character_completes_at_the_limit_is_a_stop(
    llama: Engine, tokenizer: Any
) -> None:
    half = tokenizer.encode("中")[0]
    asked: dict[str, Any] = {"logit_bias": {half: 1000.0}, "max_tokens": 1}
    made = run(llama, encode(llama), stop=("\ufffd",), **asked)
    assert (made.ids, made.text, made.finish_reason) == ([half], "", "stop")
    held = run(llama, encode(llama), stop=("\ufffd",), min_tokens=1, **asked)
    assert (held.ids, held.text, held.finish_reason) == ([half], "\ufffd", "length")


def encode(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)


def test_text_and_end_text_are_all_tokens_decoded(llama: Engine) -> None:
    for seed in range(6):
        made = run(llama, encode(llama), max_tokens=60, ignore_eos=True, temperature=1.5, seed=seed)
        assert made.text == llama.tokenizer.decode(made.ids)


def test_no_token_of_a_stop_string_has_text(llama: Engine) -> None:
    plain = run(llama, encode(llama), max_tokens=60, ignore_eos=True)
    for start in range(5, 40, 5):
        stop = plain.text[start : start + 6]
        made = run(llama, encode(llama), max_tokens=60, ignore_eos=True, stop=("nowhere", stop))
        assert made.finish_reason == "stop"
        assert made.text == plain.text[: plain.text.index(stop)]
        assert made.end_text == ""
        assert made.ids == plain.ids[: len(made.ids)]


def test_a_stop_at_the_very_limit_is_a_stop(llama: Engine) -> None:
    plain = run(llama, encode(llama), max_tokens=60, ignore_eos=True)
    stop = plain.text[20:26]
    length = len(run(llama, encode(llama), max_tokens=60, ignore_eos=True, stop=(stop,)).tokens)
    made = run(llama, encode(llama), max_tokens=length, ignore_eos=True, stop=(stop,))
    assert (len(made.tokens), made.finish_reason) == (length, "stop")
    shorter = run(llama, encode(llama), max_tokens=length - 1, ignore_eos=True, stop=(stop,))
    assert shorter.finish_reason == "length"
    assert shorter.text == llama.tokenizer.decode(shorter.ids)


@pytest.mark.parametrize("limit", [60, 8])
def test_an_end_token_is_counted_has_no_text_and_flushes(llama: Engine, limit: int) -> None:
    plain = run(llama, encode(llama), max_tokens=60, ignore_eos=True)
    end = plain.ids[7]
    assert end not in plain.ids[:7]
    made = run(
        llama, encode(llama), max_tokens=limit, ignore_eos=True, stop_token_ids=(end,), stop=("Ω",)
    )
    assert made.ids == plain.ids[:8]
    assert made.tokens[-1].text == ""
    assert made.finish_reason == "stop"
    assert made.text == llama.tokenizer.decode(made.ids[:-1])


def test_the_models_own_end_token_ends_unless_ignored(llama: Engine) -> None:
    end = next(iter(llama.eos_token_ids))
    asked: dict[str, Any] = {"max_tokens": 5, "logit_bias": {end: 100.0}}
    assert run(llama, encode(llama), **asked).ids == [end]
    made = run(llama, encode(llama), ignore_eos=True, **asked)
    assert made.ids == [end] * 5
    assert made.finish_reason == "length"
