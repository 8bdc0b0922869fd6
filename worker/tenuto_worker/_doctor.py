"""The worker's part of `tenuto doctor`: device, MLX, models, checkpoints on disk."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import redis

from tenuto_client import Finding, Level, Settings, TenutoError
from tenuto_client._endpoint import Endpoint, once
from tenuto_client._findings import size
from tenuto_client._server import find_server
from tenuto_client._to_type import tenuto_lines

from ._disk_room import check_budget
from ._lost_jobs import check_lost

_ANSWER_S = 2.0
_MEND = "mend TENUTO_MODEL"
_LITTLE_DISK = 2 * 2**30


def check(settings: Settings) -> Iterator[Finding]:
    """Look at what a worker on this machine would need."""
    with ThreadPoolExecutor(1) as asker:
        # A server that does not answer is waited for while MLX is imported.
        asked = asker.submit(_answering, settings)
        yield _device()
        yield from _models(os.environ.get("TENUTO_MODEL", "").split())
        yield from _disk(settings)
        url = asked.result()
    yield from check_budget(settings, url)
    if url is not None:
        yield from check_lost(settings, url)


def _answering(settings: Settings) -> str | None:
    """The URL of the server, if it answers: it is asked once."""
    try:
        url = settings.redis_url or find_server(settings.data_dir)
        if url is None:
            return None
        endpoint = Endpoint.parse(url)
        client = endpoint.blocking(
            socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S, retry=once()
        )
        try:
            client.ping()
        finally:
            client.close()
    except (redis.RedisError, TenutoError, OSError):
        # That it fails is a finding of its own.
        return None
    return url


def _device() -> Finding:
    try:
        import mlx.core as mx

        device = mx.default_device()
        total = mx.sum(mx.arange(8)).item()
    except Exception as error:  # noqa: BLE001 - a broken driver raises whatever it likes
        return Finding(
            Level.PROBLEM,
            "device",
            f"MLX does not compute: {error}",
            note="install mlx for this machine: mlx[cpu], mlx[cuda13], or plain mlx on macOS",
        )
    if total != 28:
        return Finding(Level.PROBLEM, "device", f"MLX adds up 0..7 to {total}")
    kind = "GPU" if device.type == mx.DeviceType.gpu else "CPU"
    name = mx.device_info(device).get("device_name", "")
    says = f"{kind} {name}".strip()
    return Finding(Level.OK, "device", f"{says}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}")


def _models(given: list[str]) -> Iterator[Finding]:
    """Models named in the environment; a repository's name is looked up only by a worker."""
    from ._commands.worker import models
    from ._errors import ConfigError

    try:
        found = models(given)
    except ConfigError as error:
        yield Finding(Level.PROBLEM, "models", str(error), note=_MEND)
        return
    for name, path in found.items():
        folder = Path(path).expanduser()
        if (folder / "config.json").is_file():
            yield Finding(Level.OK, "models", f"{name} is in {folder}")
        elif folder.exists() or path.startswith((".", "/", "~")):
            yield Finding(
                Level.PROBLEM, "models", f"{name}: {folder} has no config.json", note=_MEND
            )


def _disk(settings: Settings) -> Iterator[Finding]:
    root = settings.data_dir / "checkpoints"
    if not root.is_dir():
        return
    if not os.access(root, os.W_OK | os.X_OK):
        yield Finding(
            Level.PROBLEM,
            "checkpoints",
            f"{root} cannot be written",
            shlex.join(["chmod", "u+rwx", str(root)]),
            "or chown it",
        )
        return
    from tenuto_engine import list_jobs

    jobs = list_jobs(root)
    used = sum(job.nbytes for job in jobs)
    free = shutil.disk_usage(root).free
    count = "1 job" if len(jobs) == 1 else f"{len(jobs) or 'no'} jobs"
    says = f"{count}, {size(used)} in {root}, {size(free)} free"
    damaged = sum(stored.damage is not None for job in jobs for stored in job.checkpoints)
    if damaged:
        says = f"{says}; damaged: {damaged}"
        note = "names them; jobs go on from older ones or the stream"
        line = tenuto_lines(settings, "checkpoints", "verify", note=note)
        yield Finding(Level.WARNING, "checkpoints", says, **line)
    elif jobs and free < _LITTLE_DISK:
        note = "removes those of jobs that are gone; or free some disk"
        line = tenuto_lines(settings, "checkpoints", "gc", note=note)
        yield Finding(Level.WARNING, "checkpoints", says, **line)
    else:
        # With none, a full disk is the finding of the data dir alone.
        yield Finding(Level.OK, "checkpoints", says)
