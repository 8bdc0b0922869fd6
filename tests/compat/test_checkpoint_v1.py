"""Checkpoint files of format version 1 stay readable for as long as version 1 is promised.

The golden file was written by the first release of the format and is never written again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from checkpoint_samples import image
from tenuto_engine._caches import CacheState, HostArray
from tenuto_engine._checkpoint import Checkpoint, to_header
from tenuto_engine._format import write_file
from tenuto_engine._store import CheckpointStore, verify
from tenuto_engine._token import Token

GOLDEN = Path(__file__).parent / "checkpoint-v1.ckpt"
CREATED_AT = 1764450000.5


def expected() -> Checkpoint:
    """What the golden file holds."""
    keys = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4) / 8
    ring = np.arange(16, dtype=np.uint16).reshape(1, 1, 4, 4) + 0x3F80
    state = np.array([[1, -2, 3]], np.int32)
    return Checkpoint(
        cache_tokens=(5, 6, 7),
        original_prompt_tokens=1,
        generated=(
            Token(6, 1, "sea ", -0.5, ((6, -0.5), (9, -1.75))),
            Token(7, 2, "größe", -2.25, ()),
        ),
        pending_token=8,
        pending_logprob=-0.0625,
        pending_top_logprobs=((8, -0.0625),),
        seed=2**63 + 1,
        caches=[
            CacheState(
                "KVCache",
                {"offset": 3, "capacity": 256},
                (HostArray("keys", "float32", keys), HostArray("values", "float32", -keys)),
            ),
            CacheState(
                "RotatingKVCache",
                {"offset": 7, "index": 3, "keep": 0, "max_size": 4},
                (HostArray("keys", "bfloat16", ring), HostArray("values", "bfloat16", ring + 16)),
            ),
            CacheState("ArraysCache", {"entries": 2}, (HostArray("state.1", "int32", state),)),
            CacheState("KVCache", {"offset": 0, "capacity": 0}, ()),
        ],
        divergences=2,
        first_divergence=1,
        meta={"job": "j1", "epoch": 3, "spec": {"temperature": 0.7, "stop": ["x", None]}},
    )


def test_the_golden_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "j1"
    folder.mkdir()
    shutil.copy(GOLDEN, folder / "00000003-00000012-0a1b2c3d.ckpt")
    [stored] = CheckpointStore(folder).candidates()
    assert (stored.epoch, stored.seq, stored.nonce) == (3, 12, "0a1b2c3d")
    assert (stored.cache_length, stored.generated_tokens, stored.damage) == (3, 2, None)
    assert stored.created_at == CREATED_AT
    assert image(stored.load()) == image(expected())
    assert verify(stored.path).ok


def test_the_writer_still_writes_version_1_byte_for_byte() -> None:
    header, arrays = to_header(expected())
    header["created_at"] = CREATED_AT
    parts: list[bytes] = []
    write_file(header, arrays, lambda data: parts.append(bytes(data)))
    assert b"".join(parts) == GOLDEN.read_bytes()
