"""From the records of a chain of logs to a whole ``Checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenuto_engine._cache_kinds import CACHE_LIST
from tenuto_engine._cache_tree import CacheState, HostArray
from tenuto_engine._caches import signature
from tenuto_engine._chain import StoredCommit
from tenuto_engine._checkpoint import Checkpoint, Origin
from tenuto_engine._delta import Layout
from tenuto_engine._errors import CheckpointCorrupt
from tenuto_engine._log import read_state
from tenuto_engine._positions import Positions


def assemble(commit: StoredCommit) -> Checkpoint:
    """Read a checkpoint, checking every byte that it needs.

    It takes the memory of the result and of one record.

    Raises:
        CheckpointCorrupt: it cannot be read; ``path`` and ``offset`` name the first bad record.
            Every commit that ``needs`` it cannot be read either.
    """
    # First, since most commits of a log have lost their state.
    state = _read_state(commit)
    positions = Positions(commit)
    arrays = positions.read()
    for leaf, array in state:
        arrays[leaf].append(array)
    return _checkpoint(commit, arrays)


def _read_state(commit: StoredCommit) -> list[tuple[int, HostArray]]:
    path = commit.state_path
    if path is None:
        return []
    state = read_state(path, commit.entry)
    leaves = sum(1 for layout in commit.commit.layouts for _ in layout.leaves())
    if any(leaf >= leaves for leaf, _ in state):
        raise CheckpointCorrupt(path, "it holds the state of caches that there are not", offset=0)
    return state


def _checkpoint(commit: StoredCommit, arrays: Sequence[list[HostArray]]) -> Checkpoint:
    generated = tuple(commit.tokens())
    said = commit.commit
    each = iter(arrays)
    prompt = commit.prompt[: commit.cache_length]
    return Checkpoint(
        cache_tokens=prompt + tuple(token.token for token in generated),
        original_prompt_tokens=commit.prompt_tokens,
        generated=generated,
        pending_token=said.pending_token,
        pending_logprob=said.pending_logprob,
        pending_top_logprobs=said.pending_top_logprobs,
        seed=commit.seed,
        caches=[cache_state(layout, each) for layout in said.layouts],
        divergences=said.divergences,
        first_divergence=said.first_divergence,
        meta=commit.meta,
        origin=origin_of(commit),
    )


def origin_of(commit: StoredCommit) -> Origin:
    """The place in a log that others may go on from."""
    return Origin(
        folder=commit.path.parent,
        file=commit.path.name,
        offset=commit.entry.record.end,
        digest=commit.entry.record.digest,
        generation=commit.generation,
        position=commit.cache_length,
        generated=commit.generated_tokens,
        signature=signature(commit.commit.layouts),
    )


def cache_state(layout: Layout, arrays: Iterator[list[HostArray]]) -> CacheState:
    """A cache from its layout and, leaf by leaf, its arrays."""
    if layout.kind == CACHE_LIST:
        children = tuple(cache_state(child, arrays) for child in layout.children)
        return CacheState(layout.kind, layout.meta, (), children)
    return CacheState(layout.kind, layout.meta, tuple(next(arrays)))
