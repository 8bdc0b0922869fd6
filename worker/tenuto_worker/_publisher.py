"""`Publisher`: the only writer of tokens and ends.

Every token of a run is sent once Redis has room for it, in order; the end follows when Redis has
confirmed the last token. All runs share one round trip. While Redis is away everything waits in
the runs, so nothing is lost and nothing is sent twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _metrics as metrics
from ._answers import Finished, Published, PublishStatus
from ._calls import Call, bind_call, finish_call, publish_call, release_call
from ._errors import RedisAway
from ._redis import Backoff, Outage
from ._run import End, EndKind, Phase, Run, Runs, Stop
from ._scripts import JobScripts
from ._settings import WorkerSettings

_ENTRIES_A_ROUND = 64
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Item:
    """One call of a round, and what its answer does to the run."""

    run: Run
    call: Call[Any]
    take: Callable[[Run, Any], None]


class Publisher:
    """Sends what runs have to say.

    Args:
        on_stop: called with a run that learned from an answer that it is to stop.
        on_ended: called with a run whose job has ended here, and its state.
        on_trusted: called with a run that need not run apart any more.
    """

    def __init__(
        self,
        scripts: JobScripts,
        runs: Runs,
        settings: WorkerSettings,
        outage: Outage,
        *,
        on_stop: Callable[[Run], object],
        on_ended: Callable[[Run, str], object],
        on_trusted: Callable[[Run], object],
    ) -> None:
        self._scripts = scripts
        self._runs = runs
        self._settings = settings
        self._outage = outage
        self._on_stop = on_stop
        self._on_ended = on_ended
        self._on_trusted = on_trusted
        self._changed = threading.Condition()
        self._woken = False
        self._backoff = Backoff()

    def wake(self) -> None:
        """There may be something to send."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def appended(self, run: Run) -> None:
        """A token was appended to a run. Wakes the thread only when that makes a difference."""
        if run.unsent == 1 or run.unsent >= self._settings.publish_tokens:
            self.wake()

    def end(self, run: Run, end: End) -> None:
        """Send the rest of a run's tokens, then its end. Its row must be closed."""
        run.end = end
        run.progress(Phase.ENDING)
        self.wake()

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One round: send what is due, or wait until something is."""
        self._drop_fenced()
        now = time.monotonic()
        items = [item for run in self._runs.all() for item in self._due(run, now)]
        if not items:
            self._wait(self._next_due(now))
        elif not self._send(items):
            self._wait_for_redis(items)

    # -- what is due -------------------------------------------------------------------

    def _due(self, run: Run, now: float) -> list[_Item]:
        if run.fenced:
            return []
        items = []
        if run.label != run.label_sent and run.bound is not None:
            items.append(self._label_item(run))
        if run.unsent:
            items += self._token_items(run, now)
        elif run.end is not None:
            items.append(self._end_item(run, run.end))
        return items

    def _token_items(self, run: Run, now: float) -> list[_Item]:
        size = self._settings.publish_tokens
        full = run.unsent >= size or run.end is not None
        if not full and now - run.sent_at < self._settings.publish_seconds:
            return []
        last = min(len(run.tokens), run.sent + size * _ENTRIES_A_ROUND)
        starts = range(run.sent, last, size)
        parts = [run.tokens[start : min(start + size, last)] for start in starts]
        calls = [publish_call(run.fence, part, durable=run.durable) for part in parts]
        return [_Item(run, call, self._take_published) for call in calls]

    def _label_item(self, run: Run) -> _Item:
        assert run.bound is not None
        label = run.label
        call = bind_call(run.fence, run.bound, *label)

        def take(run: Run, answer: str) -> None:
            if answer == "fenced":
                self._fence(run)
            run.label_sent = label

        return _Item(run, call, take)

    def _end_item(self, run: Run, end: End) -> _Item:
        if end.kind is EndKind.RELEASED:
            release = release_call(run.fence, end.reason, end.error, durable=run.durable)
            return _Item(run, release, self._take_released)
        call = finish_call(
            run.fence,
            durable=run.durable,
            state=end.kind.value,
            finish_reason=end.reason,
            text=end.text,
            error=end.error,
            exactness=run.exactness,
            exactness_reason=run.exactness_reason,
            tokens=run.sent,
            stats=run.stats,
        )
        return _Item(run, call, self._take_finished)

    def _next_due(self, now: float) -> float:
        waits = [
            run.sent_at + self._settings.publish_seconds - now
            for run in self._runs.all()
            if run.unsent and not run.fenced
        ]
        return max(0.0, min([*waits, _IDLE_S]))

    # -- sending -----------------------------------------------------------------------

    def _send(self, items: list[_Item]) -> bool:
        began = time.monotonic()
        try:
            answers = self._outage.attempt(
                lambda: self._scripts.run_each([item.call for item in items])
            )
        except RedisAway:
            return False
        metrics.publish_seconds.observe(time.monotonic() - began)
        self._backoff.reset()
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Exception):
                self._give_up(item.run, answer)
            else:
                item.take(item.run, answer)
        return True

    def _give_up(self, run: Run, error: Exception) -> None:
        """What Redis has of the job lets nothing be written. Its lease runs out, and whoever reaps
        it counts that; the others go on."""
        if not run.fenced:
            run.log.error("job cannot be written to", error=str(error))
        self._fence(run)

    def _wait_for_redis(self, items: list[_Item]) -> None:
        for item in items:
            item.run.alive()
            item.run.end_tried = item.run.end is not None and not item.run.unsent
        time.sleep(self._backoff.pause())

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._woken, seconds)
            self._woken = False

    # -- answers -----------------------------------------------------------------------

    def _take_published(self, run: Run, answer: Published) -> None:
        if answer.status is PublishStatus.FENCED:
            self._fence(run)
            return
        if answer.status is PublishStatus.GAP:
            self._go_back(run, answer.tokens)
        else:
            run.sent = min(len(run.tokens), max(answer.tokens, 0))
            run.sent_at = time.monotonic()
        if run.apart and not answer.apart:
            run.log.info("job trusted again", tokens=answer.tokens)
            run.apart = False
            self._on_trusted(run)
        if answer.cancel and run.ask_to_stop(Stop.CANCEL):
            self._on_stop(run)

    def _go_back(self, run: Run, tokens: int) -> None:
        """Redis lost the end of what it had acknowledged; we still have it."""
        if tokens < run.sent:
            metrics.lost_by_redis.inc(run.sent - tokens)
            run.log.warning("redis lost tokens, sent again", had=run.sent, has=tokens)
        run.sent = tokens

    def _take_finished(self, run: Run, answer: Finished) -> None:
        assert run.end is not None
        if answer.status == "fenced":
            self._fence(run)
            return
        if answer.status == "gap":
            self._go_back(run, answer.tokens)
            return
        state = "queued" if answer.status == "requeued" else run.end.kind.value
        level = run.log.warning if run.end.kind is EndKind.FAILED else run.log.info
        facts = {"tokens": len(run.tokens), "exactness": run.exactness}
        if run.end.error:
            facts["error"] = run.end.error
        level("job ended", state=state, finish_reason=run.end.reason or None, **facts)
        if answer.status == "ok":
            metrics.ended.labels(run.model, state).inc()
            self._on_ended(run, state)
        self._runs.remove(run)

    def _take_released(self, run: Run, answer: str) -> None:
        assert run.end is not None
        if answer == "fenced":
            self._fence(run)
            return
        run.log.info("job handed back", reason=run.end.reason, state=answer, tokens=len(run.tokens))
        metrics.released.labels(run.model, run.end.reason).inc()
        if run.end.reason == "preempt":
            metrics.preempted.labels(run.model).inc()
        if answer != "queued":
            metrics.ended.labels(run.model, answer).inc()
            self._on_ended(run, answer)
        self._runs.remove(run)

    def _fence(self, run: Run) -> None:
        if run.ask_to_stop(Stop.FENCED):
            self._on_stop(run)
        self._drop_fenced()

    def _drop_fenced(self) -> None:
        """Forget runs that are fenced and have no row left; others belong to another thread."""
        for run in self._runs.all():
            if run.fenced and run.phase is Phase.ENDING:
                self._runs.remove(run)
