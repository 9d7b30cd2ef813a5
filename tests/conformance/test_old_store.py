"""A store that commit 1befeb8 warmed is read with 100 % hits, and gives the answers of a store that is warmed today.

`tests/data/store-1befeb8` was written by that commit's code, with torch 2.13.0, transformers 5.23.0 and tokenizers
0.23.3: an engine over `fixed_model` and a `DiskStore` warmed `PASSAGES` under `BASES`, captured them in all kinds, and
stored `ANSWER`. Both databases were then vacuumed to pages of 1 KiB, to keep the folder small. That commit hashed every
field of a configuration, so the model is given the recorded hash of it; all other fields of its fingerprint are equal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, Method, make_method
from qcfuse_rag.methods.captures.slots import context_of, fact
from qcfuse_rag.methods.epic import BEGUN
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.methods.relaycaching import store_answer
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.documents.sources import manifest_damage
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED
from tests.support.engines import answer_of, capture, make_engine
from tests.support.fixed_model import fixed_model, fixed_tokenizer

FOLDER = Path(__file__).parent.parent / "data" / "store-1befeb8"
LONG_PASSAGE = "The paint for the hull of the ferry is kept in the old mill by the bridge."
"""Has enough words to be recognised in a text."""
PASSAGES = ["The ferry leaves at seven.", "Its green hull is painted in spring.", LONG_PASSAGE]
SOURCES = ["ferry.md", "ferry.md", "mill.md"]
NEIGHBOURS = [[1, 2], [0, 2], [0, 1]]
QUESTION = "Where is the paint?"
ANSWER = "The paint is kept in the old mill."
BASES = (FRAMED, PRIMED, BLIND, BEGUN, ENRICHED)
KINDS = ("variant", "difference", "patch")
ENTRIES = 1 + len(BASES) * len(PASSAGES) + len(KINDS) * (len(PASSAGES) - 1) + 1
"""The system prefix, each passage under each base, what was captured of the last two, and the answer."""
METHODS = [
    *(make_method("qcfuse", ratio=0.15, base=base) for base in BASES),
    *(make_method(name).unguarded for name in ("auto", "fusionrag", "cachecraft", "kamera", "kvcomm")),
]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    lm = LanguageModel.wrap(fixed_model(), fixed_tokenizer(), name="fixed")
    [recorded] = (FOLDER / "models").glob("*.json")
    fingerprint = Fingerprint(**json.loads(recorded.read_text()))
    assert lm.fingerprint.differences(fingerprint.fields()) == ["config"]
    return replace(lm, fingerprint=fingerprint)


@pytest.fixture
def old_engine(lm: LanguageModel, tmp_path: Path) -> Iterator[FusionEngine]:
    """Return an engine over a copy of the old store."""
    shutil.copytree(FOLDER, tmp_path / "kv")
    with make_engine(lm, DiskStore(tmp_path / "kv")) as engine:
        yield engine


@pytest.fixture(scope="module")
def new_engine(lm: LanguageModel) -> FusionEngine:
    """Return an engine over a store that this version warmed the same way."""
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, sources=SOURCES, bases=BASES, neighbours=NEIGHBOURS)
    capture(engine, [PASSAGES], keep=KINDS)
    stream = answer_of(engine, engine.prompt(QUESTION, PASSAGES), ANSWER)
    assert store_answer(engine.corpus.entry_writer(), stream).reason is None
    return engine


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{method.base.name}")
def test_every_lookup_hits_and_the_answer_is_that_of_a_store_warmed_today(
    old_engine: FusionEngine, new_engine: FusionEngine, method: Method
) -> None:
    old, new = (engine.prefill(engine.prompt(QUESTION, PASSAGES), method=method) for engine in (old_engine, new_engine))
    assert [lookup.role for lookup in old.report.lookups] == ["system_prefix", "chunk", "chunk", "chunk"]
    assert [(lookup.hit, lookup.reason) for lookup in old.report.lookups] == [(True, None)] * 4
    assert [lookup.note for lookup in old.report.lookups] == [lookup.note for lookup in new.report.lookups]
    assert old.report.fallback is None
    assert torch.allclose(old.logits, new.logits, rtol=1e-5, atol=1e-5)


def test_a_stored_answer_is_placed(old_engine: FusionEngine, new_engine: FusionEngine) -> None:
    prompts = [engine.prompt("Where?", [PASSAGES[0], ANSWER]) for engine in (old_engine, new_engine)]
    old, new = (
        engine.prefill(prompt, method=make_method("relaycaching"))
        for engine, prompt in zip((old_engine, new_engine), prompts, strict=True)
    )
    assert old.report.lookups[-1].note == new.report.lookups[-1].note == "as generated"
    assert torch.allclose(old.logits, new.logits, rtol=1e-5, atol=1e-5)


def test_every_entry_is_the_one_that_would_be_written_today(old_engine: FusionEngine, new_engine: FusionEngine) -> None:
    """Keys, values, what was measured, and which passages it was made from; so a second warming computes nothing."""
    entries = {entry.address for entry in new_engine.store.entries()}
    assert {entry.address for entry in old_engine.store.entries()} == entries
    for address in entries:
        found = [engine.store.open(address) for engine in (old_engine, new_engine)]
        [(_, old), (_, new)] = found  # type: ignore[misc]
        assert (context_of(old), old.extras, set(old.names())) == (context_of(new), new.extras, set(new.names()))
        for name in ("cci", "inter", "turn", "decoded"):
            assert fact(old, name) == pytest.approx(fact(new, name), abs=1e-5)
        assert isinstance(old, ChunkKV)
        for layer in range(old.n_layers):
            for ours, theirs in zip(old.layer(layer), new.layer(layer), strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert old_engine.warm(PASSAGES, sources=SOURCES, bases=BASES, neighbours=NEIGHBOURS).warmed == 0
    assert capture(old_engine, [PASSAGES], keep=KINDS).captured == 0


def test_its_manifest_is_read(old_engine: FusionEngine, tmp_path: Path) -> None:
    """Its sources are listed, its passages are found in a text, and a forgotten document takes its entries with it."""
    sources = old_engine.corpus.open_sources()
    assert sources.names() == ["ferry.md", "mill.md"]
    assert sources.missing() == {}
    assert old_engine.prompt_from_text(" ".join(PASSAGES) + "?").chunks == (), (
        "its passages are found when warmed again"
    )
    assert old_engine.warm(PASSAGES, sources=SOURCES).warmed == 0
    assert len(old_engine.prompt_from_text(" ".join(PASSAGES) + "?").chunks) == 2
    assert manifest_damage(tmp_path / "kv") is None
    made_of_it = len(KINDS) + 2 + 1  # captured of it, the others enriched by it, and the answer
    assert old_engine.forget("mill.md") == len(BASES) + made_of_it
    [key] = old_engine.corpus.keys(old_engine.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
    assert isinstance(old_engine.store.get(key), ChunkKV)


def test_it_is_whole(old_engine: FusionEngine) -> None:
    """Its index knows every file, and every block matches its checksum."""
    assert isinstance(old_engine.store, DiskStore)
    assert old_engine.store.notes == [], "the index was read, not made anew"
    report = fsck(old_engine.store)
    assert report.clean
    assert (report.checked, report.sound) == (ENTRIES, ENTRIES)
