"""What can be wrong with a data dir, a server and its jobs."""

from __future__ import annotations

import asyncio
import errno
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ._announce import ALIVE_S, ModelInfo, WorkerInfo, unpack_model, unpack_worker
from ._config import Settings
from ._endpoint import Endpoint, address_of, once_asynchronously
from ._errors import ServerStartFailed, ServerUnavailable, TenutoError
from ._findings import Finding, Level, count, size
from ._limits_health import check_limits
from ._outlook import EXACT_WAIT_S, waits_for_its_own, without_lease
from ._redis import Connection
from ._server import find_server
from ._server_home import FULL_DISK_BYTES, ServerHome, server_binary
from ._to_type import RedisCli, tenuto_lines, with_flags
from .keys import Keys

_LOW_DISK: Final = 1 << 30
_NO_DISK: Final = 100 << 20
_ANSWER_S: Final = 2.0
_OLDEST: Final = (6, 2)
_MOST_RUNNING: Final = 10_000
_MOST_WAITING: Final = 63
_MOST_ADAPTERS: Final = 8


def check_data_dir(settings: Settings) -> Iterator[Finding]:
    """Whether the data dir can be made and written, and has room."""
    folder = settings.data_dir
    existing = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if (reason := _why_not_writable(existing)) is not None:
        yield Finding(
            Level.PROBLEM,
            "data dir",
            f"{folder} cannot be {'written' if existing == folder else 'made'}: {reason}",
            shlex.join(["chmod", "u+rwx", str(existing)]),
            "or name another: --data-dir, TENUTO_DATA_DIR",
        )
        return
    there = "" if existing == folder else " (not made yet)"
    yield Finding(Level.OK, "data dir", f"{folder}{there}")
    free = shutil.disk_usage(existing).free
    level = Level.PROBLEM if free < _NO_DISK else Level.WARNING if free < _LOW_DISK else Level.OK
    says = f"{size(free)} free"
    if level is Level.OK:
        yield Finding(level, "disk", says)
    else:
        fix = shlex.join(["df", "-h", str(existing)])
        yield Finding(level, "disk", says, fix, "make room for checkpoints")


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
        return [Finding(Level.PROBLEM, "server", error.message, note=error.hint)]
    if url is None:
        return [_idle_server(settings.data_dir)]
    connection = Connection(url, settings.data_dir, retry_for=0)
    try:
        await _greet(url, settings.data_dir)
        return await _look(connection, url, settings)
    except ServerUnavailable as error:
        return [_unreachable(error, url, settings)]
    finally:
        await connection.close()


async def _greet(url: str, data_dir: Path) -> None:
    """One try, and not for long: whoever asks what is wrong is not to wait for it.

    Raises:
        ServerUnavailable: no answer, or a refusal.
    """
    patience = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S}
    connection = Connection(url, data_dir, retry_for=0, **patience, retry=once_asynchronously())
    try:
        await asyncio.wait_for(connection.once("PING"), _ANSWER_S + 0.5)
    except TimeoutError:
        says = f"no answer from {address_of(url)} within {_ANSWER_S:g} s"
        raise ServerUnavailable(says, transient=True) from None
    finally:
        await connection.close()


def _unreachable(error: ServerUnavailable, url: str, settings: Settings) -> Finding:
    if settings.redis_url is None:
        more = tenuto_lines(settings, "server", note="tells more")
        return Finding(Level.PROBLEM, "server", error.message, **more)
    endpoint = Endpoint.parse(url)
    if not error.transient:
        has = "a password, which is not shown" if endpoint.has_password else "no password"
        note = "\n".join(filter(None, (error.hint, f"the URL has {has}")))
        return Finding(Level.PROBLEM, "server", error.message, note=note)
    more = RedisCli(endpoint).advice(endpoint.probe, note="tells more")
    return Finding(Level.PROBLEM, "server", error.message, **more)


def _idle_server(data_dir: Path) -> Finding:
    says = "the embedded server does not run"
    home = ServerHome.of(data_dir)
    if home.folder.exists() and shutil.disk_usage(home.folder).free < FULL_DISK_BYTES:
        fix = f"make room on the disk, but leave {home.folder / 'aof'} alone: it holds the jobs"
        return Finding(Level.PROBLEM, "server", f"{says}, and cannot: its disk is full", note=fix)
    try:
        server_binary()
    except ServerStartFailed as error:
        return Finding(Level.PROBLEM, "server", error.message, note=error.hint)
    return Finding(Level.OK, "server", f"{says}; it starts with the first submit or worker")


