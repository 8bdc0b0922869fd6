"""tenuto_engine: an MLX decode engine whose generations resume bit for bit.

    engine = Engine.load(path)
    generation = engine.generate(engine.encode_prompt("Hello"), GenerationOptions(seed=7))
    for token in generation:
        print(token.text, end="")
    print(generation.end_text)

With checkpoints, a program that is killed and started again goes on with the next token:

    from tenuto_engine import CheckpointStore, Engine, GenerationOptions, resume_options

    engine = Engine.load("path/to/model")
    store = CheckpointStore("checkpoints/story-1")
    prompt = engine.encode_prompt("Write a long story.")
    options = GenerationOptions(
        max_tokens=2000, temperature=0.8, seed=7, on_decode_checkpoint=store.save
    )

    # Another model, version or machine gives other bits. To notice, begin the store with
    # meta={"geometry": engine.geometry.fingerprint} and compare checkpoint.meta["geometry"].
    checkpoint = store.newest_valid()  # None at the first start
    # (): tokens that the checkpoint has are handed out again, too, from the first one on.
    prompt, options = resume_options(checkpoint, options, (), prompt_tokens=prompt)
    generation = engine.generate(prompt, options)
    for token in generation:
        print(token.text, end="", flush=True)
    print(generation.end_text)

Names are imported at their first use, so that what only describes tokens or options does not
start a device.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# cuDNN picks its attention kernel by where K and V happen to lie in memory, so the same run
# gives other bits after a resume. MLX reads this when it is first imported.
os.environ.setdefault("MLX_CUDA_USE_CUDNN_SDPA", "0")

if TYPE_CHECKING:
    from tenuto_engine._adapter_folder import AdapterFacts as AdapterFacts
    from tenuto_engine._adapter_folder import AdapterFolder as AdapterFolder
    from tenuto_engine._adapters import Adapter as Adapter
    from tenuto_engine._budget import DiskBudget as DiskBudget
    from tenuto_engine._budget import bytes_on_disk as bytes_on_disk
    from tenuto_engine._caches import CacheState as CacheState
    from tenuto_engine._checkpoint import Checkpoint as Checkpoint
    from tenuto_engine._checkpoint import Origin as Origin
    from tenuto_engine._engine import Engine as Engine
    from tenuto_engine._errors import CheckpointCorrupt as CheckpointCorrupt
    from tenuto_engine._errors import CheckpointError as CheckpointError
    from tenuto_engine._errors import CheckpointWriteError as CheckpointWriteError
    from tenuto_engine._errors import EngineError as EngineError
    from tenuto_engine._errors import GenerationFailed as GenerationFailed
    from tenuto_engine._errors import InvalidOption as InvalidOption
    from tenuto_engine._errors import ModelLoadError as ModelLoadError
    from tenuto_engine._errors import NoFreeSlot as NoFreeSlot
    from tenuto_engine._errors import PromptError as PromptError
    from tenuto_engine._errors import PromptTooLong as PromptTooLong
    from tenuto_engine._errors import ResumeMismatch as ResumeMismatch
    from tenuto_engine._errors import UnsupportedAdapter as UnsupportedAdapter
    from tenuto_engine._errors import UnsupportedCache as UnsupportedCache
    from tenuto_engine._errors import UnsupportedScheme as UnsupportedScheme
    from tenuto_engine._facts import ModelFacts as ModelFacts
    from tenuto_engine._facts import model_facts as model_facts
    from tenuto_engine._generation import Generation as Generation
    from tenuto_engine._geometry import Geometry as Geometry
    from tenuto_engine._grammar import Grammar as Grammar
    from tenuto_engine._inventory import StoredAttempt as StoredAttempt
    from tenuto_engine._inventory import StoredCheckpoint as StoredCheckpoint
    from tenuto_engine._inventory import StoredEnd as StoredEnd
    from tenuto_engine._inventory import StoredJob as StoredJob
    from tenuto_engine._inventory import job_folder as job_folder
    from tenuto_engine._inventory import job_ids as job_ids
    from tenuto_engine._inventory import list_jobs as list_jobs
    from tenuto_engine._inventory import read_job as read_job
    from tenuto_engine._inventory import stored_attempts as stored_attempts
    from tenuto_engine._kv_scheme import KVScheme as KVScheme
    from tenuto_engine._kv_scheme import LayerQuantization as LayerQuantization
    from tenuto_engine._live import LiveCheckpoint as LiveCheckpoint
    from tenuto_engine._memory import MemoryUse as MemoryUse
    from tenuto_engine._memory import default_budget as default_budget
    from tenuto_engine._memory import limit_memory as limit_memory
    from tenuto_engine._memory import memory_use as memory_use
    from tenuto_engine._memory import release_memory as release_memory
    from tenuto_engine._options import GenerationOptions as GenerationOptions
    from tenuto_engine._options import PendingLogprobs as PendingLogprobs
    from tenuto_engine._prefill import PrefillTurn as PrefillTurn
    from tenuto_engine._prefix import Prefix as Prefix
    from tenuto_engine._prefix import PrefixCache as PrefixCache
    from tenuto_engine._prefix import PrefixStats as PrefixStats
    from tenuto_engine._resume import resume_options as resume_options
    from tenuto_engine._row_cost import RowCost as RowCost
    from tenuto_engine._sequence import GenerationStats as GenerationStats
    from tenuto_engine._sequence import Sequence as Sequence
    from tenuto_engine._sequence import SequenceState as SequenceState
    from tenuto_engine._sequence import TokenEvent as TokenEvent
    from tenuto_engine._store import CheckpointStore as CheckpointStore
    from tenuto_engine._store import Durable as Durable
    from tenuto_engine._token import Token as Token
    from tenuto_engine._trace import Span as Span
    from tenuto_engine._trace import opentelemetry_spans as opentelemetry_spans
    from tenuto_engine._verify import VerifyReport as VerifyReport
    from tenuto_engine._verify import verify as verify
    from tenuto_engine._verify import verify_job as verify_job
    from tenuto_engine._writer import CheckpointWriter as CheckpointWriter

_HOMES = {
    "_adapter_folder": ["AdapterFacts", "AdapterFolder"],
    "_adapters": ["Adapter"],
    "_budget": ["DiskBudget", "bytes_on_disk"],
    "_caches": ["CacheState"],
    "_checkpoint": ["Checkpoint", "Origin"],
    "_engine": ["Engine"],
    "_errors": [
        "CheckpointCorrupt",
        "CheckpointError",
        "CheckpointWriteError",
        "EngineError",
        "GenerationFailed",
        "InvalidOption",
        "ModelLoadError",
        "NoFreeSlot",
        "PromptError",
        "PromptTooLong",
        "ResumeMismatch",
        "UnsupportedAdapter",
        "UnsupportedCache",
        "UnsupportedScheme",
    ],
    "_facts": ["ModelFacts", "model_facts"],
    "_generation": ["Generation"],
    "_geometry": ["Geometry"],
    "_grammar": ["Grammar"],
    "_inventory": [
        "StoredAttempt",
        "StoredCheckpoint",
        "StoredEnd",
        "StoredJob",
        "job_folder",
        "job_ids",
        "list_jobs",
        "read_job",
        "stored_attempts",
    ],
    "_kv_scheme": ["KVScheme", "LayerQuantization"],
    "_live": ["LiveCheckpoint"],
    "_memory": ["MemoryUse", "default_budget", "limit_memory", "memory_use", "release_memory"],
    "_options": ["GenerationOptions", "PendingLogprobs"],
    "_prefill": ["PrefillTurn"],
    "_prefix": ["Prefix", "PrefixCache", "PrefixStats"],
    "_resume": ["resume_options"],
    "_row_cost": ["RowCost"],
    "_sequence": ["GenerationStats", "Sequence", "SequenceState", "TokenEvent"],
    "_store": ["CheckpointStore", "Durable"],
    "_token": ["Token"],
    "_trace": ["Span", "opentelemetry_spans"],
    "_verify": ["VerifyReport", "verify", "verify_job"],
    "_writer": ["CheckpointWriter"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
