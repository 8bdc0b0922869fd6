"""Checkpoint files whose digests are right, whatever else they say. Independent of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

HEAD = b"TENUTOCK\x02\x00\x00\x00"
PREAMBLE_BYTES = 48


def forge(header: object, payload: bytes = b"", **changes: int) -> bytes:
    """A record.

    Args:
        header: to be packed, unless it is bytes.
        changes: of the preamble: kind, header_bytes, zero, payload_bytes.
    """
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    numbers = {"kind": 4, "header_bytes": len(packed), "zero": 0, "payload_bytes": len(payload)}
    numbers |= changes
    fixed = b"TREC"
    for name, width in (("kind", 4), ("header_bytes", 4), ("zero", 4), ("payload_bytes", 8)):
        fixed += numbers[name].to_bytes(width, "little")
    fixed += xxhash.xxh3_128_digest(packed)
    return fixed + xxhash.xxh3_64_intdigest(fixed).to_bytes(8, "little") + packed + payload


@dataclass
class Forgery:
    """A record, to be changed at will."""

    kind: int
    header: Any
    payload: bytes


def take_apart(content: bytes) -> list[Forgery]:
    """The records of a whole file."""
    records = []
    offset = 16
    while offset < len(content):
        kind, header_bytes, _ = (
            int.from_bytes(content[offset + at : offset + at + 4], "little") for at in (4, 8, 12)
        )
        payload_bytes = int.from_bytes(content[offset + 16 : offset + 24], "little")
        payload = offset + PREAMBLE_BYTES + header_bytes
        header = msgpack.unpackb(content[offset + PREAMBLE_BYTES : payload])
        offset = payload + payload_bytes
        records.append(Forgery(kind, header, content[payload:offset]))
    return records


def put_together(records: Sequence[Forgery]) -> bytes:
    """A file of these records, each chained to the one before it."""
    check = (xxhash.xxh3_64_intdigest(HEAD) % 2**32).to_bytes(4, "little")
    content = HEAD + check
    prev = None
    for record in records:
        header = record.header
        if prev is not None and isinstance(header, dict):
            header = header | {"prev": prev}
        packed = header if isinstance(header, bytes) else msgpack.packb(header)
        prev = xxhash.xxh3_128_digest(packed)
        content += forge(packed, record.payload, kind=record.kind)
    return content
