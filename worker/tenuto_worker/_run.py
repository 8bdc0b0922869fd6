"""`Run`: one attempt of one job on this worker, and `Runs`: all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import msgpack

from tenuto_client import ProtocolError, Token

from . import _metrics as metrics
from ._answers import Claim, Fence
from ._calls import Bound
from ._logging import Log, get_log
from ._spans import begin_span, trace_id

if TYPE_CHECKING:
    from tenuto_engine import CheckpointStore, GenerationStats


class Phase(StrEnum):
    """Where an attempt stands. Its value is what readers see as progress.

    An attempt belongs to one thread at a time: the preparer until PREFILL, the decode thread until
    ENDING, then the publisher, which forgets it.
    """

    LOADING = "loading"
    """Entered at the claim; left when the preparer takes it up."""
    RESTORE = "restore"
    """The prompt, the stream and a checkpoint are read; left when the decode thread has a row."""
    PREFILL = "prefill"
    """The model reads the prompt; left after its last token."""
    CATCH_UP = "catch-up"
    """Published tokens after the checkpoint are fed again; left after the last of them."""
    DECODE = "decode"
    """New tokens come; left at the end or when a stop is asked for."""
    ENDING = "ending"
    """The row is closed; what is left is to publish tokens and the end."""


class Stop(Enum):
    """Why an attempt is to stop before its generation ends. Later ones win over earlier ones."""

    PREEMPT = 1
    """Another job needs the slot more, or the worker for itself; the job is handed back."""
    DRAIN = 2
    """The worker goes; the job is handed back."""
    CANCEL = 3
    """A user asked for it."""
    DEADLINE = 4
    """The job's deadline passed."""
    RUNTIME = 5
    """The job has run for as long as it may."""
    FENCED = 6
    """The job belongs to somebody else now; nothing more may be written."""


class EndKind(StrEnum):
    """How an attempt ends. The first three are also states of the job."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASED = "released"
    """The job goes back to the queue."""


@dataclass(frozen=True, slots=True)
class End:
    """What is to be told to Redis after the last token."""

    kind: EndKind
    reason: str = ""
    """finish_reason of a completed one; why a released one is handed back, such as `drain`."""
    text: str = ""
    """Text held back until the end."""
    error: str = ""


def end_of(run: Run, stop: Stop) -> End:
    """How an attempt ends that was stopped. Of a fenced one nothing is written."""
    if stop in (Stop.PREEMPT, Stop.DRAIN):
        return End(EndKind.RELEASED, stop.name.lower())
    if stop is Stop.CANCEL:
        return End(EndKind.CANCELLED)
    if stop is Stop.FENCED:
        return End(EndKind.RELEASED, "fenced")
    if stop is Stop.RUNTIME:
        most = run.recorded("max_runtime")
        # What Redis counted may be more than what this clock did.
        ran = max(run.recorded("ran") + time.monotonic() - run.claimed_at, most)
        says = f"the job ran for {_seconds(ran)} in all, it may for {_seconds(most)}"
        return End(EndKind.FAILED, error=f"max_runtime: {says}")
    after = _seconds(max(run.recorded("deadline") - run.recorded("created_at"), 0))
    says = f"the job was not done {after} after it was submitted"
    return End(EndKind.FAILED, error=f"deadline: {says}")


def _seconds(number: float) -> str:
    """As the scripts write it."""
    return f"{round(number, 1):.14g} s"


def end_words(run: Run, state: str) -> dict[str, object]:
    """What is written down beside the checkpoints about a job that has ended."""
    end = run.end
    assert end is not None, "it has ended"
    is_handed_back = end.kind is EndKind.RELEASED
    return {
        "state": state,
        "finish_reason": "" if is_handed_back else end.reason,
        "text": end.text,
        "error": end.error,
        "exactness": run.exactness,
        "exactness_reason": run.exactness_reason,
        "finished_at": f"{time.time():.3f}",
        "stats": run.stats,
        # Close to what Redis counted.
        "ran": f"{run.recorded('ran') + time.monotonic() - run.claimed_at:.3f}",
    }


def stats_json(stats: GenerationStats) -> str:
    """What an attempt tells of itself with the job's end; the names are those of `JobStats`."""
    return json.dumps(
        {
            "cached_tokens": stats.cached_tokens,
            "prefill_tokens": stats.prefilled_tokens,
            "prefill_seconds": round(stats.prefill_seconds, 6),
            "decode_tokens": stats.decoded_tokens,
            "decode_seconds": round(stats.decode_seconds, 6),
            "peak_memory": stats.peak_memory,
        }
    )


