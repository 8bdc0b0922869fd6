"""``Block``: the KV that some whole chunks of a prefill wrote, its name, and its file.

Blocks follow one another from position 0. A name is a hash over the geometry and all tokens up to
the block's end, so whoever has the same tokens in the same geometry finds the same bits.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np

from tenuto_engine._assembly import cache_state
from tenuto_engine._cache_kinds import array_names, held, stored_length
from tenuto_engine._cache_tree import HOST_DTYPES, CacheState, HostArray
from tenuto_engine._caches import layouts, take
from tenuto_engine._delta import Bits, Blob, Layout, Member, StateArray
from tenuto_engine._headers import BlockHeader, block_blobs, block_header
from tenuto_engine._parsing import HeaderParser
from tenuto_engine._records import (
    HEAD_BYTES,
    NO_DIGEST,
    Damaged,
    Packed,
    Reader,
    RecordType,
    check_head,
    pack_head,
    pack_record,
    read_blob,
    read_record,
)

NAME_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Block:
    """What a prefill added between two borders.

    Attributes:
        name: 32 hex digits over the geometry and all tokens before ``stop``.
        start, stop: absolute positions.
        layouts: the caches at ``stop`` without their data, one a layer.
        blobs: the positions ``start..stop`` that they still held at ``stop``.
        state: the arrays that change whole, as they were at ``stop``.
    """

    name: str
    start: int
    stop: int
    layouts: tuple[Layout, ...]
    blobs: tuple[Blob, ...]
    state: tuple[StateArray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        blobs = sum(blob.data.nbytes for blob in self.blobs)
        return blobs + sum(array.data.nbytes for array in self.state)

    def on_host(self) -> Block:
        """The same in memory that the device has nothing to do with."""
        return replace(
            self,
            blobs=tuple(replace(blob, data=np.array(blob.host())) for blob in self.blobs),
            state=tuple(replace(array, data=np.array(array.host())) for array in self.state),
        )


def block_names(fingerprint: str, tokens: Sequence[int], size: int) -> tuple[str, ...]:
    """Of all blocks of ``size`` tokens that ``tokens`` begin with, in order.

    The hash is a cryptographic one: nobody can make up tokens that are taken for others.
    """
    names: list[str] = []
    above = fingerprint.encode()
    for start in range(0, len(tokens) - size + 1, size):
        own = np.array(tokens[start : start + size], np.uint32).tobytes()
        above = hashlib.blake2b(above + own, digest_size=NAME_BYTES).digest()
        names.append(above.hex())
    return tuple(names)


def take_block(name: str, caches: Sequence[object], start: int, stop: int) -> Block:
    """Copy what a prefill wrote at ``start..stop`` to private memory of the device.

    Args:
        caches: live ones that hold exactly ``stop`` positions; on the thread that owns them.
    """
    described = layouts(caches)
    blobs, state = take(caches, start, stop, state=True, described=described)
    data = [*(blob.data for blob in blobs), *(array.data for array in state)]
    mx.eval([each for each in data if isinstance(each, mx.array)])
    return Block(name, start, stop, described, blobs, state)


class Gap(Exception):
    """Blocks do not hold all that their caches held."""


def join(blocks: Sequence[Block]) -> list[CacheState]:
    """The caches at the end of the last of ``blocks``, which follow one another from 0.

    Raises:
        Gap: they do not fit together.
    """
    last = blocks[-1]
    pieces = _pieces(blocks)
    state: dict[int, list[HostArray]] = defaultdict(list)
    for array in last.state:
        state[array.leaf].append(HostArray(array.name, array.dtype, array.host()))
    leaves = [leaf for layout in last.layouts for leaf in layout.leaves()]
    if any(number >= len(leaves) for number in state):
        raise Gap("there is state of caches that there are not")
    arrays = (
        [*_filled(number, leaf, pieces, last.stop), *state[number]]
        for number, leaf in enumerate(leaves)
    )
    return [cache_state(layout, arrays) for layout in last.layouts]


# -- putting positions together --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions of one array: ``[batch, heads, positions, width]``."""

    position: int
    dtype: str
    data: Bits


