"""Prompts that begin alike: a hit gives the bits of a miss, and what is kept stays bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from cache_models import CacheModel
from engine_runs import GREEDY, STYLES, Run, engine_in_memory, finish, run
from tenuto_engine import Engine, GenerationOptions, InvalidOption, KVScheme, PrefixCache
from tenuto_engine._blocks import block_names
from tenuto_engine._fs import FileSystem
from tiny_models import Kind

LoadEngine = Callable[..., Engine]

CHUNK = 16
BLOCK = 32
PLENTY = 2**28
TAIL = (7, 9, 11)


def text(tokens: int, salt: int = 0) -> list[int]:
    """Token ids of some prompt."""
    return [3 + (7 * place + salt * (place + 1)) % 89 for place in range(tokens)]


def cached(memory: int = PLENTY, folder: Path | None = None, disk: int = PLENTY) -> PrefixCache:
    return PrefixCache(memory, folder, disk if folder else 0, block_tokens=BLOCK)


class Told:
    """A run, and how many tokens of its prompt were found."""

    def __init__(self, engine: Engine, prompt: list[int], **options: Any) -> None:
        sequence = engine.add(prompt, GenerationOptions(**{**GREEDY, "max_tokens": 12, **options}))
        self.found = sequence.stats.cached_tokens
        self.run: Run = finish(engine, sequence)
        self.read = sequence.stats.prefilled_tokens
        if engine._prefix_cache is not None:
            engine._prefix_cache.flush()


# -- the same bits ---------------------------------------------------------------------


@pytest.mark.parametrize("model", get_args(CacheModel))
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_hit_gives_the_bits_of_a_miss_with_every_kind_of_cache(
    llama: Engine, model: CacheModel, place: str, tmp_path: Path
) -> None:
    prompt = text(150)
    plain = Told(engine_in_memory(llama, model), prompt)
    memory = PLENTY if place == "memory" else 0
    cache = cached(memory, tmp_path)
    engine = engine_in_memory(llama, model, prefix_cache=cache)
    first, second = Told(engine, prompt), Told(engine, prompt)
    assert (first.found, second.found) == (0, 128)
    assert second.read == len(prompt) - 128
    assert first.run == second.run == plain.run
    # Another prompt that begins alike, and one after a restart.
    other = prompt[:70] + text(60, salt=3)
    apart = Told(engine_in_memory(llama, model), other)
    again = Told(engine_in_memory(llama, model, prefix_cache=cached(0, tmp_path)), other)
    assert (again.found, again.run) == (64, apart.run)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * BLOCK, 97])
def test_the_last_token_of_a_prompt_is_always_read(
    load_engine: LoadEngine, kind: Kind, style: str, length: int
) -> None:
    prompt = text(length)
    plain = run(load_engine(kind), prompt, max_tokens=10, **STYLES[style])
    engine = load_engine(kind, prefix_cache=cached())
    told = [Told(engine, prompt, **STYLES[style], max_tokens=10) for _ in range(2)]
    assert [each.run for each in told] == [plain, plain]
    assert told[1].found == (length - 1) // BLOCK * BLOCK
    # Where a longer one was read before, all of this one is known.
    Told(engine, text(length + BLOCK))
    again = Told(engine, prompt, **STYLES[style], max_tokens=10)
    assert (again.found, again.run) == ((length - 1) // BLOCK * BLOCK, plain)


def test_neither_what_decode_wrote_nor_half_a_block_is_kept(
    load_engine: LoadEngine, kind: Kind
) -> None:
    cache = cached()
    engine = load_engine(kind, prefix_cache=cache)
    told = Told(engine, text(50), max_tokens=100)
    whole = text(50) + told.run.ids
    assert Told(engine, whole).found == BLOCK
    assert (
        Told(load_engine(kind, prefix_cache=cache), whole).run == Told(load_engine(kind), whole).run
    )


def test_caches_that_the_caller_filled_are_not_taken_in(llama: Engine) -> None:
    """They may hold what decode wrote, even where they end at a border."""
    model: CacheModel = "llama"
    source = engine_in_memory(llama, model)
    sequence = source.add(text(40), GenerationOptions(**GREEDY, max_tokens=60))
    while len(sequence.tokens) < BLOCK:
        source.step()
    saved = source.checkpoint(sequence)
    assert saved is not None
    tokens = list(saved.cache_tokens)
    covered = len(tokens) // CHUNK * CHUNK
    while len(tokens) != covered + CHUNK:
        source.step()
        saved = source.checkpoint(sequence)
        assert saved is not None
        tokens = list(saved.cache_tokens)
    prompt = tokens + text(60)
    cache = cached()
    engine = engine_in_memory(llama, model, prefix_cache=cache)
    before = Told(engine, tokens)
    assert before.found == 0
    Told(engine, prompt, cache=saved.caches, cached_tokens=len(tokens))
    again = Told(engine, prompt)
    assert again.found == (len(tokens) - 1) // BLOCK * BLOCK
    assert again.run == Told(engine_in_memory(llama, model), prompt).run


def test_a_prefix_is_of_its_model_chunk_and_tokens(llama: Engine, tmp_path: Path) -> None:
    cache = cached(PLENTY, tmp_path)
    prompt = text(100)
    Told(engine_in_memory(llama, "llama", prefix_cache=cache), prompt)
    others = [
        engine_in_memory(llama, "llama_wide", prefix_cache=cache),
        engine_in_memory(llama, "llama", chunk_size=8, prefix_cache=cache),
    ]
    assert [Told(each, prompt).found for each in others] == [0, 0]
    engine = engine_in_memory(llama, "llama", prefix_cache=cache)
    changed = [4, *prompt[1:]]
    assert Told(engine, changed).found == 0
    assert Told(engine, [*prompt[:40], 4, *prompt[41:]]).found == 32


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("start", "found"), [(0, 128), (40, 32), (96, 64), (200, 128)])
def test_a_hit_gives_the_bits_of_a_miss_where_the_kv_is_quantized(
    llama: Engine, model: CacheModel, start: int, found: int
) -> None:
    """Blocks end where caches become quantized: what is before says nothing about what follows."""
    scheme = KVScheme(bits=8, group_size=32, start=start)
    plain = engine_in_memory(llama, model, head_dim=32, kv_scheme=scheme)
    first = Told(plain, text(150))
    engine = engine_in_memory(llama, model, head_dim=32, kv_scheme=scheme, prefix_cache=cached())
    told = [Told(engine, text(150)) for _ in range(2)]
    assert [each.run for each in told] == [first.run, first.run]
    assert told[1].found == found


def test_rows_side_by_side_share_what_the_first_has_read(load_engine: LoadEngine) -> None:
    cache = cached()
    engine = load_engine("llama", slots=2, prefix_cache=cache)
    plain = run(load_engine("llama"), text(120), max_tokens=12, **GREEDY)
    options = GenerationOptions(**GREEDY, max_tokens=12)
    first = engine.add(text(120), options)
    while first.prefill_done < 2 * BLOCK:
        engine.step()
    second = engine.add(text(120), options)
    assert second.stats.cached_tokens == 2 * BLOCK
    tokens: dict[Any, list[Any]] = {first: [], second: []}
    while not (first.state.is_end and second.state.is_end):
        for event in engine.step():
            tokens[event.sequence].append(event.token)
    assert tokens[first] == tokens[second] == plain.tokens


def test_a_prefix_found_beforehand_is_taken_as_it_is(llama: Engine) -> None:
    engine = engine_in_memory(llama, "llama", prefix_cache=cached())
    first = Told(engine, text(100))
    prefix = engine.find_prefix(text(100))
    assert prefix.tokens == 96
    assert Told(engine, text(100), prefix=prefix).run == first.run
    nothing = engine_in_memory(llama, "llama").find_prefix(text(100))
    assert nothing.tokens == 0
    told = Told(engine, text(100), prefix=nothing)
    assert (told.found, told.run) == (0, first.run)


# -- bounds ----------------------------------------------------------------------------


def test_what_was_used_last_stays_and_a_chain_loses_its_end_first(llama: Engine) -> None:
    probe = cached()
    Told(engine_in_memory(llama, "llama", prefix_cache=probe), text(100))
    block = probe.nbytes // 3
    cache = cached(memory=5 * block)
    engine = engine_in_memory(llama, "llama", prefix_cache=cache)
    one, two = text(100), text(100, salt=1)
    Told(engine, one)
    Told(engine, two)
    assert cache.nbytes <= 5 * block
    assert (engine.find_prefix(two).tokens, engine.find_prefix(one).tokens) == (96, 64)
    # Used again, so that now the other one has to give way.
    Told(engine, text(40, salt=2))
    assert (engine.find_prefix(one).tokens, engine.find_prefix(two).tokens) == (64, 64)


def test_the_folder_stays_within_its_limit(llama: Engine, tmp_path: Path) -> None:
    probe = cached(0, tmp_path / "probe")
    Told(engine_in_memory(llama, "llama", prefix_cache=probe), text(100))
    size = max(path.stat().st_size for path in (tmp_path / "probe").iterdir())
    folder = tmp_path / "folder"
    limit = 10 * size
    cache = cached(0, folder, disk=limit)
    engine = engine_in_memory(llama, "llama", prefix_cache=cache)
    for salt in range(12):
        Told(engine, text(100, salt))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
    assert engine.find_prefix(text(100, 11)).tokens == 96
    assert engine.find_prefix(text(100, 0)).tokens == 0
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_block_larger_than_all_that_may_be_kept_is_left(llama: Engine, tmp_path: Path) -> None:
    cache = cached(memory=100, folder=tmp_path, disk=100)
    engine = engine_in_memory(llama, "llama", prefix_cache=cache)
    assert Told(engine, text(100)).run == Told(engine, text(100)).run
    assert (cache.nbytes, list(tmp_path.glob("*.block"))) == (0, [])


@pytest.mark.parametrize("field", ["memory_bytes", "disk_bytes", "block_tokens"])
def test_a_limit_that_is_none_is_refused_by_name(field: str) -> None:
    wrong: dict[str, Any] = {"memory_bytes": 1, field: -1}
    with pytest.raises(InvalidOption, match=field):
        PrefixCache(**wrong)


# -- what happens to files -------------------------------------------------------------


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "zero", "another", "pipe", "folder"])
def test_damage_costs_time_and_never_a_bit(llama: Engine, harm: str, tmp_path: Path) -> None:
    prompt = text(150)
    first = Told(engine_in_memory(llama, "llama", prefix_cache=cached(0, tmp_path)), prompt)
    fingerprint = engine_in_memory(llama, "llama").geometry.fingerprint
    names = block_names(fingerprint, prompt[:-1], BLOCK)
    second = tmp_path / f"{names[1]}.block"
    content = second.read_bytes()
    second.unlink()
    match harm:
        case "cut":
            second.write_bytes(content[: len(content) // 2])
        case "flip":
            second.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "empty":
            second.touch()
        case "zero":
            second.write_bytes(bytes(len(content)))
        case "another":
            second.write_bytes((tmp_path / f"{names[0]}.block").read_bytes())
        case "pipe":
            os.mkfifo(second)
        case "folder":
            second.mkdir()
    engine = engine_in_memory(llama, "llama", prefix_cache=cached(0, tmp_path))
    told = Told(engine, prompt)
    assert (told.found, told.run) == (BLOCK, first.run)


class BrokenDisk(FileSystem):
    """Refuses to write."""

    def write(self, handle: int, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_no_file_and_harms_no_row(llama: Engine, tmp_path: Path) -> None:
    cache = PrefixCache(0, tmp_path, PLENTY, block_tokens=BLOCK, fs=BrokenDisk())
    engine = engine_in_memory(llama, "llama", prefix_cache=cache)
    plain = Told(engine_in_memory(llama, "llama"), text(100))
    assert Told(engine, text(100)).run == plain.run
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_at_any_moment_leaves_whole_blocks_or_none(
    llama: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    script = """
