"""Jobs with LoRA adapters: killed in mid-text, they go on as if nothing happened."""

from __future__ import annotations

import secrets
from pathlib import Path

from adapter_shop import write_adapter
from exact_runs import Case, Models, Scene, make_cases, perform, prepared, worker_of
from tenuto_client import JobState, SubmitOptions
from workers import poll_until


def test_a_worker_killed_in_mid_text_changes_no_bit(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    only: Models = {"llama": models["llama"]}
    write_adapter(tmp_path / "adapters", "poet", models["llama"], suffixes=None)
    flags = ("--adapters", f"llama={tmp_path / 'adapters'}")
    # The same jobs with and without the adapter, side by side.
    cases = [
        Case(f"{case.name}-{name}", case.model, case.prompt, case.options | more)
        for case in make_cases(only)
        for name, more in (("poet", SubmitOptions(adapter="poet")), ("plain", SubmitOptions()))
    ]
    undisturbed = f"t{secrets.token_hex(4)}:"
    with worker_of(only, redis_url, undisturbed, tmp_path / "undisturbed", *flags) as worker:
        worker.wait_ready()
        references = perform(redis_url, undisturbed, cases)
    for case in cases:
        assert references[case.name].state is JobState.COMPLETED
        twin = references[case.name.replace("-poet", "-plain")]
        assert (references[case.name] == twin) == case.name.endswith("plain")
    total = sum(len(outcome.tokens) for outcome in references.values())
    steps = [total * part // 4 for part in (1, 2, 3)]
    with (
        worker_of(only, redis_url, namespace, tmp_path / "killed", *flags) as worker,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            worker.kill_child()
        scene.assert_exact(references)
        assert len(worker.lines("child died")) == len(steps)
        resumed = {line["job"] for line in prepared([worker]) if line["published"]}
        with_one = {each.job.id for each in scene.jobs if each.case.options.get("adapter")}
        assert resumed & with_one
        assert any(line["cached_tokens"] for line in prepared([worker]) if line["job"] in with_one)


def test_an_adapter_that_is_put_into_the_folder_is_served_by_the_running_worker(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    only: Models = {"llama": models["llama"]}
    with (
        worker_of(
            only, redis_url, namespace, tmp_path / "data", "--adapters", str(folder)
        ) as worker,
        Scene(redis_url, namespace, ()) as scene,
    ):
        worker.wait_ready()
        write_adapter(folder, "poet", models["llama"])
        poll_until(
            lambda: any("poet" in (each.adapters or {}) for each in scene.client.models()),
            "the new adapter to be announced",
        )
        job = scene.client.submit("llama", "Hello.", max_tokens=5, adapter="poet")
        assert job.result(timeout=60).state is JobState.COMPLETED
        assert job.status().adapter == "poet"
