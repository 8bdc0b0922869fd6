"""``Checkpoint``: everything the next token depends on or that was promised. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tenuto_engine._caches import CacheState
from tenuto_engine._token import Token


@dataclass(frozen=True, slots=True)
class Origin:
    """The place in a log from which a checkpoint was loaded, so that others may go on from it.

    Attributes:
        folder: the job's folder.
        file: the log's name.
        offset: byte after the commit's record.
        digest: XXH3-128 of the commit's header.
        generation: deltas of this generation add up to it.
        position: tokens whose KV it covers.
        generated: generated ones among them.
        signature: what must stay as it is for further deltas to add up.
    """

    folder: Path
    file: str
    offset: int
    digest: bytes
    generation: int
    position: int
    generated: int
    signature: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of one generation between two steps.

    Attributes:
        cache_tokens: ids of the tokens whose KV is in ``caches``: the prompt and the
            generated tokens after it, or, at a border of a prefill, the start of a prompt.
        original_prompt_tokens: how many of all tokens are the prompt.
        generated: the generated tokens among ``cache_tokens``, in order.
        pending_token: the sampled token whose KV is not in ``caches``; None in a prefill.
        pending_logprob: its logprob, or None.
        pending_top_logprobs: the likeliest ids at its place with their logprobs.
        seed: what the draws derive from.
        caches: one state a layer.
        divergences: published tokens so far that differ from the computed ones.
        first_divergence: index of the first of those, or None.
        meta: the caller's own, of what msgpack can hold; kept and given back.
        origin: the place in a log that it was loaded from, or None.
    """

    cache_tokens: tuple[int, ...]
    original_prompt_tokens: int
    generated: tuple[Token, ...]
    pending_token: int | None
    pending_logprob: float | None
    pending_top_logprobs: tuple[tuple[int, float], ...]
    seed: int
    caches: list[CacheState]
    divergences: int = 0
    first_divergence: int | None = None
    meta: Mapping[str, object] = field(default_factory=dict)
    origin: Origin | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.generated)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the caches take."""
        return sum(state.nbytes for state in self.caches)
