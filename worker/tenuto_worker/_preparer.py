"""`Preparer`: from a claim to something that the decode thread can start.

It reads the spec, the prompt's ids, the stream and a checkpoint, on a thread of its own, so that
rows go on decoding meanwhile.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgpack
import redis

from tenuto_client import (
    JobSpec,
    Keys,
    ProtocolError,
    Token,
    unpack_entry,
    unpack_spec,
)
from tenuto_client._text_length import least_tokens

from ._calls import Bound, bind_call
from ._checkpoints import Checkpoints, engine_tokens
from ._errors import BadJob, Interrupted, LeftToOthers, NoAdapter, NoMemory
from ._geometry_of_run import describe_geometry, judge_geometry
from ._job_limits import JobLimits
from ._models import Admission
from ._other_workers import OtherWorkers
from ._redis import Patience
from ._run import End, EndKind, Phase, Run, Stop, end_of, stored_ids
from ._scripts import JobScripts
from ._settings import WorkerSettings

if TYPE_CHECKING:
    from tenuto_engine import (
        Adapter,
        Checkpoint,
        CheckpointStore,
        Engine,
        GenerationOptions,
        Geometry,
        LiveCheckpoint,
        Origin,
    )
    from tenuto_engine import Token as EngineToken

_PAGE = 1000
# About how many tokens are prefilled in the time of one that is decoded.
_DECODE_COST = 16
PREFILLED: Final = "recovery=fast: published tokens were prefilled"


@dataclass(frozen=True, slots=True)
class Road:
    """Arguments of `Engine.add` that lead to the next token of a job.

    Attributes:
        tokens, options: the arguments.
        recomputes: why what comes after it may have other bits; None when it cannot.
        kind: one of `RECOVERIES`.
    """

    tokens: list[int]
    options: GenerationOptions
    recomputes: str | None = None
    kind: str = "replay"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start a row.

    Attributes:
        run: whose it is.
        engine: what runs it.
        store: where its checkpoints go.
        roads: best first. The last replays from the prompt and needs nothing but the stream.
    """

    run: Run
    engine: Engine
    store: CheckpointStore
    roads: tuple[Road, ...]


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where the preparer's results go."""

    start: Callable[[Plan], object]
    end: Callable[[Run, End], object]
    save: Callable[[CheckpointStore, LiveCheckpoint], object]


