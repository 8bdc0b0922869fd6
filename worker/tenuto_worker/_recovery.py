"""`recover`: jobs, streams and results put back into Redis from the data dir alone.

A stream is built in pieces under a name that no reader looks at, and becomes the job's in the same
step that makes the job, so nobody ever sees half of one. What a crash leaves of it expires, and
running it again does the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import redis

from tenuto_client import Keys, Token, pack_tokens, unpack_spec
from tenuto_engine import CheckpointError, job_folder, job_ids

from ._calls import recover_call
from ._owners import Owners
from ._remains import Remains, Unreadable, remains_of
from ._scripts import JobScripts

_TOKENS_AN_ENTRY = 16
_ENTRIES_A_ROUND = 256
_HALF_LIVES_S = 3600


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one folder.

    Attributes:
        job_id: its name.
        state: what the job is now, or would be; None if it was not put back.
        tokens: how many it has.
        was_there: Redis had the job, and it was left as it was.
        reason: why it was not put back, or what of it could not be read.
        elsewhere: another server has it, or may have it.
    """

    job_id: str
    state: str | None = None
    tokens: int = 0
    was_there: bool = False
    reason: str | None = None
    elsewhere: bool = False

    @property
    def failed(self) -> bool:
        return self.state is None and not self.was_there


class Recovery:
    """Puts the jobs of a data dir back.

    Args:
        root: holds the folders of the jobs.
        reach: id of the data dir.
        owners: to whom their jobs are left; None leaves them to nobody.
    """

    def __init__(
        self,
        root: Path,
        reach: str,
        client: redis.Redis,
        keys: Keys,
        owners: Owners | None = None,
    ) -> None:
        self._root = root
        self._reach = reach
        self._client = client
        self._keys = keys
        self._owners = owners
        self._scripts = JobScripts(client, keys)

    def recover(self, job_id: str | None = None, *, dry_run: bool = False) -> Iterator[Outcome]:
        """Put back what Redis does not have, the oldest job first; of one job only if it is given.

        Raises:
            CheckpointError: the folders cannot be listed.
        """
        found, lost = self._read()
        if job_id is None:
            found = [each for each in found if not self._was_removed(each.job_id)]
        wanted = [each for each in found if job_id in (None, each.job_id)]
        yield from (each for each in lost if job_id in (None, each.job_id))
        known = {each.job_id for each in found} | {each.job_id for each in lost}
        if job_id is not None and job_id not in known:
            yield Outcome(job_id, reason="the data dir has nothing of it")
        for remains in wanted:
            yield self._one(remains, dry_run=dry_run)
        if not dry_run:
            self._settle(found)

    def _was_removed(self, job_id: str) -> bool:
        """Whether it was deleted or expired a while ago, so that its files only wait for gc."""
        return self._client.zscore(self._keys.removed(), job_id) is not None

    def _read(self) -> tuple[list[Remains], list[Outcome]]:
        found, lost = [], []
        for name in job_ids(self._root):
            try:
                remains = remains_of(job_folder(self._root, name))
            except (Unreadable, CheckpointError) as error:
                lost.append(Outcome(name, reason=str(error)))
            else:
                if remains is not None and remains.meta.prefix != self._keys.namespace:
                    # It may be alive there, and would run twice.
                    where = f"of namespace {remains.meta.prefix}: recover it with --namespace"
                    lost.append(Outcome(name, reason=f"{where} {remains.meta.prefix}"))
                elif remains is not None:
                    found.append(remains)
        return sorted(found, key=lambda each: (each.created_at, each.seq, each.job_id)), lost

    def _one(self, remains: Remains, *, dry_run: bool) -> Outcome:
        job_id = remains.job_id
        done = Outcome(job_id, remains.state, len(remains.tokens), reason=remains.damage)
        if self._client.exists(self._keys.job(job_id)):
            return Outcome(job_id, was_there=True)
        claim = self._owners.claim(remains.meta.namespace) if self._owners else None
        if claim is not None:
            # It would run twice, and what is deleted here would be removed under it.
            return Outcome(job_id, reason=claim.says, elsewhere=True)
        if dry_run:
            return done
        # Before the job: whoever claims it must be allowed to use its checkpoints.
        self._client.sadd(self._keys.heirs(), remains.meta.namespace)
        built = self._build(job_id, remains.tokens) if remains.tokens else ""
        arguments = _arguments(remains, self._keys, self._reach, built)
        answer = self._scripts.run(recover_call(*arguments))
        return Outcome(job_id, was_there=True) if answer == "there" else done

    def _build(self, job_id: str, tokens: Sequence[Token]) -> str:
        """Build the stream; returns the second part of its name."""
        built = secrets.token_hex(8)
        key = self._keys.half(job_id, built)
        parts = _parts(tokens)
        for at in range(0, len(parts), _ENTRIES_A_ROUND):
            with self._client.pipeline(transaction=False) as pipe:
                for part in parts[at : at + _ENTRIES_A_ROUND]:
                    pipe.xadd(key, {"t": pack_tokens(part)}, id=f"{part[-1].index}-0")
                pipe.expire(key, _HALF_LIVES_S)
                # An error that redis-py raises here has users' texts in its message.
                replies = pipe.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return built

    def _settle(self, readable: Iterable[Remains]) -> None:
        """Data sets of which every job that can be read is here: gc may take them for this one."""
        missing = {
            each.meta.namespace
            for each in readable
            if not self._client.exists(self._keys.job(each.job_id))
        }
        heirs: Any = self._client.smembers(self._keys.heirs())
        # Other data dirs may have jobs of it that are still to be put back.
        for whole in {heir.decode("utf-8", "replace") for heir in heirs} - missing:
            self._client.sadd(self._keys.collectable(), f"{whole}@{self._reach}")


