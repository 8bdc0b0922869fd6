"""Running tiny models to an end, and what such a run gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cache_models import VOCABULARY, CacheModel, cache_model
from tenuto_engine import (
    Checkpoint,
    Engine,
    GenerationOptions,
    KVScheme,
    PrefixCache,
    Token,
    resume_options,
)
from tenuto_engine import Sequence as Running
from tenuto_engine._model import LoadedModel

PROMPT = "hello bana dodo 中文 🌊 mike lora fun times, said the tenor to the viola at noon; why?"

GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1, "logprobs": 2, "ignore_eos": True}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "seed": 20261129,
    "logprobs": 3,
    "logit_bias": {65: 1.5, 66: -2.0},
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "ignore_eos": True,
}
STYLES = {"greedy": GREEDY, "sampled": SAMPLED}


class Run(NamedTuple):
    """All that a reader gets of a generation, and why it ended."""

    tokens: list[Token]
    end_text: str
    finish_reason: str | None

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.end_text


def run(engine: Engine, prompt: Sequence[int], **options: Any) -> Run:
    """Run one generation to its end."""
    return finish(engine, engine.add(prompt, GenerationOptions(**options)))


def finish(engine: Engine, sequence: Running) -> Run:
    """Step until `sequence` ends; the tokens handed out from here on."""
    tokens: list[Token] = []
    while not sequence.state.is_end:
        tokens += [event.token for event in engine.step() if event.sequence is sequence]
    if sequence.error is not None:
        raise sequence.error
    return Run(tokens, sequence.end_text, sequence.finish_reason)


def encode(engine: Engine) -> list[int]:
    """Ids of `PROMPT`."""
    return engine.encode_prompt(PROMPT, raw=True)


def resume(engine: Engine, checkpoint: Checkpoint, options: dict[str, Any], **how: Any) -> Run:
    """Go on from a checkpoint to the end."""
    tokens, resumed = resume_options(checkpoint, GenerationOptions(**options), **how)
    return finish(engine, engine.add(tokens, resumed))


def rest(whole: Run, handed_out: int) -> Run:
    """What of a whole run is still to come."""
    return whole._replace(tokens=whole.tokens[handed_out:])


def engine_in_memory(
    other: Engine,
    model: CacheModel,
    *,
    chunk_size: int = 16,
    prefix_cache: PrefixCache | None = None,
    head_dim: int | None = None,
    kv_scheme: KVScheme | None = None,
    pipelined: bool = False,
    ends: frozenset[int] = frozenset(),
    adapters: Path | None = None,
) -> Engine:
    """An engine of a model that has no folder; the tokenizer is that of `other`."""
    loaded = LoadedModel(
        path=Path(model),
        model=cache_model(model, head_dim=head_dim),
        tokenizer=other.tokenizer,
        config={},
        vocab_size=VOCABULARY,
        context_length=4096,
        eos_token_ids=ends,
    )
    engine = Engine(
        loaded,
        slots=1,
        chunk_size=chunk_size,
        pipelined=pipelined,
        prefix_cache=prefix_cache,
        kv_scheme=kv_scheme,
        adapters=adapters,
    )
    engine._geometry = replace(
        other.geometry, model_hash=model, chunk_size=chunk_size, kv_scheme=str(kv_scheme or "none")
    )
    return engine


def run_with_checkpoints(
    engine: Engine,
    prompt: Sequence[int],
    options: dict[str, Any],
    keep: Callable[[Checkpoint], object] | None = None,
) -> tuple[Run, list[Checkpoint]]:
    """Run to the end with a checkpoint at every token; give the run and the checkpoints."""
    taken: list[Checkpoint] = []
    done = run(
        engine,
        prompt,
        **options,
        checkpoint_every_tokens=1,
        checkpoint_every_seconds=None,
        on_decode_checkpoint=keep or taken.append,
    )
    return done, taken