async def _look(connection: Connection, url: str, settings: Settings) -> list[Finding]:
    keys = Keys(settings.namespace)
    info = await connection.call("INFO")
    cli = RedisCli(Endpoint.parse(url), connection.master)
    findings = [_version(info, url), *await _settings(connection, info, cli)]
    workers = await _workers(connection, keys)
    findings.append(await _namespace(connection, keys))
    findings += _worker_findings(workers, settings)
    findings += await _queues(connection, keys, workers, settings)
    findings += await check_limits(connection, keys, settings)
    findings += await _running(connection, keys, workers, settings)
    return findings


def _version(info: Mapping[str, Any], url: str) -> Finding:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info["redis_version"])
    says = f"{name} {version} at {address_of(url)}"
    numbers = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if numbers < _OLDEST:
        return Finding(Level.PROBLEM, "server", says, note="upgrade it to 6.2 or later")
    return Finding(Level.OK, "server", says)


async def _settings(
    connection: Connection, info: Mapping[str, Any], cli: RedisCli
) -> list[Finding]:
    try:
        appendonly = await _setting(connection, "appendonly")
        appendfsync = await _setting(connection, "appendfsync")
        policy = await _setting(connection, "maxmemory-policy")
    except ServerUnavailable as error:
        if error.transient:
            raise
        says = "its settings cannot be read; see to appendonly, appendfsync and maxmemory-policy"
        return [Finding(Level.WARNING, "durability", says)]
    return [_durability(appendonly, appendfsync, info, cli), _memory(policy, info, cli)]


async def _setting(connection: Connection, name: str) -> str:
    reply = await connection.call("CONFIG", "GET", name)
    # A list or a map, by the version of the protocol.
    value: bytes | str = reply[1] if isinstance(reply, list) else next(iter(reply.values()))
    return value.decode() if isinstance(value, bytes) else value


def _durability(
    appendonly: str, appendfsync: str, info: Mapping[str, Any], cli: RedisCli
) -> Finding:
    says = f"appendonly {appendonly}, appendfsync {appendfsync}"
    wrong = {} if appendonly == "yes" else {"appendonly": "yes"}
    if appendfsync != "always":
        wrong["appendfsync"] = "always"
    if appendonly != "yes":
        says = f"{says}: a crash of the server loses jobs"
        return Finding(Level.PROBLEM, "durability", says, **_set(wrong, info, cli))
    if info.get("aof_last_write_status", "ok") != "ok":
        says = f"{says}, and its last write failed"
        return Finding(Level.PROBLEM, "durability", says, note="look at its disk and its log")
    if wrong:
        says = f"{says}: a power loss may lose the last seconds"
        otherwise = "or have submits wait for the disk: Client(wait_fsync=True)"
        return Finding(Level.WARNING, "durability", says, **_set(wrong, info, cli, otherwise))
    return Finding(Level.OK, "durability", says)


def _set(
    wanted: Mapping[str, str], info: Mapping[str, Any], cli: RedisCli, otherwise: str = ""
) -> dict[str, str | None]:
    """How the server gets settings, and keeps them over a restart."""
    commands: list[tuple[str, ...]] = [("CONFIG", "SET", *each) for each in wanted.items()]
    notes = [otherwise] if otherwise else []
    if info.get("config_file"):
        commands.append(("CONFIG", "REWRITE"))
    else:
        flags = " ".join(f"--{name} {value}" for name, value in wanted.items())
        notes.append(
            f"it has no redis.conf: a restart forgets it, unless it is started with {flags}"
        )
    if cli.master is not None:
        notes.append("the same on each replica, which may be the master next")
    return cli.advice(*commands, note="\n".join(notes))


