"""The spans of a generation: what it did from when to when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_runs import PROMPT, STYLES, Run, finish
from tenuto_engine import (
    CheckpointStore,
    CheckpointWriter,
    Engine,
    GenerationOptions,
    InvalidOption,
    Span,
    opentelemetry_spans,
    resume_options,
)

LoadEngine = Callable[..., Engine]

OPTIONS: dict[str, Any] = STYLES["sampled"] | {"max_tokens": 10, "checkpoint_every_seconds": None}
both_loops = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def prompt_of(engine: Engine) -> list[int]:
    return engine.encode_prompt(PROMPT, raw=True)[:40]


def run(engine: Engine, prompt: list[int], options: GenerationOptions) -> Run:
    return finish(engine, engine.add(prompt, options))


def told(spans: list[Span]) -> list[tuple[str, dict[str, int]]]:
    return [(span.name, dict(span.facts)) for span in spans]


def only(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


@both_loops
def test_a_run_is_its_chunks_its_first_token_its_phases_and_its_checkpoints(
    load_engine: LoadEngine, pipelined: bool
) -> None:
    engine = load_engine("llama", pipelined=pipelined)
    spans: list[Span] = []
    options = GenerationOptions(
        **OPTIONS,
        checkpoint_every_tokens=4,
        on_decode_checkpoint=lambda live: None,
        on_span=spans.append,
    )
    run(engine, prompt_of(engine), options)

    assert told(spans[:6]) == [
        ("prefill_chunk", {"start": 0, "stop": 16}),
        ("prefill_chunk", {"start": 16, "stop": 32}),
        ("prefill_chunk", {"start": 32, "stop": 39}),
        ("first_token", {}),
        ("prefill", {"prompt": 40, "tokens": 0}),
        ("checkpoint", {"last": 0, "deferred": 0}),
    ]
    assert told(spans[-1:]) == [("decode", {"prompt": 40, "tokens": 10})]
    assert told(spans[6:-1]) == [("checkpoint", {"last": last, "deferred": 0}) for last in (4, 8)]


def test_spans_lie_within_their_phases_and_phases_follow_each_other(
    load_engine: LoadEngine,
) -> None:
    engine = load_engine("llama")
    spans: list[Span] = []
    before = time.time_ns()
    run(engine, prompt_of(engine), GenerationOptions(**OPTIONS, on_span=spans.append))
    after = time.time_ns()
    [prefill], [decode] = only(spans, "prefill"), only(spans, "decode")

    slack = 50_000_000  # of the clock on the wall, which is set now and then
    assert before - slack <= prefill.began < prefill.ended <= decode.ended <= after + slack
    assert abs(decode.began - prefill.ended) < slack
    for span in only(spans, "prefill_chunk") + only(spans, "first_token"):
        assert prefill.began - slack <= span.began < span.ended <= prefill.ended + slack


def test_a_catch_up_is_a_phase_of_its_own(load_engine: LoadEngine) -> None:
    engine = load_engine("llama")
    tokens = run(engine, prompt_of(engine), GenerationOptions(**OPTIONS)).tokens
    spans: list[Span] = []
    options = GenerationOptions(**OPTIONS, on_span=spans.append)
    prompt, options = resume_options(None, options, tokens[:6], prompt_tokens=prompt_of(engine))
    run(engine, prompt, options)

    assert [told([span])[0] for span in spans if span.name in ("catch_up", "decode")] == [
        ("catch_up", {"prompt": 40, "tokens": 6}),
        ("decode", {"prompt": 40, "tokens": 10}),
    ]


def test_a_run_that_is_closed_ends_its_phase(load_engine: LoadEngine) -> None:
    engine = load_engine("llama")
    spans: list[Span] = []
    sequence = engine.add(prompt_of(engine), GenerationOptions(**OPTIONS, on_span=spans.append))
    engine.step()
    engine.close(sequence)
    assert told(spans) == [
        ("prefill_chunk", {"start": 0, "stop": 16}),
        ("prefill", {"prompt": 16, "tokens": 0}),
    ]


def test_a_prompt_that_waits_for_anothers_has_no_span_yet(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", slots=2)
    spans: list[Span] = []
    engine.add(prompt_of(engine), GenerationOptions(**OPTIONS))
    waiting = engine.add(prompt_of(engine), GenerationOptions(**OPTIONS, on_span=spans.append))
    engine.step()
    engine.close(waiting)
    assert spans == []


def test_a_checkpoint_on_its_way_to_the_disk_is_a_span_with_its_bytes(
    load_engine: LoadEngine, tmp_path: Path
) -> None:
    engine = load_engine("llama")
    spans: list[Span] = []
    store, writer = CheckpointStore(tmp_path / "job"), CheckpointWriter()
    options = GenerationOptions(
        **OPTIONS,
        on_decode_checkpoint=lambda live: writer.submit(store, live),
        on_span=spans.append,
    )
    run(engine, prompt_of(engine), options)
    assert writer.close(20)

    [write] = only(spans, "checkpoint_write")
    assert write.facts["last"] == 0
    assert write.facts["durable"] == 1
    assert write.facts["bytes"] > 0


def test_tracing_changes_no_bit(load_engine: LoadEngine) -> None:
    engine = load_engine("llama")
    options = GenerationOptions(**OPTIONS)
    plain = run(engine, prompt_of(engine), options)
    traced = run(engine, prompt_of(engine), replace(options, on_span=lambda span: None))
    assert traced.tokens == plain.tokens


def test_a_callback_that_raises_is_logged_once_and_the_run_goes_on(
    load_engine: LoadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine("llama")

    def broken(span: Span) -> None:
        raise OSError("no collector")

    with caplog.at_level(logging.ERROR, logger="tenuto_engine"):
        ended = run(engine, prompt_of(engine), GenerationOptions(**OPTIONS, on_span=broken))
    assert len(ended.tokens) == 10
    assert [record.message for record in caplog.records] == [
        "on_span raised; nothing more is traced"
    ]


def test_what_cannot_be_called_is_refused() -> None:
    wrong: Any = "print"
    with pytest.raises(InvalidOption, match="on_span: must be callable"):
        GenerationOptions(on_span=wrong)


def test_opentelemetry_gets_them_below_the_callers_span(load_engine: LoadEngine) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = provider.get_tracer("test").start_span("request")
    context = trace.set_span_in_context(request)
    engine = load_engine("llama")
    spans: list[Span] = []
    send = opentelemetry_spans(context, provider)

    def both(span: Span) -> None:
        spans.append(span)
        send(span)

    run(engine, prompt_of(engine), GenerationOptions(**OPTIONS, on_span=both))
    sent = exporter.get_finished_spans()

    assert [each.name for each in sent] == [f"tenuto.{span.name}" for span in spans]
    for each, span in zip(sent, spans, strict=True):
        assert (each.start_time, each.end_time) == (span.began, span.ended)
        assert each.attributes == {f"tenuto.{name}": value for name, value in span.facts.items()}
        assert each.parent is not None
        assert each.parent.span_id == request.get_span_context().span_id
