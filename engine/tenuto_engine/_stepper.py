"""``Stepper``: moves the rows of an engine on by one step: all that decode, one that reads."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from tenuto_engine._compiled import CompiledForward
from tenuto_engine._decode import (
    Forward,
    catch_up_step,
    jump_step,
    pipelined_step,
    synchronous_step,
    take_published,
)
from tenuto_engine._prefill import PrefillTurn, prefill_step
from tenuto_engine._sequence import Sequence, SequenceState, TokenEvent
from tenuto_engine._slots import Row, Slots
from tenuto_engine._wired import WIRED_LIMIT


class Stepper:
    """Runs the rows that are seated here; on the decode thread.

    Args:
        model: gives logits ``[1, L, V]`` for ``[1, L]`` tokens and ``cache=``.
        chunk: tokens of a prefill chunk.
        pipelined: which loop decodes; None decides by each row's caches.
        turn: shared with others that prefill on the device.
        compiled: whether decoded tokens go through a compiled ``model``.
        weight_bytes: what ``model`` takes.

    Attributes:
        slots: the rows.
    """

    def __init__(
        self,
        model: Forward,
        slots: Slots,
        *,
        chunk: int,
        pipelined: bool | None,
        turn: PrefillTurn,
        compiled: bool,
        weight_bytes: int,
    ) -> None:
        self.slots = slots
        self._model = model
        self._compiled = CompiledForward(model) if compiled else None
        self._chunk = chunk
        self._pipelined = pipelined
        self._turn = turn
        self._weight_bytes = weight_bytes

    def seat(self, row: Row) -> None:
        """Run a row from the next step on."""
        self.slots.seat(row)
        WIRED_LIMIT.begin(self, self._weight_bytes)

    def end(self, sequence: Sequence, state: SequenceState) -> None:
        """Free the row of a sequence, which ends in `state`; harmless after another end."""
        if self.slots.find(sequence) is None:
            return  # a callback closed it
        sequence.state = state
        self.slots.vacate(sequence)
        if not self.slots.rows:
            WIRED_LIMIT.end(self)
            self._turn.note(self, decodes=False, reads=False)

    def step(self) -> list[TokenEvent]:
        """Move all on; the tokens handed out, oldest first."""
        rows = self.slots.rows
        for row in rows:
            row.begin()
        decoding = [row for row in rows if row.sequence.state is not SequenceState.PREFILL]
        prefilling = [row for row in rows if row.sequence.state is SequenceState.PREFILL]
        self._turn.note(self, decodes=bool(decoding), reads=bool(prefilling))
        began = time.perf_counter()
        events = [event for row in decoding for event in self._run(row, self._decode)]
        self._turn.decoded(began)
        if self._turn.may_prefill(self):
            began = time.perf_counter()
            events += self._run(prefilling[0], self._prefill)
            self._turn.prefilled(self, began)
        return events

    def _run(self, row: Row, action: Callable[[Row], None]) -> list[TokenEvent]:
        sequence = row.sequence
        try:
            action(row)
        except BaseException as error:
            sequence.error = error
            self.end(sequence, SequenceState.FAILED)
            # The frames hold the row's arrays, and the error may be kept for long.
            traceback.clear_frames(error.__traceback__)
            if not isinstance(error, Exception):
                raise
        else:
            if sequence.finish_reason:
                self.end(sequence, SequenceState.FINISHED)
        return [TokenEvent(sequence, token) for token in sequence.hand_out()]

    def _decode(self, row: Row) -> None:
        sequence = row.sequence
        if sequence.finish_reason:
            return  # the last published token was the end
        model = self._model_of(row, self._compiled or self._model)
        if sequence.options.jump_forward:
            jump_step(model, row)
        elif sequence.next_published:
            catch_up_step(model, row)
        else:
            step = pipelined_step if self._pipelines(row) else synchronous_step
            step(model, row)
        sequence.go_on()

    def _pipelines(self, row: Row) -> bool:
        return row.gains_by_pipelining if self._pipelined is None else self._pipelined

    def _prefill(self, row: Row) -> None:
        sequence = row.sequence
        sequence.start_prefill()
        prefill_step(self._model_of(row, self._model), row, self._chunk)
        if row.pending is None:
            return
        sequence.start_decode()
        row.checkpoint_if_due(now=True)
        if sequence.next_published:
            take_published(row)
        else:
            sequence.take(row.pending.read())
        sequence.go_on()

    @staticmethod
    def _model_of(row: Row, plain: Forward) -> Forward:
        return plain if row.adapter is None else row.adapter.model