class Preparer:
    """Prepares claimed runs, one after the other.

    Args:
        engine_of: the engine of a model; only its tokenizer and geometry are used.
        admit: reserves memory for a run's row of so many tokens, prompt and answer.
        adapter_gone: called with a model of which an adapter is not there any more.
        others: asked for workers that have more memory.
        limits: asked whether a job is within them, once its prompt is counted.
        client: a connection of this thread's own, for the stream.
        reach: id of this data dir.
    """

    def __init__(
        self,
        scripts: JobScripts,
        client: redis.Redis,
        keys: Keys,
        settings: WorkerSettings,
        patience: Patience,
        *,
        engine_of: Callable[[str], Engine],
        admit: Callable[[Run, int], Admission],
        adapter_gone: Callable[[str], object],
        others: OtherWorkers,
        limits: JobLimits,
        checkpoints: Checkpoints,
        reach: str,
        outlets: Outlets,
    ) -> None:
        self._scripts = scripts
        self._client = client
        self._keys = keys
        self._settings = settings
        self._patience = patience
        self._engine_of = engine_of
        self._admit = admit
        self._adapter_gone = adapter_gone
        self._others = others
        self._limits = limits
        self._checkpoints = checkpoints
        self._reach = reach
        self._outlets = outlets
        self._waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._behind: list[Run] = []

    def submit(self, run: Run) -> None:
        """Prepare a run soon."""
        self._behind.append(run)
        self._waiting.put(run)

    def run(self) -> None:
        """The body of the thread."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Prepare the next run and pass it on: to the decode thread, or to its end."""
        from tenuto_engine import EngineError

        run = self._waiting.get()
        self._behind.remove(run)
        run.progress(Phase.RESTORE)
        try:
            plan = self._plan(run)
        except Interrupted:
            self._stopped(run)
        except LeftToOthers as error:
            run.log.info("job left to other workers", why=str(error))
            self._outlets.end(run, End(EndKind.RELEASED, "limits"))
        except NoAdapter as error:
            run.log.info("job left to other workers", why=str(error))
            self._outlets.end(run, End(EndKind.RELEASED, "adapter"))
        except NoMemory as error:
            run.log.info("job waits for memory", why=str(error))
            self._outlets.end(run, End(EndKind.RELEASED, "memory"))
        except (BadJob, ProtocolError, EngineError) as error:
            self._outlets.end(run, End(EndKind.FAILED, error=str(error)))
        except Exception as error:
            # This job's trouble; the others on this worker go on.
            run.log.exception("attempt failed", phase=run.phase.value)
            self._outlets.end(run, End(EndKind.RELEASED, "error", error=repr(error)))
        else:
            if run.stop is None:
                self._outlets.start(plan)
            else:
                self._stopped(run)

    def _stopped(self, run: Run) -> None:
        stop = run.stop
        assert stop is not None, "nothing else interrupts"
        # Of a fenced run the publisher writes nothing, it only forgets it.
        self._outlets.end(run, end_of(run, stop))

    # -- the steps ---------------------------------------------------------------------

    def _plan(self, run: Run) -> Plan:
        spec = unpack_spec(run.claim.spec)
        if spec.seed is None:
            raise BadJob("seed: the job's spec has none")
        engine = self._engine_of(run.model)
        published = self._read_stream(run)
        options = options_of(spec, self._settings)
        if options.grammar is not None:
            # Here, so that no row waits for it.
            options = replace(options, grammar=engine.compile_grammar(options.grammar))
        if spec.adapter is not None:
            options = replace(options, adapter=self._adapter(run, spec.adapter, engine))
        geometry = engine.geometry_of(options.adapter)
        self._check_text(run, spec, engine)
        prompt = prompt_ids(run, spec, engine)
        check_length(len(prompt), options.max_tokens, engine.context_length)
        described = describe_geometry(geometry, options)
        judge_geometry(run, geometry, described)
        self._bind(run, prompt, geometry, described)
        self._wait(run, lambda: self._limits.check(run, len(prompt), options.max_tokens))
        self._reserve(run, len(prompt), options.max_tokens)
        # Published tokens stand first in the run, so that all of it can be sent again.
        run.tokens.extend(published)
        run.sent = len(published)
        return self._roads(run, spec, prompt, options, published, engine)

    def _roads(
        self,
        run: Run,
        spec: JobSpec,
        prompt: list[int],
        options: GenerationOptions,
        published: Sequence[Token],
        engine: Engine,
    ) -> Plan:
        from tenuto_engine import Prefix

        geometry = engine.geometry_of(options.adapter)
        assert spec.seed is not None, "submit draws one"
        checkpoint = self._checkpoints.choose(
            run, prompt=prompt, published=published, seed=spec.seed, geometry=geometry
        )
        known = engine_tokens(published)
        missing = len(known) - (checkpoint.generated_tokens if checkpoint else 0)
        is_fast = spec.recovery == "fast" and missing * _DECODE_COST > len(prompt) + len(known)
        label = ("recomputed", PREFILLED) if is_fast and run.exactness == "exact" else run.label
        store = run.store = self._checkpoints.store(run, label)
        save = self._outlets.save
        options = replace(
            options,
            on_decode_checkpoint=lambda taken: save(store, taken),
            on_span=run.span.on_span,
        )
        replay = replace(options, published_tokens=tuple(known), prefix=Prefix())
        roads = [Road(prompt, replay)]
        if checkpoint is not None:
            roads = [*resume_road(run, checkpoint, options, known, prompt), *roads]
        covered = 0 if checkpoint is None else len(checkpoint.cache_tokens)
        # A checkpoint in mid-prompt may be behind what others have read of the same.
        prefix = engine.find_prefix(prompt, options) if covered < len(prompt) else Prefix()
        if prefix.tokens > covered:
            roads.insert(0, Road(prompt, replace(replay, prefix=prefix)))
        options = replace(options, prefix=prefix)
        if is_fast:
            roads.insert(0, prefill_road(prompt, known, options))
        run.durable = 0 if checkpoint is None else _covered(checkpoint)
        self._begin(run, store, prompt, spec.seed, roads[0].options.cache_origin)
        run.log.info(
            "attempt prepared",
            prompt_tokens=len(prompt),
            published=len(published),
            # The names that `tenuto checkpoints list --json` has: with the prompt, and without it.
            cached_tokens=None if checkpoint is None else len(checkpoint.cache_tokens),
            checkpoint_tokens=None if checkpoint is None else checkpoint.generated_tokens,
            prefix_tokens=prefix.tokens,
            exactness=run.exactness,
        )
        return Plan(run, engine, store, tuple(roads))

    def _adapter(self, run: Run, name: str, engine: Engine) -> Adapter:
        """Here, so that no row waits for it, and once, so that one that is replaced meanwhile is
        no other one's.

        Raises:
            NoAdapter: it has gone since the claim.
            UnsupportedAdapter: it is damaged, and the job has not begun.
        """
        from tenuto_engine import InvalidOption, UnsupportedAdapter

        if run.claim.record.get("adapter") != name.encode():
            # By the hash any worker may claim it.
            raise BadJob("adapter: the job's hash has another one than its spec")
        try:
            return engine.load_adapter(name)
        except InvalidOption as error:
            # Of a job that has begun they may just be on their way to another state.
            if isinstance(error, UnsupportedAdapter) and not run.claim.tokens:
                raise
            self._adapter_gone(run.model)
            raise NoAdapter(str(error)) from error

    def _check_text(self, run: Run, spec: JobSpec, engine: Engine) -> None:
        """Refuse what is far too long before it is tokenized, for which all others would wait.

        Raises:
            BadJob: it says by how much.
        """
        if run.claim.prompt_ids is not None or engine.longest_token is None:
            return
        text = engine.prompt_text(spec.prompt, raw=spec.raw)
        if text is None:
            return
        least = least_tokens(text, engine.longest_token)
        check_length(least, spec.max_tokens, engine.context_length, "at least ")
        self._limits.check_text(run, least)

    def _reserve(self, run: Run, prompt: int, max_tokens: int) -> None:
        """Have memory for the run's row, to its longest end.

        Raises:
            NoMemory: others have it.
            BadJob: no worker has so much.
        """
        admission = self._admit(run, prompt + max_tokens)
        if admission is Admission.FITS:
            return
        if admission is Admission.WAITS:
            raise NoMemory("other jobs have it")
        most = self._wait(run, lambda: self._others.widest("max_context", run.model))
        # Of one that has begun, a worker that had memory for it may be back soon.
        if most is None or most >= prompt + max_tokens or run.claim.tokens:
            raise NoMemory("this worker has too little, even alone")
        raise BadJob(
            f"max_tokens: {max_tokens} do not fit into memory: the prompt has {prompt} tokens, and "
            f"no worker has memory for more than {most} of prompt and answer together",
            hint=f"at most {most - prompt} can follow this prompt"
            if most > prompt
            else "shorten the prompt",
        )

    @staticmethod
    def _begin(
        run: Run, store: CheckpointStore, prompt: list[int], seed: int, origin: Origin | None
    ) -> None:
        """Have the job on disk before its first token, so that it can be put back from there."""
        from tenuto_engine import CheckpointWriteError

        try:
            store.open(prompt, seed, origin)
        except CheckpointWriteError as error:
            run.log.warning("checkpoint not saved", error=str(error))

    def _read_stream(self, run: Run) -> list[Token]:
        tokens: list[Token] = []
        start = "-"
        while len(tokens) < run.claim.tokens:
            try:
                page = self._wait(run, lambda start=start: self._page(run, start))  # type: ignore[misc]
            except redis.ResponseError as error:
                # What a later call may mend was waited for.
                raise BadJob(f"stream: cannot be read: {error}") from error
            if not page:
                break
            for entry_id, fields in page:
                self._collect(tokens, entry_id.decode(), fields)
            start = f"({page[-1][0].decode()}"
        if len(tokens) < run.claim.tokens:
            raise BadJob(f"stream: token {len(tokens) + 1} of {run.claim.tokens} is missing")
        return tokens[: run.claim.tokens]

    def _page(self, run: Run, start: str) -> Any:
        return self._client.xrange(self._keys.stream(run.job_id), start, "+", count=_PAGE)

    @staticmethod
    def _collect(tokens: list[Token], entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        entry = unpack_entry(entry_id, fields)
        if isinstance(entry, list):
            # A packed entry may begin with what an earlier one had.
            tokens.extend(token for token in entry if token.index > len(tokens))

    def _bind(
        self, run: Run, prompt: list[int], geometry: Geometry, described: Mapping[str, Any]
    ) -> None:
        packed: bytes = msgpack.packb(prompt)
        bound = Bound(
            packed, len(prompt), geometry.fingerprint, msgpack.packb(described), self._reach
        )
        label = run.label
        answer = self._wait(
            run,
            lambda: self._scripts.run(bind_call(run.fence, bound, *label)),
        )
        if answer != "ok":
            run.ask_to_stop(Stop.FENCED)
            raise Interrupted("fenced")
        run.bound, run.label_sent = bound, label

    def _wait(self, run: Run, call: Callable[[], Any]) -> Any:
        def alive() -> None:
            # Those behind it wait for Redis as well.
            for each in (run, *self._behind):
                each.alive()

        return self._patience(call, until=lambda: run.stop is not None, beat=alive)


def prompt_ids(run: Run, spec: JobSpec, engine: Engine) -> list[int]:
    """The ids that an earlier claim stored, or those of the spec's prompt.

    Raises:
        ProtocolError: what is stored is none.
        PromptError: the prompt is empty, or the model cannot take it.
    """
    if run.claim.prompt_ids is not None:
        return engine.encode_prompt(stored_ids(run.claim.prompt_ids))
    return engine.encode_prompt(spec.prompt, raw=spec.raw)


def options_of(spec: JobSpec, settings: WorkerSettings) -> GenerationOptions:
    """What a spec asks for, in the engine's words."""
    from tenuto_engine import GenerationOptions

    return GenerationOptions(
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        xtc_probability=spec.xtc_probability,
        xtc_threshold=spec.xtc_threshold,
        seed=spec.seed,
        stop=spec.stop,
        stop_token_ids=spec.stop_token_ids,
        ignore_eos=spec.ignore_eos,
        logprobs=spec.logprobs,
        logit_bias=spec.logit_bias,
        repetition_penalty=spec.repetition_penalty,
        repetition_context_size=spec.repetition_context_size,
        presence_penalty=spec.presence_penalty,
        presence_context_size=spec.presence_context_size,
        frequency_penalty=spec.frequency_penalty,
        frequency_context_size=spec.frequency_context_size,
        grammar=spec.grammar,
        jump_forward=spec.jump_forward,
        checkpoint_every_tokens=settings.checkpoint_every_tokens,
        checkpoint_every_seconds=settings.checkpoint_every_seconds,
    )


def resume_road(
    run: Run,
    checkpoint: Checkpoint,
    options: GenerationOptions,
    published: Sequence[EngineToken],
    prompt: list[int],
) -> list[Road]:
    """The way on from a checkpoint; none if the engine says that it does not lead there."""
    from tenuto_engine import ResumeMismatch, resume_options

    try:
        arguments = resume_options(checkpoint, options, published, prompt_tokens=prompt)
    except ResumeMismatch as error:
        run.log.warning("checkpoint not usable", error=str(error))
        return []
    return [Road(*arguments, kind="older" if run.passed_over else "checkpoint")]


def _covered(checkpoint: Checkpoint) -> int:
    """Generated tokens that a resume from it has without a forward pass."""
    return checkpoint.generated_tokens + (checkpoint.pending_token is not None)


def prefill_road(
    prompt: Sequence[int], published: Sequence[EngineToken], options: GenerationOptions
) -> Road:
    """Read the published tokens together with the prompt: quicker than feeding them one by one."""
    resumed = replace(
        options, initial_generated_tokens=len(published), initial_tokens=tuple(published)
    )
    tokens = [*prompt, *(token.token for token in published)]
    return Road(tokens, resumed, PREFILLED, kind="prefill")


def check_length(prompt: int, max_tokens: int, context: int | None, at_least: str = "") -> None:
    """Refuse what cannot fit; `at_least` where only the fewest tokens of the prompt are known.

    Raises:
        BadJob: it says by how much.
    """
    if context is not None and prompt + max_tokens > context:
        left = context - prompt
        if left < 1:
            raise BadJob(
                f"prompt: its {at_least}{prompt} tokens leave no room for an answer: the model's "
                f"context has {context}",
                hint="shorten the prompt",
            )
        raise BadJob(
            f"max_tokens: {max_tokens} do not fit: the prompt has {at_least}{prompt} tokens, the "
            f"model's context {context}",
            hint=f"at most {left} can follow this prompt",
        )
