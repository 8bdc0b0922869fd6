"""Checkpoint files of format version 2, as released: later engines must read them and write them.

The files in checkpoint-v2 are never changed. A new version gets files of its own beside them, by
a module as `golden_v2`, which says what is in these and writes them (`python
tests/compat/golden_v2.py`, only as long as no release has them).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import cache as cache_module

from compat import golden_v2 as golden
from compat.golden_v2 import GOLDEN, JOB, META, NOW, PROMPT, SEED
from tenuto_engine import CacheState, Checkpoint, CheckpointCorrupt, CheckpointStore, Token
from tenuto_engine._caches import rebuild, snapshot
from tenuto_engine._headers import End, end_header
from tenuto_engine._inventory import read_job, stored_attempts, stored_checkpoints, stored_ends
from tenuto_engine._verify import verify_job

FOLDER = GOLDEN / "checkpoints" / JOB
VERSION_1 = Path(__file__).with_name("checkpoint-v1.ckpt")
# mlx-lm is not annotated.
mlx_caches: Any = cache_module


def images(caches: Sequence[CacheState]) -> list[object]:
    return [
        (
            cache.kind,
            dict(cache.meta),
            [(a.name, a.dtype, a.data.dtype, a.data.shape, a.data.tobytes()) for a in cache.arrays],
            images(cache.children),
        )
        for cache in caches
    ]


def load(length: int) -> Checkpoint:
    (stored,) = [each for each in stored_checkpoints(FOLDER) if each.cache_length == length]
    return stored.load()


def test_a_token_that_jumped_has_one_element_more_and_no_other_has() -> None:
    """Added later; the tokens of other jobs are written as they were."""
    tokens = (Token(7, 1, "ü", -0.5, ((7, -0.5),)), Token(8, 2, "a", 0.0, jumped=True))
    header = end_header(End({}, tokens, 0.0))
    assert header["tokens"] == [[7, 1, "ü", -0.5, [[7, -0.5]]], [8, 2, "a", 0.0, [], True]]


def test_the_checkpoints_of_both_attempts_are_found() -> None:
    found = stored_checkpoints(FOLDER)
    assert [(each.epoch, each.nonce, each.seq, each.cache_length) for each in found] == [
        (2, "second", 1, 14),
        (1, "first", 8, 11),
        (1, "first", 7, 9),
        (1, "first", 4, 7),
        (1, "first", 2, 3),
    ]
    assert [each.generated_tokens for each in found] == [9, 6, 4, 2, 0]
    assert [each.pending_token for each in found] == [909, 906, 904, 902, None]
    assert {(each.seed, each.prompt, each.prompt_tokens, each.damage) for each in found} == {
        (SEED, PROMPT, 5, None)
    }
    assert all(each.meta == META and each.created_at == NOW for each in found)


@pytest.mark.parametrize(("length", "epoch"), [(14, 2), (11, 1)])
def test_a_checkpoint_holds_what_it_held(length: int, epoch: int) -> None:
    checkpoint = load(length)
    generated = length - 5
    tokens = tuple(golden.token(index) for index in range(1, generated + 1))
    assert images(checkpoint.caches) == images(golden.caches(length, is_quantized=True))
    assert checkpoint.cache_tokens == (*PROMPT, *range(101, 101 + generated))
    assert checkpoint.original_prompt_tokens == 5
    assert checkpoint.generated == tokens
    assert checkpoint.pending_token == 900 + generated
    assert checkpoint.pending_logprob == -0.125
    assert checkpoint.pending_top_logprobs == ((900 + generated, -0.125), (2, -3.0))
    assert (checkpoint.seed, checkpoint.meta) == (SEED, META)
    assert (checkpoint.divergences, checkpoint.first_divergence) == (generated // 4, 4)
    origin = checkpoint.origin
    assert origin is not None
    assert (origin.generation, origin.position, origin.generated) == (1, length, generated)
    assert origin.file.startswith(f"{epoch:08d}-")


def test_a_checkpoint_becomes_the_caches_that_it_was_read_from() -> None:
    states = golden.caches(14, is_quantized=True)

    def make() -> list[Any]:
        recurrent = mlx_caches.CacheList(mlx_caches.ArraysCache(3))
        return [
            mlx_caches.KVCache(),
            mlx_caches.RotatingKVCache(golden.RING_SIZE, keep=golden.RING_KEEP),
            mlx_caches.KVCache(),
            mlx_caches.ArraysCache(3),
            mlx_caches.CacheList(mlx_caches.KVCache(), recurrent),
            mlx_caches.ChunkedKVCache(golden.CHUNK),
            mlx_caches.ConcatenateKVCache(),
        ]

    assert images(snapshot(rebuild(load(14).caches, make))) == images(states)


@pytest.mark.parametrize("length", [9, 7, 3])
def test_a_checkpoint_whose_state_was_overwritten_is_refused(length: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="holds the state of another commit"):
        load(length)


def test_the_write_that_was_cut_short_is_no_damage() -> None:
    second, first = stored_attempts(FOLDER)
    assert (first.checkpoints, first.is_torn, first.damage) == (4, True, None)
    assert (second.checkpoints, second.is_torn, second.damage) == (1, False, None)
    reports = list(verify_job(FOLDER))
    assert all(report.ok for report in reports)
    assert [report.path.name for report in reports if report.note] == ["00000001-first.log"]


def test_the_end_says_how_the_job_ended() -> None:
    (end,) = stored_ends(FOLDER)
    assert (end.epoch, end.nonce, end.end, end.damage) == (2, "second", golden.END, None)
    assert end.tokens == tuple(golden.token(index) for index in range(1, 10))
    assert (end.prompt, end.seed, end.meta, end.ended_at) == (PROMPT, SEED, META, NOW)


def test_the_same_content_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    golden.write(tmp_path / "data")
    assert contents(tmp_path / "data") == contents(GOLDEN)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("epoch", [0, 9])
def test_a_file_of_version_1_is_refused_by_name_and_the_next_fallback_taken(
    tmp_path: Path, epoch: int
) -> None:
    folder = tmp_path / JOB
    shutil.copytree(FOLDER, folder)
    old = folder / f"{epoch:08d}-00000001-old.ckpt"
    shutil.copy(VERSION_1, old)
    refused: list[CheckpointCorrupt] = []
    checkpoint = CheckpointStore(folder).newest_valid(refused.append)
    assert checkpoint is not None
    assert len(checkpoint.cache_tokens) == 14
    assert [(error.path, error.reason) for error in refused] == [
        (old, "of format version 1, which is not read any more")
    ]
    assert read_job(folder).checkpoints[0].damage == refused[0].reason
    assert next(r.reason for r in verify_job(folder) if r.path == old) == refused[0].reason


def test_version_1_in_the_place_of_the_newest_log_is_refused_and_the_first_attempt_taken(
    tmp_path: Path,
) -> None:
    folder = tmp_path / JOB
    shutil.copytree(FOLDER, folder)
    shutil.copy(VERSION_1, folder / "00000002-second.log")
    refused: list[CheckpointCorrupt] = []
    checkpoint = CheckpointStore(folder).newest_valid(refused.append)
    assert checkpoint is not None
    assert images(checkpoint.caches) == images(golden.caches(11, is_quantized=True))
    assert [error.reason for error in refused] == ["format version 1 is not known"]
