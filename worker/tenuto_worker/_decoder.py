"""`DecodeThread`: owns the engines, steps them and hands out tokens. All MLX work is here."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenuto_client import Token

from . import _metrics as metrics
from ._deaths import is_out_of_memory
from ._logging import get_log
from ._preparer import Plan, Road
from ._publisher import Publisher
from ._run import End, EndKind, Phase, Run, Runs, Stop, end_of, stats_json
from ._settings import WorkerSettings
from ._tallies import RowMeter, Tally

if TYPE_CHECKING:
    from tenuto_engine import (
        CheckpointStore,
        CheckpointWriter,
        Engine,
        LiveCheckpoint,
        Sequence,
        TokenEvent,
    )

_IDLE_S = 1.0
_PAUSED_S = 0.05


@dataclass(slots=True)
class _Row:
    """A run that the engine has, and its engine's view of it."""

    run: Run
    sequence: Sequence
    store: CheckpointStore
    meter: RowMeter
    divergences: str | None = None


@dataclass(slots=True)
class Host:
    """An engine that has rows, and the rows."""

    engine: Engine
    rows: list[_Row] = field(default_factory=list)


class DecodeThread:
    """One thread, because one thread owns the device.

    Attributes:
        hosts: by name, the models that have rows here.
        beat: when the thread was last seen alive, by the monotonic clock; infinite before its first
            turn, as it loads models until then.
        tallies: what was counted of each model.
        paused: decoding waits because Redis is too far behind.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runs: Runs,
        publisher: Publisher,
        writer: CheckpointWriter,
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._publisher = publisher
        self._writer = writer
        self._changed = threading.Condition()
        self._inbox: list[Plan] = []
        self._woken = False
        self.paused = False
        self.tallies = {name: Tally() for name in settings.models}
        self._log = get_log()
        self.hosts: dict[str, Host] = {}
        self.beat = math.inf

    # -- from other threads ------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Give a prepared run a row soon."""
        with self._changed:
            self._inbox.append(plan)
            self._woken = True
            self._changed.notify()

    def wake(self) -> None:
        """A run is to stop, or the publisher has room again."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    # -- the thread --------------------------------------------------------------------

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One step of every engine with rows, or a wait for something to do."""
        self.beat = time.monotonic()
        self._admit()
        for host in list(self.hosts.values()):
            self._obey(host)
        busy = list(self.hosts.values())
        if not busy:
            self._wait(_IDLE_S)
        elif self._is_full():
            self._wait(_PAUSED_S)
        else:
            for host in busy:
                self._step(host)

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._woken, seconds)
            self._woken = False

    def _is_full(self) -> bool:
        """Whether Redis is so far behind that decoding has to wait for it."""
        rows = [row for host in self.hosts.values() for row in host.rows]
        full = any(row.run.unsent >= self._settings.max_unsent_tokens for row in rows)
        if full != self.paused:
            self.paused = full
            self._log.warning("decoding paused" if full else "decoding goes on")
        if full:
            for row in rows:
                row.run.alive()
        return full

    # -- joins and leaves --------------------------------------------------------------

    def _admit(self) -> None:
        with self._changed:
            plans, self._inbox = self._inbox, []
        for plan in plans:
            if plan.run.stop is not None:
                self._leave(plan.run, plan.run.stop)
                continue
            try:
                self._seat(plan)
            except Exception as error:  # noqa: BLE001 - one job's trouble; the others go on
                self._refuse(plan.run, error)

    def _seat(self, plan: Plan) -> None:
        from tenuto_engine import EngineError

        *shortcuts, replay = plan.roads
        for road in shortcuts:
            try:
                self._add(plan, road)
            except EngineError as error:
                plan.run.log.warning("shortcut not usable", error=str(error))
            else:
                return
        self._add(plan, replay)

    def _add(self, plan: Plan, road: Road) -> None:
        sequence = plan.engine.add(road.tokens, road.options)
        if road.recomputes:
            plan.run.relabel(road.recomputes)
        if plan.run.claim.attempts > 1:
            metrics.recoveries.labels(plan.run.model, road.kind).inc()
        meter = RowMeter(self.tallies[plan.run.model], plan.run, sequence)
        row = _Row(plan.run, sequence, plan.store, meter)
        host = self.hosts.setdefault(plan.run.model, Host(plan.engine))
        host.rows.append(row)
        self._note(row)

    def _refuse(self, run: Run, error: Exception) -> None:
        from tenuto_engine import InvalidOption, PromptError

        if is_out_of_memory(error):
            # Whatever came next would fail as well; the next child begins with all of it.
            raise error
        if isinstance(error, InvalidOption | PromptError):
            self._publisher.end(run, End(EndKind.FAILED, error=str(error)))
        else:
            run.log.error("attempt failed", phase=run.phase.value, exc_info=error)
            self._publisher.end(run, End(EndKind.RELEASED, "error", error=_describe(error)))

    def _obey(self, host: Host) -> None:
        for row in list(host.rows):
            stop = row.run.stop
            if stop is None:
                continue
            taken = stop is not Stop.FENCED and self._take_last_checkpoint(host, row)
            host.engine.close(row.sequence)
            self._drop(row)
            if taken:
                self._leave_saved(row, stop)
            else:
                self._leave(row.run, stop)

    def _drop(self, row: _Row) -> None:
        """Forget a row that is closed, and with the last one the engine: it may be unloaded."""
        row.run.stats = stats_json(row.sequence.stats)
        host = self.hosts[row.run.model]
        host.rows.remove(row)
        if not host.rows:
            del self.hosts[row.run.model]

    def _take_last_checkpoint(self, host: Host, row: _Row) -> bool:
        taken = []

        def take(live: LiveCheckpoint) -> None:
            taken.append(self._writer.submit(row.store, live, final=True))

        host.engine.checkpoint_to(row.sequence, take)
        return any(taken)

    def _leave(self, run: Run, stop: Stop) -> None:
        if stop is Stop.FENCED:
            self._runs.remove(run)
        else:
            self._publisher.end(run, end_of(run, stop))

    def _leave_saved(self, row: _Row, stop: Stop) -> None:
        """End a run once its last checkpoint is durable, so that whoever goes on finds it.

        On a thread of its own: a disk may be slow, and neither decoding nor publishing waits.
        """
        row.run.progress(Phase.ENDING)
        patience = self._settings.grace_seconds / 3

        def save() -> None:
            if not self._writer.wait(row.store, patience):
                row.run.log.warning("final checkpoint not saved")
            self._publisher.end(row.run, end_of(row.run, stop))

        threading.Thread(target=save, name="final-checkpoint", daemon=True).start()

    # -- a step ------------------------------------------------------------------------

    def _step(self, host: Host) -> None:
        rows = {row.sequence: row for row in host.rows}
        events = host.engine.step()
        for event in events:
            self._take(rows[event.sequence], event)
        # After all of them: the first would go alone, and the others wait for its round trip.
        for event in events:
            self._publisher.appended(rows[event.sequence].run)
        for row in rows.values():
            self._note(row)
            if row.sequence.state.is_end:
                self._drop(row)
                self._publisher.end(row.run, self._end(row))

    def _take(self, row: _Row, event: TokenEvent) -> None:
        run, token = row.run, event.token
        assert token.index == len(run.tokens) + 1, "the engine hands tokens out in order"
        run.tokens.append(
            Token(
                token.token,
                token.index,
                token.text,
                token.logprob,
                token.top_logprobs,
                token.jumped,
            )
        )
        row.meter.token(token.index)

    def _note(self, row: _Row) -> None:
        from tenuto_engine import SequenceState

        run, sequence = row.run, row.sequence
        if sequence.state in (SequenceState.WAITING, SequenceState.PREFILL):
            run.progress(Phase.PREFILL, sequence.prefill_done, sequence.prefill_total)
            # At most one row reads its prompt at a time; to wait for that is not to be stuck.
            run.alive()
        elif sequence.state is SequenceState.CATCH_UP:
            run.progress(Phase.CATCH_UP, sequence.catch_up_done, sequence.catch_up_total)
        else:
            run.progress(Phase.DECODE, len(run.tokens), sequence.options.max_tokens)
        row.meter.progress(sequence)
        self._judge(row)

    def _judge(self, row: _Row) -> None:
        """Label the run as soon as a published token came out differently."""
        stats = row.sequence.stats
        if not stats.divergences:
            return
        reason = (
            f"{stats.divergences} published tokens came out differently when they were fed "
            f"again, the first of them token {stats.first_divergence}"
        )
        row.run.relabel(reason, instead_of=row.divergences)
        row.divergences = reason

    def _end(self, row: _Row) -> End:
        from tenuto_engine import SequenceState

        sequence = row.sequence
        if sequence.state is SequenceState.FINISHED:
            return End(EndKind.COMPLETED, sequence.finish_reason or "", text=sequence.end_text)
        error = sequence.error or RuntimeError("the row was closed")
        if is_out_of_memory(error):
            raise error
        row.run.log.error("attempt failed", phase=row.run.phase.value, exc_info=error)
        return End(EndKind.RELEASED, "error", error=_describe(error))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
