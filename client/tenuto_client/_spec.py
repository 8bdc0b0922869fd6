"""What a submit asks for: `JobSpec`, its checks by field name, and its packed form.

The packed form is a msgpack map with a version `v`, and a field for each attribute that is not
None. It is written once, by submit, and read by workers. A field that a reader does not know is an
error: leaving out what somebody asked for would be worse than refusing.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Final, Literal

import msgpack

from . import _checks as check
from ._asked import Message
from ._errors import InvalidRequest, ProtocolError
from ._grammar import (
    check_alone,
    check_grammar,
    check_jump_forward,
    is_packed_grammar,
    pack_grammar,
    unpack_grammar,
)
from ._trace import check_traceparent, current_traceparent
from .keys import DEFAULT_TENANT, MODEL_NAME, MODEL_NAME_HINT

SPEC_VERSION: Final = 1
MAX_PROMPT_BYTES: Final = 16 * 1024 * 1024
MAX_MESSAGES: Final = 10_000
MAX_SEED: Final = 2**63 - 1
DAY_S: Final = 24 * 3600.0
FOREVER: Final = "forever"
_MAX_SECONDS: Final = 100 * 365 * DAY_S
_ROLES: Final = ("system", "user", "assistant", "tool")
_TENANT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A checked request, as workers get it.

    Attributes:
        model: the name under which workers announce the model.
        prompt: text, chat messages, or token ids.
        raw: send a text prompt without the model's chat template.
        max_tokens: tokens to generate at most, 1 to 1,000,000.
        min_tokens: no end token comes, and no stop string that is complete by then ends the text,
            before there are so many; at most `max_tokens`.
        temperature: 0 (the default) is greedy; to 10.
        top_p: keep the likeliest tokens that together hold this probability; 1 is off.
        top_k: keep this many likeliest tokens; 0 is off.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
        xtc_probability: how often all but the least likely of the tokens above `xtc_threshold` (a
            probability, to 0.5) are excluded, end tokens and line breaks never; 0 is off.
        seed: 0 to 2**63-1. None only before `with_seed`: submit draws one.
        stop: strings that end the text and are not part of it; up to 16.
        stop_token_ids: token ids that end it, besides the model's own.
        ignore_eos: let the model's own end tokens pass as ordinary ones.
        logprobs: how many likeliest tokens to report with each, 0 to 20. The chosen token's
            logprob is always there. `top_logprobs` is another name for it.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        repetition_penalty: divides the logit of a token seen lately, 0.01 to 100; 1 is off.
        presence_penalty: subtracted once from the logit of a token seen lately; 0 is off.
        frequency_penalty: the same, for each time it was seen.
        repetition_context_size: how many last tokens, prompt included, count as lately;
            likewise `presence_context_size` and `frequency_context_size`.
        grammar: what the text must match: a dict with one of `json_schema` (a JSON object, or True
            for any JSON), `regex` and `lark` (strings), up to 256 KiB. The model can end only where
            it is complete. llguidance checks it at submit (`tenuto-client[grammar]`).
        jump_forward: let tokens that the grammar forces go through the model in one forward with
            the token before them, which is quicker; they come marked (`Token.jumped`). It needs a
            grammar, and goes with no `logprobs`.
        adapter: the name of a LoRA adapter that workers have for the model; None is none.
        priority: -100 to 100; higher goes first.
        deadline: Unix seconds after which the job fails, unlike the two that follow. A timedelta
            counts from now, as does the command's `--deadline`.
        queue_ttl: seconds after which the job fails if no worker has started it; a timedelta will
            do. Once started, it may wait as long as it must.
        max_runtime: seconds that it may run in all, over all attempts.
        traceparent: the trace that it belongs to, as W3C writes it; by default the OpenTelemetry
            span that `submit` is called in. No part of the packed form, nor of what a repeated
            idempotency key has to have in common.
        tenant: whose job it is; tenants of one priority take turns.
        idempotency_key: a second submit of the same tenant with the same key and body gets the same
            job.
        metadata: a JSON object that comes back in the record.
        retention: seconds that an ended job is kept, or "forever". A timedelta will do.
        recovery: "exact", or "fast", which prefills again after a crash instead of replaying
            (the job is then labelled `recomputed`).
    """

    model: str
    prompt: str | tuple[Message, ...] | tuple[int, ...]
    raw: bool = False
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    priority: int = 0
    deadline: float | None = None
    tenant: str = DEFAULT_TENANT
    idempotency_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    retention: float | Literal["forever"] = DAY_S
    recovery: Literal["exact", "fast"] = "exact"
    queue_ttl: float | None = None
    max_runtime: float | None = None
    traceparent: str | None = None
    min_tokens: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    grammar: Mapping[str, Any] | None = None
    jump_forward: bool = False
    adapter: str | None = None

    @property
    def least_prompt_tokens(self) -> int:
        """How many tokens the prompt has at least; only a tokenizer can count those of text."""
        return len(self.prompt) if self.has_token_ids else 1

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompt is token ids."""
        return isinstance(self.prompt, tuple) and check.is_integer(self.prompt[0])

    def with_seed(self) -> JobSpec:
        """The same with a seed, drawn if there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


