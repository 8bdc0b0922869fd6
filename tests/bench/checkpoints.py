"""What checkpoints cost, and how quickly they are read back: the cost table.

    python tests/bench/checkpoints.py [--only cost,runs,resume] [--write] [--folder DISK]

- *cost*: bytes and stall of the decode thread of a checkpoint of 256 new positions, at 1k, 8k and
  32k; the step after it, which must not copy the caches; and mlx-lm's `save_prompt_cache` at 8k.
- *runs*: processor time a token of whole runs with checkpoints by that of runs without.
- *resume*: finding, loading and rebuilding a checkpoint, against reading the prompt again.

Run it on a machine that does nothing else, with `--folder` on the disk that is meant; what the
figures mean stands in BENCHMARKS.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import mlx.core as mx  # noqa: E402

from bench import checkpoint_report as report  # noqa: E402
from bench.checkpoint_caches import KINDS, Shape  # noqa: E402
from bench.checkpoint_cost import Costs, measure_costs  # noqa: E402
from bench.checkpoint_model import (  # noqa: E402
    ModelSize,
    SyntheticKV,
    build_model,
    random_prompt,
)
from bench.checkpoint_resume import (  # noqa: E402
    Prefill,
    Resumes,
    measure_prefill,
    measure_resume,
)
from bench.checkpoint_runs import Runs, measure_runs  # noqa: E402
from bench.figures import machine, versioned_machine  # noqa: E402
from tenuto_engine import Engine  # noqa: E402
from tenuto_engine._geometry import CHUNK_CPU, CHUNK_GPU  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
SECTIONS = ("cost", "runs", "resume")
# The worst case of a record, and the repetitions that the disk's whims need.
SMALL_RECORD = 8
READINGS = 3


@dataclass(slots=True)
class Figures:
    """All that was measured."""

    costs: list[list[Costs]] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)
    resumes: list[tuple[Prefill, list[Resumes]]] = field(default_factory=list)


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """All sections that were asked for."""
    figures = Figures()
    if "cost" in args.only:
        figures.costs = list(_costs(args, folder))
    if "runs" in args.only:
        figures.runs = list(_runs(args, folder))
    if "resume" in args.only:
        figures.resumes = list(_resumes(args, folder))
    return figures


def _costs(args: argparse.Namespace, folder: Path) -> Iterator[list[Costs]]:
    for kind in KINDS:
        _say(f"cost: {kind}, {args.rounds} checkpoints at each context")
        yield measure_costs(
            folder,
            kind,
            Shape(layers=args.layers),
            args.contexts,
            compared=args.compared,
            rounds=args.rounds,
            every=args.every,
        )


def _runs(args: argparse.Namespace, folder: Path) -> Iterator[Runs]:
    for number, (size, context, tokens) in enumerate(args.runs):
        _say(f"runs: {size.name} at {context} tokens, {args.pairs} pairs of {tokens} tokens")
        yield measure_runs(
            folder / f"runs-{number}",
            size,
            context,
            pairs=args.pairs,
            tokens=tokens,
            every=args.every,
            report=lambda runs: _say(f"  pair {len(runs.pairs)}: {runs.ratios[-1]:.4f}"),
        )


def _resumes(args: argparse.Namespace, folder: Path) -> Iterator[tuple[Prefill, list[Resumes]]]:
    size, contexts = args.resume_model, sorted(args.contexts)
    model = build_model(folder / "resume-model", size, contexts[-1] + 1)
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    chunk = CHUNK_GPU if on_gpu else CHUNK_CPU
    engine = Engine.load(model, chunk_size=chunk)
    kv = SyntheticKV(size.layers, contexts[-1])
    for context in contexts:
        prompt = random_prompt(engine, context)
        resumes = []
        for every in (args.every, SMALL_RECORD):
            _say(f"resume: {context} tokens, a record every {every}")
            job = folder / "resume-job"
            resumes.append(measure_resume(job, engine, kv, prompt, every, READINGS))
        _say(f"resume: reading {context} tokens again")
        yield measure_prefill(engine, kv, prompt, chunk, args.prefill_seconds), resumes


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tables(args: argparse.Namespace, figures: Figures) -> list[report.Table]:
    """Of the sections that were measured."""
    made = [
        report.cost_table(figures.costs, args.every),
        report.saving_table(figures.costs),
        report.runs_table(figures.runs),
        report.resume_table(args.resume_model.name, figures.resumes),
    ]
    return [table for table in made if table.rows]


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    args = parse(sys.argv[1:])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-", dir=args.folder) as folder:
        figures = measure(args, Path(folder))
    _say(f"measured in {time.monotonic() - began:.0f} s")
    made = tables(args, figures)
    goals = report.cost_goals(figures.costs) + report.run_goals(figures.runs)
    if args.json:
        print(json.dumps({"type": "checkpoints", "machine": machine(), **asdict(figures)}))
    else:
        print("\n".join([f"\n{versioned_machine()}", *map(str, made), "", *map(str, goals)]))
    if args.write:
        for table in made:
            table.write(REPORT, versioned_machine(), time.strftime("%Y-%m-%d"))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--only", type=_sections, default=SECTIONS, metavar="A,B", help="sections (all)")
    add("--folder", type=Path, help="on which disk (that of the temporary files)")
    add("--contexts", type=_integers, default=[1024, 8192, 32768], metavar="N,N")
    add("--compared", type=int, default=8192, metavar="N", help="context for mlx-lm (8192)")
    add("--every", type=int, default=256, metavar="N", help="tokens between checkpoints (256)")
    add("--rounds", type=int, default=20, metavar="N", help="checkpoints at each context (20)")
    add("--layers", type=int, default=16, metavar="N", help="of the synthetic caches (16)")
    add("--pairs", type=int, default=10, metavar="N", help="of whole runs (10)")
    add(
        "--runs", type=_run, nargs="+", metavar="HIDDENxLAYERS@CONTEXT:TOKENS",
        default=[_run("512x4@1024:512"), _run("512x2@32768:256")],
        help="whole runs: a random model, where it begins, and how far it goes "
        "(512x4@1024:512 512x2@32768:256)",
    )  # fmt: skip
    add(
        "--resume-model", type=_size, default=_size("512x6"), metavar="HIDDENxLAYERS",
        help="random model that is resumed (512x6)",
    )  # fmt: skip
    add(
        "--prefill-seconds", type=float, default=60.0, metavar="S",
        help="a prompt that takes longer to read is read in samples (60)",
    )  # fmt: skip
    add("--json", action="store_true", help="everything that was measured as one JSON object")
    add("--write", action="store_true", help="put the tables into BENCHMARKS.md")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.pairs < 1 or any(run[2] < args.every for run in args.runs):
        parser.error("at least 1 round, 1 pair, and tokens for 1 checkpoint")
    return args


def _sections(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"not all of {', '.join(SECTIONS)}: {text}")
    return chosen


def _integers(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(","))


def _size(text: str) -> ModelSize:
    hidden, _, layers = text.partition("x")
    return ModelSize(int(hidden), int(layers))


def _run(text: str) -> tuple[ModelSize, int, int]:
    size, _, rest = text.partition("@")
    context, _, tokens = rest.partition(":")
    return _size(size), int(context), int(tokens)


if __name__ == "__main__":
    sys.exit(main())