def _parts(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """What each entry of a stream is to hold."""
    starts = range(0, len(tokens), _TOKENS_AN_ENTRY)
    return [tokens[start : start + _TOKENS_AN_ENTRY] for start in starts]


def _arguments(remains: Remains, keys: Keys, reach: str, built: str) -> list[str | bytes | float]:
    end = remains.end or {}
    fields = remains.meta.fields
    spec = unpack_spec(fields["spec"])
    body = fields.get("body", b"")
    is_named = spec.idempotency_key is not None and body
    idem = keys.idem(spec.tenant, spec.idempotency_key or "") if is_named else ""
    said = [end.get(name) or "" for name in ("finish_reason", "text", "error", "finished_at")]
    return [remains.job_id, built, str(remains.state), *said, idem, body, *_hash(remains, reach)]


def _hash(remains: Remains, reach: str) -> list[str | bytes | float]:
    meta = remains.meta
    end = remains.end
    count = len(remains.tokens)
    label = (end or {}).get("exactness", meta.exactness)
    why = (end or {}).get("exactness_reason", meta.exactness_reason)
    values: dict[str, str | bytes | float | None] = {
        **meta.fields,
        # Whoever holds the job yet is fenced by a new epoch; one that has ended is held by nobody.
        "epoch": remains.epoch + (end is None),
        "tokens": count,
        "written": sum(len(pack_tokens(part)) for part in _parts(remains.tokens)),
        "durable": count,
        "fingerprint": meta.fingerprint,
        "geometry": msgpack.packb(dict(meta.geometry)),
        "reach": reach,
        "exactness": label,
        "exactness_reason": why,
    }
    for name in ("stats", "ran"):
        if told := (end or {}).get(name):
            values[name] = told
    if remains.prompt is not None:
        values["prompt_ids"] = msgpack.packb(list(remains.prompt))
        values["prompt_tokens"] = len(remains.prompt)
    return [part for name, value in values.items() if value is not None for part in (name, value)]