@dataclass(frozen=True, slots=True)
class Request:
    """A checked submit: the spec (without a drawn seed) and the hash of the body as sent."""

    spec: JobSpec
    body_hash: str


def make_request(model: object, prompt: object, options: Mapping[str, Any]) -> Request:
    """Check everything that can be known without Redis.

    Raises:
        InvalidRequest: names the field, and the likely one for a name that is unknown.
    """
    values = _checked(options)
    # A retry sends the same timedelta, but another point in time.
    sent_deadline = options.get("deadline")
    spec = JobSpec(_model(model), _prompt(prompt), **values)
    if spec.raw and not isinstance(spec.prompt, str) and not spec.has_token_ids:
        raise InvalidRequest("raw", "needs a text prompt; chat messages need the chat template")
    if spec.min_tokens > spec.max_tokens:
        says = f"is {spec.min_tokens}, max_tokens is {spec.max_tokens}"
        raise InvalidRequest("min_tokens", says)
    if spec.grammar:
        check_alone(ignore_eos=spec.ignore_eos, min_tokens=spec.min_tokens)
    if spec.jump_forward:
        check_jump_forward(grammar=spec.grammar, logprobs=spec.logprobs)
    spec = replace(spec, traceparent=spec.traceparent or current_traceparent())
    body = replace(spec, idempotency_key=None, deadline=None)
    digest = hashlib.sha256(pack_spec(body))
    digest.update(repr(sent_deadline).encode())
    return Request(spec, digest.hexdigest())


def pack_spec(spec: JobSpec) -> bytes:
    """The packed form of a spec, the same bytes for the same spec."""
    body: dict[str, Any] = {"v": SPEC_VERSION}
    for each in fields(spec):
        value = getattr(spec, each.name)
        if each.name == "logit_bias":
            value = sorted(value.items())
        elif each.name == "grammar":
            value = value and pack_grammar(value)
        elif each.name == "metadata":
            value = check.metadata("metadata", value)
        is_packed = each.name not in _UNLESS_DEFAULT or value != each.default
        # A retry comes from another span, and is the same request all the same.
        if value is not None and is_packed and each.name != "traceparent":
            body[each.name] = value
    packed: bytes = msgpack.packb(body)
    return packed


def unpack_spec(packed: bytes) -> JobSpec:
    """The inverse of `pack_spec`.

    Raises:
        ProtocolError: it is damaged, or of a version that this one cannot read.
    """
    try:
        body = msgpack.unpackb(packed, use_list=False)
    except (TypeError, ValueError, msgpack.UnpackException):
        raise ProtocolError("spec: the job's is not msgpack") from None
    version = body.pop("v", None) if isinstance(body, dict) else None
    if version != SPEC_VERSION:
        number = version if check.is_integer(version) else None
        raise ProtocolError(
            f"spec: the job's has version {number}, this reads {SPEC_VERSION}",
            hint="upgrade tenuto-client here",
        )
    unknown = [key for key in body if key not in _KINDS]
    if unknown:
        # Whatever packed it may have taken a text for a name.
        names = [key for key in unknown if isinstance(key, str) and _FIELD_NAME.fullmatch(key)]
        shown = f": {', '.join(sorted(names))}" if names else ""
        raise ProtocolError(
            f"spec: the job's has {len(unknown)} unknown fields{shown}",
            hint="upgrade tenuto-client here",
        )
    for name, value in body.items():
        kind, is_one = _KINDS[name]
        if not is_one(value):
            what = type(value).__name__
            raise ProtocolError(f"{name}: the job's spec has a {what} there that is not {kind}")
    try:
        body["logit_bias"] = dict(body.get("logit_bias", ()))
        body["grammar"] = unpack_grammar(body["grammar"]) if "grammar" in body else None
        body["metadata"] = json.loads(body.get("metadata", "{}"))
        return JobSpec(**body)
    except (TypeError, ValueError, RecursionError):
        missing = [name for name in ("model", "prompt") if name not in body]
        name = missing[0] if missing else "metadata"
        raise ProtocolError(f"{name}: the job's spec has none that can be read") from None