_Pieces = dict[tuple[int, int], list[_Piece]]


def _pieces(blocks: Sequence[Block]) -> _Pieces:
    found: _Pieces = defaultdict(list)
    for block in blocks:
        for blob in block.blobs:
            for member, data in zip(blob.members, blob.host(), strict=True):
                piece = _Piece(member.position, blob.dtype, data)
                found[member.leaf, member.array].append(piece)
    return found


def _filled(number: int, leaf: Layout, pieces: _Pieces, stop: int) -> Iterator[HostArray]:
    runs = held(leaf.kind, leaf.meta)
    if not runs:
        return
    if any(run.position + run.length > stop for run in runs):
        raise Gap(f"leaf {number} holds positions behind {stop}")
    length = stored_length(leaf.kind, leaf.meta)
    for index, name in enumerate(array_names(leaf.kind)):
        known = pieces[number, index]
        if not known:
            raise Gap(f"array {name} of leaf {number} is missing")
        batch, heads, _, width = known[0].data.shape
        whole = np.zeros((batch, heads, length, width), HOST_DTYPES[known[0].dtype])
        filled = 0
        for piece in known:
            if (piece.dtype, *_kept(piece)) != (known[0].dtype, batch, heads, width):
                raise Gap(f"array {name} of leaf {number} changes its shape")
            for run in runs:
                part = run.within(piece.position, piece.position + piece.data.shape[2])
                if part.length:
                    first = part.position - piece.position
                    slots = slice(part.slot, part.slot + part.length)
                    whole[:, :, slots] = piece.data[:, :, first : first + part.length]
                    filled += part.length
        if filled != sum(run.length for run in runs):
            raise Gap(f"array {name} of leaf {number} has not all its positions")
        yield HostArray(name, known[0].dtype, whole)


def _kept(piece: _Piece) -> tuple[int, int, int]:
    batch, heads, _, width = piece.data.shape
    return batch, heads, width


# -- the file --------------------------------------------------------------------------


def pack_block(block: Block) -> list[bytes | memoryview]:
    """The bytes of its file, in order; the payload is shared with its arrays."""
    header = BlockHeader(block.name, block.start, block.stop, block.layouts)
    packed: Packed = pack_record(
        RecordType.BLOCK,
        block_header(header, positional=len(block.blobs)),
        seq=0,
        prev=NO_DIGEST,
        blobs=block_blobs(block.blobs, block.state),
    )
    return [pack_head(), *packed.chunks]


def read_block(path: Path, name: str) -> Block:
    """Read a block, checking every byte.

    Raises:
        BadRecord: it is damaged, or is not the block of this name.
        OSError: the disk refused.
    """
    with Reader(path) as reader:
        check_head(reader)
        record, header = read_record(reader, HEAD_BYTES)
        found = HeaderParser().parse(record, header)
        if not isinstance(found, BlockHeader) or record.end != reader.size:
            raise Damaged("it is no block")
        if found.name != name:
            raise Damaged("it is another block")
        data = [read_blob(reader, info) for info in record.blobs]
    positional = len(found.slices)
    blobs = tuple(
        Blob(
            info.dtype,
            tuple(
                Member(leaf, array, position)
                for (leaf, array), position in zip(each.owners, each.positions, strict=True)
            ),
            bits,
        )
        for each, info, bits in zip(found.slices, record.blobs, data[:positional], strict=False)
    )
    state = tuple(
        StateArray(leaf, label, info.dtype, bits)
        for (leaf, label), info, bits in zip(
            found.state, record.blobs[positional:], data[positional:], strict=True
        )
    )
    return Block(name, found.start, found.stop, found.layouts, blobs, state)