def _memory(policy: str, info: Mapping[str, Any], cli: RedisCli) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    bound = f" of {most >> 20}" if most else ""
    says = f"{used >> 20}{bound} MiB used, maxmemory-policy {policy}"
    if policy != "noeviction":
        says = f"{says}: it may throw jobs away"
        fix = _set({"maxmemory-policy": "noeviction"}, info, cli)
        return Finding(Level.PROBLEM, "memory", says, **fix)
    if most and used > 0.9 * most:
        note = "raise maxmemory, or delete old jobs: tenuto list"
        return Finding(Level.WARNING, "memory", f"{says}: submits will soon be refused", note=note)
    return Finding(Level.OK, "memory", says)


async def _namespace(connection: Connection, keys: Keys) -> Finding:
    found = await connection.call("GET", keys.namespace_id())
    says = f"{keys.namespace} has no id yet: no worker has run on what is in it now"
    if found is not None:
        says = f"{keys.namespace} has id {found.decode()}"
    return Finding(Level.OK, "namespace", says)


async def _workers(connection: Connection, keys: Keys) -> list[WorkerInfo]:
    seconds, _ = await connection.call("TIME")
    entries = await connection.call("HGETALL", keys.workers())
    known = [unpack_worker(name.decode(), value) for name, value in sorted(entries.items())]
    return [each for each in known if int(seconds) - each.seen_at <= ALIVE_S]


def _worker_findings(workers: list[WorkerInfo], settings: Settings) -> Iterator[Finding]:
    if not workers:
        note = _start(settings, "NAME")
        yield Finding(Level.WARNING, "workers", "none is alive, so no job runs", note=note)
    for worker in workers:
        device = f" on {worker.device}" if worker.device else ""
        yield Finding(
            Level.OK,
            "worker",
            f"{worker.name}{device}: {', '.join(worker.models)}; "
            f"{worker.running} of {worker.slots} slots in use{_adapters(worker)}",
        )
        if worker.last_death is not None:
            note = "its log has the rest; jobs went on in the process that followed"
            says = f"the process of {worker.name} before this one died: {worker.last_death}"
            yield Finding(Level.WARNING, "worker", says, note=note)
        for model, reason in worker.broken.items():
            note = "mend or replace its files; the worker tries again by itself"
            says = f"{worker.name} cannot load model {model}: {reason}"
            yield Finding(Level.PROBLEM, "model", says, note=note)


def _adapters(worker: WorkerInfo) -> str:
    told = []
    for model, names in sorted(worker.adapters.items()):
        shown = ", ".join(sorted(names)[:_MOST_ADAPTERS])
        more = ", ..." if len(names) > _MOST_ADAPTERS else ""
        told += [f"{shown}{more} of {model}"] if names else []
    return f"; adapters {'; '.join(told)}" if told else ""


def _start(settings: Settings, model: str) -> str:
    line = with_flags(settings, f"tenuto worker --model {model}=PATH_OR_REPO")
    return f"start one, with the model's folder or repository: {line}"


async def _queues(
    connection: Connection, keys: Keys, workers: list[WorkerInfo], settings: Settings
) -> list[Finding]:
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
            note = _start(settings, model.name)
            findings.append(Finding(Level.PROBLEM, "queue", says, note=note))
    return findings


async def _held_back(
    connection: Connection,
    keys: Keys,
    lanes: list[str],
    workers: list[WorkerInfo],
    model: ModelInfo,
) -> str:
    """What to add when jobs wait for workers of their own, though others have free slots."""
    fields = ("fingerprint", "reach", "queued_at", "tokens", "adapter")
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
        f", {held} of them for a worker of its own geometry and checkpoints, for as long as "
        f"--exact-wait says ({EXACT_WAIT_S:.0f} s by default)"
    )


async def _running(
    connection: Connection, keys: Keys, workers: list[WorkerInfo], settings: Settings
) -> list[Finding]:
    ids = [i.decode() for i in await connection.call("ZRANGE", keys.running(), 0, _MOST_RUNNING)]
    lost = await without_lease(connection, keys, ids)
    if not lost:
        return [Finding(Level.OK, "jobs", f"{len(ids) or 'none'} running")]
    has = "has" if len(lost) == 1 else "have"
    says = f"{len(lost)} of {count(len(ids), 'running job')} {has} no lease: {', '.join(lost[:3])}"
    if workers:
        return [Finding(Level.WARNING, "jobs", f"{says}; a worker will take them over")]
    note = f"a worker takes them over; {_start(settings, 'NAME')}"
    return [Finding(Level.PROBLEM, "jobs", says, note=note)]