_FIELD_NAME: Final = re.compile(r"[a-z][a-z_]{0,31}")
_Kind = tuple[str, Callable[[Any], bool]]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(is_one, value))


def _is_bias(pair: object) -> bool:
    return isinstance(pair, tuple) and [*map(_is_number, pair)] == [True, True]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(_is_text(value.get(key)) for key in ("role", "content"))


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    return bool(value) and (_are(check.is_integer)(value) or _are(_is_message)(value))


_TEXT: Final[_Kind] = ("text", _is_text)
_WHOLE: Final[_Kind] = ("a whole number", check.is_integer)
_NUMBER: Final[_Kind] = ("a number", _is_number)
_FLAG: Final[_Kind] = ("true or false", lambda value: isinstance(value, bool))
_KINDS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(("model", "tenant", "idempotency_key", "metadata", "recovery"), _TEXT),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "priority"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p", "deadline"), _NUMBER),
    **dict.fromkeys(("queue_ttl", "max_runtime", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("xtc_probability", "xtc_threshold"), _NUMBER),
    **dict.fromkeys(("repetition_context_size", "presence_context_size"), _WHOLE),
    "frequency_context_size": _WHOLE,
    "raw": _FLAG,
    "ignore_eos": _FLAG,
    "jump_forward": _FLAG,
    "traceparent": _TEXT,
    "adapter": _TEXT,
    "stop": ("a list of texts", _are(_is_text)),
    "stop_token_ids": ("a list of token ids", _are(check.is_integer)),
    "grammar": ("a grammar", is_packed_grammar),
    "logit_bias": ("a list of pairs of numbers", _are(_is_bias)),
    "retention": ("seconds", lambda value: value == FOREVER or _is_number(value)),
    "prompt": ("text, messages or token ids", _is_prompt),
}
"""What workers take for the value of each field; its bounds are the engine's matter."""


# Fields that came later: without them a spec is what older workers read, and hashes as it did.
_UNLESS_DEFAULT: Final = frozenset(
    ("min_tokens", "xtc_probability", "xtc_threshold", "jump_forward")
)
_TWO_MILLION: Final = 2_000_000
_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "raw": check.flag,
    "max_tokens": lambda name, value: check.integer(name, value, 1, 1_000_000),
    "min_tokens": lambda name, value: check.integer(name, value, 0, 1_000_000),
    "temperature": lambda name, value: check.number(name, value, 0, 10),
    "top_p": lambda name, value: check.above_zero(name, value, 1, "temperature=0 is greedy"),
    "top_k": lambda name, value: check.integer(name, value, 0, _TWO_MILLION),
    "min_p": lambda name, value: check.number(name, value, 0, 1),
    "xtc_probability": lambda name, value: check.number(name, value, 0, 1),
    "xtc_threshold": lambda name, value: check.number(name, value, 0, 0.5),
    "seed": lambda name, value: check.integer(name, value, 0, MAX_SEED),
    "stop": lambda name, value: _stop(name, value),
    "stop_token_ids": lambda name, value: check.token_ids(name, check.items(name, value, 1024)),
    "ignore_eos": check.flag,
    "logprobs": lambda name, value: _logprobs(name, value),
    "top_logprobs": lambda name, value: _logprobs(name, value),
    "logit_bias": lambda name, value: check.logit_bias(name, value, 4096),
    "repetition_penalty": lambda name, value: check.number(name, value, 0.01, 100),
    "repetition_context_size": lambda name, value: check.integer(name, value, 1, _TWO_MILLION),
    "presence_penalty": lambda name, value: check.number(name, value, -100, 100),
    "presence_context_size": lambda name, value: check.integer(name, value, 1, _TWO_MILLION),
    "frequency_penalty": lambda name, value: check.number(name, value, -100, 100),
    "frequency_context_size": lambda name, value: check.integer(name, value, 1, _TWO_MILLION),
    "grammar": check_grammar,
    "jump_forward": check.flag,
    "adapter": check.adapter,
    "priority": lambda name, value: check.integer(name, value, -100, 100),
    "deadline": lambda name, value: _deadline(name, value),
    "queue_ttl": lambda name, value: _duration(name, value),
    "max_runtime": lambda name, value: _duration(name, value),
    "traceparent": check_traceparent,
    "tenant": check.tenant,
    "idempotency_key": lambda name, value: check.text(name, value, 255),
    "metadata": lambda name, value: json.loads(check.metadata(name, value)),
    "retention": lambda name, value: _retention(name, value),
    "recovery": lambda name, value: check.choice(name, value, ("exact", "fast")),
}
_OTHER_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "stop_sequences": "stop",
    "json_schema": "grammar",
    "response_format": "grammar",
    "lora": "adapter",
    "lora_name": "adapter",
    "adapters": "adapter",
    "adapter_path": "adapter",
    "timeout": "deadline",
    "ttl": "retention",
    "user": "tenant",
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _CHECKS:
            raise InvalidRequest(name, "no such parameter", hint=_guess(name))
        # None is how callers say "not given" when they pass things on.
        if value is not None:
            values[name] = _CHECKS[name](name, value)
    if (alias := values.pop("top_logprobs", None)) is not None:
        if values.get("logprobs", alias) != alias:
            raise InvalidRequest(
                "top_logprobs",
                f"is {alias} and logprobs is {values['logprobs']}; they mean the same",
            )
        values["logprobs"] = alias
    return values


