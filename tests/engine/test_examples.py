"""The examples of README and docstrings do what the text beside them says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import tenuto_engine
from tenuto_engine import CheckpointStore, Engine, read_job, stored_attempts
from tiny_models import build_tiny_model

README = Path(__file__).parents[2] / "README.md"
JOB = Path("checkpoints") / "story-1"


def readme_example(having: str) -> str:
    """The one of README that has `having` in it."""
    found = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = [each for each in found if having in each]
    return str(example)


def docstring_example(doc: str | None, having: str) -> str:
    """The lines from the first one with `having` to the end of their indented block."""
    lines = str(doc).splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if having in line)
    indent = re.match(" *", lines[first])
    assert indent
    block = []
    for line in lines[first:]:
        if line.strip() and not line.startswith(indent[0]):
            break
        block.append(line)
    return textwrap.dedent("".join(block)).strip() + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has hundreds of tokens to say to the prompt of the examples."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_docstring_of_the_package_has_the_example_of_the_readme() -> None:
    importing = "from tenuto_engine import CheckpointStore"
    assert docstring_example(tenuto_engine.__doc__, importing) == readme_example(importing)


def test_the_example_without_checkpoints_prints_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(readme_example("max_tokens=64"), model)
    assert len(capsys.readouterr().out) > 64


def test_a_killed_example_prints_what_an_undisturbed_one_does_when_it_is_started_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = readme_example("store.newest_valid()").replace("2000", "600")
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    printed = run_until_checkpoint_and_kill(example.replace("path/to/model", str(model)), killed)
    left = read_job(killed / JOB).checkpoints[0].generated_tokens

    undisturbed.mkdir()
    monkeypatch.chdir(undisturbed)
    whole = run_here(example, model)["generation"]
    text = capsys.readouterr().out
    assert 0 < len(printed) < len(text.encode())
    assert text.encode().startswith(printed)
    assert whole.stats.generated_tokens > left > 0

    monkeypatch.chdir(killed)
    again = run_here(example, model)
    assert capsys.readouterr().out == text
    assert again["generation"].sequence.tokens == whole.sequence.tokens
    assert again["checkpoint"].generated_tokens >= left
    stats = again["generation"].stats
    assert (stats.prefilled_tokens, stats.checkpoint_errors) == (0, 0)
    assert stats.decoded_tokens <= whole.stats.generated_tokens - left
    assert [attempt.epoch for attempt in stored_attempts(JOB)] == [1, 0]


def test_the_example_of_the_store_goes_on_where_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = docstring_example(CheckpointStore.__doc__, "store = CheckpointStore(")
    monkeypatch.chdir(tmp_path)
    engine = Engine.load(model)
    prompt = engine.encode_prompt("Write a long story.")
    begun, resumed = (begin(engine, example, prompt) for _ in range(2))
    assert (begun["store"].epoch, begun["checkpoint"]) == (0, None)
    assert resumed["store"].epoch == 1
    assert resumed["options"].resumes


def test_the_fingerprint_in_a_stores_meta_comes_back_with_the_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    engine = Engine.load(model)
    meta = {"geometry": engine.geometry.fingerprint}
    store = CheckpointStore(tmp_path / "story-1", meta=meta)
    sequence = engine.add(engine.encode_prompt("Hello"))
    for _ in range(2):
        engine.step()
    taken = engine.checkpoint(sequence)
    engine.close(sequence)
    assert taken is not None
    store.save(taken)
    checkpoint = store.newest_valid()
    assert checkpoint is not None
    assert checkpoint.meta["geometry"] == engine.geometry.fingerprint


def run_here(example: str, model: Path) -> dict[str, Any]:
    """Run it in this process; what its names stand for at the end."""
    names: dict[str, Any] = {}
    exec(example.replace("path/to/model", str(model)), names)  # noqa: S102 - our own text
    return names


def begin(engine: Engine, example: str, prompt: list[int]) -> dict[str, Any]:
    """Run the lines that make the options, and the first three tokens with those."""
    names = {name: getattr(tenuto_engine, name) for name in tenuto_engine.__all__}
    names["prompt"] = prompt
    exec(example, names)  # noqa: S102 - our own text
    with engine.generate(names["prompt"], names["options"]) as generation:
        for _ in range(3):
            next(generation)
    return names


def run_until_checkpoint_and_kill(program: str, folder: Path) -> bytes:
    """Kill it as soon as a checkpoint with generated tokens is on disk; what it has printed."""
    folder.mkdir()
    output = folder / "printed"
    with output.open("wb") as stdout:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=stdout)
        try:
            deadline = time.monotonic() + 60
            while not any(each.generated_tokens for each in read_job(folder / JOB).checkpoints):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGKILL)
            status = process.wait()
    assert status == -signal.SIGKILL
    return output.read_bytes()
