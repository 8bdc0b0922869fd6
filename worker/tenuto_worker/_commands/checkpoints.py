"""`tenuto checkpoints`: what stands on disk."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto_client import (
    DataDirError,
    InvalidRequest,
    JobGone,
    Keys,
    ServerUnavailable,
    Settings,
)
from tenuto_client._findings import count, size
from tenuto_client._lines import dump
from tenuto_client._to_type import tenuto_lines

from ._checkpoints_help import ACTIONS, DESCRIPTION, EPILOG, Choose

if TYPE_CHECKING:
    import redis

    from tenuto_engine import StoredJob
    from tenuto_worker._recovery import Outcome

HELP = "list, verify or collect the checkpoints of the data dir, or put jobs back from them"

_RECOVER_TIMEOUT_S = 60.0
_HEAD = f"{'JOB':<18}{'EPOCHS':<10}{'TOKENS':>8}  {'SIZE':>10}  {'SAVED':<21}END\n"
_ELSEWHERE = (
    "What another server has is left to it: look there, or point workers of this Redis to a data "
    "dir of\ntheir own. Where that server is gone for good, --force puts its jobs back here.\n"
)
_NOTE = "Redis had no jobs: jobs that no worker had begun are not on disk; submit those again\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", nargs="?", choices=tuple(ACTIONS), action=Choose)
    parser.add_argument("job", nargs="?", metavar="JOB", help="of this job only (not gc)")
    parser.add_argument(
        "--dry-run", action="store_true", help="gc, recover: only say what would be done"
    )
    parser.add_argument(
        "--force", action="store_true", help="recover: also what another server has, or may have"
    )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns the exit code."""
    if args.action is None:
        hint = "list, verify, gc or recover; --help tells more"
        raise InvalidRequest("action", "which one?", hint=hint)
    _refuse_what_it_has_no_use_for(args)
    from tenuto_engine import CheckpointError

    actions = {"list": _list, "verify": _verify, "gc": _gc, "recover": _recover}
    try:
        return actions[args.action](args, settings)
    except CheckpointError as error:
        print(f"tenuto checkpoints: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _refuse_what_it_has_no_use_for(args: argparse.Namespace) -> None:
    if args.action == "gc" and args.job is not None:
        hint = "tenuto delete JOB ends a single one"
        raise InvalidRequest("job", "gc takes none, it removes all that are gone", hint=hint)
    if args.force and args.action != "recover":
        raise InvalidRequest(
            "--force", f"{args.action} has no use for it", hint="it is for recover"
        )
    if args.dry_run and args.action in ("list", "verify"):
        hint = "it is for gc and recover"
        raise InvalidRequest("--dry-run", f"{args.action} changes nothing", hint=hint)


# -- on disk alone ---------------------------------------------------------------------


def _jobs(args: argparse.Namespace, root: Path) -> list[str]:
    """Those on disk, or the one that was named. Raises JobGone."""
    from tenuto_engine import job_ids

    found = list(job_ids(root))
    if args.job is None:
        return found
    if args.job not in found:
        raise NoCheckpoints(args.job, root)
    return [args.job]


class NoCheckpoints(JobGone):
    """The data dir has nothing of a job."""

    def __init__(self, job_id: str, root: Path) -> None:
        super().__init__(job_id)
        self.message = f"nothing of job {job_id} in {root}"
        self.hint = "tenuto checkpoints list names all jobs there"


def _list(args: argparse.Namespace, settings: Settings) -> int:
    from tenuto_engine import read_job

    root = _root(settings)
    jobs = _jobs(args, root)
    if not args.json:
        sys.stdout.write(_HEAD if jobs else f"no checkpoints in {root}\n")
    for job_id in jobs:
        facts = _facts(read_job(root / job_id))
        _say(args, facts, _row(facts))
    return 0


def _verify(args: argparse.Namespace, settings: Settings) -> int:
    from tenuto_engine import verify_job

    damaged = 0
    root = _root(settings)
    for job_id in _jobs(args, root):
        for report in verify_job(root / job_id):
            damaged += not report.ok
            facts = {
                "type": "verified",
                "job": job_id,
                "file": report.path.name,
                "ok": report.ok,
                "tokens": report.generated_tokens,
                "reason": report.reason,
                "note": report.note,
            }
            state = f"ok{f', {report.note}' if report.note else ''}"
            _say(
                args,
                facts,
                f"{job_id}  {report.path.name}  "
                f"{state if report.ok else f'DAMAGED: {report.reason}'}",
            )
    return 1 if damaged else 0


def _facts(job: StoredJob) -> dict[str, Any]:
    from tenuto_worker._remains import files_of

    found = [each for each in job.checkpoints if each.damage is None]
    newest = found[0] if found else None
    end = next((each for each in job.ends if each.damage is None), None)
    began = next((each for each in job.attempts if each.meta is not None), None)
    files = files_of(job)
    damages = {f"{each.path.name}: {each.damage}": None for each in files if each.damage}
    return {
        "type": "checkpoints",
        "job": job.job_id,
        "epochs": sorted({each.epoch for each in files}),
        "logs": len(job.attempts),
        "checkpoints": len(found),
        "prompt_tokens": known.prompt_tokens if (known := newest or end or began) else 0,
        "cached_tokens": newest.cache_length if newest else 0,
        "tokens": max(newest.generated_tokens if newest else 0, len(end.tokens) if end else 0),
        "bytes": job.nbytes,
        "created_at": newest.created_at if newest else end.ended_at if end else None,
        "end": end.end.get("state") if end else None,
        "damage": "; ".join(damages) or None,
    }


def _row(facts: dict[str, Any]) -> str:
    epochs = ", ".join(map(str, facts["epochs"])) or "-"
    at = facts["created_at"]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"
    row = f"{facts['job']:<18}{epochs:<10}{facts['tokens']:>8}  {size(facts['bytes']):>10}"
    row = f"{row}  {saved:<21}{facts['end'] or '-'}"
    return f"{row}  DAMAGED: {facts['damage']}" if facts["damage"] else row


# -- with Redis ------------------------------------------------------------------------


def _gc(args: argparse.Namespace, settings: Settings) -> int:
    from tenuto_worker._collector import collect
    from tenuto_worker._judge import Judge, folders
    from tenuto_worker._owners import NOBODY, Missing, find_owners

    keys, root = Keys(settings.namespace), _root(settings)
    with _redis(settings) as (client, url):
        judge = Judge(client, keys, _reach(settings))
        found = collect(root, judge, dry_run=args.dry_run)
        lacking = [each for each in judge.lost(list(folders(root))) if each.job_id not in found]
        owners = find_owners(settings.data_dir, url, client, keys) if lacking else NOBODY
        missing = Missing.among(lacking, judge, owners)
    word = "would be removed" if args.dry_run else "removed"
    for job, refused in found.items():
        if refused is None:
            _say(args, {"type": "removed", "job": job, "dry_run": args.dry_run}, f"{job}  {word}")
        else:
            facts = {"type": "refused", "job": job, "reason": refused}
            _say(args, facts, f"{job}  NOT REMOVED: {refused}")
    why = "kept: Redis does not have it, and did not remove it; tenuto checkpoints recover"
    for folder in missing.lost:
        facts = {"type": "kept", "job": folder.job_id, "reason": "lost by Redis"}
        _say(args, facts, f"{folder.job_id}  {why}")
    for claim, jobs in missing.others.items():
        for folder in jobs:
            facts = {"type": "kept", "job": folder.job_id, "reason": claim.says}
            _say(args, facts, f"{folder.job_id}  kept: {claim.says}")
    if not found and not lacking and not args.json:
        sys.stdout.write("nothing to remove\n")
    return int(any(found.values()))


def _recover(args: argparse.Namespace, settings: Settings) -> int:
    from tenuto_worker._owners import find_owners
    from tenuto_worker._recovery import Recovery

    counts: Counter[str] = Counter()
    keys = Keys(settings.namespace)
    with _redis(settings) as (client, url):
        was_empty = not client.exists(keys.jobs())
        owners = None if args.force else find_owners(settings.data_dir, url, client, keys)
        recovery = Recovery(_root(settings), _reach(settings), client, keys, owners)
        for outcome in recovery.recover(args.job, dry_run=args.dry_run):
            kind = _kind(outcome)
            counts[kind] += 1
            _say(args, _outcome(outcome, kind, args), _outcome_row(outcome))
    if not args.json:
        word = "would be put back" if args.dry_run else "put back"
        sys.stdout.write(f"{count(counts['recovered'], 'job')} {word}\n")
        # What another server has is not lost, nor is what only waits there.
        sys.stdout.write(_ELSEWHERE if counts["elsewhere"] else _NOTE * was_empty)
        if counts["elsewhere"] and owners is not None and owners.doubt:
            line = tenuto_lines(replace(settings, redis_url=None), "server")["fix"]
            sys.stdout.write(
                f"To look into the embedded server, start it and run this again: {line}\n"
            )
    return 1 if counts["lost"] or counts["elsewhere"] else 0


def _kind(outcome: Outcome) -> str:
    if outcome.was_there:
        return "present"
    if outcome.elsewhere:
        return "elsewhere"
    return "lost" if outcome.failed else "recovered"


def _outcome(outcome: Outcome, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "type": kind,
        "job": outcome.job_id,
        "state": outcome.state,
        "tokens": outcome.tokens,
        "reason": outcome.reason,
        "dry_run": args.dry_run,
    }


def _outcome_row(outcome: Outcome) -> str:
    if outcome.was_there:
        return f"{outcome.job_id}  is there, left as it is"
    if outcome.failed:
        return f"{outcome.job_id}  NOT PUT BACK: {outcome.reason}"
    note = f"  (DAMAGED: {outcome.reason})" if outcome.reason else ""
    return f"{outcome.job_id}  {outcome.state}  {outcome.tokens} tokens{note}"


@contextmanager
def _redis(settings: Settings) -> Iterator[tuple[redis.Redis, str]]:
    """A client, and the URL that it is of."""
    import redis

    from tenuto_worker._errors import RedisUnavailable
    from tenuto_worker._redis import connect, reach

    url = _url(settings)
    client = connect(url, timeout=_RECOVER_TIMEOUT_S)
    try:
        reach(client, url)
        yield client, url
    except RedisUnavailable as error:
        raise ServerUnavailable(str(error)) from error
    except redis.RedisError as error:
        raise ServerUnavailable(
            f"Redis failed: {error}", hint="tenuto doctor looks for the cause"
        ) from error
    finally:
        client.close()


def _url(settings: Settings) -> str:
    if settings.redis_url is not None:
        return settings.redis_url
    from tenuto_client._server import ensure_server

    return ensure_server(settings.data_dir)


def _root(settings: Settings) -> Path:
    return settings.data_dir / "checkpoints"


def _reach(settings: Settings) -> str:
    """The data dir's id; "" where there is no data dir, and so nothing in it."""
    from tenuto_worker._errors import ConfigError
    from tenuto_worker._identity import reach_of

    if not _root(settings).exists():
        return ""
    try:
        return reach_of(settings.data_dir)
    except ConfigError as error:
        raise DataDirError(settings.data_dir, "its id cannot be read") from error


def _say(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    sys.stdout.write(dump(facts) if args.json else text + "\n")
