"""``PrefixCache``: the KV of prompts that begin alike, computed once.

Only what a prefill wrote in whole chunks from position 0 is kept, so a hit gives the bits that a
miss would have given. It is kept in memory and, where there is a folder, on disk, each with a
limit in bytes; what was used last stays longest.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tenuto_engine._blocks import Block, Gap, block_names, join, take_block
from tenuto_engine._cache_tree import CacheState
from tenuto_engine._caches import signature
from tenuto_engine._errors import InvalidOption
from tenuto_engine._fs import FileSystem, StrPath
from tenuto_engine._prefix_folder import PrefixFolder

BLOCK_TOKENS: Final = 256
"""A block has about so many: as many chunks as fit, but one at least."""
_MAX_WAITING_BYTES: Final = 128 * 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What a prompt may start from.

    Attributes:
        tokens: how many of the prompt are covered; 0 where nothing was found.
        caches: their KV, one state a layer.
        fingerprint: of the geometry that it was computed in; empty where nothing was found.
    """

    tokens: int = 0
    caches: tuple[CacheState, ...] = ()
    fingerprint: str = ""


@dataclass(slots=True)
class PrefixStats:
    """Counted since the cache was made.

    Attributes:
        hits, misses: lookups that found some of a prompt, or nothing of it.
        tokens: prompt tokens that were found.
        dropped: blocks not kept because too much waited to be kept.
    """

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    dropped: int = 0


