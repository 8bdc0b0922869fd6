"""What the client hands out: tokens, events, job records, results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

QUIET_PHASES: Final = ("loading", "restore", "prefill", "catch-up")
"""Work of an attempt before its first token."""


class JobState(StrEnum):
    """Where a job stands. Every move is one script that Redis runs as a whole."""

    QUEUED = "queued"
    """Entered by submit, by resume, and when a running attempt is handed back or lost.
    Left by a claim or a cancel."""
    RUNNING = "running"
    """Entered by a worker's claim.
    Left when the job ends, or its attempt is handed back or lost."""
    COMPLETED = "completed"
    """Entered by the worker at the end (`stop` or `length`); never left."""
    CANCELLED = "cancelled"
    """Entered when a user's cancel is carried out; left by resume."""
    FAILED = "failed"
    """Entered on an error that retrying cannot mend, or after 3 attempts in a row without progress.
    Left by resume."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, for now."""
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        token: its id in the model's vocabulary.
        index: its place in the generation, from 1; also the cursor for `stream(after=...)`.
        text: what it adds to the text; empty while a character or a stop string is incomplete.
        logprob: natural log of its probability, after logits processors, before temperature
            and filters.
        top_logprobs: the most probable tokens with theirs, as many as were asked for.
        jumped: whether the grammar forced it, so that nothing was drawn (`jump_forward`); its
            logprob is 0.0 then.
    """

    token: int
    index: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    jumped: bool = False


@dataclass(frozen=True, slots=True)
class StateEvent:
    """The job changed its state after token `index`; so does an end that was resumed from."""

    state: JobState
    epoch: int
    index: int
    worker: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Work that yields no tokens: `phase` is `loading`, `restore`, `prefill` or `catch-up`."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job.

    Attributes:
        cached_tokens: tokens of the prompt that the attempt which ended the job did not have to
            compute, as they stood in a cache or a checkpoint; None where none has told. It follows
            what happened on the way, so it does not count when two are compared.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class JobStats:
    """What it took to run a job: of the attempt that ended it, but for the last two.

    Attempts that were handed back or lost are in those two only. Seconds are wall-clock, and what
    a worker spends on other jobs in between is part of them.

    Attributes:
        cached_tokens: tokens of the prompt that it found in a cache or a checkpoint.
        prefill_tokens: tokens of the prompt that it computed.
        prefill_seconds: from the first of those to its first token.
        decode_tokens: tokens that it computed after that, those that a reader had already included.
        decode_seconds: how long that took.
        peak_memory: bytes that its worker's process had in arrays at most meanwhile, models and
            other jobs included.
        attempts: how often a worker had begun the job.
        seconds: for how long it ran in all, over all attempts; what `max_runtime` limits.
    """

    cached_tokens: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    peak_memory: int
    attempts: int
    seconds: float

    @property
    def prefill_tps(self) -> float:
        """Tokens of the prompt a second; 0 where none was computed."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens a second after the first; 0 where there was none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The last line that a reader gets.

    Attributes:
        index: how many tokens there are.
        text: text that was held back and belongs after the last token.
        exactness: `exact`, or `recomputed` with `exactness_reason`.
        stats: what it took; None of a job that no worker has ended, or that an older one did.
    """

    index: int
    state: JobState
    epoch: int
    finish_reason: str | None
    text: str
    usage: Usage
    exactness: str
    exactness_reason: str | None = None
    error: str | None = None
    stats: JobStats | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a job produced, up to its end. `stats` is that of its `EndEvent`."""

    job_id: str
    state: JobState
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    usage: Usage
    exactness: str
    exactness_reason: str | None = None
    error: str | None = None
    stats: JobStats | None = None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as `status` and `list` show it. Times are Unix seconds.

    Attributes:
        tokens_at_risk: published tokens that the last durable checkpoint does not cover, which a
            crash would have to compute again; None of a job that never ran or is completed.
            None of them can be lost: they stand in the stream.
        checkpoint_error: why the last checkpoint of its newest attempt could not be saved; None
            if it was, or the job is completed. The job goes on without.
        attempts: how often a worker has begun it. (`epoch` also counts resumes.)
        deadline: Unix seconds after which it fails; None without one. A resume takes one away that
            has passed.
        queue_ttl, max_runtime: as they were asked for, in seconds.
        suspect: a worker died while it ran there; until it progresses it runs apart from others.
        preemptions: how often it made way for a job of a higher priority.
        adapter: the LoRA adapter that it was submitted with; None without one.
        stats: what it took, once it has ended; None where no worker ended it, or an older one did.
    """

    id: str
    model: str
    state: JobState
    epoch: int
    prompt_tokens: int | None
    tokens: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    finish_reason: str | None
    exactness: str
    error: str | None
    priority: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    exactness_reason: str | None = None
    tenant: str = "default"
    worker: str | None = None
    attempts: int = 0
    cancelling: bool = False
    max_tokens: int = 0
    phase: str | None = None
    phase_done: int | None = None
    phase_total: int | None = None
    tokens_at_risk: int | None = None
    checkpoint_error: str | None = None
    queue_ttl: float | None = None
    max_runtime: float | None = None
    suspect: bool = False
    preemptions: int = 0
    deadline: float | None = None
    stats: JobStats | None = None
    adapter: str | None = None
