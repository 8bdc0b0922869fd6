"""What `tenuto doctor` says of jobs on disk that Redis does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import redis

from tenuto_client import Finding, Keys, Level, Settings
from tenuto_client._findings import count
from tenuto_client._to_type import tenuto_lines

from ._redis import connect

_TIMEOUT_S = 15.0


def check_lost(settings: Settings, url: str) -> Iterator[Finding]:
    """Whether they are lost, or another server has them.

    Args:
        url: of a Redis that answers.
    """
    root = settings.data_dir / "checkpoints"
    if not root.is_dir() or not any(root.iterdir()):
        return
    client = connect(url, timeout=_TIMEOUT_S)
    try:
        yield from _look(settings, url, client, root)
    except redis.RedisError as error:
        yield Finding(Level.WARNING, "lost", f"lost jobs cannot be looked for: {error}")
    finally:
        client.close()


def _look(settings: Settings, url: str, client: redis.Redis, root: Path) -> Iterator[Finding]:
    from ._judge import Judge, folders
    from ._owners import Missing, find_owners

    keys = Keys(settings.namespace)
    # It asks for no data dir's id; one that has none gets none by being looked at.
    judge = Judge(client, keys, reach="")
    found = judge.lost(list(folders(root)))
    if not found:
        return
    missing = Missing.among(found, judge, find_owners(settings.data_dir, url, client, keys))
    if missing.lost:
        says = f"{_jobs(len(missing.lost), root)} that Redis does not have, and did not remove"
        line = tenuto_lines(settings, "checkpoints", "recover", note="puts them back")
        yield Finding(Level.WARNING, "lost", says, **line)
    for claim, jobs in missing.others.items():
        if claim.is_sure:
            says = f"{_jobs(len(jobs), root)} of another Redis that is in use: {claim.who}"
            note = "a data dir for each Redis keeps them apart"
            yield Finding(Level.OK, "elsewhere", says, note=note)
        else:
            says = (
                f"{_jobs(len(jobs), root)} that Redis does not have, and did not remove; "
                f"they may be in {claim.who}"
            )
            note = (
                "starts it; then look again (if it is gone for good, "
                "`tenuto checkpoints recover --force` puts them back)"
            )
            here = replace(settings, redis_url=None)
            yield Finding(Level.WARNING, "lost", says, **tenuto_lines(here, "server", note=note))


def _jobs(number: int, root: Path) -> str:
    return f"{count(number, 'job')} with checkpoints in {root}"
