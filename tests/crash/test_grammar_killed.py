"""Jobs whose text has to match a grammar: killed in mid-word, they go on as if nothing happened."""

from __future__ import annotations

import json
import random
import re
import secrets
from pathlib import Path
from typing import Any

from exact_runs import SAMPLED, Case, Models, Outcome, Scene, perform, prepared, worker_of
from tenuto_client import JobState, SubmitOptions
from tiny_models import Kind

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 30, "maxLength": 60},
        "years": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000, "maximum": 2999},
            "minItems": 8,
            "maxItems": 12,
        },
        "kind": {"enum": ["novel", "poem"]},
    },
    "required": ["title", "years", "kind"],
    "additionalProperties": False,
    # Random models are fond of endless blanks.
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"([a-z]{2,5} ){20,30}[0-9]{5}\."
LARK = "start: " + "part " * 20 + '\npart: NUMBER ("+" | "-")\nNUMBER: /[0-9]{1,4}/\n'


def make_grammar_cases(models: Models) -> tuple[Case, ...]:
    """JSON from every model, and each other grammar from one, with logprobs and penalties."""
    asked: dict[str, dict[str, Any]] = {
        "json_schema": {"json_schema": SCHEMA},
        "regex": {"regex": REGEX},
        "lark": {"lark": LARK},
    }
    others: tuple[tuple[Kind, str], ...] = (("gemma3_text", "regex"), ("lfm2", "lark"))
    shared = SAMPLED | SubmitOptions(ignore_eos=False, max_tokens=300)
    return tuple(
        Case(f"{kind}-{name}", kind, "Tell me.", shared | SubmitOptions(grammar=asked[name]))
        for kind, name in (*((each, "json_schema") for each in models), *others)
    )


def assert_fits(name: str, outcome: Outcome) -> None:
    """The text of a case is whole."""
    assert (outcome.state, outcome.finish_reason) == (JobState.COMPLETED, "stop")
    text = outcome.text
    if name.endswith("json_schema"):
        book = json.loads(text)
        assert list(book) == ["title", "years", "kind"]
        assert 30 <= len(book["title"]) <= 60
        assert all(1000 <= year <= 2999 for year in book["years"])
    else:
        pattern = REGEX if name.endswith("regex") else r"([0-9]{1,4}[+-]){20}"
        assert re.fullmatch(pattern, text)


def test_a_worker_killed_in_mid_text_changes_no_bit(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    cases = make_grammar_cases(models)
    undisturbed = f"t{secrets.token_hex(4)}:"
    with worker_of(models, redis_url, undisturbed, tmp_path / "undisturbed") as worker:
        worker.wait_ready()
        references = perform(redis_url, undisturbed, cases)
    for name, outcome in references.items():
        assert_fits(name, outcome)
    total = sum(len(outcome.tokens) for outcome in references.values())
    steps = sorted(random.Random(1).sample(range(20, total - 60), 4))
    with (
        worker_of(models, redis_url, namespace, tmp_path / "killed") as worker,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            worker.kill_child()
        scene.assert_exact(references)
        assert len(worker.lines("child died")) == len(steps)
        # Some went on from a checkpoint, and some had tokens to catch up.
        resumed = [line for line in prepared([worker]) if line["published"]]
        assert any(line["cached_tokens"] for line in resumed)
