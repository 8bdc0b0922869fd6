"""``Slots``: the fixed set of rows, and ``Row``: the device side of one generation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx

from tenuto_engine._adapters import Adapter
from tenuto_engine._checkpoint import Origin
from tenuto_engine._errors import GenerationFailed, NoFreeSlot
from tenuto_engine._kv_quantizer import quantize_caches
from tenuto_engine._kv_scheme import KVScheme
from tenuto_engine._live import LiveCheckpoint, Moment
from tenuto_engine._logits import Likeliest, LogitsProcessors, in_order
from tenuto_engine._memory import PeakMeter
from tenuto_engine._options import GenerationOptions
from tenuto_engine._prefix import PrefixOffers
from tenuto_engine._sampler import Sampler
from tenuto_engine._sequence import Drawn, Sequence, SequenceState

async_eval = cast(Callable[..., None], mx.async_eval)  # untyped in mlx's stubs

# Measured with SmolLM2 (30 layers) on two cores: a step is built in about 10 ms, and 100 MiB of
# caches are copied in about as much.
_PIPELINED_CACHE_BYTES: Final = 64 * 2**20

_log = logging.getLogger("tenuto_engine")


class Pending:
    """The token after those in the cache: sampled, its KV not written, perhaps not read yet.

    Attributes:
        token: uint32 ``[1]`` on the device.
    """

    def __init__(self, token: mx.array, logprob: mx.array, likeliest: Likeliest | None) -> None:
        self.token = token
        self._logprob = logprob
        self._likeliest = likeliest
        self._drawn: Drawn | None = None

    @classmethod
    def known(cls, drawn: Drawn) -> Pending:
        """A pending token that the host has: a resumed or a published one."""
        token = mx.array([drawn.token], dtype=mx.uint32)
        pending = cls(token, mx.array(drawn.logprob), None)
        pending._drawn = drawn
        return pending

    def dispatch(self) -> None:
        """Have the device begin with it."""
        async_eval(self.token, self._logprob, *(self._likeliest or ()))

    def read(self) -> Drawn:
        """Wait for the device and return the token."""
        if self._drawn is None:
            mx.eval(self.token, self._logprob, *(self._likeliest or ()))
            logprob = cast(float, self._logprob.item())
            if math.isnan(logprob):
                raise GenerationFailed("the model gave logits that are not numbers (NaN)")
            self._drawn = Drawn(cast(int, self.token.item()), logprob, in_order(self._likeliest))
        return self._drawn


class CheckpointClock:
    """Says when a checkpoint is due: every so many tokens or seconds, whichever is first."""

    def __init__(self, options: GenerationOptions, generated: int) -> None:
        self._tokens = options.checkpoint_every_tokens
        self._seconds = options.checkpoint_every_seconds
        self.reset(generated)

    def due(self, generated: int) -> bool:
        if self._put_off:
            return True
        if self._tokens is not None and generated // self._tokens > self._last // self._tokens:
            return True
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds

    def reset(self, generated: int) -> None:
        self._last = generated
        self._since = time.monotonic()
        self._put_off = False

    def put_off(self) -> None:
        """One was due and could not be taken, or not all of it."""
        self._put_off = True


@dataclass(eq=False)
class Row:
    """What runs one sequence.

    Invariant between steps: ``caches`` hold exactly the first ``position`` tokens of
    prompt + generated; once the prompt is read, ``pending`` is the token after them.

    Attributes:
        caches: mlx-lm cache objects, one a layer; nobody else holds their arrays.
        position: tokens whose KV is in ``caches``.
        bound: most tokens they may ever hold.
        reading: what a prefill reads: the prompt, and generated tokens if there is no
            pending one to go on from.
        pending: the token after those in the caches; None in a prefill.
        origin: the place in a log that the caches were loaded from, or None.
        offers: takes what its prefill writes for prompts that begin alike, or None.
        unquantized: the scheme by which the caches are quantized once they are long enough; None
            if they are, or never will be.
        adapter: what its forwards are built with, or None.
        peak: memory of the process since the row was made.
    """

    sequence: Sequence
    caches: list[Any]
    position: int
    bound: int
    reading: tuple[int, ...]
    processors: LogitsProcessors
    sampler: Sampler
    pending: Pending | None = None
    origin: Origin | None = None
    offers: PrefixOffers | None = None
    unquantized: KVScheme | None = None
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        self._clock = CheckpointClock(self.sequence.options, max(self.generated, 0))
        self.peak = PeakMeter()

    @property
    def generated(self) -> int:
        """Generated tokens whose KV is in the caches; negative in a prefill."""
        return self.position - len(self.sequence.prompt)

    @property
    def settled(self) -> bool:
        """Whether the pending token already has its text, so that only its KV is missing."""
        return len(self.sequence.tokens) > self.generated

    @property
    def gains_by_pipelining(self) -> bool:
        """Whether building a step while the last one runs saves a CPU more than it costs.

        A cache that two steps share is copied, not written in place.
        """
        held: int = sum(cache.nbytes for cache in self.caches)
        return held <= _PIPELINED_CACHE_BYTES

    def begin(self) -> None:
        """Leave WAITING, if it does not yet."""
        sequence = self.sequence
        if sequence.state is not SequenceState.WAITING:
            return
        if self.pending is None:
            sequence.state = SequenceState.PREFILL
        else:
            sequence.start_decode()

    def tokens_in_cache(self) -> tuple[int, ...]:
        prompt = self.sequence.prompt
        generated = self.sequence.tokens[: max(self.generated, 0)]
        return prompt[: self.position] + tuple(token.token for token in generated)

    def reserve(self, count: int) -> None:
        """Check that `count` more positions may be written."""
        assert self.position + count <= self.bound, "a row would write past its bound"

    def quantize_if_due(self) -> None:
        """To be called after each forward, so that it happens at the same position in every run.

        The caches are quantized at once: lazily they would be held in both forms for a step.
        """
        scheme = self.unquantized
        if scheme is not None and self.position >= scheme.start:
            quantize_caches(self.caches, scheme)
            self.unquantized = None

    def checkpoint(self) -> LiveCheckpoint | None:
        """All that the next token depends on; close it before the row goes on.

        None while nothing is computed, and while generated tokens are prefilled: that gives
        other bits, so whoever goes on must know that it did.
        """
        if self.position == 0 or (self.pending is None and self.generated > 0):
            return None
        sequence = self.sequence
        return LiveCheckpoint(
            Moment(
                lineage=self,
                origin=self.origin,
                prompt=sequence.prompt,
                prompt_tokens=len(sequence.prompt),
                tokens=sequence.tokens,
                position=self.position,
                pending=self.pending,
                caches=self.caches,
                seed=sequence.seed,
                divergences=sequence.stats.divergences,
                first_divergence=sequence.stats.first_divergence,
                trace=sequence.trace,
            )
        )

    def checkpoint_if_due(self, *, now: bool = False) -> None:
        """Hand a checkpoint to the caller's callback if one is due, or `now`."""
        generated = max(self.generated, 0)
        callback = self.sequence.options.on_decode_checkpoint
        if callback is None or not (now or self._clock.due(generated)):
            return
        live = self.checkpoint()
        if live is None:
            return
        self.hand_over(live, callback)
        # Counted from here, so that a slow copy does not make the next one due at once.
        self._clock.reset(generated)
        if live.deferred:
            self._clock.put_off()

    def hand_over(self, live: LiveCheckpoint, callback: Callable[[LiveCheckpoint], object]) -> None:
        """Call `callback`, whatever it does."""
        stats = self.sequence.stats
        with self.sequence.trace.span("checkpoint", last=live.generated_tokens) as facts:
            try:
                callback(live)
            except Exception:  # noqa: BLE001  # it is the caller's code; a job must outlive its disk
                stats.checkpoint_errors += 1
                _log.exception("the checkpoint callback raised; the generation goes on")
            finally:
                live.close()
            facts["deferred"] = int(live.deferred)
        stats.checkpoints += not live.deferred


class Slots:
    """The rows of an engine. A row sits in one from its start to its end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._rows: dict[Sequence, Row] = {}

    @property
    def free(self) -> int:
        return self.count - len(self._rows)

    @property
    def rows(self) -> list[Row]:
        """Those that are taken, the longest seated first."""
        return list(self._rows.values())

    def require_free(self) -> None:
        if not self.free:
            raise NoFreeSlot(
                f"all {self.count} slots are taken",
                hint="close a generation, or load the engine with more slots",
            )

    def seat(self, row: Row) -> None:
        self.require_free()
        self._rows[row.sequence] = row

    def find(self, sequence: Sequence) -> Row | None:
        return self._rows.get(sequence)

    def vacate(self, sequence: Sequence) -> None:
        """Free the row and its caches."""
        row = self._rows.pop(sequence)
        sequence.stats.cache_tokens = row.tokens_in_cache()
        sequence.stop_clock()
        sequence.stats.peak_memory = row.peak.read()
        row.caches, row.pending = [], None
