"""What each feature of the engine costs a decoded token, against the plain loop, in one process.

    python tests/bench/features.py [--rounds 5] [--tokens 48] [--context 257]
        [--model smollm2|tiny|HIDDENxLAYERS|FOLDER] [--only compiled,logprobs]

Rows of one loaded model, one with each feature and a plain one, at the same context, take turns of
eight steps, so that whatever else the machine does slows all alike. A turn ends when the device has
done all that was dispatched in it, or it would be the next row's time. *ratio* is the speed with
the feature by that of the plain row in the same round; the median over the rounds counts, with its
lower bound at 95 % (bootstrap). *bits* says whether its tokens and logprobs were those of the plain
row, where they should be. *beside a long prompt* is the rate of a plain row while another one reads
its prompt, by its own rate alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from adapter_shop import write_adapter  # noqa: E402
from bench.checkpoint_model import ModelSize, build_model  # noqa: E402
from bench.checkpoint_report import Table  # noqa: E402
from bench.figures import lower_bound, versioned_machine  # noqa: E402
from tenuto_engine import (  # noqa: E402
    CheckpointStore,
    CheckpointWriter,
    Engine,
    GenerationOptions,
    Prefix,
    PrefixCache,
    opentelemetry_spans,
)
from tenuto_engine._model import LoadedModel, load  # noqa: E402
from tiny_models import build_tiny_model  # noqa: E402

REPORT = HERE.parents[1] / "BENCHMARKS.md"
MARK = "<!-- features: rows are written by `make bench-features ARGS=--write` -->"
COLUMNS = ("model", "context", "feature", "rounds x tokens", "tokens/s", "ratio", "bits")
WARM_UP = 4
TURN = 8
"""Steps; so many that a pipelined row is, but for the last of them."""
READING: Final = "beside a long prompt"
_WARM: Final = {"temperature": 0.8}
_ADAPTER: Final = "bench"
# Of such a text the grammar forces more than half.
_RECORDS: Final = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "temperature_in_degrees": {"type": "integer", "minimum": -50, "maximum": 50},
            "description": {"enum": ["sunny with some clouds", "rain from the west", "fog"]},
        },
        "required": ["temperature_in_degrees", "description"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
_STOPS: Final = tuple(f"never {number}" for number in range(16))


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a row may have and a plain one has not.

    Attributes:
        options: what is asked for; other bits are computed with it unless `same_bits`.
        engine: arguments of the engine.
        callbacks: makes options that need a folder to write to.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], Mapping[str, Any]] = lambda folder: {}
    same_bits: bool = False


def _checkpoints(folder: Path) -> Mapping[str, Any]:
    store, writer = CheckpointStore(folder), CheckpointWriter()
    return {"on_decode_checkpoint": lambda live: writer.submit(store, live)}


FEATURES: Final[Mapping[str, Feature]] = {
    "plain": Feature(same_bits=True),
    "compiled": Feature(engine={"compiled": True}, same_bits=True),
    "pipelined": Feature(engine={"pipelined": True}, same_bits=True),
    "synchronous": Feature(engine={"pipelined": False}, same_bits=True),
    "temperature": Feature(_WARM),
    "top_p": Feature({**_WARM, "top_p": 0.9}),
    "top_k": Feature({**_WARM, "top_k": 40}),
    "min_p": Feature({**_WARM, "min_p": 0.05}),
    "xtc": Feature({**_WARM, "xtc_probability": 0.5}),
    "all filters": Feature(
        {**_WARM, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "xtc_probability": 0.5}
    ),
    "three penalties": Feature(
        {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    ),
    "logit_bias of 100": Feature({"logit_bias": dict.fromkeys(range(100), -1.0)}),
    "min_tokens": Feature({"min_tokens": 5000, "ignore_eos": False}),
    "logprobs=20": Feature({"logprobs": 20}),
    "16 stop strings": Feature({"stop": _STOPS}, same_bits=True),
    "grammar: a regex": Feature({"grammar": {"regex": "[a-zA-Z ,.]+"}, "ignore_eos": False}),
    "grammar: JSON": Feature({"grammar": {"json_schema": True}, "ignore_eos": False}),
    "grammar: records": Feature({"grammar": {"json_schema": _RECORDS}, "ignore_eos": False}),
    "the same with jump_forward": Feature(
        {"grammar": {"json_schema": _RECORDS}, "ignore_eos": False, "jump_forward": True}
    ),
    "LoRA of rank 8": Feature({"adapter": _ADAPTER}),
    "checkpoints on disk": Feature(callbacks=_checkpoints, same_bits=True),
    "trace spans": Feature(
        callbacks=lambda folder: {"on_span": opentelemetry_spans()}, same_bits=True
    ),
    "KV of 8 bits": Feature(engine={"kv_scheme": "8:32:0"}),
    "KV of 4 bits": Feature(engine={"kv_scheme": "4:32:0"}),
}


class Row:
    """A row of an engine of its own, past its prompt."""

    def __init__(self, engine: Engine, prompt: Sequence[int], options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._sequence = engine.add(prompt, GenerationOptions(**options))
        while len(self._sequence.tokens) < WARM_UP:
            engine.step()
            if self._sequence.error is not None:
                raise self._sequence.error
        self._had = len(self._sequence.tokens)
        self.seconds = 0.0

    def step(self, steps: int) -> None:
        """So many steps, or until it ends."""
        began = time.perf_counter()
        for _ in range(steps):
            if not self._sequence.state.is_end:
                self._engine.step()
        mx.synchronize()
        self.seconds += time.perf_counter() - began

    @property
    def speed(self) -> float:
        """Tokens a second of the steps measured."""
        assert self._sequence.error is None, self._sequence.error
        return (len(self._sequence.tokens) - self._had) / self.seconds

    @property
    def told(self) -> list[tuple[int, float]]:
        """Tokens and their logprobs."""
        return [(token.token, token.logprob) for token in self._sequence.tokens]

    def close(self) -> None:
        """Free it."""
        self._engine.close(self._sequence)


class Bench:
    """One loaded model, and an engine for each feature."""

    def __init__(
        self, loaded: LoadedModel, names: Sequence[str], context: int, adapters: Path
    ) -> None:
        self.loaded = loaded
        self._adapters = adapters
        # So that a prompt is read once for all rows of a geometry.
        self._prefixes = PrefixCache(2**30)
        self.engines = {name: self._engine(FEATURES[name]) for name in names}
        self._prompt = [5 + 7 * place % (loaded.vocab_size - 10) for place in range(context)]

    def _engine(self, feature: Feature) -> Engine:
        from tenuto_engine._geometry import default_chunk
        from tenuto_engine._kv_scheme import scheme_of

        how = dict(feature.engine)
        if "kv_scheme" in how:
            how["kv_scheme"] = scheme_of(how["kv_scheme"], self.loaded.path)
        how.setdefault("pipelined", True if _on_gpu() else None)
        how["adapters"] = self._adapters if "adapter" in feature.options else None
        return Engine(
            self.loaded, slots=2, chunk_size=default_chunk(), prefix_cache=self._prefixes, **how
        )

    def _most(self, prompt: int) -> int:
        """So many tokens that no row ends by itself."""
        return min((self.loaded.context_length or 2**17) - prompt, 2**16)

    def round(self, tokens: int) -> dict[str, tuple[float, bool]]:
        """Tokens a second of each feature, and whether its bits were those of the plain row."""
        rows: dict[str, Row] = {}
        with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as folder:
            for name, engine in self.engines.items():
                feature = FEATURES[name]
                options: dict[str, Any] = {"ignore_eos": True, "seed": 1}
                options |= {"max_tokens": self._most(len(self._prompt)), **feature.options}
                options |= feature.callbacks(Path(folder) / name.replace(" ", "-"))
                rows[name] = Row(engine, self._prompt, options)
            for done in range(0, tokens, TURN):
                for row in rows.values():
                    row.step(min(TURN, tokens - done))
            plain = rows["plain"].told
            found = {
                name: (row.speed, row.told == plain[: len(row.told)]) for name, row in rows.items()
            }
            for row in rows.values():
                row.close()
        return found

    def beside_a_long_prompt(self, tokens: int) -> tuple[float, float]:
        """Tokens a second of a plain row alone, and while another reads a prompt."""
        engine = self._engine(FEATURES["plain"])
        chunk = engine.geometry.chunk_size
        most = self._most(max(len(self._prompt), 8 * chunk))
        options: dict[str, Any] = {"ignore_eos": True, "max_tokens": most}
        row = Row(engine, self._prompt, options)
        row.step(tokens)
        alone = row.speed
        prompt = [3 + place % 50 for place in range(8 * chunk)]
        reading = engine.add(prompt, GenerationOptions(**options, prefix=Prefix()))
        talking = row._sequence
        # From the end of the first chunk to that of another one, each has its time of decoding.
        while not reading.prefill_done:
            engine.step()
        before, began = talking.emitted, time.perf_counter()
        while reading.prefill_done < 7 * chunk:
            engine.step()
        beside = (talking.emitted - before) / (time.perf_counter() - began)
        row.close()
        engine.close(reading)
        return alone, beside


def table_of(
    bench: Bench, model: str, context: int, tokens: int, rounds: Sequence[dict[str, Any]]
) -> Table:
    """The rows, each feature by the plain one of its round."""
    size = f"{len(rounds)} x {tokens}"
    cells = []
    for name in bench.engines:
        ratios = [each[name][0] / each["plain"][0] for each in rounds]
        speed = statistics.median(each[name][0] for each in rounds)
        same = all(each[name][1] for each in rounds)
        bits = ("same" if same else "OTHERS") if FEATURES[name].same_bits else "others"
        cells.append(_cells(model, context, name, size, speed, ratios, bits))
    pairs = [each[READING] for each in rounds]
    ratios = [beside / alone for alone, beside in pairs]
    speed = statistics.median(beside for _, beside in pairs)
    cells.append(_cells(model, context, READING, size, speed, ratios, "same"))
    return Table("Features", MARK, COLUMNS, 3, cells)


def _cells(
    model: str,
    context: int,
    name: str,
    size: str,
    speed: float,
    ratios: list[float],
    bits: str,
) -> tuple[str, ...]:
    ratio = f"**{statistics.median(ratios):.3f}** (>= {lower_bound(ratios):.3f})"
    return (model, str(context), name, size, f"{speed:.2f}", ratio, bits)


def main() -> int:
    """Measure, print, and where asked for write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, HIDDENxLAYERS, a folder")
    parser.add_argument("--context", type=int, default=257)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--bf16", action="store_true", help="of HIDDENxLAYERS: not in float32")
    parser.add_argument("--only", help="these features, by commas (all)")
    parser.add_argument("--write", action="store_true", help="put the rows into BENCHMARKS.md")
    args = parser.parse_args()
    names = list(FEATURES) if args.only is None else ["plain", *args.only.split(",")]
    with (
        _model(args.model, bf16=args.bf16) as (name, folder),
        tempfile.TemporaryDirectory(prefix="tenuto-bench-") as adapters,
    ):
        write_adapter(Path(adapters), _ADAPTER, folder)
        bench = Bench(load(folder), names, args.context, Path(adapters))
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            rounds.append(dict(bench.round(args.tokens)))
            rounds[-1][READING] = bench.beside_a_long_prompt(args.tokens)
    table = table_of(bench, name, args.context, args.tokens, rounds)
    print(table)
    if args.write:
        table.write(REPORT, versioned_machine(), time.strftime("%Y-%m-%d"))
    return 0


@contextmanager
def _model(name: str, *, bf16: bool) -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as kept:
        folder = Path(kept)
        if name == "tiny":
            yield name, build_tiny_model(folder / "tiny", context_length=2**17, wide=True)
        elif name == "smollm2":
            from tenuto_engine._smollm2 import convert, locate

            yield "SmolLM2 135M, 4 bits", convert(locate(), folder / "smollm2")
        elif name.replace("x", "", 1).isdigit():
            size = ModelSize(*map(int, name.split("x")))
            built = build_model(folder / "model", size, context=2**17)
            if bf16:
                _round_weights(built / "model.safetensors")
            yield f"{size.name}{', bf16' * bf16}", built
        else:
            yield Path(name).name, Path(name)


def _round_weights(path: Path) -> None:
    weights: Any = mx.load(str(path))
    rounded = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(path), rounded, metadata={"format": "mlx"})


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


if __name__ == "__main__":
    raise SystemExit(main())
