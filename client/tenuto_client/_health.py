"""What can be wrong with a data dir, a server and its jobs."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ._announce import ALIVE_S, ModelInfo, WorkerInfo, unpack_model, unpack_worker
from ._config import Settings
from ._endpoint import Endpoint, address_of
from ._errors import ServerStartFailed, ServerUnavailable, TenutoError
from ._findings import Finding, Level, count, size
from ._limits_health import check_limits
from ._outlook import EXACT_WAIT_S, waits_for_its_own, without_lease
from ._redis import Connection
from ._server import find_server
from ._server_home import FULL_DISK_BYTES, ServerHome, server_binary
from .keys import Keys

_LOW_DISK: Final = 1 << 30
_NO_DISK: Final = 100 << 20
_OLDEST: Final = (6, 2)
_MOST_RUNNING: Final = 10_000
_MOST_WAITING: Final = 63


def check_data_dir(settings: Settings) -> Iterator[Finding]:
    """Whether the data dir can be made and written, and has room."""
    folder = settings.data_dir
    existing = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if (reason := _why_not_writable(existing)) is not None:
        yield Finding(
            Level.PROBLEM,
            "data dir",
            f"{folder} cannot be {'written' if existing == folder else 'made'}: {reason}",
            f"chmod u+rwx {existing}   or name another: --data-dir, TENUTO_DATA_DIR",
        )
        return
    there = "" if existing == folder else " (not made yet)"
    yield Finding(Level.OK, "data dir", f"{folder}{there}")
    free = shutil.disk_usage(existing).free
    level = Level.PROBLEM if free < _NO_DISK else Level.WARNING if free < _LOW_DISK else Level.OK
    fix = None if level is Level.OK else f"df -h {existing}   and make room for checkpoints"
    yield Finding(level, "disk", f"{size(free)} free", fix)


def _why_not_writable(folder: Path) -> str | None:
    """Tried, since permissions are not all: some file systems refuse even root.

    A full disk is another finding.
    """
    try:
        Path(tempfile.mkdtemp(prefix=".tenuto-", dir=folder)).rmdir()
    except OSError as error:
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return None


async def check_server(settings: Settings) -> list[Finding]:
    """Whether the server answers, keeps what it acknowledges, and has work that nobody does."""
    try:
        url = settings.redis_url or find_server(settings.data_dir)
    except TenutoError as error:
        return [Finding(Level.PROBLEM, "server", error.message, error.hint)]
    if url is None:
        return [_idle_server(settings.data_dir)]
    connection = Connection(url, settings.data_dir, retry_for=0)
    try:
        keys = Keys(settings.namespace)
        findings = await _look(connection, url, keys)
        return findings + await _lost_jobs(connection, keys, settings.data_dir / "checkpoints")
    except ServerUnavailable as error:
        fix = "tenuto server" if settings.redis_url is None else Endpoint.parse(url).probe
        return [Finding(Level.PROBLEM, "server", error.message, f"{fix}   tells more")]
    finally:
        await connection.close()


def _idle_server(data_dir: Path) -> Finding:
    says = "the embedded server does not run"
    home = ServerHome.of(data_dir)
    if home.folder.exists() and shutil.disk_usage(home.folder).free < FULL_DISK_BYTES:
        fix = f"make room on the disk, but leave {home.folder / 'aof'} alone: it holds the jobs"
        return Finding(Level.PROBLEM, "server", f"{says}, and cannot: its disk is full", fix)
    try:
        server_binary()
    except ServerStartFailed as error:
        return Finding(Level.PROBLEM, "server", error.message, error.hint)
    return Finding(Level.OK, "server", f"{says}; it starts with the first submit or worker")


async def _look(connection: Connection, url: str, keys: Keys) -> list[Finding]:
    info = await connection.call("INFO")
    findings = [_version(info, url), *await _settings(connection, info)]
    workers = await _workers(connection, keys)
    findings.append(await _namespace(connection, keys))
    findings += _worker_findings(workers)
    findings += await _queues(connection, keys, workers)
    findings += await check_limits(connection, keys)
    findings += await _running(connection, keys, workers)
    return findings


def _version(info: Mapping[str, Any], url: str) -> Finding:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info["redis_version"])
    says = f"{name} {version} at {address_of(url)}"
    numbers = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if numbers < _OLDEST:
        return Finding(Level.PROBLEM, "server", says, "upgrade it to 6.2 or later")
    return Finding(Level.OK, "server", says)


async def _settings(connection: Connection, info: Mapping[str, Any]) -> list[Finding]:
    try:
        appendonly = await _setting(connection, "appendonly")
        appendfsync = await _setting(connection, "appendfsync")
        policy = await _setting(connection, "maxmemory-policy")
    except ServerUnavailable as error:
        if error.transient:
            raise
        says = "its settings cannot be read; see to appendonly, appendfsync and maxmemory-policy"
        return [Finding(Level.WARNING, "durability", says)]
    return [_durability(appendonly, appendfsync, info), _memory(policy, info)]


async def _setting(connection: Connection, name: str) -> str:
    reply = await connection.call("CONFIG", "GET", name)
    # A list or a map, by the version of the protocol.
    value: bytes | str = reply[1] if isinstance(reply, list) else next(iter(reply.values()))
    return value.decode() if isinstance(value, bytes) else value


def _durability(appendonly: str, appendfsync: str, info: Mapping[str, Any]) -> Finding:
    says = f"appendonly {appendonly}, appendfsync {appendfsync}"
    if appendonly != "yes":
        return Finding(
            Level.PROBLEM,
            "durability",
            f"{says}: a crash of the server loses jobs",
            "redis-cli CONFIG SET appendonly yes   and write it into redis.conf",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        says = f"{says}, and its last write failed"
        return Finding(Level.PROBLEM, "durability", says, "look at its disk and its log")
    if appendfsync != "always":
        return Finding(
            Level.WARNING,
            "durability",
            f"{says}: a power loss may lose the last seconds",
            "redis-cli CONFIG SET appendfsync always   or submit with wait_fsync",
        )
    return Finding(Level.OK, "durability", says)


def _memory(policy: str, info: Mapping[str, Any]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    bound = f" of {most >> 20}" if most else ""
    says = f"{used >> 20}{bound} MiB used, maxmemory-policy {policy}"
    if policy != "noeviction":
        return Finding(
            Level.PROBLEM,
            "memory",
            f"{says}: it may throw jobs away",
            "redis-cli CONFIG SET maxmemory-policy noeviction   and write it into redis.conf",
        )
    if most and used > 0.9 * most:
        fix = "raise maxmemory, or delete old jobs: tenuto list"
        return Finding(Level.WARNING, "memory", f"{says}: submits will soon be refused", fix)
    return Finding(Level.OK, "memory", says)


async def _namespace(connection: Connection, keys: Keys) -> Finding:
    found = await connection.call("GET", keys.namespace_id())
    says = f"{keys.namespace} has no id yet: no worker has run on what is in it now"
    if found is not None:
        says = f"{keys.namespace} has id {found.decode()}"
    return Finding(Level.OK, "namespace", says)


def _jobs_on_disk(root: Path) -> list[str]:
    try:
        return sorted(path.name for path in root.iterdir() if path.is_dir() and any(path.iterdir()))
    except OSError:
        return []


async def _lost_jobs(connection: Connection, keys: Keys, root: Path) -> list[Finding]:
    """Jobs with checkpoints here that Redis does not have, though it did not remove them."""
    jobs = _jobs_on_disk(root)
    known = await connection.pipeline([("EXISTS", keys.job(job)) for job in jobs])
    removed = await connection.pipeline([("ZSCORE", keys.removed(), job) for job in jobs])
    both = zip(known, removed, strict=True)
    lost = sum(not is_known and when is None for is_known, when in both)
    if not lost:
        return []
    jobs_lost = f"{count(lost, 'job')} with checkpoints in {root}"
    says = f"{jobs_lost} that Redis does not have, and did not remove"
    return [Finding(Level.WARNING, "lost", says, "tenuto checkpoints recover   puts them back")]


async def _workers(connection: Connection, keys: Keys) -> list[WorkerInfo]:
    seconds, _ = await connection.call("TIME")
    entries = await connection.call("HGETALL", keys.workers())
    known = [unpack_worker(name.decode(), value) for name, value in sorted(entries.items())]
    return [each for each in known if int(seconds) - each.seen_at <= ALIVE_S]


def _worker_findings(workers: list[WorkerInfo]) -> Iterator[Finding]:
    if not workers:
        fix = "tenuto worker --model NAME=PATH_OR_REPO"
        yield Finding(Level.WARNING, "workers", "none is alive, so no job runs", fix)
    for worker in workers:
        device = f" on {worker.device}" if worker.device else ""
        yield Finding(
            Level.OK,
            "worker",
            f"{worker.name}{device}: {', '.join(worker.models)}; "
            f"{worker.running} of {worker.slots} slots in use",
        )
        if worker.last_death is not None:
            fix = "its log has the rest; jobs went on in the process that followed"
            says = f"the process of {worker.name} before this one died: {worker.last_death}"
            yield Finding(Level.WARNING, "worker", says, fix)
        for model, reason in worker.broken.items():
            fix = "mend or replace its files; the worker tries again by itself"
            says = f"{worker.name} cannot load model {model}: {reason}"
            yield Finding(Level.PROBLEM, "model", says, fix)


async def _queues(connection: Connection, keys: Keys, workers: list[WorkerInfo]) -> list[Finding]:
    findings = []
    for name, packed in sorted((await connection.call("HGETALL", keys.models())).items()):
        model = unpack_model(name.decode(), packed)
        lanes = await connection.call("ZRANGE", keys.queue(model.name), 0, -1)
        names = [keys.lane(model.name, lane.decode()) for lane in lanes]
        queued = sum(await connection.pipeline([("ZCARD", each) for each in names]))
        if not queued:
            continue
        says = f"{model.name}: {count(queued, 'job')} {'waits' if queued == 1 else 'wait'}"
        if serving := [worker for worker in workers if model.name in worker.models]:
            says += await _held_back(connection, keys, names, serving, model)
            findings.append(Finding(Level.OK, "queue", says))
        else:
            says = f"{says}, and no worker serves it"
            fix = f"tenuto worker --model {model.name}=PATH_OR_REPO"
            findings.append(Finding(Level.PROBLEM, "queue", says, fix))
    return findings


async def _held_back(
    connection: Connection,
    keys: Keys,
    lanes: list[str],
    workers: list[WorkerInfo],
    model: ModelInfo,
) -> str:
    """What to add when jobs wait for workers of their own, though others have free slots."""
    fields = ("fingerprint", "reach", "queued_at", "tokens")
    ids = await connection.pipeline([("ZRANGE", lane, 0, _MOST_WAITING) for lane in lanes])
    (seconds, _), *found = await connection.pipeline(
        [("TIME",)] + [("HMGET", keys.job(i.decode()), *fields) for lane in ids for i in lane]
    )
    jobs = [
        {name: value.decode() for name, value in zip(fields, values, strict=True) if value}
        for values in found
    ]
    held = sum(waits_for_its_own(job, int(seconds), workers, model) for job in jobs)
    if not held:
        return ""
    return (
        f", {held} of them up to {EXACT_WAIT_S:.0f} s (--exact-wait) for a worker of its own "
        "geometry and checkpoints"
    )


async def _running(connection: Connection, keys: Keys, workers: list[WorkerInfo]) -> list[Finding]:
    ids = [i.decode() for i in await connection.call("ZRANGE", keys.running(), 0, _MOST_RUNNING)]
    lost = await without_lease(connection, keys, ids)
    if not lost:
        return [Finding(Level.OK, "jobs", f"{len(ids) or 'none'} running")]
    has = "has" if len(lost) == 1 else "have"
    says = f"{len(lost)} of {count(len(ids), 'running job')} {has} no lease: {', '.join(lost[:3])}"
    if workers:
        return [Finding(Level.WARNING, "jobs", f"{says}; a worker will take them over")]
    fix = "tenuto worker --model NAME=PATH_OR_REPO   takes them over"
    return [Finding(Level.PROBLEM, "jobs", says, fix)]
