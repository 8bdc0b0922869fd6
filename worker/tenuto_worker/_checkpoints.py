"""A job's checkpoints on disk, and which of them may be used for a claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from tenuto_client import Token

from ._meta import JobMeta, UnknownMeta
from ._run import Run

if TYPE_CHECKING:
    from tenuto_engine import (
        Checkpoint,
        CheckpointCorrupt,
        CheckpointStore,
        DiskBudget,
        Geometry,
        StoredCheckpoint,
    )
    from tenuto_engine import Token as EngineToken


class Checkpoints:
    """The folder of all jobs' checkpoints.

    Args:
        root: holds one folder for each job.
        prefix: what all keys of the data set begin with.
        budget: what all of them may take.
    """

    def __init__(self, root: Path, prefix: str, budget: DiskBudget) -> None:
        self._root = root
        self._prefix = prefix
        self._budget = budget

    def store(self, run: Run, label: tuple[str, str | None]) -> CheckpointStore:
        """Where an attempt saves: files that bear its epoch and nonce, and nobody else's.

        Args:
            run: one that is bound; the geometry that Redis has of it is written down.
            label: exactness of what the attempt will compute, and its reason.

        Raises:
            InvalidOption: the job's id cannot be a folder's name.
        """
        from tenuto_engine import CheckpointStore, job_folder

        assert run.bound is not None, "a run is bound before it saves anything"
        meta = JobMeta(
            namespace=run.claim.namespace,
            prefix=self._prefix,
            job=run.job_id,
            epoch=run.fence.epoch,
            model=run.model,
            fingerprint=run.bound.fingerprint,
            geometry=msgpack.unpackb(run.bound.geometry),
            exactness=label[0],
            exactness_reason=label[1],
            fields=run.claim.record,
        )
        return CheckpointStore(
            job_folder(self._root, run.job_id),
            epoch=run.fence.epoch,
            nonce=run.fence.nonce,
            meta=meta.pack(),
            budget=self._budget,
        )

    def choose(
        self,
        run: Run,
        *,
        prompt: Sequence[int],
        published: Sequence[Token],
        seed: int,
        geometry: Geometry,
    ) -> Checkpoint | None:
        """The newest checkpoint that this attempt may go on from, or None.

        What is passed over is logged with the reason, once for all those of a file that share it.
        """
        from tenuto_engine import (
            CheckpointCorrupt,
            CheckpointError,
            CheckpointStore,
            job_folder,
        )

        try:
            found = CheckpointStore(job_folder(self._root, run.job_id)).candidates()
        except CheckpointError as error:
            run.log.warning("checkpoints not readable", error=str(error))
            return None
        said: set[tuple[Path, str]] = set()
        damages: list[CheckpointCorrupt] = []
        for stored in found:
            # What can be told from headers comes first: reading a whole checkpoint takes time.
            problem = (
                stored.damage
                or _problem_of_meta(run, stored, geometry)
                or disagreement(stored, prompt, published, seed)
                or _problem_of_base(stored, damages)
            )
            if not problem:
                try:
                    checkpoint = stored.load()
                except CheckpointCorrupt as error:
                    damages.append(error)
                    problem = str(error)
                else:
                    run.passed_over = bool(said)
                    return checkpoint
            if (stored.path, problem) not in said:
                said.add((stored.path, problem))
                run.log.warning("checkpoint passed over", file=stored.path.name, reason=problem)
        return None


def engine_tokens(tokens: Sequence[Token]) -> list[EngineToken]:
    """The same tokens as the engine has them."""
    from tenuto_engine import Token as EngineToken

    return [
        EngineToken(t.token, t.index, t.text, t.logprob, t.top_logprobs, t.jumped) for t in tokens
    ]


def _problem_of_base(stored: StoredCheckpoint, damages: Sequence[CheckpointCorrupt]) -> str:
    return "it needs what is damaged" if any(map(stored.needs, damages)) else ""


def _problem_of_meta(run: Run, stored: StoredCheckpoint, geometry: Geometry) -> str:
    try:
        meta = JobMeta.read(stored.meta or {})
    except UnknownMeta as error:
        return str(error)
    claim = run.claim
    if meta.namespace not in {claim.namespace, *claim.heirs}:
        return "belongs to another data set in Redis"
    if meta.fingerprint == geometry.fingerprint:
        return ""
    if run.exactness == "exact":
        return "of another geometry"
    try:
        other = type(geometry).from_dict(meta.geometry)
    except (KeyError, TypeError):
        return "its geometry was described by another version"
    return "" if geometry.compatible_kv(other) else "its KV is of another model or scheme"


def disagreement(
    stored: StoredCheckpoint, prompt: Sequence[int], published: Sequence[Token], seed: int
) -> str:
    """Why a checkpoint cannot continue this stream; empty if it can."""
    own_prompt = stored.prompt
    if stored.prompt_tokens != len(prompt) or own_prompt != tuple(prompt[: len(own_prompt)]):
        return "of another prompt"
    if stored.seed != seed:
        return "of another seed"
    own = [(token.token, token.jumped) for token in stored.tokens()]
    if stored.pending_token is not None:
        own.append((stored.pending_token, False))
    for index, ((ours, jumped), token) in enumerate(zip(own, published, strict=False), 1):
        if ours != token.token:
            return f"its token {index} is not the published one"
        if jumped != token.jumped:
            return f"its token {index} was in another forward than the published one"
    return ""
