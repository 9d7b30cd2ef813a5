"""A store that an earlier version wrote is read; its entries are hits, but for those behind another primer.

`tests/data/store-3320c96` was written by the code of commit 3320c96, with torch 2.13.0, transformers 5.23.0 and
tokenizers 0.23.3: an engine over `fixed_model` and a `DiskStore` ran `warm(PASSAGES, sources=SOURCES, bases=BASES)` and
`capture([PASSAGES[:2]])`. Both databases were then vacuumed to pages of 1 KiB, to keep the folder small.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, Method, make_method
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.documents.manifest import manifest_damage
from qcfuse_rag.store.maintenance import fsck
from qcfuse_rag.store.prefill_base import BLIND, FRAMED, PRIMED, Base
from qcfuse_rag.store.variant_slots import filled_slots
from tests.support.engines import make_engine
from tests.support.fixed_model import fixed_model, fixed_tokenizer

FOLDER = Path(__file__).parent.parent / "data" / "store-3320c96"
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "tokenizers": "0.23.3"}
LONG_PASSAGE = "The paint for the hull of the ferry is kept in the old mill by the bridge."
"""Has enough words to be recognised in a text."""
PASSAGES = ["The ferry leaves at seven.", "Its green hull is painted in spring.", LONG_PASSAGE]
SOURCES = ["ferry.md", "ferry.md", "mill.md"]
QUESTION = "Where is the paint?"
BASES = (FRAMED, PRIMED, BLIND)
SAME_BASES = (FRAMED, BLIND)
"""Those that are computed as before; the primer has changed since."""
ENTRIES = 1 + len(BASES) * len(PASSAGES) + 1
"""The system prefix, each passage under each base, and the captured variant of the second passage."""


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.wrap(fixed_model(), fixed_tokenizer(), name="fixed")


@pytest.fixture
def old_engine(lm: LanguageModel, tmp_path: Path) -> Iterator[FusionEngine]:
    """Return an engine over a copy of the old store."""
    [recorded] = (FOLDER / "models").glob("*.json")
    fingerprint = json.loads(recorded.read_text())
    if lm.fingerprint.fields() != fingerprint and any(version(name) != used for name, used in VERSIONS.items()):
        pytest.skip("other versions of the libraries give this model another configuration, tokenizer or rotation")
    assert lm.fingerprint.fields() == fingerprint
    shutil.copytree(FOLDER, tmp_path / "kv")
    with make_engine(lm, DiskStore(tmp_path / "kv")) as engine:
        yield engine


@pytest.fixture(scope="module")
def new_engine(lm: LanguageModel) -> FusionEngine:
    """Return an engine over a store that this version warmed the same way."""
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, sources=SOURCES, bases=BASES)
    engine.corpus.capture([PASSAGES[:2]])
    return engine


def method_reading(base: Base) -> Method:
    return make_method("qcfuse", ratio=0.15, base=base)


def logits(engine: FusionEngine, method: Method) -> Tensor:
    return engine.prefill(engine.prompt(QUESTION, PASSAGES), method=method).logits


@pytest.mark.parametrize("base", SAME_BASES, ids=lambda base: base.name)
def test_every_passage_is_a_hit(old_engine: FusionEngine, base: Base) -> None:
    report = old_engine.prefill(old_engine.prompt(QUESTION, PASSAGES), method=method_reading(base)).report
    assert [lookup.role for lookup in report.lookups] == ["system_prefix", "chunk", "chunk", "chunk"]
    assert [(lookup.hit, lookup.reason) for lookup in report.lookups] == [(True, None)] * 4
    assert report.fallback is None


@pytest.mark.parametrize("base", SAME_BASES, ids=lambda base: base.name)
def test_answers_are_those_of_a_store_that_is_warmed_today(
    old_engine: FusionEngine, new_engine: FusionEngine, base: Base
) -> None:
    old, new = logits(old_engine, method_reading(base)), logits(new_engine, method_reading(base))
    assert torch.allclose(old, new, rtol=1e-5, atol=1e-5)


def test_caches_behind_another_primer_are_not_read(old_engine: FusionEngine) -> None:
    report = old_engine.prefill(old_engine.prompt(QUESTION, PASSAGES), method=method_reading(PRIMED)).report
    assert [lookup.hit for lookup in report.lookups] == [True, False, False, False]
    assert report.fallback is not None


def test_warming_it_again_computes_only_what_is_primed(old_engine: FusionEngine, new_engine: FusionEngine) -> None:
    summary = old_engine.warm(PASSAGES, sources=SOURCES, bases=BASES)
    assert (summary.warmed, summary.present) == (len(PASSAGES), len(SAME_BASES) * len(PASSAGES))
    old, new = logits(old_engine, method_reading(PRIMED)), logits(new_engine, method_reading(PRIMED))
    assert torch.allclose(old, new, rtol=1e-5, atol=1e-5)


def test_the_captured_variant_is_there(old_engine: FusionEngine, new_engine: FusionEngine) -> None:
    ids = old_engine.prompts.chunk_ids(PASSAGES[1])
    variants = []
    for engine in (old_engine, new_engine):
        prefix_ids = engine.prompts.prefix_ids
        [slot] = filled_slots(engine.store, "variant", 5, engine.lm.fingerprint, prefix_ids, ids)
        variants.append(slot.chunk)
    old, new = variants
    assert (old.context, old.extras, old.names()) == (new.context, new.extras, new.names())
    assert {name: pytest.approx(numbers, abs=1e-5) for name, numbers in old.facts.items()} == new.facts
    for name in old.names():
        assert torch.allclose(old.blocks[name].double(), new.blocks[name].double(), rtol=1e-5, atol=1e-5)


def test_its_manifest_is_read(old_engine: FusionEngine, tmp_path: Path) -> None:
    """Its sources are listed, its passages are found in a text, and a forgotten document takes its entries with it."""
    sources = old_engine.corpus.open_sources()
    assert sources.names() == ["ferry.md", "mill.md"]
    assert sources.missing() == {}
    assert [match.text for match in old_engine.corpus.signatures.find(" ".join(PASSAGES))] == [LONG_PASSAGE]
    assert manifest_damage(tmp_path / "kv") is None
    assert old_engine.forget("mill.md") == len(BASES)
    [key] = old_engine.corpus.keys(old_engine.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
    assert isinstance(old_engine.store.get(key), ChunkKV)


def test_it_is_whole(old_engine: FusionEngine) -> None:
    """Its index knows every file, and every block matches its checksum."""
    assert isinstance(old_engine.store, DiskStore)
    report = fsck(old_engine.store)
    assert report.clean
    assert (report.checked, report.sound) == (ENTRIES, ENTRIES)
