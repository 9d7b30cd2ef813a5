"""A document that is forgotten while another process warms it stays forgotten, and leaves no entry without an owner."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, LanguageModel
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.backends.tiered import TieredStore
from qcfuse_rag.store.documents.sources import Sources
from tests.store.disk.folders import in_a_child
from tests.support.cases import cases
from tests.support.engines import make_engine

TEXTS = [f"passage {number} of the report is about {'many things ' * number}" for number in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def forget(folder: Path, source: str = "report") -> None:
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        sources.forget(source)


def entries(folder: Path) -> set[str]:
    with DiskStore(folder) as store:
        return {address for address, _ in store.files.entries()}


def warm(lm: LanguageModel, folder: Path, texts: list[str], source: str | None, **options: object) -> None:
    with DiskStore(folder) as store:
        engine = make_engine(lm, store)
        engine.warm(texts, sources=[source] * len(texts), batch_tokens=1, **options)  # type: ignore[arg-type]
        engine.corpus.close()


def at_entry(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], object], *, before: bool = False) -> None:
    """Do something before or after the store has written so many entries."""
    put, count = DiskStore.put, 0

    def watched(store: DiskStore, *arguments: object, **options: object) -> None:
        nonlocal count
        count += 1
        if before and count == number:
            do()
        put(store, *arguments, **options)  # type: ignore[arg-type]
        if not before and count == number:
            do()

    monkeypatch.setattr(DiskStore, "put", watched)


@pytest.fixture
def prefix_only(llama: LanguageModel, folder: Path) -> set[str]:
    """The entries of a store without documents: the system prefix."""
    warm(llama, folder, ["a passage that goes"], "other")
    forget(folder, "other")
    return entries(folder)


@pytest.mark.parametrize("moment", cases([(1, True, True), (3, False, True), (6, True, False)], (6, True, False)))
def test_it_stays_forgotten(
    llama: LanguageModel,
    folder: Path,
    prefix_only: set[str],
    monkeypatch: pytest.MonkeyPatch,
    moment: tuple[int, bool, bool],
) -> None:
    """Forgotten before or after so many entries were written, by a job that replaces or adds."""
    number, before, replace = moment
    with monkeypatch.context() as patch:
        at_entry(patch, number, lambda: in_a_child(lambda: forget(folder)), before=before)
        warm(llama, folder, TEXTS, "report", replace=replace)
    assert entries(folder) == prefix_only
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        assert sources.names() == []
        assert sources.garbage.ownerless() == []
        assert sources.manifest.read("SELECT * FROM recognised") == []
        assert fsck(store).clean


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 6])
def test_what_a_killed_job_leaves_is_found_and_removed(
    llama: LanguageModel, folder: Path, prefix_only: set[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Killed right after it wrote an entry of a document that was forgotten just before."""
    with monkeypatch.context() as patch:
        at_entry(patch, number, lambda: in_a_child(lambda: forget(folder)), before=True)
        killed = DiskStore.put

        def put_and_die(store: DiskStore, *arguments: object, **options: object) -> None:
            present = set(entries(folder))
            killed(store, *arguments, **options)  # type: ignore[arg-type]
            with closing(Sources(store)) as sources:
                if not sources.names() and set(entries(folder)) - present - prefix_only:
                    os.kill(os.getpid(), signal.SIGKILL)

        patch.setattr(DiskStore, "put", put_and_die)
        assert in_a_child(lambda: warm(llama, folder, TEXTS, "report")) == -signal.SIGKILL
    [left] = entries(folder) - prefix_only
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        report = fsck(store)
        assert report.ownerless == [left]
        assert not report.clean
        assert sources.garbage.collect_ownerless() == 1
        assert fsck(store).clean
    assert entries(folder) == prefix_only


def test_passages_of_other_documents_stay(
    llama: LanguageModel, folder: Path, prefix_only: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(llama, folder, TEXTS[:2], "other report")
    kept = entries(folder)
    with monkeypatch.context() as patch:
        at_entry(patch, 2, lambda: in_a_child(lambda: forget(folder)))
        warm(llama, folder, TEXTS, "report")
    assert entries(folder) == kept


def test_a_document_that_another_process_warms_anew_stays(
    llama: LanguageModel, folder: Path, prefix_only: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten and warmed with another text: the newer text stays, the older does not come back."""

    def change() -> None:
        monkeypatch.undo()
        forget(folder)
        warm(llama, folder, TEXTS[4:], "report")

    with monkeypatch.context() as patch:
        at_entry(patch, 2, lambda: in_a_child(change))
        warm(llama, folder, TEXTS[:4], "report")
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        assert entries(folder) - prefix_only == sources.addresses("report")
        assert len(sources.addresses("report")) == 2


def test_an_entry_that_is_stored_without_a_source_later_stays(
    llama: LanguageModel, folder: Path, prefix_only: set[str]
) -> None:
    warm(llama, folder, TEXTS, "report")
    forget(folder)
    warm(llama, folder, TEXTS, None)
    kept = entries(folder)
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        assert fsck(store).clean
        assert sources.garbage.collect_ownerless() == 0
    assert entries(folder) == kept > prefix_only


def test_it_is_removed_from_every_tier(
    llama: LanguageModel, folder: Path, prefix_only: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredStore(MemoryStore(), DiskStore(folder)) as store:
        engine = make_engine(llama, store)
        with monkeypatch.context() as patch:
            at_entry(patch, 3, lambda: in_a_child(lambda: forget(folder)))
            engine.warm(TEXTS, sources=["report"] * len(TEXTS), batch_tokens=1)
        assert {entry.address for entry in store.entries()} == prefix_only
        engine.corpus.close()
