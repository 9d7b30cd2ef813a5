"""Engines with a method that the tests name: it reads one cache of each passage and always fuses.

The default method reads two caches of a passage and refuses to fuse prompts as short as most tests', so counts would be
twice what a test is about, and depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from qcfuse_rag import (
    FusionEngine,
    FusionReport,
    KVStore,
    LanguageModel,
    MemoryStore,
    Method,
    SamplingParams,
    make_method,
)
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fusion.lookup import Lookups, plan_lookups
from qcfuse_rag.fusion.report import Lookup
from qcfuse_rag.fusion.state import AdaptedChunk, FusedPrompt
from qcfuse_rag.generation.decoding import TextStream
from qcfuse_rag.methods.captures.job import CaptureSummary
from qcfuse_rag.methods.captures.job import capture as capture_groups
from qcfuse_rag.methods.captures.slots import Slot, SlotKind, filled_slots
from qcfuse_rag.prompts.segments import Prompt, Span
from qcfuse_rag.runtime.cost import Costs
from qcfuse_rag.runtime.graphs.runners import PrefillRunner
from qcfuse_rag.runtime.learned_costs import LearnedCosts
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.key import FRAMED, Base, hash_ids
from tests.support.passages import PASSAGES

METHOD = make_method("qcfuse", ratio=0.15, base=FRAMED)
METHOD_OPTIONS = ("--method", "qcfuse", "--ratio", "0.15")
"""The same method on the command line."""


def make_warmed_engine(
    lm: LanguageModel,
    store: KVStore | None = None,
    texts: Sequence[str] = PASSAGES,
    bases: Sequence[Base] | None = None,
    **options: Any,
) -> FusionEngine:
    """Return an engine whose store, in memory unless one is given, has passages for its method, or for given bases."""
    engine = make_engine(lm, MemoryStore() if store is None else store, **options)
    engine.warm(texts, bases=bases)
    return engine


def make_engine(lm: LanguageModel, store: KVStore, **options: Any) -> FusionEngine:
    """Return an engine with `METHOD`, unless the options name another."""
    return FusionEngine(lm, store, **{"method": METHOD, **options})


def look_up(
    lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method
) -> Sequence[tuple[Span, AdaptedChunk | Miss]]:
    """Plan what to read and read it at once, however long it takes."""
    return Lookups(plan_lookups(lm, store, prompt, method, priced=False), WaitBudget(None)).outcomes()


def placed(engine: FusionEngine, prompt: Prompt, method: Method) -> FusedPrompt:
    """Return a prompt with its stored chunks placed as a method has them, before anything is computed."""
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    fused.load(look_up(engine.lm, engine.store, prompt, method), WaitBudget(None))
    return fused


def chunk_lookups(report: FusionReport) -> list[Lookup]:
    """Return what a report says of a prompt's passages."""
    return [lookup for lookup in report.lookups if lookup.role == "chunk"]


def stored_chunk(engine: FusionEngine, text: str, base: Base = FRAMED) -> ChunkKV:
    """Return the cache of a passage, which must be there."""
    chunk = engine.store.get(engine.corpus.keys(engine.prompts.chunk_ids(text), [base])[0])
    assert isinstance(chunk, ChunkKV)
    return chunk


def capture(engine: FusionEngine, groups: Iterable[Sequence[str]], **options: Any) -> CaptureSummary:
    """Capture groups of passages into an engine's store."""
    return capture_groups(engine.corpus.entry_writer(), groups, **options)


def slots_of(engine: FusionEngine, text: str, kind: SlotKind = "variant") -> list[Slot]:
    """Return the slots of a passage that have an entry."""
    ids = engine.prompts.chunk_ids(text)
    prefix_ids = engine.prompts.prefix_ids
    return filled_slots(engine.store, kind, 20, engine.lm.fingerprint, prefix_ids, hash_ids(ids), len(ids))


def answer_of(engine: FusionEngine, prompt: Prompt, text: str, method: str = "full") -> TextStream:
    """Return a finished answer with a set text, whatever the model would say."""
    ids = engine.lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = iter([*ids, engine.lm.tokenizer.eos_token_id])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qcfuse_rag.engine.engine.Sampler", lambda params, lm: lambda *_: next(tokens))
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=len(ids) + 1), method=make_method(method))
    stream.result()
    return stream


def damaged(chunk: ChunkKV, block: str | None = None) -> ChunkKV:
    """Return a chunk of which one block, or none, can be read, whatever is read before it."""

    class Damaged(Blocks):
        def __getitem__(self, name: str) -> Tensor:
            if block in (name, None):
                raise CorruptEntry(f"block {name} does not match its checksum")
            return super().__getitem__(name)

    return replace(chunk, blocks=Damaged({name: chunk.blocks[name] for name in chunk.names()}))


class FixedCosts(LearnedCosts):
    """Costs that nothing changes."""

    def __init__(self, lm: LanguageModel, store: KVStore, costs: Costs) -> None:
        super().__init__(lm, store, PrefillRunner(lm))
        self._fixed = costs

    def __call__(self) -> Costs:
        return self._fixed


def loading_first(lm: LanguageModel, store: KVStore, *, costs: Costs | None = None) -> ModelRunner:
    """Return a runner that loads everything before it computes: the reference of loading while computing."""
    runner = ModelRunner(lm, store, load_limit_s=None, overlap=False)
    if costs is not None:
        runner.costs = FixedCosts(lm, store, costs)
    return runner
