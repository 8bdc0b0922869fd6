"""`JobMeta`: what every checkpoint of a job says of the job, so that it can be put back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

META_VERSION: Final = 2
_ALWAYS: Final = (
    *("v", "id", "model", "tenant", "priority", "spec", "retention", "created_at"),
    *("max_tokens", "metadata", "started_at", "attempts", "seq"),
)
_OPTIONAL: Final = (
    "deadline",
    "body",
    "queue_ttl",
    "max_runtime",
    "max_prompt",
    "ran",
    "logprobs",
    "traceparent",
    "adapter",
)
RECORDED: Final = (*_ALWAYS, *_OPTIONAL)
"""Fields of a job's hash that no attempt changes, or that count attempts. Those of `_OPTIONAL` are
not there in every job."""


class UnknownMeta(ValueError):
    """It was written by another version, or is incomplete."""


@dataclass(frozen=True, slots=True)
class JobMeta:
    """What stands in a log's beginning beside prompt and seed.

    Attributes:
        namespace: id of the data set in Redis that the job belonged to.
        prefix: what all keys of that data set begin with.
        job, epoch, model: whose it is.
        fingerprint, geometry: of the engine.
        exactness, exactness_reason: the job's label when the attempt began.
        fields: those of `RECORDED` that the job has, as Redis had them.
    """

    namespace: str
    prefix: str
    job: str
    epoch: int
    model: str
    fingerprint: str
    geometry: Mapping[str, Any]
    exactness: str
    exactness_reason: str | None
    fields: Mapping[str, bytes]

    def pack(self) -> dict[str, object]:
        """As the store takes it."""
        return {"v": META_VERSION, **asdict(self)}

    @classmethod
    def read(cls, meta: Mapping[str, Any]) -> Self:
        """The inverse of `pack`.

        Raises:
            UnknownMeta: it says why.
        """
        version = meta.get("v")
        if version != META_VERSION:
            raise UnknownMeta(f"written by version {version!r}")
        try:
            found = cls(**{name: meta[name] for name in cls.__dataclass_fields__})
            missing = [name for name in _ALWAYS if not isinstance(found.fields[name], bytes)]
            float(found.fields["created_at"])
            int(found.fields["seq"])
        except (KeyError, TypeError, ValueError) as error:
            raise UnknownMeta(f"it is not as it is written: {error!r}") from error
        if missing or not set(found.fields) <= set(RECORDED):
            raise UnknownMeta("its fields are not those of a job")
        return found
