"""Jobs whose text has to match a grammar: killed in mid-word, they go on as if nothing happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from exact_runs import SAMPLED, Case, Models, Outcome, Scene, perform, prepared, worker_of
from tenuto_client import JobState, SubmitOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 30},
        "years": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000, "maximum": 2999},
            "minItems": 4,
            "maxItems": 6,
        },
        "kind": {"enum": ["novel", "poem"]},
    },
    "required": ["title", "years", "kind"],
    "additionalProperties": False,
    # Random models are fond of endless blanks.
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"([a-z]{2,5} ){10,14}[0-9]{5}\."
LARK = "start: " + "part " * 12 + '\npart: NUMBER ("+" | "-")\nNUMBER: /[0-9]{1,4}/\n'


def make_grammar_cases(models: Models) -> tuple[Case, ...]:
    """A grammar for each model, with logprobs and penalties."""
    asked: dict[str, dict[str, Any]] = {
        "json_schema": {"json_schema": SCHEMA},
        "regex": {"regex": REGEX},
        "lark": {"lark": LARK},
    }
    shared = SAMPLED | SubmitOptions(ignore_eos=False, max_tokens=300)
    cases = tuple(
        Case(f"{kind}-{name}", kind, "Tell me.", shared | SubmitOptions(grammar=asked[name]))
        for kind, name in zip(models, asked, strict=True)
    )
    # And one that takes what is forced in one forward, with the rings' cache.
    jumps = shared | SubmitOptions(grammar=asked["json_schema"], jump_forward=True, logprobs=0)
    return (*cases, Case("jumps-json_schema", "gemma3_text", "Tell me.", jumps))


def assert_fits(name: str, outcome: Outcome) -> None:
    """The text of a case is whole."""
    assert (outcome.state, outcome.finish_reason) == (JobState.COMPLETED, "stop")
    text = outcome.text
    if name.endswith("json_schema"):
        book = json.loads(text)
        assert list(book) == ["title", "years", "kind"]
        assert 20 <= len(book["title"]) <= 30
        assert all(1000 <= year <= 2999 for year in book["years"])
    else:
        pattern = REGEX if name.endswith("regex") else r"([0-9]{1,4}[+-]){12}"
        assert re.fullmatch(pattern, text)


def test_a_worker_killed_in_mid_text_changes_no_bit(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    cases = make_grammar_cases(models)
    with (
        worker_of(models, redis_url, namespace, tmp_path) as worker,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        references = perform(redis_url, namespace, cases)
        for name, outcome in references.items():
            assert_fits(name, outcome)
            assert any(token.jumped for token in outcome.tokens) == name.startswith("jumps")
        total = sum(len(outcome.tokens) for outcome in references.values())
        # Apart from each other, so that each kill meets a child that decodes.
        steps = [total * part // 3 for part in (1, 2)]
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            worker.kill_child()
        scene.assert_exact(references)
        assert len(worker.lines("child died")) == len(steps)
        # Some went on from a checkpoint, and some had tokens to catch up.
        resumed = [line for line in prepared([worker]) if line["published"]]
        assert any(line["cached_tokens"] for line in resumed)
