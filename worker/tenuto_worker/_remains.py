"""`Remains`: what a job's folder has of the job, the longest copy that is consistent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto_client import JobState, ProtocolError, Token, unpack_spec
from tenuto_engine import StoredAttempt, StoredCheckpoint, StoredEnd, StoredJob, read_job
from tenuto_engine import Token as EngineToken

from ._meta import JobMeta, UnknownMeta

_ENDED = ("completed", "failed", "cancelled")


class Unreadable(Exception):
    """Nothing of a job can be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Remains:
    """A job as its folder knows it.

    Attributes:
        meta: of the newest attempt that can be read.
        epoch: the highest that there is, readable or not.
        tokens: all that are known.
        prompt: the whole prompt's ids, or None.
        end: how it ended, if that is the newest that was written of it.
        damage: what could not be read beside it, or None.
    """

    meta: JobMeta
    epoch: int
    tokens: tuple[Token, ...]
    prompt: tuple[int, ...] | None
    end: Mapping[str, Any] | None
    damage: str | None

    @property
    def job_id(self) -> str:
        return self.meta.job

    @property
    def state(self) -> JobState:
        """The state that it is put back in."""
        return JobState.QUEUED if self.end is None else JobState(self.end["state"])

    @property
    def created_at(self) -> float:
        return float(self.meta.fields["created_at"])

    @property
    def seq(self) -> int:
        """Orders jobs that were made in the same millisecond."""
        return int(self.meta.fields["seq"])


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one file knows of a job."""

    epoch: int
    meta: JobMeta
    tokens: tuple[EngineToken, ...]
    prompt: tuple[int, ...] | None
    end: Mapping[str, Any] | None = None


def remains_of(folder: Path) -> Remains | None:
    """What a job's folder has of it; None if there is nothing of ours in it.

    Raises:
        CheckpointError: the folder cannot be listed.
        Unreadable: there is something, but nothing that can be used.
    """
    job = read_job(folder)
    damages = list(_damages(job))
    copies = list(_copies(job, damages))
    epochs = [each.epoch for each in files_of(job)]
    if not epochs:
        return None
    if not copies:
        raise Unreadable("; ".join(damages) or "nothing in it can be read")
    newest = max(epochs)
    best = _best(copies)
    # An end is the last word only if no attempt began after it.
    end = best.end if best.epoch == newest else None
    return Remains(
        meta=max(copies, key=lambda copy: copy.epoch).meta,
        epoch=newest,
        tokens=tuple(
            Token(t.token, t.index, t.text, t.logprob, t.top_logprobs, t.jumped)
            for t in best.tokens
        ),
        prompt=next((copy.prompt for copy in copies if copy.prompt is not None), None),
        end=end,
        damage="; ".join(damages) or None,
    )


def _best(copies: list[_Copy]) -> _Copy:
    """The newest attempt's own, or a longer one that says the same as far as that goes.

    A longer one that says something else is of a past that the stream did not keep.
    """
    newest = max(copies, key=lambda copy: (copy.epoch, copy.end is not None, len(copy.tokens)))
    if newest.end is not None:
        return newest
    best = newest
    for copy in copies:
        common = copy.tokens[: len(newest.tokens)]
        is_same = [(t.token, t.jumped) for t in common] == [
            (t.token, t.jumped) for t in newest.tokens
        ]
        if len(copy.tokens) > len(best.tokens) and is_same:
            best = copy
    return best


def _copies(job: StoredJob, damages: list[str]) -> Iterable[_Copy]:
    for end in job.ends:
        if end.damage is None and end.end.get("state") not in _ENDED:
            damages.append(f"{end.path.name}: it says nothing of the job's state")
        elif end.damage is None and (meta := _meta(job, end.meta, end.path, damages)):
            yield _Copy(end.epoch, meta, end.tokens, _whole(end.prompt, end.prompt_tokens), end.end)
    for attempt in job.attempts:
        if attempt.meta is not None and (meta := _meta(job, attempt.meta, attempt.path, damages)):
            prompt = _whole(attempt.prompt, attempt.prompt_tokens)
            yield _Copy(attempt.epoch, meta, (), prompt)
            longest = max(
                (each for each in job.checkpoints if each.path == attempt.path and not each.damage),
                key=lambda each: each.generated_tokens,
                default=None,
            )
            if longest is not None:
                yield _Copy(attempt.epoch, meta, tuple(longest.tokens()), prompt)


def _meta(
    job: StoredJob, meta: Mapping[str, Any] | None, path: Path, damages: list[str]
) -> JobMeta | None:
    try:
        found = JobMeta.read(meta or {})
        if found.job != job.job_id:
            raise UnknownMeta(f"of job {found.job}")
        unpack_spec(found.fields["spec"])
    except (UnknownMeta, ProtocolError, KeyError) as error:
        damages.append(f"{path.name}: {error}")
        return None
    return found


def _damages(job: StoredJob) -> Iterable[str]:
    # A damaged log is a damaged checkpoint and a damaged attempt.
    files = files_of(job)
    return dict.fromkeys(f"{each.path.name}: {each.damage}" for each in files if each.damage)


def files_of(job: StoredJob) -> list[StoredCheckpoint | StoredEnd | StoredAttempt]:
    """All that a job's files say, damaged ones too; a log and each of its checkpoints."""
    return [*job.checkpoints, *job.ends, *job.attempts]


def _whole(prompt: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    return prompt if prompt and len(prompt) == length else None
