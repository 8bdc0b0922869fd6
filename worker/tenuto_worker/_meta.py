"""`JobMeta`: what every checkpoint of a job says of the job, so that it can be put back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

META_VERSION: Final = 2


class UnknownMeta(ValueError):
    """It was written by another version, or is incomplete."""


@dataclass(frozen=True, slots=True)
class JobMeta:
    """What stands in a log's beginning beside prompt and seed.

    Attributes:
        namespace: id of the data set in Redis that the job belonged to.
        job, epoch, model: whose it is.
        fingerprint, geometry: of the engine.
        exactness, exactness_reason: the job's label when the attempt began.
        fields: those of the job's hash that no attempt changes, or that count attempts; see
            `Claim.record`.
    """

    namespace: str
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
            return cls(**{name: meta[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise UnknownMeta(f"it says nothing of {error}") from error