def _guess(name: str) -> str | None:
    if (known := _OTHER_NAMES.get(name.lower())) is not None:
        return f"did you mean {known}?"
    close = difflib.get_close_matches(name.lower(), _CHECKS, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(_CHECKS)}"


def _model(value: object) -> str:
    if not isinstance(value, str) or not MODEL_NAME.fullmatch(value):
        raise InvalidRequest("model", f"{value!r} is not a model's name", hint=MODEL_NAME_HINT)
    return value


def _prompt(value: object) -> str | tuple[Message, ...] | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise InvalidRequest("prompt", "is empty")
        _bound_prompt(check.encodable("prompt", value))
        return value
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise InvalidRequest(
            "prompt", f"must be text, chat messages or token ids, is a {type(value).__name__}"
        )
    if not value:
        raise InvalidRequest("prompt", "is empty")
    if isinstance(value[0], Mapping):
        return _messages(value)
    _bound_prompt(4 * len(value))
    return check.token_ids("prompt", value)


def _messages(value: Sequence[object]) -> tuple[Message, ...]:
    check.items("prompt", value, MAX_MESSAGES)
    messages = tuple(_message(f"prompt[{place}]", each) for place, each in enumerate(value))
    if not any(message["content"] for message in messages):
        raise InvalidRequest("prompt", "is empty: no message has any content")
    _bound_prompt(sum(len(message["content"].encode()) for message in messages))
    return messages


def _message(name: str, value: object) -> Message:
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        raise InvalidRequest(name, "must be a dict with role and content")
    for key in value:
        if key not in ("role", "content"):
            raise InvalidRequest(f"{name}.{key}", "no such part of a message")
    role = check.choice(f"{name}.role", value["role"], _ROLES)
    content = value["content"]
    if not isinstance(content, str):
        raise InvalidRequest(f"{name}.content", f"must be text, is a {type(content).__name__}")
    check.encodable(f"{name}.content", content)
    return {"role": role, "content": content}


def _bound_prompt(size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            "prompt", f"is {size} bytes, at most {MAX_PROMPT_BYTES} (16 MiB) are allowed"
        )


def _stop(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (check.text(name, value, 1024),)
    listed = check.items(name, value, 16)
    return tuple(check.text(f"{name}[{n}]", each, 1024) for n, each in enumerate(listed))


def _logprobs(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise InvalidRequest(
            name,
            f"must be a whole number, is {value}",
            hint="how many likeliest tokens to report; the chosen one's logprob is always there",
        )
    return check.integer(name, value, 0, 20)


def _deadline(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        return time.time() + check.above_zero(
            name, value.total_seconds(), _MAX_SECONDS, "it counts from now"
        )
    at = check.number(name, value, 0, 1e12)
    if at <= time.time():
        raise InvalidRequest(name, f"{at:.0f} is in the past", hint="Unix seconds, or a timedelta")
    return at


def _duration(name: str, value: object) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return check.above_zero(name, seconds, _MAX_SECONDS, "leave it out for no limit")


def _retention(name: str, value: object) -> float | Literal["forever"]:
    if value == FOREVER:
        return FOREVER
    if isinstance(value, str):
        raise InvalidRequest(name, f'must be seconds or "{FOREVER}", is {value!r}')
    return check.seconds(name, value, 1, _MAX_SECONDS)
