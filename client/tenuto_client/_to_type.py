"""Lines to type, such that they do what is meant as they stand, and show no password."""

from __future__ import annotations

import shlex
import shutil
from typing import Final

from ._config import Settings
from ._endpoint import Endpoint
from ._errors import InvalidRequest

_CLIENTS: Final = ("redis-cli", "valkey-cli")


def tenuto_lines(settings: Settings, *words: str, note: str | None = None) -> dict[str, str | None]:
    """`fix` and `note` of a finding: a line of our own, for the server that was looked at.

    Args:
        note: what to say of the line, in words.
    """
    flags, told = _flags(settings)
    line = shlex.join(["tenuto", *words, *flags])
    if told is None:
        return {"fix": line, "note": note}
    return {"fix": None, "note": "; ".join(filter(None, (f"{line}  {told}", note)))}


def with_flags(settings: Settings, line: str) -> str:
    """A line that has something to fill in, for the server that was looked at."""
    flags, told = _flags(settings)
    return " ".join(filter(None, (line, shlex.join(flags), told)))


def _flags(settings: Settings) -> tuple[list[str], str | None]:
    """What the environment does not say, and what cannot be shown of it."""
    try:
        usual = Settings.load()
    except InvalidRequest:
        usual = Settings(None, "", settings.data_dir)
    flags, told = [], None
    if settings.redis_url is not None and settings.redis_url != usual.redis_url:
        if Endpoint.parse(settings.redis_url).has_secret:
            told = "with the same --redis, which has a password and is not shown"
        else:
            flags += ["--redis", settings.redis_url]
    if settings.namespace != usual.namespace:
        flags += ["--namespace", settings.namespace]
    if settings.data_dir != usual.data_dir:
        flags += ["--data-dir", str(settings.data_dir)]
    return flags, told


class RedisCli:
    """Lines for the server's own command line client.

    Args:
        master: where the server is, if only sentinels know.
    """

    def __init__(self, endpoint: Endpoint, master: tuple[str, int] | None = None) -> None:
        self._client = next((name for name in _CLIENTS if shutil.which(name)), None)
        self._start = [self._client or _CLIENTS[0], *endpoint.flags(master)]
        self._endpoint = endpoint
        self.master = master

    def advice(self, *commands: tuple[str, ...], note: str = "") -> dict[str, str | None]:
        """`fix` and `note` of a finding: a line for each command, and what they need."""
        notes = [note] if note else []
        if self._endpoint.has_secret:
            notes.append("it needs the password of the URL: export REDISCLI_AUTH=PASSWORD first")
        if self._client is None:
            notes.append(f"neither {' nor '.join(_CLIENTS)} is on the PATH here: type it elsewhere")
        lines = [shlex.join([*self._start, *words]) for words in commands]
        return {"fix": "\n".join(lines), "note": "\n".join(notes) or None}
