"""`WorkerSettings`: every knob of a worker, with its default and unit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

from tenuto_client._sizes import UNITS, parse_size

from ._errors import ConfigError

VERSION: Final = version("tenuto-worker")
"""Of this distribution; its files are read once, as an upgrade may take them away meanwhile."""
# Times `stall_seconds`: these wait for the disk and for each other, the others compute.
_PHASE_FACTORS: Mapping[str, float] = {"loading": 5.0, "restore": 5.0, "ending": 2.5}
_LEAST_BUDGET = 16 * 2**20
_MOST_PORTS = 65535
SIZE = f"a size such as 2GiB or 500MB ({UNITS}), or 0"
MEMORY = f"a size such as 20GiB or 500MB ({UNITS}), or none"
BUDGET = f"a size of at least 16MiB, such as 20GiB or 500MB ({UNITS}), or none for no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker behaves. Durations are seconds.

    Attributes:
        models: name under which a model is served -> its folder or hub name.
        redis_url: where the jobs are; never logged with its password.
        embedded: the URL is that of the data dir's own server, which the worker starts again
            when it is gone.
        data_dir: locks and checkpoints live here.
        namespace: prefix of every Redis key.
        slots: how many jobs of a model run at once.
        chunk_size: tokens of a prefill chunk; None lets the engine choose by device.
        pipelined: decode ahead of the host; None lets the engine choose by device.
        kv_schemes: name of a model -> the text of the scheme by which its KV is quantized; others
            have full precision.
        compiled: names of the models whose decode steps are compiled.
        adapter_folders: name of a model -> the folder of its LoRA adapters; others have none.
        max_prompt, max_tokens: a job with more is left to other workers; None is no limit.
        disk_budget: bytes that checkpoints may take; infinite is no limit, None is what they take
            and four fifths of what is free.
        memory_budget: bytes that models and their caches may take of the device's memory; infinite
            is no limit, None lets the engine choose by device.
        prefix_memory, prefix_disk: bytes of host memory, beside `memory_budget`, and of the data
            dir that the KV of prompts' beginnings may take; 0 is off.
        load_retry_seconds: after how long a model that could not be loaded is tried again; twice as
            long each time, up to five minutes.
        memory_wait_seconds: how long a job waits for memory that other models' jobs take by turns,
            before they have to let it.
        checkpoint_every_tokens, checkpoint_every_seconds: whichever comes first.
        lease_seconds: how long a silent attempt keeps its job.
        renew_seconds: how often leases are renewed; None is three tenths of a lease.
        poll_seconds: how often queues are looked at when nothing woke the worker.
        reap_seconds: how often jobs without a lease are looked for.
        chores_seconds: how often tickets are mended and ended jobs expired.
        gc_seconds: how often checkpoints of jobs that are gone are removed.
        preempt_wait_seconds: how long a job of a higher priority waits for a slot before a running
            one makes way for it.
        preempt_hold_seconds: how long an attempt goes on at least before it makes way; doubled,
            up to 16 times as much, with each time that its job made way before.
        exact_wait_seconds: how long a job that has begun waits for workers of its geometry.
        widest_seconds: for how long jobs wait for a worker that takes as much as the widest one did
            that has gone, before they are refused by what the others take.
        grace_seconds: how long a drain may take.
        publish_seconds, publish_tokens: tokens are packed until one of the two is reached.
        max_unsent_tokens: decoding pauses when a job has this many tokens that Redis lacks.
        stall_seconds: how long prefill, catch-up and decode may go without progress; loading and
            restore five times as long, an end two and a half times. What stands still for longer
            has its child end, and start anew.
        phase_limits: how long an attempt may go without progress in each phase, before its
            lease is left to run out.
        restart_pause_max: longest pause before a child that keeps dying is started again.
        metrics_port: where metrics, health and readiness are served; None is nowhere, 0 takes a
            free port.
        metrics_host: the address of this machine that they are served on.
        depth_seconds: how often the metrics look at the queues.
        log_format: "json", "pretty", or "auto" (pretty on a terminal).
    """

    models: Mapping[str, str]
    redis_url: str
    data_dir: Path
    embedded: bool = False
    namespace: str = "tenuto:"
    slots: int = 1
    chunk_size: int | None = None
    pipelined: bool | None = None
    kv_schemes: Mapping[str, str] = field(default_factory=dict)
    compiled: Sequence[str] = ()
    adapter_folders: Mapping[str, str] = field(default_factory=dict)
    max_prompt: int | None = None
    max_tokens: int | None = None
    disk_budget: float | None = None
    memory_budget: float | None = None
    prefix_memory: float = 256 * 2**20
    prefix_disk: float = 2**30
    load_retry_seconds: float = 10.0
    memory_wait_seconds: float = 30.0
    checkpoint_every_tokens: int = 256
    checkpoint_every_seconds: float = 2.0
    lease_seconds: float = 10.0
    renew_seconds: float | None = None
    poll_seconds: float = 1.0
    reap_seconds: float = 1.0
    chores_seconds: float = 5.0
    gc_seconds: float = 60.0
    exact_wait_seconds: float = 30.0
    widest_seconds: float = 300.0
    preempt_wait_seconds: float = 2.0
    preempt_hold_seconds: float = 5.0
    grace_seconds: float = 30.0
    publish_seconds: float = 0.005
    publish_tokens: int = 16
    max_unsent_tokens: int = 4096
    stall_seconds: float = 120.0
    phase_limits: Mapping[str, float] = field(default_factory=dict)
    restart_pause_max: float = 30.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    depth_seconds: float = 5.0
    log_format: str = "auto"

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("--model", "no model is given", hint="--model NAME=PATH_OR_REPO")
        for name in self.compiled:
            if name in self.kv_schemes:
                raise ConfigError(f"--compiled {name}", "cannot be with --kv of the same model")
        _at_least("--slots", self.slots, 1)
        _at_least("--checkpoint-every", self.checkpoint_every_tokens, 1)
        _at_least("--checkpoint-seconds", self.checkpoint_every_seconds, 0.0)
        _at_least("--lease-seconds", self.lease_seconds, 0.5)
        _at_least("--exact-wait", self.exact_wait_seconds, 0.0)
        _at_least("--stall-seconds", self.stall_seconds, 1.0)
        _at_least("--restart-pause", self.restart_pause_max, 0.0)
        _at_least("--grace-seconds", self.grace_seconds, 0.0)
        _at_least("--max-unsent-tokens", self.max_unsent_tokens, self.publish_tokens)
        if self.disk_budget is not None and not self.disk_budget > 0:
            raise ConfigError("--disk-budget", f"must be above 0, is {self.disk_budget:g}")
        if self.memory_budget is not None and not self.memory_budget > 0:
            raise ConfigError("--memory-budget", f"must be above 0, is {self.memory_budget:g}")
        _at_least("--prefix-memory", self.prefix_memory, 0)
        _at_least("--prefix-disk", self.prefix_disk, 0)
        for flag in ("--chunk-size", "--max-prompt", "--max-tokens"):
            value = getattr(self, flag.removeprefix("--").replace("-", "_"))
            if value is not None:
                _at_least(flag, value, 1)
        if self.metrics_port is not None and not 0 <= self.metrics_port <= _MOST_PORTS:
            raise ConfigError(
                "--metrics-port", f"must be 0 to {_MOST_PORTS}, is {self.metrics_port}"
            )
        if self.log_format not in ("auto", "json", "pretty"):
            raise ConfigError("--log-format", f"{self.log_format!r} is not auto, json or pretty")

    @property
    def lease_ms(self) -> int:
        return round(self.lease_seconds * 1000)

    @property
    def renew_every(self) -> float:
        return self.renew_seconds or self.lease_seconds * 0.3

    @property
    def hash_cache(self) -> Path:
        """Remembers the hashes of model files."""
        return self.data_dir / "model-hashes.json"

    @property
    def prefixes_dir(self) -> Path:
        """Holds the KV of prompts' beginnings, which is only ever a saving of time."""
        return self.data_dir / "prefixes"

    @property
    def checkpoints_dir(self) -> Path:
        """Holds one folder for each job."""
        return self.data_dir / "checkpoints"

    def numerics(self, model: str) -> dict[str, Any]:
        """What decides a model's geometry here, as the engine's functions take it."""
        return {
            "chunk_size": self.chunk_size,
            "kv_scheme": self.kv_schemes.get(model),
            "compiled": model in self.compiled,
        }

    def limit(self, phase: str) -> float:
        """How many seconds an attempt may go without progress in a phase."""
        default = self.stall_seconds * _PHASE_FACTORS.get(phase, 1.0)
        return self.phase_limits.get(phase, default)

    def to_json(self) -> str:
        """One line, for the child."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(line)
        made = {"data_dir": Path(values["data_dir"]), "compiled": tuple(values["compiled"])}
        return cls(**values | made)


def size(text: str) -> float:
    """Bytes of `20GiB`, `500MB`, `1024` or `none`, which is infinite.

    Raises:
        ValueError: it is none of these.
    """
    if text.strip().lower() == "none":
        return math.inf
    return parse_size(text)


def disk_budget(text: str) -> float:
    """A `size` in which the checkpoints of a job have room.

    Raises:
        ValueError: it is too small, or none.
    """
    try:
        found = size(text)
    except ValueError:
        found = 0.0
    if found < _LEAST_BUDGET:
        raise ValueError(f"{text!r} is not {BUDGET}")
    return found


def _at_least(flag: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(flag, f"must be at least {low:g}, is {value:g}")
    if math.isinf(value):
        raise ConfigError(flag, "must be finite")