class PrefixCache:
    """Shared by all engines of a process, and through its folder by all processes of a machine.

    Safe to use from any thread. Blocks are copied to the host and written on a thread of its own.

    Args:
        memory_bytes: how much host memory the blocks may take.
        folder: where they are kept on disk; None is nowhere.
        disk_bytes: how much of the disk they may take.
        block_tokens: at most so many tokens a block, unless a chunk has more. Others in the same
            folder must have the same.

    Raises:
        InvalidOption: a number is negative, or ``block_tokens`` is below 1.
    """

    def __init__(
        self,
        memory_bytes: int,
        folder: StrPath | None = None,
        disk_bytes: int = 0,
        *,
        block_tokens: int = BLOCK_TOKENS,
        fs: FileSystem | None = None,
    ) -> None:
        for name, value, least in (
            ("memory_bytes", memory_bytes, 0),
            ("disk_bytes", disk_bytes, 0),
            ("block_tokens", block_tokens, 1),
        ):
            if value < least:
                raise InvalidOption(name, f"must be at least {least}, is {value}")
        self.stats = PrefixStats()
        self._block_tokens = block_tokens
        self._limit = memory_bytes
        self._folder = PrefixFolder(folder, disk_bytes, fs) if folder and disk_bytes else None
        self._lock = threading.Lock()
        self._blocks: OrderedDict[str, Block] = OrderedDict()
        self._nbytes = 0
        self._keeper = _Keeper(self._keep)

    @property
    def nbytes(self) -> int:
        """Host memory that the blocks take, without those that wait."""
        return self._nbytes

    def block_size(self, chunk: int) -> int:
        """Tokens of a block where a prefill chunk has ``chunk``."""
        return chunk * max(1, self._block_tokens // chunk)

    def find(self, fingerprint: str, prompt: Sequence[int], chunk: int) -> Prefix:
        """The longest prefix of ``prompt`` that is known, of whole blocks, without its last token.

        May read the disk.

        Args:
            fingerprint: of the engine's geometry.
            chunk: the engine's chunk size.
        """
        chain: list[Block] = []
        for name in block_names(fingerprint, prompt[:-1], self.block_size(chunk)):
            block = self._get(name)
            if block is None:
                break
            chain.append(block)
        found = Prefix()
        if chain:
            self._touch([block.name for block in chain])
            try:
                found = Prefix(chain[-1].stop, tuple(join(chain)), fingerprint)
            except (Gap, ValueError) as error:
                _log.warning("blocks of a prefix do not fit together: %s", error)
        self._count(found)
        return found

    def has(self, name: str) -> bool:
        """Whether a block is kept, or about to be."""
        if name in self._blocks or self._keeper.has(name):
            return True
        return self._folder is not None and self._folder.has(name)

    def offer(self, block: Block, above: Sequence[str]) -> bool:
        """Keep a block behind those ``above`` it; False if too much waits to be kept.

        Its arrays must be evaluated, and nobody else's.
        """
        taken = self._keeper.offer(block, above)
        self.stats.dropped += not taken
        return taken

    def flush(self) -> None:
        """Wait until all blocks that were offered are kept."""
        self._keeper.flush()

    def _get(self, name: str) -> Block | None:
        with self._lock:
            block = self._blocks.get(name)
        if block is None:
            block = self._keeper.waiting(name)
        if block is None and self._folder is not None:
            block = self._folder.read(name)
            if block is not None:
                self._remember(block, ())
        return block

    def _keep(self, block: Block, above: Sequence[str]) -> None:
        kept = block.on_host()
        self._remember(kept, above)
        if self._folder is not None:
            self._folder.write(kept, above)

    def _remember(self, block: Block, above: Sequence[str]) -> None:
        with self._lock:
            if block.name not in self._blocks and block.nbytes <= self._limit:
                self._blocks[block.name] = block
                self._nbytes += block.nbytes
            self._move_up([*above, block.name])
            while self._nbytes > self._limit:
                _, oldest = self._blocks.popitem(last=False)
                self._nbytes -= oldest.nbytes

    def _touch(self, names: Sequence[str]) -> None:
        with self._lock:
            self._move_up(names)
        if self._folder is not None:
            self._folder.touch(names)

    def _move_up(self, names: Sequence[str]) -> None:
        # The end of a chain goes before its beginning, without which it is of no use.
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def _count(self, found: Prefix) -> None:
        with self._lock:
            self.stats.hits += bool(found.tokens)
            self.stats.misses += not found.tokens
            self.stats.tokens += found.tokens


class PrefixOffers:
    """What the prefill of one row adds to a cache.

    Args:
        fingerprint, prompt, chunk: as of ``PrefixCache.find``.
        caches: what the row starts from: nothing, or what was found.
        position: how many tokens they hold.
    """

    def __init__(
        self,
        cache: PrefixCache,
        fingerprint: str,
        prompt: Sequence[int],
        chunk: int,
        *,
        caches: Sequence[Any],
        position: int,
    ) -> None:
        self._cache = cache
        self._size = cache.block_size(chunk)
        self._names = block_names(fingerprint, prompt[:-1], self._size)
        self._signature = signature(caches) if position else None
        self._over = False

    def border(self, caches: Sequence[Any], position: int) -> None:
        """The prefill has read ``position`` tokens; on the thread that owns ``caches``."""
        number, rest = divmod(position, self._size)
        if self._over or rest or not 0 < number <= len(self._names):
            return
        kinds = signature(caches)
        if self._signature not in (None, kinds):
            # Where caches change their class, what earlier blocks have of them is void.
            self._over = True
            return
        self._signature = kinds
        name, above = self._names[number - 1], self._names[: number - 1]
        if not self._cache.has(name):
            block = take_block(name, caches, position - self._size, position)
            self._over = not self._cache.offer(block, above)


class _Keeper:
    """Hands blocks to a function on a thread of its own, in order; few may wait."""

    def __init__(self, keep: Any) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._items: deque[tuple[Block, tuple[str, ...]]] = deque()
        self._names: dict[str, Block] = {}
        self._nbytes = 0
        self._thread: threading.Thread | None = None

    def has(self, name: str) -> bool:
        return name in self._names

    def waiting(self, name: str) -> Block | None:
        return self._names.get(name)

    def offer(self, block: Block, above: Sequence[str]) -> bool:
        with self._changed:
            if self._nbytes and self._nbytes + block.nbytes > _MAX_WAITING_BYTES:
                return False
            self._items.append((block, tuple(above)))
            self._names[block.name] = block
            self._nbytes += block.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="prefix-cache", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._names)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                block, above = self._items[0]
            try:
                self._keep(block, above)
            except Exception:  # noqa: BLE001 - whatever a full disk or memory raises
                # It only saves time; whoever generates must not suffer from it.
                _log.exception("a block of a prefix is not kept")
            with self._changed:
                self._items.popleft()
                self._names.pop(block.name, None)
                self._nbytes -= block.nbytes
                self._changed.notify_all()
