"""What workers announce: the models they serve, and themselves.

Both are msgpack maps with a version `v`, in the hashes `models` (by name; outlives the workers) and
`workers` (by worker). Fields that a reader does not know are left alone: they only inform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

import msgpack

from ._errors import ProtocolError

VERSION: Final = 1
ALIVE_S: Final = 15.0
"""A worker that has said nothing for this long is not alive."""

_T = TypeVar("_T", "ModelInfo", "WorkerInfo")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as a worker announced it.

    Attributes:
        context_length: tokens of prompt and generation together; None is not known.
        fingerprint: identifies the bytes of model, adapter and tokenizer.
        features: whatever else a client may want to know, such as `chat_template`.
        announced_at: Redis's time, Unix seconds.
        max_prompt, max_tokens: the most that a worker takes; None is no limit. They are the widest
            of those of the living workers; so is `max_context`, which bounds both together by the
            memory that there is.
        longest_token: a text has at least one token for so many of its characters, as
            `least_tokens` counts them; None where nobody has proved that.
        adapters: the LoRA adapters that living workers have for it, by name, each with the
            fingerprint of the model with it; those that have gone stay for some minutes. None where
            nobody tells.
        wide_at: Redis's time when the living workers last took as much as these limits say. Some
            minutes later they become narrower, and not before: a worker that is started again
            takes its jobs then.
        workers: how many living workers serve it, and `queued` how many jobs wait for it; 0 but in
            what `Client.models()` returns.
    """

    name: str
    context_length: int | None
    vocab_size: int | None
    fingerprint: str
    announced_at: float
    features: Mapping[str, Any] = field(default_factory=dict)
    max_prompt: int | None = None
    max_tokens: int | None = None
    max_context: int | None = None
    longest_token: int | None = None
    adapters: Mapping[str, str] | None = None
    wide_at: float | None = None
    workers: int = 0
    queued: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it last spoke of itself.

    Attributes:
        models: names of the models that it serves.
        slots: how many jobs it can run at once; `running` is how many it does.
        seen_at: Redis's time when it said so, Unix seconds; so is `started_at`.
        device: what it computes on, such as `cpu` or the name of a GPU.
        data_dir: the id of the folder that holds its checkpoints.
        tokens_at_risk: published tokens of its running jobs that no durable checkpoint covers;
            None of a worker that does not tell.
        checkpoint_bytes: what the checkpoints of its data dir take; None of a worker that does
            not tell. Of one that does, `checkpoint_budget` is what they may take (`--disk-budget`),
            None without a limit.
        limits: its own `max_prompt`, `max_tokens` and `max_context` of each model, where it has
            them.
        broken: models that it could not load when it last tried, and why.
        loaded: models that it has in memory; None of a worker that does not tell. Of one that does,
            `busy` is how many jobs of each model it runs, where there are any.
        adapters: its own LoRA adapters of each model, as `ModelInfo` has them.
        last_death: how the process before its present one died by itself; None if none did.
    """

    name: str
    models: tuple[str, ...]
    slots: int
    running: int
    started_at: float
    seen_at: float
    host: str = ""
    pid: int = 0
    device: str = ""
    data_dir: str = ""
    version: str = ""
    tokens_at_risk: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_budget: int | None = None
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    last_death: str | None = None
    loaded: tuple[str, ...] | None = None
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    busy: Mapping[str, int] = field(default_factory=dict)

    def free_slots(self, model: str) -> int:
        """How many more jobs of a model it could run at once, had it the memory."""
        if self.loaded is None or not self.models:
            return self.slots - self.running
        return self.slots // len(self.models) - self.busy.get(model, 0)


MODEL_LIMITS: Final = ("max_prompt", "max_tokens", "max_context")
"""Names of the limits that a worker has for each model."""

_OPTIONAL: Final = (
    *("tokens_at_risk", "checkpoint_bytes", "checkpoint_budget"),
    *("limits", "broken", "last_death", "loaded", "busy", "longest_token", "wide_at", "adapters"),
    *MODEL_LIMITS,
)
_NOT_SAID: Final = ("name", "workers", "queued")


def pack_announcement(info: ModelInfo | WorkerInfo) -> bytes:
    """The value under which `info.name` is the field."""
    body = {each.name: getattr(info, each.name) for each in fields(info)}
    for name in _NOT_SAID:
        body.pop(name, None)
    for name in _OPTIONAL:
        # Zero is said, but what there is not need not be.
        if body.get(name, 0) in (None, {}):
            del body[name]
    if isinstance(info, ModelInfo) and info.adapters is not None:
        # That there are none is said.
        body["adapters"] = dict(info.adapters)
    packed: bytes = msgpack.packb({"v": VERSION, **body})
    return packed


def unpack_model(name: str, packed: bytes) -> ModelInfo:
    """A field of the hash `models`."""
    return _unpack(ModelInfo, name, packed)


def unpack_worker(name: str, packed: bytes) -> WorkerInfo:
    """A field of the hash `workers`."""
    return _unpack(WorkerInfo, name, packed)


def _unpack(kind: type[_T], name: str, packed: bytes) -> _T:
    try:
        body = msgpack.unpackb(packed, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"what was announced of {name} is not msgpack: {error}") from error
    if not isinstance(body, dict) or body.get("v") != VERSION:
        raise ProtocolError(
            f"what was announced of {name} has another version than {VERSION}",
            hint="upgrade tenuto-client",
        )
    known = {each.name for each in fields(kind)} - {*_NOT_SAID}
    try:
        return kind(name=name, **{key: value for key, value in body.items() if key in known})
    except TypeError as error:
        raise ProtocolError(f"what was announced of {name} is incomplete: {error}") from error
