"""Tokens a second of the whole path (queue, engine, stream, checkpoints) against bare mlx-lm.

    python tests/bench/whole_path.py [--pairs 5] [--tokens 300] [--model smollm2|tiny|FOLDER]

Both sides are real processes that stay loaded: a `tenuto worker` with the embedded server, read
through the client as any service does; and a process that runs `mlx_lm.generate_step`. In a pair
both decode greedily the same number of tokens after the same prompt, and take turns of a second,
one always stopped while the other runs; only the time that a side runs counts.

*decode* is from the first token to the last, as the reader sees them, so the prompt is left out on
both sides. *whole* is from asking to the end. The ratio of a pair is Tenuto's figure by mlx-lm's;
what counts is the median over the pairs, and its lower bound at 95 % (bootstrap).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench import figures  # noqa: E402
from bench.figures import Pair, Run, Timing  # noqa: E402
from bench.turns import Turns  # noqa: E402
from tenuto_client import Client, EndEvent, Token  # noqa: E402
from tenuto_client._server import stop_server  # noqa: E402
from tiny_models import build_tiny_model  # noqa: E402
from workers import WorkerProcess  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
PROMPT = "Write a long story about a lighthouse keeper who finds an old map."
WARM_UP_TOKENS = 16


class Baseline:
    """The process of bare mlx-lm."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "baseline.py"), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process that decodes."""
        return self._process.pid

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """One generation."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Tenuto:
    """A worker with its embedded server, and a reader of its streams."""

    def __init__(self, model: Path, data_dir: Path, checkpoint_seconds: float) -> None:
        self._data_dir = data_dir
        flags = ("--checkpoint-every", "256", "--checkpoint-seconds", str(checkpoint_seconds))
        self._worker = WorkerProcess(model, None, data_dir, name="bench", lease=10, flags=flags)
        self._worker.wait_ready(timeout=300)

    @property
    def pid(self) -> int:
        """Of the process that decodes."""
        return self._worker.child_pid

    async def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """One job, from submit to the last line of its stream."""
        run = Run(asked=0.0, arrivals=[], ended=0.0, cpu=[], tokens=[])
        pid = self.pid
        async with Client(data_dir=self._data_dir) as client:
            run.asked = time.monotonic()
            job = await client.submit("bench", list(prompt), max_tokens=tokens, ignore_eos=True)
            async for event in job.events():
                if isinstance(event, Token):
                    run.arrivals.append(time.monotonic())
                    run.tokens.append(event.token)
                    run.cpu += _cpu_seconds(pid)
                elif isinstance(event, EndEvent):
                    assert event.exactness == "exact", event
            run.ended = time.monotonic()
            await job.delete()
        return run

    def close(self) -> None:
        """End worker and server."""
        self._worker.close()
        stop_server(self._data_dir)


def _cpu_seconds(pid: int) -> list[float]:
    """Processor time of a process so far; nothing where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return []
    return [(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")]


def measure(args: argparse.Namespace, model: Path, data_dir: Path) -> list[Pair]:
    """Run all pairs."""
    prompt = _prompt(model)
    baseline, tenuto = Baseline(model), Tenuto(model, data_dir, args.checkpoint_seconds)
    try:
        baseline.run(prompt, WARM_UP_TOKENS)
        asyncio.run(tenuto.run(prompt, WARM_UP_TOKENS))
        pairs = []
        for number in range(args.pairs):
            pairs.append(asyncio.run(_pair(baseline, tenuto, prompt, args)))
            _say(args, number, pairs[-1])
        return pairs
    finally:
        baseline.close()
        tenuto.close()


async def _pair(
    baseline: Baseline, tenuto: Tenuto, prompt: list[int], args: argparse.Namespace
) -> Pair:
    with Turns([baseline.pid, tenuto.pid], args.turn) as turns:
        theirs, ours = await asyncio.gather(
            asyncio.to_thread(baseline.run, prompt, args.tokens), tenuto.run(prompt, args.tokens)
        )
    if ours.tokens != theirs.tokens:
        print("note: the tokens differ; the prefill chunks do, too", file=sys.stderr)
    return Pair(
        Timing.of(theirs, partial(turns.clock, 0)),
        Timing.of(ours, partial(turns.clock, 1)),
        ours.tokens == theirs.tokens,
    )


def _prompt(model: Path) -> list[int]:
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    tokenizer: Any = load_tokenizer(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    return list(ids)


def _say(args: argparse.Namespace, number: int, pair: Pair) -> None:
    if args.json:
        sides = {"baseline": asdict(pair.baseline), "tenuto": asdict(pair.tenuto)}
        print(json.dumps({"type": "pair", "number": number + 1, **sides}), flush=True)
        return
    cpu = "" if pair.cpu is None else f"   cpu {pair.cpu:.3f}"
    print(
        f"pair {number + 1}: mlx-lm {pair.baseline.decode:8.2f}   tenuto {pair.tenuto.decode:8.2f} "
        f"tokens/s   ratio {pair.decode:.3f}   whole run {pair.whole:.3f}{cpu}",
        flush=True,
    )


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    args = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
        model = _model(args.model, Path(folder))
        pairs = measure(args, model, Path(folder) / "data")
    facts = figures.summary(args.model, pairs, args.tokens, args.checkpoint_seconds)
    print(json.dumps({"type": "summary", **facts}) if args.json else figures.describe(facts))
    if args.write:
        figures.write_row(REPORT, facts)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder (smollm2)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--tokens", type=int, default=300, metavar="N", help="of each run (300)")
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=2.0, metavar="S",
        help="checkpoints every 256 tokens or so many seconds (2)",
    )  # fmt: skip
    parser.add_argument("--turn", type=float, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write", action="store_true", help="put the figures into BENCHMARKS.md")
    args = parser.parse_args(argv)
    if args.pairs < 1 or args.tokens < 2:
        parser.error("at least 1 pair of 2 tokens")
    return args


def _model(name: str, folder: Path) -> Path:
    if name == "tiny":
        return build_tiny_model(folder / "tiny")
    if name != "smollm2":
        return Path(name)
    from tenuto_engine import _smollm2

    return _smollm2.convert(_smollm2.locate(), folder / "SmolLM2-135M-Instruct")


if __name__ == "__main__":
    sys.exit(main())
