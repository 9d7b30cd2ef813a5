"""A passage is present when the tier that lasts has it: warming writes what the farthest tier lacks."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, KVStore, LanguageModel, MemoryStore, TieredStore, open_store
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES

SOURCES = ["a.md", "a.md", "b.md"]
LIMIT = 1 << 26


class AwayBlobs(FsspecBlobs):
    """A bucket that cannot be reached."""

    def exists(self, name: str) -> bool:
        raise ConnectionError("no route to host")


def warm(engine: FusionEngine, *bases: object) -> tuple[int, int, int]:
    """Warm the passages; return how many were present and prefilled, and how many tokens were computed."""
    summary = engine.warm(PASSAGES, sources=SOURCES, bases=bases or None, neighbours=[[1], [0], [0]])
    return summary.present, summary.warmed, summary.computed_tokens


def lost(store: KVStore) -> list[str]:
    """Return the entries that the farthest tier lacks."""
    nearer = {entry.address for tier in store.tiers[:-1] for entry in tier.entries()}
    return [address for address in nearer if address not in store.tiers[-1]]


def bucket() -> RemoteStore:
    return RemoteStore(FsspecBlobs(f"memory://{uuid.uuid4()}/kv"))


def clear_farthest(store: KVStore) -> None:
    store.tiers[-1].clear()


def remove_files(store: KVStore) -> None:
    for path in (store.folder or Path()).glob("objects/*/*.kv"):
        path.unlink()


def remove_folder(store: KVStore) -> None:
    shutil.rmtree(store.folder or Path())


STORES: dict[str, tuple[Callable[[Path], KVStore], Callable[[KVStore], None]]] = {
    "folder removed": (lambda path: open_store(path, disk_bytes=LIMIT), remove_folder),
    "files removed below the index": (lambda path: open_store(path), remove_files),
    "objects removed": (lambda path: open_store(path), lambda store: shutil.rmtree(store.folder / "objects")),
    "evicted from disk": (lambda path: open_store(path), clear_farthest),
    "a tenant's": (lambda path: TenantStore(open_store(path), "acme", b"s" * 16), clear_farthest),
    "remote emptied": (lambda path: TieredStore(DiskStore(path), bucket(), near_suffices=True), clear_farthest),
    "remote emptied behind three tiers": (
        lambda path: TieredStore(MemoryStore(), TieredStore(DiskStore(path), bucket(), near_suffices=True)),
        clear_farthest,
    ),
}


@pytest.mark.parametrize("name", STORES)
def test_what_only_a_nearer_tier_has_is_copied_and_not_computed(
    llama: LanguageModel, tmp_path: Path, name: str
) -> None:
    opened, lose = STORES[name]
    with make_engine(llama, opened(tmp_path / "kv")) as engine:
        assert warm(engine)[:2] == (0, 3)
        lose(engine.store)
        assert len(lost(engine.store)) == 4, "three passages and the system prefix"
        assert warm(engine) == (3, 0, 0)
        assert lost(engine.store) == []


def test_after_its_folder_was_removed_the_next_process_finds_everything(llama: LanguageModel, tmp_path: Path) -> None:
    """The entries, their documents, the texts to recognise them by, the settings, and which models they are of."""
    with make_engine(llama, open_store(tmp_path / "kv", disk_bytes=LIMIT)) as engine:
        warm(engine)
        remove_folder(engine.store)
        warm(engine)
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        assert warm(engine) == (3, 0, 0)
        assert engine.store.limit_bytes == LIMIT
        assert len(engine.prompt_from_text(" ".join([*PASSAGES, "?"])).passages) == 3
        assert list(engine.store.tiers[-1].models()) == [llama.fingerprint.digest]  # type: ignore[attr-defined]
        assert engine.forget("a.md") == 2


def test_another_process_may_make_the_folder_again(llama: LanguageModel, tmp_path: Path) -> None:
    engines = [make_engine(llama, open_store(tmp_path / "kv")) for _ in range(2)]
    assert [warm(engine)[:2] for engine in engines] == [(0, 3), (3, 0)]
    remove_folder(engines[0].store)
    assert [warm(engine)[:2] for engine in engines] == [(3, 0), (3, 0)]
    assert [engine.corpus.open_sources().names() for engine in engines] == [["a.md", "b.md"]] * 2
    assert [lost(engine.store) for engine in engines] == [[], []]
    for engine in engines:
        engine.close()


def test_questions_go_on_without_the_folder_and_do_not_make_it_again(llama: LanguageModel, tmp_path: Path) -> None:
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        warm(engine)
        remove_folder(engine.store)
        report = engine.prefill(engine.prompt("When?", PASSAGES)).report
        assert all(lookup.hit for lookup in report.lookups)
        assert not (tmp_path / "kv").exists()


def test_a_plan_counts_it_as_present_and_copies_nothing(llama: LanguageModel, tmp_path: Path) -> None:
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        warm(engine)
        clear_farthest(engine.store)
        plan = engine.corpus.warm_job([engine.prompts.chunk_ids(text) for text in PASSAGES]).plan()
        assert (plan.present, plan.to_warm) == (3, 0)
        assert len(lost(engine.store)) == 4


def test_what_is_damaged_in_the_nearer_tier_is_computed(llama: LanguageModel, tmp_path: Path) -> None:
    with make_engine(llama, TieredStore(DiskStore(tmp_path / "kv"), bucket(), near_suffices=True)) as engine:
        warm(engine)
        [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
        [path] = tmp_path.glob(f"kv/objects/*/{key.address}.kv")
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        clear_farthest(engine.store)
        assert warm(engine)[:2] == (2, 1)
        assert lost(engine.store) == []


def test_what_was_made_from_other_passages_is_made_again_and_its_origins_are_known(
    llama: LanguageModel, tmp_path: Path
) -> None:
    """They may have been lost with the folder, and a forgotten passage takes along what was made from it."""
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        warm(engine, ENRICHED)
        remove_folder(engine.store)
        assert warm(engine, ENRICHED)[:2] == (3, 3), "the plain entries are copied"
        [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[2]), (ENRICHED,))
        assert engine.corpus.open_sources().derivations.origins(key)


def test_while_a_remote_cannot_be_reached_the_disk_counts(llama: LanguageModel, tmp_path: Path) -> None:
    away = RemoteStore(AwayBlobs(f"memory://{uuid.uuid4()}/kv"), kv_dtype="int8")
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        warm(engine)
    with make_engine(llama, TieredStore(DiskStore(tmp_path / "kv"), away, near_suffices=True)) as engine:
        assert warm(engine) == (3, 0, 0)


def test_what_does_not_fit_the_farthest_tier_is_left_out(llama: LanguageModel, tmp_path: Path) -> None:
    with make_engine(llama, open_store(tmp_path / "kv")) as engine:
        job = engine.corpus.warm_job([engine.prompts.chunk_ids(text) for text in PASSAGES])
        size_bytes = job.plan().size_bytes
        warm(engine)
        clear_farthest(engine.store)
        plan = job.plan(limit_bytes=size_bytes - 1)
        assert plan.present > 0 < plan.left_out
        assert plan.present + plan.left_out == 3
