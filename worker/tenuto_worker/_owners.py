"""`Owners`: whose the jobs on disk are, where Redis does not have them.

A data dir outlives the server that it is used with, and may be used with two: the embedded one
first, then another. What the second does not have is lost only if the first is not in use.
A data dir knows two kinds of others: its embedded server, and the workers that hold a lock in it,
each of which has written beside the lock which data set it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import redis

from tenuto_client import Keys, TenutoError
from tenuto_client._endpoint import Endpoint
from tenuto_client._server import server_url
from tenuto_client._server_home import Answer, ServerHome

from ._identity import living_workers, note_of
from ._judge import Folder, Judge
from ._served import Served, data_set_ids

_ASK_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Owners:
    """Who else has jobs of this data dir, as far as can be told.

    Attributes:
        claims: who has the jobs of a data set, by its id: other servers that are in use.
        ours: ids of the data sets that are in the Redis that is looked at.
        doubt: why another server may have jobs of which nobody can say; "" if none may.
    """

    claims: Mapping[str, str]
    ours: frozenset[str]
    doubt: str = ""

    def of(self, folder: Folder, judge: Judge) -> Claim | None:
        """Who has, or may have, a job that this Redis does not have; None if nobody has."""
        prefix, namespace = judge.data_set(folder)
        if prefix is not None and prefix != judge.prefix:
            return Claim(f"namespace {prefix} (--namespace {prefix.rstrip(':')})")
        return None if namespace is None else self.claim(namespace)

    def claim(self, namespace: str) -> Claim | None:
        """The same of a data set."""
        if who := self.claims.get(namespace):
            return Claim(who)
        # Of what was put back here once, nobody has to ask again.
        is_open = bool(self.doubt) and namespace not in self.ours
        return Claim(self.doubt, is_sure=False) if is_open else None


@dataclass(frozen=True, slots=True)
class Claim:
    """That jobs are another's.

    Attributes:
        who: the server that has them, or may have them.
        is_sure: it is in use, and has that data set.
    """

    who: str
    is_sure: bool = True

    @property
    def says(self) -> str:
        return f"it {'is' if self.is_sure else 'may be'} in {self.who}"


@dataclass(slots=True)
class Missing:
    """Jobs on disk that Redis does not have, and did not remove.

    Attributes:
        lost: those that nobody else is known to have.
        others: those that another has, or may have, by claim.
    """

    lost: list[Folder] = field(default_factory=list)
    others: dict[Claim, list[Folder]] = field(default_factory=dict)

    @classmethod
    def among(cls, found: list[Folder], judge: Judge, owners: Owners) -> Self:
        missing = cls()
        for folder in found:
            claim = owners.of(folder, judge)
            if claim is None:
                missing.lost.append(folder)
            else:
                missing.others.setdefault(claim, []).append(folder)
        return missing


NOBODY: Final = Owners({}, frozenset())


def find_owners(data_dir: Path, url: str, client: redis.Redis, keys: Keys) -> Owners:
    """Look who else is in use.

    Args:
        url: of the Redis that is looked at.
        client: connected to it.

    Raises:
        RedisError: that Redis is away.
    """
    here = Endpoint.parse(url).place
    ours = data_set_ids(client, keys)
    claims: dict[str, str] = {}
    for served in _living(data_dir):
        # By another address it may be the same server; that has the same id.
        if served.place != here and served.ids[:1] != ours[:1]:
            who = f"{served.place}, which worker {served.worker} serves"
            claims.update(dict.fromkeys(served.ids, who))
    doubt = ""
    if here != Endpoint.parse(server_url(data_dir)).place:
        found, doubt = _embedded(data_dir, keys)
        if found[:1] != ours[:1]:
            claims.update(dict.fromkeys(found, "the embedded server of this data dir, which runs"))
    return Owners(claims, frozenset(ours), doubt)


def _living(data_dir: Path) -> Iterator[Served]:
    for number in living_workers(data_dir):
        if (served := Served.read(note_of(data_dir, number))) is not None:
            yield served


def _embedded(data_dir: Path, keys: Keys) -> tuple[tuple[str, ...], str]:
    """The ids of what is in the embedded server, and why that cannot be told."""
    try:
        home = ServerHome.of(data_dir)
        if home.ask() is Answer.ABSENT and home.is_free():
            has_data = home.has_data()
            return (), (
                "the embedded server of this data dir, which does not run, but has data"
                if has_data
                else ""
            )
        endpoint = Endpoint.parse(home.url)
        client = endpoint.blocking(socket_timeout=_ASK_S, socket_connect_timeout=_ASK_S)
        try:
            return data_set_ids(client, keys), ""
        finally:
            client.close()
    except (redis.RedisError, TenutoError, OSError):
        return (), "the embedded server of this data dir, which does not answer"
