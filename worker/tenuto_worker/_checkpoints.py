"""A job's checkpoints on disk, and which of them may be used for a claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_client import Token

from ._run import Run

if TYPE_CHECKING:
    from tenuto_engine import Checkpoint, CheckpointStore, Geometry, StoredCheckpoint

META_VERSION = 1


class Checkpoints:
    """The folder of all jobs' checkpoints.

    Args:
        root: holds one folder for each job.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def store(self, run: Run, geometry: Geometry) -> CheckpointStore:
        """Where an attempt saves: files that bear its epoch and nonce, and nobody else's.

        Raises:
            InvalidOption: the job's id cannot be a folder's name.
        """
        from tenuto_engine import CheckpointStore, job_folder

        return CheckpointStore(
            job_folder(self._root, run.job_id),
            epoch=run.fence.epoch,
            nonce=run.fence.nonce,
            meta={
                "v": META_VERSION,
                "namespace": run.claim.namespace,
                "job": run.job_id,
                "epoch": run.fence.epoch,
                "model": run.model,
                "spec": run.claim.spec,
                "fingerprint": geometry.fingerprint,
                "geometry": geometry.to_dict(),
            },
        )

    def choose(
        self,
        run: Run,
        store: CheckpointStore,
        *,
        prompt: Sequence[int],
        published: Sequence[Token],
        seed: int,
        geometry: Geometry,
    ) -> Checkpoint | None:
        """The newest checkpoint that this attempt may go on from, or None.

        What is passed over is logged with the reason.
        """
        from tenuto_engine import CheckpointError

        try:
            found = list(store.candidates())
        except CheckpointError as error:
            run.log.warning("checkpoints not readable", error=str(error))
            return None
        for stored in found:
            checkpoint, problem = self._try(
                run, stored, prompt=prompt, published=published, seed=seed, geometry=geometry
            )
            if checkpoint is not None:
                return checkpoint
            run.log.warning("checkpoint passed over", file=stored.path.name, reason=problem)
        return None

    def _try(
        self,
        run: Run,
        stored: StoredCheckpoint,
        *,
        prompt: Sequence[int],
        published: Sequence[Token],
        seed: int,
        geometry: Geometry,
    ) -> tuple[Checkpoint | None, str]:
        from tenuto_engine import CheckpointCorrupt

        if stored.damage is not None:
            return None, stored.damage
        problem = self._problem_of_meta(run, stored.meta or {}, geometry)
        if problem:
            return None, problem
        try:
            checkpoint = stored.load()
        except CheckpointCorrupt as error:
            return None, error.reason
        problem = disagreement(checkpoint, prompt, published, seed)
        return (None, problem) if problem else (checkpoint, "")

    def _problem_of_meta(self, run: Run, meta: Any, geometry: Geometry) -> str:
        if meta.get("v") != META_VERSION:
            return f"written by version {meta.get('v')!r}"
        claim = run.claim
        if meta["namespace"] not in {claim.namespace, *claim.heirs}:
            return "belongs to another data set in Redis"
        if meta["fingerprint"] == geometry.fingerprint:
            return ""
        if run.exactness == "exact":
            return "of another geometry"
        try:
            other = type(geometry).from_dict(meta["geometry"])
        except (KeyError, TypeError):
            return "its geometry was described by another version"
        return "" if geometry.compatible_kv(other) else "its KV is of another model or scheme"


def disagreement(
    checkpoint: Checkpoint, prompt: Sequence[int], published: Sequence[Token], seed: int
) -> str:
    """Why a checkpoint cannot continue this stream; empty if it can."""
    length = checkpoint.original_prompt_tokens
    cached = checkpoint.cache_tokens[:length]
    if length != len(prompt) or tuple(cached) != tuple(prompt[: len(cached)]):
        return "of another prompt"
    if checkpoint.seed != seed:
        return "of another seed"
    own = [token.token for token in checkpoint.generated]
    if checkpoint.pending_token is not None:
        own.append(checkpoint.pending_token)
    for index, (ours, token) in enumerate(zip(own, published, strict=False), 1):
        if ours != token.token:
            return f"its token {index} is not the published one"
    return ""