import sys
from pathlib import Path
from tenuto_engine import Engine, GenerationOptions, PrefixCache
cache = PrefixCache(0, sys.argv[2], 2**28, block_tokens=32)
engine = Engine.load(sys.argv[1], chunk_size=16, prefix_cache=cache)
print("ready", flush=True)
for salt in range(10**6):
    prompt = [3 + (7 * place + salt * (place + 1)) % 89 for place in range(300)]
    for _ in engine.generate(prompt, GenerationOptions(max_tokens=1)):
        pass
    print(salt, flush=True)
"""
    model = llama._loaded.path
    for kill_after in (1, 2, 3):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(model), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(1 + kill_after):
                process.stdout.readline()
            process.kill()
    cache = PrefixCache(0, folder, PLENTY, block_tokens=BLOCK)
    engine = Engine.load(model, chunk_size=CHUNK, prefix_cache=cache)
    found = 0
    for salt in range(4):
        told = Told(engine, text(300, salt), max_tokens=4)
        assert told.run == Told(llama, text(300, salt), max_tokens=4).run
        found += told.found
    assert found > 0


def test_threads_that_look_and_write_at_once_agree(llama: Engine, tmp_path: Path) -> None:
    small = cached(2**20, tmp_path, disk=2**20)
    engine = engine_in_memory(llama, "llama", prefix_cache=small)
    plain = {salt: Told(engine_in_memory(llama, "llama"), text(200, salt)).run for salt in range(4)}
    stop = threading.Event()
    wrong: list[object] = []

    def look() -> None:
        while not stop.is_set():
            for salt in plain:
                try:
                    engine.find_prefix(text(200, salt))
                except Exception as error:  # noqa: BLE001 - it is what the test looks for
                    wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for salt, expected in plain.items():
            assert Told(engine, text(200, salt)).run == expected
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
