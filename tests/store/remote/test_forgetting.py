"""Warming and forgetting while the remote is away: nothing that was forgotten comes back with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, TieredStore, make_method
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from tests.store.remote.filesystems import Away
from tests.support.engines import METHOD, make_engine
from tests.support.passages import PASSAGES

NAMES = ["ferry", "hull", "mill"]


def open_tiers(folder: Path) -> TieredStore:
    remote = RemoteStore(FsspecBlobs("away://forgetting/kv"), pause_s=0.0)
    return TieredStore(MemoryStore(), TieredStore(DiskStore(folder), remote, near_suffices=True))


def test_passages_warmed_while_it_is_away_are_in_use(llama: LanguageModel, tmp_path: Path, away: type[Away]) -> None:
    with make_engine(llama, open_tiers(tmp_path), method=METHOD) as engine:
        away.down = True
        with pytest.raises(StoreError, match=r"disk tier only: .* copy them later with `qcfuse store move --keep"):
            engine.warm(PASSAGES, sources=NAMES)
        found = engine.prompt_from_text([("user", f"{PASSAGES[0]} Who is the captain?")])
        assert found.chunks, "also recognised in messages"
        report = engine.prefill(engine.prompt("Who?", PASSAGES)).report
        assert report.fallback is None
        away.down = False


def test_a_server_drops_a_forgotten_document_from_memory(
    llama: LanguageModel, tmp_path: Path, away: type[Away]
) -> None:
    with make_engine(llama, open_tiers(tmp_path), method=METHOD) as engine:
        engine.warm(PASSAGES, sources=NAMES)
        with make_engine(llama, open_tiers(tmp_path), method=METHOD) as server:
            prompt = server.prompt("Who?", PASSAGES[:1])
            assert server.prefill(prompt).report.lookups[-1].hit
            away.down = True
            engine.forget(NAMES[0])
            assert not server.generate(prompt).report.lookups[-1].hit
            away.down = False


def test_what_was_made_from_a_forgotten_passage_does_not_come_back(
    llama: LanguageModel, tmp_path: Path, away: type[Away]
) -> None:
    store = open_tiers(tmp_path)
    [*_, remote] = store.tiers
    with FusionEngine(llama, store, method=make_method("fusionrag")) as engine:
        engine.warm(PASSAGES, sources=NAMES)
        made = {entry.address: remote.open(entry.address) for entry in remote.entries()}
        enriched = {address: found[1] for address, found in made.items() if "enriched" in found[0].base}  # type: ignore[index]
        assert len(enriched) == 3
        away.down = True
        engine.forget(NAMES[2])
        with pytest.raises(StoreError, match="disk tier only"):
            engine.warm([*PASSAGES[:2], "The mill is for sale."], sources=[*NAMES[:2], "sale"])
        away.down = False
        engine.forget("nothing")  # collects what is unwanted
        for address, old in enriched.items():
            kept = remote.open(address)
            assert isinstance(kept, Miss) or not torch.equal(kept[1].layer(3)[0], old.layer(3)[0])