class Run:
    """One attempt of one job on this worker.

    Attributes:
        claim, fence: what the claim said.
        claimed_at: when it was claimed, by the monotonic clock.
        log: its lines carry job, epoch and, where the job was submitted in a trace, its id.
        span: the attempt as tracing sees it.
        phase, done, total: progress, as readers see it.
        beat: when it last made progress, by the monotonic clock.
        apart: a worker died on the job, and it is not trusted again yet: nothing else may run here.
            Cleared by the publisher.
        row_tokens: for so many, prompt and answer, memory is reserved. Set by the pool of models.
        tokens: all tokens of the job from index 1, published or not. Appended to by its thread.
        sent: how many of them stand in the stream. Moved by the publisher.
        sent_at: when it last sent some.
        passed_over: newer checkpoints than the one it goes on from could not be used.
        store: where its checkpoints go; None before it is prepared.
        durable: how many of its tokens the last durable checkpoint covers. Set by the preparer,
            then by the writer.
        durable_at: when that was last so, or it was claimed, by the monotonic clock.
        checkpoint_error: why its last checkpoint could not be saved; "" if it was. Set by the
            writer.
        bound: what it goes by, as it was stored; None before.
        label_sent: the label that Redis knows.
        end: set once, when the row is closed.
        end_tried: it was sent, but no answer came.
        stats: what the engine says of it, as JSON; "" where it never had a row. Set when that is
            closed.
        exactness, exactness_reason: the label that the end will carry.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.fence: Fence = claim.fence
        self.claimed_at = time.monotonic()
        self.log: Log = get_log(job=self.fence.job_id, epoch=self.fence.epoch)
        if trace := trace_id(claim.traceparent):
            self.log = self.log.bind(trace_id=trace)
        self.span = begin_span(claim)
        self.phase = Phase.LOADING
        self.done = 0
        self.total = 0
        self.beat = time.monotonic()
        self.row_tokens = 0
        self.apart = claim.suspect
        self.tokens: list[Token] = []
        self.sent = 0
        self.sent_at = 0.0
        self.passed_over = False
        self.store: CheckpointStore | None = None
        self.durable = claim.durable
        self.durable_at = self.claimed_at
        self.checkpoint_error = ""
        self.end: End | None = None
        self.end_tried = False
        self.stats = ""
        self.exactness = claim.exactness
        self.exactness_reason = claim.exactness_reason
        self.bound: Bound | None = None
        self.label_sent = self.label
        self._stop: Stop | None = None
        self._lock = threading.Lock()

    @property
    def job_id(self) -> str:
        return self.fence.job_id

    @property
    def label(self) -> tuple[str, str | None]:
        """Exactness and its reason."""
        return self.exactness, self.exactness_reason

    @property
    def model(self) -> str:
        return self.claim.model

    def recorded(self, name: str) -> float:
        """A number of the job's hash as it was at the claim; 0 where it has none."""
        return float(self.claim.record.get(name, 0))

    @property
    def stop(self) -> Stop | None:
        """Why it is to stop, if it is."""
        return self._stop

    @property
    def fenced(self) -> bool:
        return self._stop is Stop.FENCED

    @property
    def unsent(self) -> int:
        return len(self.tokens) - self.sent

    @property
    def at_risk(self) -> int:
        """How many published tokens a crash would have to compute again."""
        return max(0, self.sent - self.durable)

    def ask_to_stop(self, why: Stop) -> bool:
        """Whether that was news."""
        with self._lock:
            if self._stop is not None and self._stop.value >= why.value:
                return False
            self._stop = why
        if why is not Stop.FENCED:
            self.log.info("attempt asked to stop", why=why.name.lower(), phase=self.phase.value)
        elif self.end_tried:
            self.log.info("job ended, the answer was lost")
        else:
            metrics.fenced.labels(self.model).inc()
            self.log.warning("attempt fenced", phase=self.phase.value, unsent=self.unsent)
        return True

    def progress(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """Note where it stands; anything new counts as a sign of life."""
        if phase is not self.phase:
            self.span.event(phase.value)
        if (phase, done, total) != (self.phase, self.done, self.total):
            self.phase, self.done, self.total = phase, done, total
            self.beat = time.monotonic()

    def alive(self) -> None:
        """A sign of life without progress: waiting for Redis, or for its turn."""
        self.beat = time.monotonic()

    def relabel(self, reason: str, *, instead_of: str | None = None) -> None:
        """The job is `recomputed` from now on. The first reason stays, if not `instead_of`."""
        if self.exactness != "recomputed":
            metrics.recomputed.labels(self.model).inc()
            self.log.warning("job recomputed", reason=reason)
        elif self.exactness_reason != instead_of:
            return
        self.exactness, self.exactness_reason = "recomputed", reason


class Runs:
    """The attempts of this worker. Safe to use from any thread."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._changed = threading.Condition()
        self.on_gone: Callable[[Run], object] = lambda run: None

    def add(self, run: Run) -> None:
        """Enter a run. One that this worker still has of the same job is fenced by its epoch."""
        with self._changed:
            old = self._runs.get(run.job_id)
            if old is not None:
                old.ask_to_stop(Stop.FENCED)
                self._runs[f"{run.job_id} {old.fence.nonce}"] = old
            self._runs[run.job_id] = run

    def remove(self, run: Run) -> None:
        """The run is over and its slot is free. Harmless when it was removed before."""
        with self._changed:
            keys = [key for key, each in self._runs.items() if each is run]
            for key in keys:
                del self._runs[key]
            self._changed.notify_all()
        if keys:
            _end_span(run)
            self.on_gone(run)

    def all(self) -> list[Run]:
        with self._changed:
            return list(self._runs.values())

    def of_model(self, model: str) -> int:
        """How many slots of a model are taken."""
        return sum(run.model == model for run in self.all())

    def has(self, job_id: str) -> bool:
        return job_id in self._runs

    def get(self, job_id: str) -> Run | None:
        return self._runs.get(job_id)

    def wait_empty(self, timeout: float) -> bool:
        """Whether no run was left before the time was over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout)


def stored_ids(packed: bytes) -> list[int]:
    """The prompt's ids, as an earlier claim stored them in the job's hash.

    Raises:
        ProtocolError: they are none; whether the model has them is another question.
    """
    try:
        ids = msgpack.unpackb(packed)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError("prompt_ids: what is stored is not msgpack") from error
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise ProtocolError("prompt_ids: what is stored is no list of token ids")
    return ids


def _end_span(run: Run) -> None:
    end = run.end
    if run.fenced or end is None:
        outcome, failed = "fenced", False
    else:
        outcome = end.reason if end.kind is EndKind.RELEASED else end.kind.value
        failed = end.kind is EndKind.FAILED or outcome == "error"
    run.span.end(outcome, failed=failed, tokens=len(run.tokens), exactness=run.exactness)
