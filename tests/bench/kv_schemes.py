"""Tokens a second with quantized KV against full precision, at some contexts, in one process.

    python tests/bench/kv_schemes.py [--rounds 5] [--tokens 64] [--contexts 512,4096]
        [--model smollm2|tiny|FOLDER] [--schemes 8:64:0,4:64:0]

The engines of all schemes have the same model loaded, each with a row at the same context, and take
turns of eight decoded tokens. So whatever else the machine does slows all alike; a turn ends when
the device has done all that was dispatched in it. *ratio* is the speed
of a scheme by that of full precision in the same round; the median over the rounds counts, with its
lower bound at 95 % (bootstrap). *bytes* is what a row's caches take, by what plain ones do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.checkpoint_report import Table  # noqa: E402
from bench.figures import lower_bound, versioned_machine  # noqa: E402
from tenuto_engine import Engine, GenerationOptions, PrefixCache  # noqa: E402
from tiny_models import build_tiny_model  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
MARK = "<!-- kv schemes: rows are written by `make bench-kv ARGS=--write` -->"
COLUMNS = ("model", "context", "scheme", "rounds x tokens", "tokens/s", "ratio", "bytes")
WARM_UP = 4
TURN = 8


class Row:
    """A row of an engine, past its prompt."""

    def __init__(self, engine: Engine, prompt: Sequence[int], tokens: int) -> None:
        self._engine = engine
        options = GenerationOptions(max_tokens=tokens, ignore_eos=True)
        self._sequence = engine.add(prompt, options)
        while len(self._sequence.tokens) < WARM_UP:
            engine.step()
            if self._sequence.error is not None:
                raise self._sequence.error
        [row] = engine._slots.rows
        self.nbytes: int = sum(cache.nbytes for cache in row.caches)

    def step(self, tokens: int) -> float:
        """Seconds of so many."""
        began = time.perf_counter()
        for _ in range(tokens):
            self._engine.step()
        mx.synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        """Free it."""
        self._engine.close(self._sequence)


def measure(engines: Sequence[Engine], context: int, tokens: int) -> list[tuple[float, int]]:
    """One round: tokens a second and bytes of a row, of each engine."""
    prompt = [token % engines[0].vocab_size for token in range(context)]
    rows = [Row(engine, prompt, tokens + WARM_UP + 2) for engine in engines]
    seconds = [0.0] * len(rows)
    for done in range(0, tokens, TURN):
        for place, row in enumerate(rows):
            seconds[place] += row.step(min(TURN, tokens - done))
    for row in rows:
        row.close()
    return [(tokens / total, row.nbytes) for total, row in zip(seconds, rows, strict=True)]


def table_of(
    model: str,
    schemes: Sequence[str],
    rounds: dict[int, list[list[tuple[float, int]]]],
    tokens: int,
) -> Table:
    """The rows: of each context, each scheme by full precision, which is the first engine."""
    cells = []
    for context, taken in rounds.items():
        for place, scheme in enumerate(["none", *schemes]):
            ratios = [each[place][0] / each[0][0] for each in taken]
            speed = statistics.median(each[place][0] for each in taken)
            ratio = f"**{statistics.median(ratios):.3f}** (>= {lower_bound(ratios):.3f})"
            share = taken[0][place][1] / taken[0][0][1]
            size = f"{len(taken)} x {tokens}"
            row = (model, str(context), scheme, size, f"{speed:.2f}", ratio, f"{share:.3f}")
            cells.append(row)
    return Table("Quantized KV", MARK, COLUMNS, 3, cells)


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a model folder")
    parser.add_argument("--schemes", help="8:64:0,4:64:0; of tiny 8:32:0,4:32:0")
    parser.add_argument("--contexts", default="512,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="put the rows into BENCHMARKS.md")
    args = parser.parse_args()
    group_size = 32 if args.model == "tiny" else 64
    schemes = (args.schemes or f"8:{group_size}:0,4:{group_size}:0").split(",")
    contexts = [int(each) for each in args.contexts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(args.model, Path(folder))
        # So that a round need not read the prompt again.
        prefixes = PrefixCache(2**31)
        engines = [
            Engine.load(model, kv_scheme=each, prefix_cache=prefixes) for each in [None, *schemes]
        ]
        rounds = {
            context: [measure(engines, context, args.tokens) for _ in range(args.rounds)]
            for context in contexts
        }
    table = table_of(Path(args.model).name, schemes, rounds, args.tokens)
    print(table)
    if args.write:
        table.write(REPORT, versioned_machine(), time.strftime("%Y-%m-%d"))
    return 0


def _model(name: str, folder: Path) -> Path:
    if name == "tiny":
        return build_tiny_model(folder / "tiny", context_length=2**17, wide=True)
    if name == "smollm2":
        from tenuto_engine._smollm2 import convert, locate

        return convert(locate(), folder / "smollm2")
    return Path(name)


if __name__ == "__main__":
    raise SystemExit(main())
