"""How much sooner the first token comes where an earlier prompt began alike.

    python tests/bench/prefix.py [--tokens 6144] [--rounds 3] [--write]

The whole path: a real server, a real worker of a random model, from submit to the first token in
the stream. *off*: a worker without a prefix cache. *first*: with one, and a prompt that it has not
seen. *again*: the same beginning and another end. *restart*: a third end, in a worker that was
started again, so that the beginning comes from disk. Each round has a beginning of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench import figures  # noqa: E402
from bench.checkpoint_model import ModelSize, build_model  # noqa: E402
from servers import RealServer  # noqa: E402
from tenuto_client import SyncClient, Token  # noqa: E402
from workers import WorkerProcess, poll_until  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
MARK = "<!-- prefix: rows are written by `make bench-prefix ARGS=--write` -->"
OFF = ("--prefix-memory", "0", "--prefix-disk", "0")
TAIL = 40
SIZE = ModelSize(hidden=256, layers=4)
WHAT = ("off", "first", "again", "restart")


class Bench:
    """A model, a server, and what was measured.

    Attributes:
        seconds: to the first token, by what was done, a value a round.
    """

    def __init__(self, folder: Path, url: str, tokens: int) -> None:
        self._folder, self._url, self._tokens = folder, url, tokens
        self._model = build_model(folder / "model", SIZE, context=2 * tokens + 1024)
        self.seconds: dict[str, list[float]] = {what: [] for what in WHAT}

    def run(self, rounds: int) -> None:
        """All rounds of each worker, one worker after the other."""
        for salt in range(rounds):
            tokens = []
            with self._worker("off", OFF) as worker:
                tokens.append(self._ask("off", worker, salt, 0))
            with self._worker("on") as worker:
                tokens.append(self._ask("first", worker, salt, 0))
                self._ask("again", worker, salt, 1)
                self._wait_kept(salt)
            with self._worker("on") as worker:
                self._ask("restart", worker, salt, 2)
            assert tokens[0] == tokens[1], "the cache changed a bit"

    def _worker(self, name: str, flags: tuple[str, ...] = ()) -> WorkerProcess:
        return WorkerProcess(self._model, self._url, self._folder / name, flags=flags)

    def _ask(self, what: str, worker: WorkerProcess, salt: int, tail: int) -> list[Token]:
        worker.wait_ready()
        with SyncClient(self._url) as client:
            client.list()  # what connects is not measured
            began = time.monotonic()
            job = client.submit(
                "tiny", self._prompt(salt, tail), max_tokens=8, ignore_eos=True, logprobs=1
            )
            stream = job.stream()
            first = next(stream)
            self.seconds[what].append(time.monotonic() - began)
            return [first, *stream]

    def _prompt(self, salt: int, tail: int) -> list[int]:
        begin = [5 + (7 * place + salt * (place + 3)) % 240 for place in range(self._tokens)]
        return begin + [5 + tail] * TAIL

    def _wait_kept(self, salt: int) -> None:
        blocks = (self._tokens + TAIL - 1) // 256 * (salt + 1)
        folder = self._folder / "on" / "prefixes"
        poll_until(lambda: len(list(folder.glob("*.block"))) >= blocks, "the blocks on disk")


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=6144, help="that prompts share (6144)")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken (3)")
    parser.add_argument("--write", action="store_true", help="put the figures into BENCHMARKS.md")
    args = parser.parse_args()
    with RealServer() as server, tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
        bench = Bench(Path(folder), server.url, args.tokens)
        bench.run(args.rounds)
    print(f"{'':10}{'seconds':>10}{'times sooner':>14}")
    off = median(bench.seconds["off"])
    for what in WHAT:
        seconds = median(bench.seconds[what])
        print(f"{what:10}{seconds:10.3f}{off / seconds:14.2f}")
    if args.write:
        figures.write_rows(REPORT, MARK, [_row(args, bench.seconds)], 2)
    return 0


def _row(args: argparse.Namespace, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    where = figures.machine()
    off = median(seconds["off"])
    cells = [f"{median(seconds[what]):.3f}" for what in WHAT]
    sooner = [f"{off / median(seconds[what]):.1f}" for what in WHAT[2:]]
    return [
        f"{where['device']}, {where['cores']} cores, {where['system']}",
        SIZE.name,
        f"{args.tokens} + {TAIL}",
        str(args.rounds),
        *cells,
        *sooner,
        time.strftime("%Y-%m-%d"),
    ]


if __name__ == "__main__":
    sys.exit(main())
