"""The limits by name: what they bound, their values, and whether a submit is within them.

They stand in the hash `limits`, `<model or *>|<name>` to a number, and are checked in Redis, in the
step that accepts a job. What workers announce of themselves is checked here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final, cast

from . import _checks as check
from ._announce import ModelInfo
from ._errors import InvalidRequest, LimitExceeded
from ._findings import count, size
from ._sizes import UNITS, parse_size
from ._spec import JobSpec
from ._text_length import least_tokens
from .keys import MODEL_NAME, MODEL_NAME_HINT

ALL_MODELS: Final = "*"
DEFAULT_MAX_QUEUED: Final = 100_000
MEMORY: Final = "max_stream_memory"
MEANINGS: Final[Mapping[str, str]] = {
    "max_tokens": "tokens that a job may ask for",
    "max_prompt": "tokens of a prompt (a text's are counted when it starts)",
    "max_queued_per_tenant": "jobs of one tenant that wait for a model",
    "max_queued": f"jobs that wait for a model ({DEFAULT_MAX_QUEUED:,} if unset)",
    MEMORY: "bytes in Redis that all jobs may come to (512MiB, 8GB); not of one model",
}
"""What each limit bounds, in the order in which submit looks at them."""

Limits = dict[str, dict[str, int]]
"""Model or `*` -> name of a limit -> its value; only what is set."""

_RETRYABLE: Final = ("max_queued_per_tenant", "max_queued", MEMORY)
_MOST: Final = 2**53
_MOST_NAMES: Final = 20
_SOON: Final = "submit again when one of them has started, or raise it: tenuto limits"
_HINTS: Final = {
    "max_tokens": "ask for at most {maximum}",
    "max_prompt": "shorten the prompt to at most {maximum} tokens",
    "max_context": "shorten the prompt, or ask for fewer tokens",
    "max_queued_per_tenant": _SOON,
    "max_queued": _SOON,
    MEMORY: "delete ended jobs or submit again later; fewer max_tokens take less; tenuto limits",
}
_ZERO: Final = "0 refuses every job; whoever runs the queue may raise or clear it: tenuto limits"


def check_values(values: Mapping[str, object], model: str | None) -> dict[str, int]:
    """Values to be set, of one model or of all.

    Raises:
        InvalidRequest: names the limit that there is not, or that cannot have this value.
    """
    if model is not None and not MODEL_NAME.fullmatch(model):
        raise InvalidRequest("model", f"{model!r} is not a model's name", hint=MODEL_NAME_HINT)
    check_names(values)
    if model is not None and MEMORY in values:
        raise InvalidRequest(MEMORY, "is one for all models", hint="leave the model out")
    return {name: check.integer(name, value, 0, _MOST) for name, value in values.items()}


def check_names(names: Mapping[str, object] | tuple[str, ...]) -> None:
    """Refuse what is no limit."""
    for name in names:
        if name not in MEANINGS:
            raise InvalidRequest(name, "no such limit", hint=f"known: {', '.join(MEANINGS)}")


def parse_value(name: str, text: str) -> int:
    """A value as it is typed; memory with a unit or in bytes."""
    try:
        return int(parse_size(text) if name == MEMORY else text)
    except (ValueError, OverflowError):
        hint = f"bytes, or as 8GiB: {UNITS}" if name == MEMORY else "a whole number"
        raise InvalidRequest(name, f"cannot be {text!r}", hint=hint) from None


def show_value(name: str, value: int) -> str:
    """A value as people read it."""
    return size(value) if name == MEMORY else str(value)


def unpack_limits(fields: Mapping[bytes, bytes]) -> Limits:
    """The hash `limits`."""
    limits: Limits = {}
    for key, value in sorted(fields.items()):
        model, _, name = key.decode().rpartition("|")
        limits.setdefault(model, {})[name] = int(value)
    return limits


def field_of(model: str | None, name: str) -> str:
    """The field of the hash `limits` that a limit stands in."""
    return f"{model or ALL_MODELS}|{name}"


def limit_of(limits: Limits, model: str, name: str) -> int | None:
    """What holds for a model: the narrower of its own and that of all."""
    default = {"max_queued": DEFAULT_MAX_QUEUED}.get(name)
    set_ones = [limits[each][name] for each in (model, ALL_MODELS) if name in limits.get(each, {})]
    return min(set_ones, default=default) if set_ones else default


def refusal(spec: JobSpec, name: str, value: int, maximum: int) -> LimitExceeded:
    """The error for a submit that is over a limit."""
    return LimitExceeded(
        name,
        value,
        maximum,
        _problem(spec, name, value, maximum),
        hint=_HINTS[name].format(maximum=maximum) if maximum else _ZERO,
        retryable=name in _RETRYABLE,
    )


def _problem(spec: JobSpec, name: str, value: int, maximum: int) -> str:
    if name == MEMORY:
        return (
            f"with this job all might come to {size(value)} in Redis, at most {size(maximum)} "
            "are allowed"
        )
    if name in _RETRYABLE:
        whose = f" of tenant {spec.tenant}" if name == "max_queued_per_tenant" else ""
        jobs = count(value - 1, "job")
        return f"{jobs}{whose} waiting for {spec.model}, at most {maximum} may"
    what = {"max_tokens": "tokens", "max_prompt": "tokens of prompt"}.get(
        name, "tokens of prompt and generation"
    )
    at_least = "" if spec.has_token_ids or name == "max_tokens" else "at least "
    return f"{at_least}{value} {what} are over the {maximum} that {spec.model} allows"


def least_prompt(spec: JobSpec, model: ModelInfo) -> int:
    """How many tokens the prompt has at least, as far as that can be known without a tokenizer."""
    if model.longest_token is None or not isinstance(spec.prompt, str):
        return spec.least_prompt_tokens
    # A chat template may strip it.
    return max(1, least_tokens(spec.prompt.strip(), model.longest_token))


def _check_adapter(spec: JobSpec, model: ModelInfo) -> None:
    known = model.adapters
    if spec.adapter is None or known is None or spec.adapter in known:
        return
    close = difflib.get_close_matches(spec.adapter, known, n=1, cutoff=0.6)
    names = sorted(known)
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    hint = f"did you mean {close[0]}?" if close else f"known: {shown}"
    raise InvalidRequest(
        "adapter",
        f"no worker of {spec.model} has {spec.adapter}" if known
        else f"no worker of {spec.model} has any adapter",
        hint=hint if known else "tenuto worker --adapters DIR",
    )  # fmt: skip


def check_announced(spec: JobSpec, model: ModelInfo) -> None:
    """Refuse what cannot fit the model, or what no worker takes, as far as it is known without a
    tokenizer.

    Raises:
        InvalidRequest: the model cannot hold it, or has no such token or adapter.
        LimitExceeded: no worker takes as much.
    """
    least = least_prompt(spec, model)
    asked = (
        ("max_tokens", spec.max_tokens, model.max_tokens),
        ("max_prompt", least, model.max_prompt),
        ("max_context", least + spec.max_tokens, model.max_context),
    )
    _check_adapter(spec, model)
    _check_context(spec, model, least)
    _check_tokens(spec, model)
    for name, value, maximum in asked:
        if maximum is not None and value > maximum:
            raise refusal(spec, name, value, maximum)


def _check_context(spec: JobSpec, model: ModelInfo, least: int) -> None:
    room, at_least = model.context_length, "" if spec.has_token_ids else "at least "
    if room is not None and least >= room:
        raise InvalidRequest(
            "prompt",
            f"has {at_least}{least} tokens, and {spec.model} can hold {room}, with the answer",
            hint="shorten it",
        )
    if room is not None and least + spec.max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"{spec.max_tokens} after a prompt of {at_least}{least} "
            f"is over the {room} tokens that {spec.model} can hold",
            hint=f"at most {room - least}",
        )


def _check_tokens(spec: JobSpec, model: ModelInfo) -> None:
    size = model.vocab_size
    if size is None:
        return
    prompt = cast(tuple[int, ...], spec.prompt) if spec.has_token_ids else ()
    given: Mapping[str, Iterable[int]] = {
        "prompt": prompt,
        "logit_bias": spec.logit_bias,
        "stop_token_ids": spec.stop_token_ids,
    }
    for name, tokens in given.items():
        for place, token in enumerate(tokens):
            if token >= size:
                raise InvalidRequest(
                    f"prompt[{place}]" if name == "prompt" else name,
                    f"{token} is no token of {spec.model}",
                    hint=f"its vocabulary has {size}",
                )
