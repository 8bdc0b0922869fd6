"""`Rooms`: everything that works in a child, wired together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from tenuto_client import Keys
from tenuto_client._announce import MODEL_LIMITS
from tenuto_engine import CheckpointStore, CheckpointWriteError, CheckpointWriter, Durable

from . import _metrics as metrics
from ._announcer import Announcer, Namespace
from ._checkpoints import Checkpoints, engine_tokens
from ._claimer import Claimer, Served
from ._collector import Collector
from ._decoder import DecodeThread
from ._depths import QueueDepths
from ._housekeeper import Housekeeper
from ._identity import Identity, dead_sibling
from ._job_limits import JobLimits
from ._judge import Judge
from ._late_ends import LateEnds
from ._lease import LeaseKeeper
from ._loads import Loads, note_of
from ._logging import get_log
from ._models import ModelPool, PoolOutlets
from ._nudges import NudgeListener
from ._other_workers import OtherWorkers
from ._owners import find_owners
from ._preparer import Outlets, Preparer
from ._publisher import Publisher
from ._redis import Outage, Patience, connect
from ._run import EndKind, Run, Runs, Stop, end_words
from ._scripts import JobScripts
from ._served import ServedNote
from ._settings import WorkerSettings
from ._tickets import Tickets

if TYPE_CHECKING:
    from tenuto_engine import MemoryUse


class Rooms:
    """The parts of a worker.

    In this order: construct, `load` (on the decode thread), `open`, run `threads()` and `tickets`;
    `drain` ends the work.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        identity: Identity,
        outage: Outage,
        patience: Patience,
        *,
        last_death: str = "",
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._outage = outage
        self._patience = patience
        self._last_death = last_death
        self._log = get_log()
        self._keys = Keys(settings.namespace)
        self.runs = Runs()
        self.runs.on_gone = self._run_gone
        self.pool = self._make_pool()
        self._served: dict[str, Served] = {}
        self._client = self._connect()
        self._namespace = Namespace(self._client, self._keys)
        self.collector = self._make_collector()
        self._announcer = Announcer(
            self._client,
            self._keys,
            settings,
            identity,
            self.runs,
            self._namespace,
            self.collector.budget,
            broken=self.pool.broken,
            loaded=self.pool.loaded,
            last_death=last_death,
            note=ServedNote(settings.data_dir, identity.name, settings.redis_url),
            adapters=self.pool.adapters,
            own_limits=lambda model: {
                name: limit
                for name in MODEL_LIMITS
                if (limit := self._own_limit(name, model)) is not None
            },
        )
        self.writer = CheckpointWriter(
            on_saved=self._checkpoint_saved,
            on_error=self._checkpoint_failed,
        )
        self.publisher = self._make_publisher()
        self.decoder = DecodeThread(settings, self.runs, self.publisher, self.writer)
        self.lease = self._make_lease_keeper()
        self.housekeeper = self._make_housekeeper()
        self.depths = self._make_depths()

    def load(self) -> None:
        """Load the models that fit, on the decode thread.

        Raises:
            ConfigError: none can be loaded.
        """
        self.pool.load_first(self._last_death)
        self._describe_models()

    def open(self) -> None:
        """Build what needs the loaded models, and tell the world of them."""
        self.preparer = self._make_preparer()
        self.claimer = self._make_claimer()
        self.nudges = NudgeListener(
            self._connect(),
            self._keys,
            on_queued=self.claimer.poke,
            on_cancel=lambda job_id: self.lease.poke() if self.runs.has(job_id) else None,
        )
        self.tickets = Tickets(
            self._settings.redis_url,
            self._keys,
            self._settings.models,
            poke=self.claimer.poke,
            has_slot=self.claimer.has_slot,
        )
        # It also learns the namespace id, without which nothing may be saved.
        self._patiently(self._announcer.announce)
        self._patiently(self.collector.report_lost)

    def threads(self) -> dict[str, Callable[[], None]]:
        """The bodies of the threads, by name; the decode thread is not among them."""
        bodies = {
            "publisher": self.publisher.run,
            "lease": self.lease.run,
            "models": self.pool.run,
            "preparer": self.preparer.run,
            "housekeeper": self.housekeeper.run,
            "nudges": self.nudges.run,
            "claimer": self.claimer.run,
        }
        if self._settings.metrics_port is not None:
            bodies["depths"] = self.depths.run
        return bodies

    def memory_use(self) -> MemoryUse:
        """What the models and their caches take of the device's memory."""
        return self.pool.memory()

    def trouble(self) -> str:
        """What has stood still for too long; "" if nothing has."""
        if load := self.pool.loads.trouble(self._settings.limit("loading")):
            return load
        now = time.monotonic()
        silent = now - self.decoder.beat
        limit = max(self._settings.limit("prefill"), self._settings.limit("decode"))
        if silent > limit:
            return f"the decode thread has not moved for {silent:.0f} s"
        for run in self.runs.all():
            still = now - run.beat
            if still > self._settings.limit(run.phase.value):
                return f"job {run.job_id} made no progress in {run.phase.value} for {still:.0f} s"
        return ""

    def drain(self) -> None:
        """Checkpoint every run, hand it back, and wait until that is known, for the grace time."""
        end = time.monotonic() + self._settings.grace_seconds
        self.claimer.stop()
        self._stop_all()
        # One that was being claimed meanwhile.
        self.claimer.wait_ended(max(0.0, end - time.monotonic()))
        self._stop_all()
        if not self.runs.wait_empty(max(0.0, end - time.monotonic())):
            jobs = [run.job_id for run in self.runs.all()]
            self._log.warning("grace time over, leases will run out", jobs=jobs)
        self.writer.close(max(0.0, end - time.monotonic()))
        with contextlib.suppress(redis.RedisError, OSError):
            self._announcer.retract()

    def _stop_all(self) -> None:
        for run in self.runs.all():
            run.ask_to_stop(Stop.DRAIN)
        self.pool.wake()
        self.decoder.wake()

    # -- building ----------------------------------------------------------------------

    def _connect(self, timeout: float = 5.0) -> redis.Redis:
        return connect(self._settings.redis_url, timeout=timeout)

    def _make_pool(self) -> ModelPool:
        outlets = PoolOutlets(
            ready=lambda run: self.preparer.submit(run),
            end=lambda run, end: self.publisher.end(run, end),
            changed=self._models_changed,
        )
        loads = Loads(note_of(self._settings.data_dir, self._identity.name))
        return ModelPool(self._settings, self.runs, outlets, loads)

    def _make_publisher(self) -> Publisher:
        return Publisher(
            JobScripts(self._connect(), self._keys),
            self.runs,
            self._settings,
            self._outage,
            on_stop=lambda run: self.decoder.wake(),
            on_ended=self._job_ended,
            on_trusted=lambda run: self.claimer.poke(),
        )

    def _make_collector(self) -> Collector:
        client = self._connect()
        judge = Judge(client, self._keys, self._identity.reach, self.runs.has)
        return Collector(
            self._settings.checkpoints_dir,
            self._settings.disk_budget,
            judge,
            self._outage,
            partial(
                find_owners,
                self._settings.data_dir,
                self._settings.redis_url,
                client,
                self._keys,
            ),
            LateEnds(client, self._keys, judge).note,
        )

    def _make_lease_keeper(self) -> LeaseKeeper:
        # A silent server must not keep the one thread that may not be late from trying again.
        timeout = max(0.5, min(5.0, self._settings.lease_seconds * 0.4))
        return LeaseKeeper(
            JobScripts(self._connect(timeout), self._keys),
            self.runs,
            self._settings,
            self._outage,
            holder=self._identity.name,
            on_stop=self._run_must_stop,
        )

    def _make_housekeeper(self) -> Housekeeper:
        client = self._connect()
        return Housekeeper(
            JobScripts(client, self._keys),
            client,
            self._keys,
            self._settings,
            self._outage,
            collector=self.collector,
            announce=self._announcer.announce,
            is_dead=partial(dead_sibling, self._settings.data_dir, self._identity),
        )

    def _make_depths(self) -> QueueDepths:
        return QueueDepths(
            JobScripts(self._connect(), self._keys),
            self._settings.models,
            self._outage,
            every=self._settings.depth_seconds,
        )

    def _make_preparer(self) -> Preparer:
        client = self._connect()
        others = OtherWorkers(client, self._keys, self._identity.name, self._own_limit)
        return Preparer(
            JobScripts(client, self._keys),
            client,
            self._keys,
            self._settings,
            self._patience,
            engine_of=self.pool.engine,
            admit=self.pool.admit,
            adapter_gone=self.pool.look_at_adapters,
            others=others,
            limits=JobLimits(self._settings, others),
            checkpoints=Checkpoints(
                self._settings.checkpoints_dir, self._keys.namespace, self.collector.budget
            ),
            reach=self._identity.reach,
            outlets=Outlets(self.decoder.start, self.publisher.end, self.writer.submit),
        )

    def _make_claimer(self) -> Claimer:
        return Claimer(
            JobScripts(self._connect(), self._keys),
            self.runs,
            self._settings,
            self._outage,
            served=self._served,
            pool=self.pool,
            holder=self._identity.name,
            reach=self._identity.reach,
            on_claim=self.pool.bring,
            on_stop=self._runs_make_way,
        )

    # -- what one room tells another ---------------------------------------------------

    def _models_changed(self) -> None:
        self._describe_models()
        self.claimer.poke()

    def _describe_models(self) -> None:
        for name in self._settings.models:
            self._served[name] = Served(
                name,
                self.pool.fingerprint(name),
                self._settings.slots,
                self.pool.adapters(name),
            )
        self._announcer.describe(self.pool.facts)

    def _own_limit(self, limit: str, model: str) -> int | None:
        if limit == "max_context":
            return self.pool.max_context(model)
        return self._settings.max_prompt if limit == "max_prompt" else self._settings.max_tokens

    def _run_gone(self, run: Run) -> None:
        self.pool.gone(run)
        self.claimer.poke()

    def _runs_make_way(self) -> None:
        self.decoder.wake()
        self.pool.wake()

    def _run_must_stop(self, run: Run) -> None:
        self.pool.wake()
        self.decoder.wake()
        self.publisher.wake()

    def _checkpoint_saved(self, store: CheckpointStore, durable: Durable) -> None:
        run = self._run_of(store)
        if run is not None:
            run.durable, run.durable_at = durable.tokens, time.monotonic()
            run.checkpoint_error = ""

    def _checkpoint_failed(self, store: CheckpointStore, error: CheckpointWriteError) -> None:
        run = self._run_of(store)
        if run is not None:
            # What was durable may be gone with its folder.
            run.durable = min(run.durable, store.durable.tokens)
            run.checkpoint_error = error.reason
        metrics.checkpoint_errors.inc()
        log = get_log(job=store.folder.name, epoch=store.epoch) if run is None else run.log
        log.warning("checkpoint not saved", error=str(error))

    def _run_of(self, store: CheckpointStore) -> Run | None:
        run = self.runs.get(store.folder.name)
        return run if run is not None and run.store is store else None

    def _job_ended(self, run: Run, state: str) -> None:
        """Have it written down beside the checkpoints. Nobody waits: Redis has the end."""
        if run.store is not None:
            keep = state != EndKind.COMPLETED
            tokens = engine_tokens(run.tokens)
            self.writer.finish(run.store, end_words(run, state), tokens, keep_caches=keep)

    def _patiently(self, call: Callable[[], Any]) -> Any:
        return self._patience(call, until=lambda: False, beat=lambda: None)
