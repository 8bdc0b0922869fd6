"""What a submit may ask for: every bad value is refused by the name of its field."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import msgpack
import pytest

from tenuto_client import InvalidRequest, JobSpec, ProtocolError, pack_spec, unpack_spec
from tenuto_client._spec import make_request

NAN = float("nan")
BAD: list[tuple[str, Any]] = [
    ("raw", 1),
    ("max_tokens", 0),
    ("max_tokens", 1_000_001),
    ("max_tokens", True),
    ("max_tokens", 1.0),
    ("max_tokens", "12"),
    ("max_tokens", 10**400),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", float("inf")),
    ("temperature", True),
    ("temperature", "hot"),
    ("temperature", 99),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("top_k", -1),
    ("top_k", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 1.0),
    ("min_tokens", 513),
    ("min_tokens", 1_000_001),
    ("xtc_probability", -0.1),
    ("xtc_probability", 1.1),
    ("xtc_probability", NAN),
    ("xtc_probability", True),
    ("xtc_threshold", -0.1),
    ("xtc_threshold", 0.51),
    ("xtc_threshold", "much"),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", True),
    ("seed", 1.0),
    ("stop", ""),
    ("stop", 7),
    ("stop", b"x"),
    ("stop", "\ud800"),
    ("stop", ["x"] * 17),
    ("ignore_eos", "yes"),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("top_logprobs", 21),
    ("logit_bias", [1]),
    ("repetition_penalty", 0),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", NAN),
    ("repetition_context_size", 0),
    ("presence_penalty", NAN),
    ("presence_context_size", 0),
    ("frequency_penalty", "much"),
    ("frequency_context_size", 0),
    ("priority", 101),
    ("priority", -101),
    ("priority", 0.5),
    ("deadline", 1),
    ("deadline", NAN),
    ("deadline", timedelta(0)),
    ("deadline", timedelta(seconds=-1)),
    ("deadline", "tomorrow"),
    ("tenant", ""),
    ("tenant", "a:b"),
    ("tenant", "x" * 65),
    ("tenant", 3),
    ("idempotency_key", ""),
    ("idempotency_key", "x" * 256),
    ("idempotency_key", 5),
    ("metadata", []),
    ("metadata", {1: "x"}),
    ("metadata", {"x": NAN}),
    ("metadata", {"x": object()}),
    ("metadata", {"x": "y" * 20_000}),
    ("retention", 0),
    ("retention", -1),
    ("retention", NAN),
    ("retention", "a while"),
    ("retention", True),
    ("recovery", "quick"),
    ("recovery", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda each: repr(each)[:20])
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_request("m", "hi", {field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias key[0]"),
        ({"logit_bias": {5: NAN}}, "logit_bias[5]"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]"),
    ],
)
def test_a_bad_entry_is_refused_by_its_place(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_request("m", "hi", options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ((), "prompt"),
        (None, "prompt"),
        (b"bytes", "prompt"),
        (5, "prompt"),
        ({"role": "user", "content": "x"}, "prompt"),
        ("\ud800", "prompt"),
        ("x" * (16 * 1024 * 1024 + 1), "prompt"),
        ([1, 2.0], "prompt[1]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        (["text"], "prompt[0]"),
        ([1, {"role": "user", "content": "x"}], "prompt[1]"),
        ([{"role": "user", "content": "x"}, 1], "prompt[1]"),
        ([{"role": "user"}], "prompt[0]"),
        ([{"role": "robot", "content": "x"}], "prompt[0].role"),
        ([{"role": ["user"], "content": "x"}], "prompt[0].role"),
        ([{"role": "user", "content": 5}], "prompt[0].content"),
        ([{"role": "user", "content": None}], "prompt[0].content"),
        ([{"role": "user", "content": "x", "name": "y"}], "prompt[0].name"),
        ([{"role": "user", "content": ""}], "prompt"),
    ],
    ids=lambda each: repr(each)[:40],
)
def test_a_bad_prompt_is_refused_by_the_place_in_it(prompt: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_request("m", prompt, {})
    assert caught.value.field == field


@pytest.mark.parametrize("model", ["", " m", "-m", "m m", "m:x", "x" * 129, 5, None, "ü"])
def test_a_bad_model_name_is_refused(model: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_request(model, "hi", {})
    assert caught.value.field == "model"


@pytest.mark.parametrize("model", ["m", "org/model-1.5_b", "x" * 128])
def test_a_model_name_may_have_letters_digits_and_some_marks(model: str) -> None:
    assert make_request(model, "hi", {}).spec.model == model


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("Temperature", "temperature"),
        ("stop_sequences", "stop"),
    ],
)
def test_an_unknown_parameter_is_refused_with_a_guess(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {hint}") as caught:
        make_request("m", "hi", {name: 1})
    assert caught.value.field == name


def test_raw_with_chat_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="raw"):
        make_request("m", [{"role": "user", "content": "x"}], {"raw": True})


def test_top_logprobs_is_another_name_for_logprobs() -> None:
    assert make_request("m", "hi", {"top_logprobs": 3}).spec.logprobs == 3
    assert make_request("m", "hi", {"top_logprobs": 3, "logprobs": 3}).spec.logprobs == 3
    with pytest.raises(InvalidRequest, match="mean the same"):
        make_request("m", "hi", {"top_logprobs": 3, "logprobs": 2})


def test_none_is_the_same_as_not_given() -> None:
    given = make_request("m", "hi", {"seed": None, "stop": None, "deadline": None})
    assert given == make_request("m", "hi", {})


def test_a_timedelta_deadline_counts_from_now() -> None:
    deadline = make_request("m", "hi", {"deadline": timedelta(hours=1)}).spec.deadline
    assert deadline is not None
    assert 3590 < deadline - time.time() <= 3600


def test_retention_takes_seconds_a_timedelta_or_forever() -> None:
    def retention(value: object) -> object:
        return make_request("m", "hi", {"retention": value}).spec.retention

    assert retention(60) == 60
    assert retention(timedelta(minutes=2)) == 120
    assert retention("forever") == "forever"
    assert make_request("m", "hi", {}).spec.retention == 24 * 3600


def test_the_body_hash_tells_bodies_apart_but_not_keys_or_drawn_seeds() -> None:
    def digest(**options: Any) -> str:
        return make_request("m", "hi", options).body_hash

    assert digest() == digest(idempotency_key="k") == digest(temperature=0)
    assert digest(deadline=timedelta(hours=1)) == digest(deadline=timedelta(hours=1))
    assert digest() != digest(seed=1)
    assert digest() != digest(metadata={"a": 1})
    assert digest(deadline=timedelta(hours=1)) != digest(deadline=timedelta(hours=2))
    assert digest() != make_request("m", "ho", {}).body_hash


PROMPTS: list[Any] = ["text ü 🎻", [{"role": "user", "content": "x"}], [1, 2, 3], (2**31 - 1,)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_a_spec_comes_back_from_its_packed_form(prompt: Any) -> None:
    options = {
        "raw": not isinstance(prompt, list),
        "stop": ["a", "ü"],
        "stop_token_ids": [5],
        "logit_bias": {"7": -1.5, 3: 2},
        "metadata": {"n": 2**70, "list": [1, {"x": None}]},
        "retention": "forever",
        "deadline": timedelta(hours=1),
        "idempotency_key": "k",
        "min_tokens": 12,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
    spec = make_request("m", prompt, options).spec.with_seed()
    assert unpack_spec(pack_spec(spec)) == spec
    assert spec.seed is not None
    assert 0 <= spec.seed < 2**63


def test_fields_that_came_later_are_packed_only_where_they_say_something() -> None:
    later = {"min_tokens", "xtc_probability", "xtc_threshold"}
    plain = make_request(
        "m", "hi", dict.fromkeys(later, 0) | {"xtc_threshold": 0.1, "jump_forward": False}
    )
    assert "jump_forward" not in msgpack.unpackb(pack_spec(plain.spec))
    assert not later & msgpack.unpackb(pack_spec(plain.spec)).keys()
    assert plain.body_hash == make_request("m", "hi", {}).body_hash
    for name in later:
        asked = make_request("m", "hi", {name: 0.5 if "xtc" in name else 5})
        assert later & msgpack.unpackb(pack_spec(asked.spec)).keys() == {name}
        assert asked.body_hash != plain.body_hash


def test_min_tokens_and_max_tokens_may_be_the_same_and_not_the_other_way_round() -> None:
    assert make_request("m", "hi", {"min_tokens": 9, "max_tokens": 9}).spec.min_tokens == 9
    with pytest.raises(InvalidRequest, match="min_tokens: is 10, max_tokens is 9"):
        make_request("m", "hi", {"min_tokens": 10, "max_tokens": 9})


def test_a_seed_that_was_given_is_kept() -> None:
    assert make_request("m", "hi", {"seed": 0}).spec.with_seed().seed == 0


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (b"\xc1", "msgpack"),
        (b"\x81\xa1v\x02", "version 2"),
        (b"\x93\x01\x02\x03", "version None"),
        (pack_spec(JobSpec("m", "hi")).replace(b"min_p", b"min_q"), "min_q"),
    ],
)
def test_a_spec_of_another_version_is_a_protocol_error(packed: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpack_spec(packed)


def test_damaged_bytes_of_a_spec_are_a_protocol_error_and_nothing_else() -> None:
    packed = pack_spec(JobSpec("m", "hi", stop=("x",), logit_bias={3: 1.0}, metadata={"a": 1}))
    for place in range(len(packed)):
        for damaged in (packed[:place], packed[:place] + b"\xff" + packed[place + 1 :]):
            with contextlib.suppress(ProtocolError):
                unpack_spec(damaged)
    for body in ({"v": 1}, {"v": 1, "model": "m", "prompt": "hi", "metadata": "{"}, {"v": 1, 2: 3}):
        with pytest.raises(ProtocolError):
            unpack_spec(msgpack.packb(body))
