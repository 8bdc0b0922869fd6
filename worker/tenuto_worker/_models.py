"""`ModelPool`: the models of a worker, loaded and unloaded within its memory.

A claimed job goes through the pool to the preparer. If its model is not in memory, the pool makes
room, by unloading models that have no runs, the least recently used first, and loads it on a thread
of its own, while the decode thread goes on.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tenuto_client import ProtocolError, unpack_spec
from tenuto_client._findings import size

from . import _metrics as metrics
from ._errors import ConfigError
from ._hosted import Hosted, ModelState
from ._loads import Loads
from ._logging import get_log
from ._run import End, EndKind, Run, Runs, end_of, stored_ids
from ._settings import WorkerSettings

if TYPE_CHECKING:
    from tenuto_engine import Engine, MemoryUse, ModelFacts, PrefillTurn, PrefixCache

# What prefill, checkpoints on their way to the disk and MLX itself take beside weights and caches.
RESERVE: Final = 0.05
_IDLE_S: Final = 1.0


class Admission(Enum):
    """Whether a row has memory."""

    FITS = "fits"
    WAITS = "waits"
    """Not as long as other rows have theirs."""
    NEVER = "never"
    """Not even if it were alone."""


@dataclass(frozen=True, slots=True)
class PoolOutlets:
    """What the pool tells others.

    Attributes:
        ready: the model of a run is loaded.
        end: a run ends before it began.
        changed: there may be room, or a model, that was not there before.
    """

    ready: Callable[[Run], object]
    end: Callable[[Run, End], object]
    changed: Callable[[], object]


class ModelPool:
    """The models of a worker. Safe to use from any thread; none waits for a load.

    Attributes:
        budget: bytes that weights and rows may take, with the reserve; infinite is no limit.
        loads: the loads of this worker.
        loaded_at: when a model was last loaded, by the monotonic clock.
        prefixes: what prompts that begin alike share, of all models; None before the start.
    """

    def __init__(
        self, settings: WorkerSettings, runs: Runs, outlets: PoolOutlets, loads: Loads
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._outlets = outlets
        self._hosted = {name: Hosted.of(name, settings) for name in settings.models}
        self._to_load: list[Hosted] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._log = get_log()
        # At the start nothing is tried again until it is known that one model can be served.
        self._starting = False
        self.budget = math.inf
        self.loads = loads
        self.loaded_at = -math.inf
        self.prefixes: PrefixCache | None = None
        self._turn: PrefillTurn | None = None

    # -- at the start ------------------------------------------------------------------

    def load_first(self, last_death: str = "") -> None:
        """Look at all models, and load them in order while they fit; call it on the decode thread.

        One in whose load a process of this worker died is left alone at first, so that the others
        are served. If there are no others, it is tried all the same.

        Args:
            last_death: how the process before this one died; "" if it did not.

        Raises:
            ConfigError: none can be loaded; the message names each.
        """
        from tenuto_engine import PrefillTurn, PrefixCache, default_budget, limit_memory

        given = self._settings.memory_budget
        self.budget = default_budget() if given is None else given
        limit_memory(self.budget)
        self.prefixes = PrefixCache(
            int(self._settings.prefix_memory),
            self._settings.prefixes_dir,
            int(self._settings.prefix_disk),
        )
        self._turn = PrefillTurn()
        self._starting = True
        feared = [each for each in self._hosted.values() if each.name in self.loads.deaths]
        for hosted in self._hosted.values():
            if hosted in feared:
                self._rest(hosted, last_death)
            else:
                self._begin_with(hosted)
        for hosted in sorted(feared, key=lambda each: self.loads.deaths[each.name]):
            if self._is_all_broken:
                self._begin_with(hosted)
        if self._is_all_broken:
            broken = self.broken()
            first, *others = (f"--model {name}: {reason}" for name, reason in broken.items())
            subject, _, problem = first.partition(": ")
            raise ConfigError(subject, "; ".join([problem, *others]))
        self._starting = False
        for hosted in self._hosted.values():
            if hosted.failures:
                self._tell_broken(hosted)

    def _rest(self, hosted: Hosted, last_death: str) -> None:
        """Leave it alone for as long as after so many failures, which went with their processes."""
        hosted.failures = self.loads.deaths[hosted.name] - 1
        how = f": {last_death}" if last_death and hosted.name == self.loads.last else ""
        self._failed(hosted, f"a process of this worker died while it loaded this model{how}")

    def _begin_with(self, hosted: Hosted) -> None:
        with self.loads.of(hosted.name):
            if not self._look(hosted):
                return
            if self._weights() + hosted.weight_bytes <= self._usable:
                hosted.state = ModelState.LOADING
                self._load(hosted)
            else:
                hosted.state = ModelState.COLD

    @property
    def _is_all_broken(self) -> bool:
        return len(self.broken()) == len(self._hosted)

    # -- what others ask ---------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, ModelFacts]:
        """What is known of each model whose files could be read, loaded or not."""
        return {
            name: hosted.facts for name, hosted in self._hosted.items() if hosted.facts is not None
        }

    def fingerprint(self, model: str) -> str:
        """Of the geometry that the model has or would have; "" if its files cannot be read."""
        return self._hosted[model].fingerprint

    def adapters(self, model: str) -> Mapping[str, str]:
        """The same with each of its adapters."""
        return self._hosted[model].adapters.fingerprints

    def look_at_adapters(self, model: str) -> None:
        """Notice now that one is gone."""
        hosted = self._hosted[model]
        if hosted.facts is not None and hosted.adapters.look(hosted.facts):
            self._outlets.changed()

    def engine(self, model: str) -> Engine:
        """The engine of a model that has runs past their loading."""
        engine = self._hosted[model].engine
        assert engine is not None, "a model with runs stays loaded"
        return engine

    def states(self) -> dict[str, ModelState]:
        """Where each model stands."""
        return {name: hosted.state for name, hosted in self._hosted.items()}

    def loaded(self) -> list[str]:
        """The models that are in memory, or about to be."""
        return [name for name, hosted in self._hosted.items() if hosted.in_memory]

    def broken(self) -> dict[str, str]:
        """The models that could not be loaded when that was last tried, and why."""
        with self._lock:
            return {name: h.reason for name, h in self._hosted.items() if h.failures}

    def memory(self) -> MemoryUse:
        """What of the device's memory is in use."""
        from tenuto_engine import memory_use

        return memory_use(self.budget)

    def is_warm(self, model: str) -> bool:
        """Whether the model is in memory, or is on its way there."""
        return self._hosted[model].in_memory

    def may_claim(self, model: str) -> bool:
        """Whether the model is in memory, or room can be made for it, with a row."""
        with self._lock:
            hosted = self._hosted[model]
            return not hosted.rests(time.monotonic()) and not self._is_short(hosted)

    def has_room(self, model: str, tokens: int, *, without: Collection[Run] = ()) -> bool:
        """Whether a new row of so many tokens would have memory if the runs of `without` were gone,
        and all models that have no runs then."""
        with self._lock:
            hosted = self._hosted[model]
            if hosted.rests(time.monotonic()):
                return False
            runs = [run for run in self._runs.all() if run not in without]
            return hosted.need(tokens) <= self._left_for(hosted, runs)

    def room(self, model: str) -> int | None:
        """Most tokens of prompt and answer for which a new row has memory; None is no limit.

        What models without runs take counts as free, since they would be unloaded.
        """
        with self._lock:
            hosted = self._hosted[model]
            return hosted.tokens_in(self._left_for(hosted, self._runs.all()))

    def max_context(self, model: str) -> int | None:
        """As `room`, in a worker that runs nothing else; None where memory sets no limit, which
        is at least the model's context, or where it is not known yet."""
        with self._lock:
            hosted = self._hosted[model]
            most = hosted.tokens_in(self._usable - hosted.weight_bytes)
            context = hosted.facts.context_length if hosted.facts else None
            return None if most is None or (context or math.inf) <= most else most

    # -- a run -------------------------------------------------------------------------

    def bring(self, run: Run) -> None:
        """Pass a claimed run on as soon as its model is in memory."""
        with self._lock:
            hosted = self._hosted[run.model]
            run.row_tokens = known_tokens(run)
            hosted.used_at = time.monotonic()
            is_warm = hosted.state is ModelState.WARM
            if not is_warm:
                hosted.waiting.append(run)
                if hosted.state is not ModelState.LOADING:
                    hosted.state = ModelState.LOADING
                    self._to_load.append(hosted)
                    self._changed.notify_all()
            self._make_room()
        if is_warm:
            self._outlets.ready(run)
        else:
            self.wake()

    def admit(self, run: Run, tokens: int) -> Admission:
        """Reserve memory for a row of `tokens`, prompt and answer; its model is in memory."""
        with self._lock:
            hosted = self._hosted[run.model]
            run.row_tokens = 0
            need = hosted.need(tokens)
            if need > self._usable - hosted.weight_bytes:
                return Admission.NEVER
            if need > self._left_for(hosted, self._runs.all()):
                return Admission.WAITS
            run.row_tokens = tokens
            self._make_room()
            return Admission.FITS

    def gone(self, run: Run) -> None:
        """A run is over, and its memory free."""
        with self._lock:
            self._hosted[run.model].used_at = time.monotonic()

    def wake(self) -> None:
        """A run may have been asked to stop; one that waits for its model ends at once."""
        with self._lock:
            stopped = []
            for hosted in self._hosted.values():
                stopped += [run for run in hosted.waiting if run.stop is not None]
                hosted.waiting = [run for run in hosted.waiting if run.stop is None]
        for run in stopped:
            assert run.stop is not None
            self._outlets.end(run, end_of(run, run.stop))

    # -- the thread --------------------------------------------------------------------

    def run(self) -> None:
        """The body of the thread that loads, after `load_first`."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Load the model that is asked for longest, or look around once a second."""
        with self._changed:
            if not self._to_load:
                self._changed.wait(_IDLE_S)
            hosted = self._to_load.pop(0) if self._to_load else None
            for run in self._waiting():
                # To wait behind another load is not to be stuck.
                run.alive()
        if hosted is None:
            self._look_around()
            return
        with self.loads.of(hosted.name):
            if self._look(hosted):
                self._load(hosted)
        self._outlets.changed()

    def _waiting(self) -> Iterator[Run]:
        for hosted in self._hosted.values():
            yield from hosted.waiting

    def _look_around(self) -> None:
        """Notice files that were mended, and adapters that came or went."""
        now = time.monotonic()
        for hosted in self._hosted.values():
            if hosted.facts is not None and hosted.adapters.look_if_due(hosted.facts):
                self._outlets.changed()
            if hosted.facts is None and not hosted.rests(now):
                with self.loads.of(hosted.name):
                    found = self._look(hosted)
                if found:
                    hosted.state = ModelState.COLD
                    self._outlets.changed()

    # -- loading -----------------------------------------------------------------------

    def _look(self, hosted: Hosted) -> bool:
        """Read what the files of a model tell; whether it can be loaded, as far as that goes."""
        from tenuto_engine import EngineError, model_facts

        try:
            if not Path(hosted.path).expanduser().exists():
                self.loads.downloads()
            facts = model_facts(
                hosted.path,
                hash_cache=self._settings.hash_cache,
                **self._settings.numerics(hosted.name),
            )
            hosted.adapters.look(facts)
        except EngineError as error:
            self._failed(hosted, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - one model's trouble; the others go on
            self._failed(hosted, f"its files cannot be read: {type(error).__name__}: {error}")
            return False
        self.loads.got_on()
        with self._lock:
            hosted.learn(facts)
        if facts.weight_bytes > self._usable:
            self._failed(hosted, self._too_large(facts.weight_bytes))
            return False
        return True

    def _too_large(self, weights: int) -> str:
        return (
            f"its weights take {size(weights)}, and of the memory budget of "
            f"{size(self.budget)} models may take {size(self._usable)} "
            "(a larger --memory-budget, or a model quantized to fewer bits, would do)"
        )

    def _load(self, hosted: Hosted) -> None:
        from tenuto_engine import Engine

        self._log.info("model loading", model=hosted.name, path=hosted.path)
        began = time.monotonic()
        try:
            engine = Engine.load(
                hosted.path,
                slots=self._settings.slots,
                pipelined=self._settings.pipelined,
                hash_cache=self._settings.hash_cache,
                prefix_cache=self.prefixes,
                prefill_turn=self._turn,
                adapters=hosted.adapters.folder,
                **self._settings.numerics(hosted.name),
            )
            assert engine.geometry is not None
        except Exception as error:  # noqa: BLE001 - one model's trouble; the others go on
            # Its frames may hold half a model.
            reason = str(error) or type(error).__name__
        else:
            self._loaded(hosted, engine, time.monotonic() - began)
            return
        self._failed(hosted, reason)

    def _loaded(self, hosted: Hosted, engine: Engine, seconds: float) -> None:
        with self._lock:
            hosted.warmed(engine)
            self.loads.loaded(hosted.name)
            hosted.used_at = self.loaded_at = time.monotonic()
            self._make_room()
            waiting, hosted.waiting = hosted.waiting, []
        metrics.model_loads.labels(hosted.name, "loaded").inc()
        self._log.info(
            "model loaded",
            model=hosted.name,
            fingerprint=hosted.fingerprint,
            kv_scheme=self._settings.kv_schemes.get(hosted.name, "none"),
            seconds=round(seconds, 2),
            bytes=hosted.weight_bytes,
        )
        for run in waiting:
            self._outlets.ready(run)

    def _failed(self, hosted: Hosted, reason: str) -> None:
        with self._lock:
            hosted.broke(reason, time.monotonic(), self._settings.load_retry_seconds)
            waiting, hosted.waiting = hosted.waiting, []
        metrics.model_loads.labels(hosted.name, "failed").inc()
        if not self._starting:
            self._tell_broken(hosted)
        for run in waiting:
            error = f"model {hosted.name} cannot be loaded: {reason}"
            self._outlets.end(run, End(EndKind.RELEASED, "error", error=error))

    def _tell_broken(self, hosted: Hosted) -> None:
        retry_in = round(max(0.0, hosted.retry_at - time.monotonic()))
        self._log.error(
            "model cannot be loaded", model=hosted.name, error=hosted.reason, retry_in=retry_in
        )

    # -- memory; all of it under the lock ----------------------------------------------

    @property
    def _usable(self) -> float:
        return self.budget * (1 - RESERVE)

    def _rows(self, runs: Iterable[Run]) -> int:
        return sum(self._hosted[run.model].need(run.row_tokens) for run in runs)

    def _is_short(self, hosted: Hosted) -> bool:
        """Whether there is no memory for the model, or for a row of it."""
        left = self._left_for(hosted, self._runs.all())
        return left < 0 or hosted.tokens_in(left) == 0

    def _left_for(self, hosted: Hosted, runs: Collection[Run]) -> float:
        """Bytes for a new row of a model beside these runs, if all models that have none of them
        but itself were unloaded."""
        pinned = sum(
            each.weight_bytes
            for each in self._hosted.values()
            if each is hosted or (each.in_memory and not _is_idle(each, runs))
        )
        return self._usable - pinned - self._rows(runs)

    def _make_room(self) -> None:
        """Unload what has no runs, the least recently used first, until the rest fits."""
        runs = self._runs.all()
        while self._rows(runs) + self._weights() > self._usable:
            idle = [each for each in self._hosted.values() if _is_idle(each, runs)]
            if not idle:
                break
            self._unload(min(idle, key=lambda each: each.used_at))

    def _weights(self) -> int:
        return sum(each.weight_bytes for each in self._hosted.values() if each.in_memory)

    def _unload(self, hosted: Hosted) -> None:
        from tenuto_engine import release_memory

        before = self.memory().active
        engine = hosted.cooled()
        del engine
        release_memory()
        if before - self.memory().active < hosted.weight_bytes / 2:
            # Something refers to it in a circle.
            gc.collect()
            release_memory()
        self._log.info("model unloaded", model=hosted.name, bytes=hosted.weight_bytes)


def _is_idle(hosted: Hosted, runs: Iterable[Run]) -> bool:
    return hosted.state is ModelState.WARM and all(run.model != hosted.name for run in runs)


def known_tokens(run: Run) -> int:
    """Tokens of the row that a claimed run needs, as far as the claim tells: of the prompt, if it
    was ever tokenized, and of the longest answer."""
    try:
        spec = unpack_spec(run.claim.spec)
        if run.claim.prompt_ids is not None:
            return len(stored_ids(run.claim.prompt_ids)) + spec.max_tokens
    except ProtocolError:
        # The preparer says what is wrong with it.
        return 0
    return spec.least_prompt_tokens + spec.max_tokens
