"""`tenuto checkpoints`: what stands on disk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_client import InvalidRequest, Keys, ServerUnavailable, Settings
from tenuto_client._lines import dump

if TYPE_CHECKING:
    from tenuto_engine import StoredCheckpoint, StoredJob

HELP = "list, verify or collect the checkpoints of the data dir"

_DESCRIPTION = """\
Checkpoints make catching up cheap after a crash; the published stream is what counts. So deleting
them loses no token, only time.
"""
_EPILOG = """\
examples:
  tenuto checkpoints list
  tenuto checkpoints verify            check every byte; exit code 1 if any file is damaged
  tenuto checkpoints gc --dry-run      what would be removed: jobs that are completed or gone
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", nargs="?", choices=("list", "verify", "gc"))
    parser.add_argument("job", nargs="?", help="of this job only (list and verify)")
    parser.add_argument("--dry-run", action="store_true", help="gc: only say what would be removed")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns the exit code."""
    if args.action is None:
        raise InvalidRequest("action", "which one?", hint="list, verify or gc; --help tells more")
    from tenuto_engine import CheckpointError

    action = {"list": _list, "verify": _verify, "gc": _gc}[args.action]
    try:
        return action(args, settings)
    except CheckpointError as error:
        print(f"tenuto checkpoints: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _list(args: argparse.Namespace, settings: Settings) -> int:
    for job in _jobs(args, settings):
        for stored in job.checkpoints:
            facts = _facts(job, stored)
            _say(args, facts, _row(facts))
    return 0


def _verify(args: argparse.Namespace, settings: Settings) -> int:
    from tenuto_engine import verify

    damaged = 0
    for job in _jobs(args, settings):
        for stored in job.checkpoints:
            report = verify(stored.path)
            damaged += not report.ok
            facts = {
                "type": "verified",
                "job": job.job_id,
                "file": stored.path.name,
                "ok": report.ok,
                "tokens": report.generated_tokens,
                "reason": report.reason,
            }
            state = "ok" if report.ok else f"DAMAGED: {report.reason}"
            _say(args, facts, f"{job.job_id}  {stored.path.name}  {state}")
    return 1 if damaged else 0


def _gc(args: argparse.Namespace, settings: Settings) -> int:
    import redis

    from tenuto_worker._collector import Judge, collect
    from tenuto_worker._errors import RedisUnavailable
    from tenuto_worker._redis import connect, reach

    url = _url(settings)
    client = connect(url)
    try:
        reach(client, url)
        judge = Judge(client, Keys(settings.namespace))
        removed = collect(_root(settings), judge, dry_run=args.dry_run)
    except RedisUnavailable as error:
        raise ServerUnavailable(str(error)) from error
    except redis.RedisError as error:
        raise ServerUnavailable(
            f"Redis failed: {error}", hint="tenuto doctor looks for the cause"
        ) from error
    finally:
        client.close()
    word = "would be removed" if args.dry_run else "removed"
    for job in removed:
        _say(args, {"type": "removed", "job": job, "dry_run": args.dry_run}, f"{job}  {word}")
    if not removed and not args.json:
        sys.stdout.write("nothing to remove\n")
    return 0


def _url(settings: Settings) -> str:
    if settings.redis_url is not None:
        return settings.redis_url
    from tenuto_client._server import ensure_server

    return ensure_server(settings.data_dir)


def _root(settings: Settings) -> Path:
    return settings.data_dir / "checkpoints"


def _jobs(args: argparse.Namespace, settings: Settings) -> Iterable[StoredJob]:
    from tenuto_engine import list_jobs

    return [job for job in list_jobs(_root(settings)) if args.job in (None, job.job_id)]


def _facts(job: StoredJob, stored: StoredCheckpoint) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "job": job.job_id,
        "file": stored.path.name,
        "epoch": stored.epoch,
        "prompt_tokens": stored.prompt_tokens,
        "cached_tokens": stored.cache_length,
        "tokens": stored.generated_tokens,
        "bytes": stored.nbytes,
        "created_at": stored.created_at,
        "damage": stored.damage,
    }


def _row(facts: dict[str, Any]) -> str:
    if facts["damage"]:
        return f"{facts['job']}  {facts['file']}  DAMAGED: {facts['damage']}"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["created_at"]))
    size = f"{facts['bytes'] / 2**20:.1f} MiB"
    return f"{facts['job']}  {facts['file']}  {facts['tokens']} tokens  {size}  {at}"


def _say(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    sys.stdout.write(dump(facts) if args.json else text + "\n")
