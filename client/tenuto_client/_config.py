"""Settings: flags, then `TENUTO_*` of the environment, then defaults."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from ._endpoint import Endpoint
from ._errors import InvalidRequest
from .keys import DEFAULT_NAMESPACE

REDIS_URL: Final = "TENUTO_REDIS_URL"
DATA_DIR: Final = "TENUTO_DATA_DIR"
NAMESPACE: Final = "TENUTO_NAMESPACE"
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}(:[A-Za-z0-9_.-]{1,64})*:?")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the jobs are.

    Attributes:
        redis_url: None is the embedded server of `data_dir`, shared by all who name that folder.
        namespace: prefix of every key.
        data_dir: holds the embedded server's data, models made by us, and checkpoints.
    """

    redis_url: str | None
    namespace: str
    data_dir: Path

    @classmethod
    def load(
        cls,
        *,
        redis_url: str | None = None,
        namespace: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """What was given, else what the environment says, else the defaults.

        Raises:
            InvalidRequest: the namespace is not a prefix that a key may have, or the URL none
                of Redis.
        """
        env = os.environ if environ is None else environ
        url = redis_url or env.get(REDIS_URL) or None
        folder = data_dir or env.get(DATA_DIR) or _default_data_dir(env)
        prefix = namespace or env.get(NAMESPACE) or DEFAULT_NAMESPACE
        if not _NAMESPACE.fullmatch(prefix):
            raise InvalidRequest(
                "namespace", f"{prefix!r} is not a key prefix", hint="such as tenuto: or team-a:"
            )
        if url is not None:
            Endpoint.parse(url)
        return cls(url, prefix.rstrip(":") + ":", Path(folder).expanduser().absolute())


def _default_data_dir(env: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/tenuto")
    return Path(env.get("XDG_DATA_HOME") or "~/.local/share") / "tenuto"
