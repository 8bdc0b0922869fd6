"""The types of what users give to `submit`; what they mean is said by `JobSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict


class Message(TypedDict):
    """One message of a chat: `role` is system, user, assistant or tool."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]
"""Text, chat messages, or token ids."""


class SubmitOptions(TypedDict, total=False):
    """What `submit` takes besides model and prompt; everything has a default (see `JobSpec`)."""

    raw: bool
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    top_logprobs: int
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    presence_context_size: int
    frequency_penalty: float
    frequency_context_size: int
    grammar: Mapping[str, Any] | None
    jump_forward: bool
    adapter: str | None
    priority: int
    deadline: float | timedelta | None
    queue_ttl: float | timedelta | None
    max_runtime: float | timedelta | None
    traceparent: str | None
    tenant: str
    idempotency_key: str | None
    metadata: Mapping[str, Any]
    retention: float | timedelta | Literal["forever"]
    recovery: Literal["exact", "fast"]
