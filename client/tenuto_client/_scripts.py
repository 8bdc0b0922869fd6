"""Loading Lua scripts: the key functions, the shared moves of a job, and one script's own body."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

import msgpack

from .keys import Keys

TICKET_FUNCTION: Final = "run_ticket"
"""Name under which the workers register the function that every ticket calls."""


@cache
def source(package: str, name: str) -> str:
    """The whole text of the script `lua/<name>.lua` of a package, ready for EVAL."""
    return assemble(files(package).joinpath("lua", f"{name}.lua").read_text("utf-8"))


def assemble(body: str) -> str:
    """A script's own text with what all scripts share in front of it."""
    common = files("tenuto_client").joinpath("lua", "_common.lua").read_text("utf-8")
    return f"local P = ARGV[1]\n{Keys.lua()}\n{common}\n{body}"


def ticket_payload(enqueued_ms: int) -> bytes:
    """What arq reads for a ticket: a call of `run_ticket` without arguments.

    The fields are those of `arq.jobs.serialize_job` (arq 0.28), packed with msgpack.
    """
    return _pack(
        {"t": None, "f": TICKET_FUNCTION, "a": (), "k": {}, "et": enqueued_ms},
    )


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
