"""``Checkpoint``: everything the next token depends on or that was promised. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tenuto_engine._caches import CacheState, HostArray
from tenuto_engine._errors import CheckpointError
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
    generated: int = 0
    signature: tuple[object, ...] | None = None


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

    def with_meta(self, meta: Mapping[str, object]) -> Checkpoint:
        """The same checkpoint, with ``meta`` added beneath its own."""
        return replace(self, meta={**meta, **self.meta})


def to_header(checkpoint: Checkpoint) -> tuple[dict[str, object], list[HostArray]]:
    """Split a checkpoint into a msgpack map and its arrays, named ``<layer>.<name>``."""
    arrays = [
        HostArray(f"{layer}.{array.name}", array.dtype, array.data)
        for layer, state in enumerate(checkpoint.caches)
        for array in state.arrays
    ]
    header: dict[str, object] = {
        "cache_tokens": list(checkpoint.cache_tokens),
        "original_prompt_tokens": checkpoint.original_prompt_tokens,
        "generated": [_token_to_list(token) for token in checkpoint.generated],
        "pending_token": checkpoint.pending_token,
        "pending_logprob": checkpoint.pending_logprob,
        "pending_top_logprobs": [list(pair) for pair in checkpoint.pending_top_logprobs],
        "seed": checkpoint.seed,
        "divergences": checkpoint.divergences,
        "first_divergence": checkpoint.first_divergence,
        "caches": [
            {"kind": s.kind, "meta": dict(s.meta), "arrays": len(s.arrays)}
            for s in checkpoint.caches
        ],
        "meta": dict(checkpoint.meta),
    }
    return header, arrays


def from_header(header: Mapping[str, Any], arrays: Sequence[HostArray]) -> Checkpoint:
    """Put together what ``to_header`` took apart.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    try:
        checkpoint = Checkpoint(
            cache_tokens=tuple(header["cache_tokens"]),
            original_prompt_tokens=header["original_prompt_tokens"],
            generated=tuple(_token_from_list(entry) for entry in header["generated"]),
            pending_token=header["pending_token"],
            pending_logprob=header["pending_logprob"],
            pending_top_logprobs=_pairs(header["pending_top_logprobs"]),
            seed=header["seed"],
            caches=_caches(header["caches"], arrays),
            divergences=header["divergences"],
            first_divergence=header["first_divergence"],
            meta=header["meta"],
        )
        _check(checkpoint)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the header is incomplete: {error!r}") from error
    return checkpoint


def _check(checkpoint: Checkpoint) -> None:
    tail = checkpoint.cache_tokens[checkpoint.original_prompt_tokens :]
    if tail != tuple(token.token for token in checkpoint.generated):
        raise ValueError("the generated tokens are not the end of the cached ones")
    if [token.index for token in checkpoint.generated] != list(range(1, len(tail) + 1)):
        raise ValueError("the generated tokens are not numbered from 1")


def _caches(
    described: Sequence[Mapping[str, Any]], arrays: Sequence[HostArray]
) -> list[CacheState]:
    states = []
    start = 0
    for layer, entry in enumerate(described):
        end = start + int(entry["arrays"])
        own = tuple(_own(layer, array) for array in arrays[start:end])
        states.append(CacheState(entry["kind"], entry["meta"], own))
        start = end
    if start != len(arrays):
        raise ValueError(f"the caches own {start} arrays, the file has {len(arrays)}")
    return states


def _own(layer: int, array: HostArray) -> HostArray:
    prefix = f"{layer}."
    if not array.name.startswith(prefix):
        raise ValueError(f"array {array.name} is not of layer {layer}")
    return HostArray(array.name.removeprefix(prefix), array.dtype, array.data)


def _token_to_list(token: Token) -> list[object]:
    top = [list(pair) for pair in token.top_logprobs]
    return [token.token, token.index, token.text, token.logprob, top]


def _token_from_list(entry: Sequence[Any]) -> Token:
    token, index, text, logprob, top = entry
    return Token(token, index, text, logprob, _pairs(top))


def _pairs(entries: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, logprob) for token, logprob in entries)
