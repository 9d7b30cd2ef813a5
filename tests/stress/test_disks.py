"""A disk that is full, read-only, broken or far away costs time and nothing else: every question is answered.

Where nothing can be read, the answer is that of a plain prefill, bit for bit, and the report says why.
"""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
import torch

from qcfuse_rag import (
    DiskStore,
    FusionEngine,
    LanguageModel,
    MemoryStore,
    Method,
    make_method,
)
from qcfuse_rag.errors import StoreError
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.stress.campaign import Tally, sized
from tests.stress.mounts import disk, remount, tmpfs
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

QCFUSE = make_method("qcfuse", ratio=0.3, base=FRAMED)
OTHERS = [f"{text} Another page." for text in PASSAGES]


def ask(engine: FusionEngine, texts: list[str] = PASSAGES, method: Method = QCFUSE) -> Prefilled:
    return engine.prefill(engine.prompt(QUESTION, texts), method=method)


def answers_in_full(engine: FusionEngine, tally: Tally, reason: str, texts: list[str] = PASSAGES) -> None:
    """Check that a question is answered as without a store, and that the report gives the reason."""
    done, expected = ask(engine, texts), ask(make_engine(engine.lm, MemoryStore()), texts, make_method("full"))
    tally.trials += 1
    tally.reads += sum(lookup.hit for lookup in done.report.lookups)
    if done.report.reused_tokens == 0:
        tally.wrong_bytes += int((done.logits != expected.logits).sum())
    else:  # the system prefix was there: its keys have been turned to their place once more
        assert torch.allclose(done.logits, expected.logits, atol=1e-4)
    assert done.report.fallback is not None
    assert done.report.fallback.startswith(f"3 of 3 passages computed in full: {reason}"), done.report.fallback
    assert not any(lookup.hit for lookup in done.report.lookups if lookup.role == "chunk")


def answers_from_store(engine: FusionEngine, tally: Tally, texts: list[str] = PASSAGES) -> None:
    """Check that a question is answered from what is stored, as it would be anywhere else."""
    done = ask(engine, texts)
    elsewhere = make_engine(engine.lm, MemoryStore())
    warm(elsewhere, texts)
    tally.trials += 1
    tally.reads += sum(lookup.hit for lookup in done.report.lookups)
    tally.wrong_bytes += int((done.logits != ask(elsewhere, texts).logits).sum())
    assert done.report.fallback is None, done.report.fallback


def warm(engine: FusionEngine, texts: list[str] = PASSAGES) -> None:
    engine.warm(texts, batch_tokens=1)


def fill(place: Path, leaving: int = 0) -> Path:
    """Fill a disk, but for some bytes, with one file."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            size = file.tell()
        file.truncate(max(0, size - leaving))
    return ballast


@pytest.mark.slow
def test_a_full_disk(llama: LanguageModel, tmp_path: Path) -> None:
    tally = Tally("a full disk")
    with tmpfs(tmp_path / "disk", "12m") as place, DiskStore(place / "kv") as store:
        engine = make_engine(llama, store)
        ballast = fill(place)
        with pytest.raises(StoreError, match=r"cannot write to .*(No space left|disk is full|disk I/O error)"):
            warm(engine)
        assert not store.health()[0].ok
        answers_in_full(engine, tally, "absent")
        ballast.unlink()
        warm(engine)
        answers_from_store(engine, tally)
        assert fsck(store).clean
    tally.finish()


@pytest.mark.slow
def test_a_document_is_forgotten_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be recorded there: what is to go anyway makes the room."""
    document, others = [example_key(number) for number in range(3)], [example_key(3)]
    with tmpfs(tmp_path / "disk", "12m") as place, DiskStore(place / "kv") as store, closing(Sources(store)) as sources:
        for key in (*document, *others):
            store.put(key, example_chunk(n_tokens=2000))
        sources.replace("gone", [*document, *others])
        sources.replace("kept", others)
        fill(place)
        assert sources.forget("gone") == len(document)
        assert sources.names() == ["kept"]
        assert [key in store for key in (*document, *others)] == [False, False, False, True]
        with closing(Sources(store)) as again:
            assert (again.names(), again.garbage.count()) == (["kept"], 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_fills_up_at_any_moment(llama: LanguageModel, tmp_path: Path) -> None:
    """Space runs out in the index, in its journal or in an entry: wherever, it works again once there is some."""
    tally, rng = Tally("a disk that fills up while passages are warmed"), random.Random(0)
    with tmpfs(tmp_path / "disk", "12m") as place, DiskStore(place / "kv") as store:
        engine = make_engine(llama, store)
        for _ in range(sized(15, 300)):
            ballast = fill(place, leaving=4096 * rng.randrange(60))
            try:
                warm(engine)
                tally.note("all fitted")
            except StoreError as error:
                tally.note("entry" if "No space left" in str(error) else "index")
            tally.trials += 1
            done = ask(engine)
            tally.reads += len(done.report.lookups) - len(done.report.missing)
            ballast.unlink()
            warm(engine)
            answers_from_store(engine, tally)
            report = fsck(store)
            assert not report.damaged
            if not report.clean:
                tally.note("fsck had something to do")
            assert fsck(store).clean
            store.clear()
    assert len(tally.notes) >= 2
    tally.finish()


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(llama: LanguageModel, tmp_path: Path) -> None:
    tally = Tally("a disk that becomes read-only, with the store open")
    with disk(tmp_path) as ext4:
        store = DiskStore(ext4.place / "kv")
        engine = make_engine(llama, store)
        warm(engine)
        ext4.give_up_writing()
        for _ in range(20):  # uses are counted and cannot be written
            answers_from_store(engine, tally)
        answers_in_full(engine, tally, "absent", OTHERS)
        with pytest.raises(StoreError, match="cannot write to"):
            warm(engine, OTHERS)
        assert not store.health()[0].ok
        with DiskStore(ext4.place / "kv") as again:
            answers_from_store(make_engine(llama, again), tally)
        engine.close()
        ext4.unmount()
        ext4.mount()
        with DiskStore(ext4.place / "kv") as after:
            warm(make_engine(llama, after), OTHERS)
            answers_from_store(make_engine(llama, after), tally, OTHERS)
            assert fsck(after).clean
    tally.finish()


@pytest.mark.slow
def test_a_read_only_mount(llama: LanguageModel, tmp_path: Path) -> None:
    tally = Tally("a read-only mount")
    with tmpfs(tmp_path / "disk", "4m") as place:
        with DiskStore(place / "kv") as store:
            warm(make_engine(llama, store))
        remount(place, "ro")
        with DiskStore(place / "kv") as store:
            engine = make_engine(llama, store)
            assert any("Read-only" in problem for problem in store.health()[0].problems)
            answers_from_store(engine, tally)
            answers_in_full(engine, tally, "absent", OTHERS)
            with pytest.raises(StoreError, match="cannot write to"):
                warm(engine, OTHERS)
        with pytest.raises(StoreError, match="cannot open a store in"):
            DiskStore(place / "new")
        remount(place, "rw")
        with DiskStore(place / "kv") as store:
            warm(make_engine(llama, store), OTHERS)
            answers_from_store(make_engine(llama, store), tally, OTHERS)
    tally.finish()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "ro"])
def test_passages_are_found_in_a_text_where_nothing_can_be_written(
    how: str, llama: LanguageModel, tmp_path: Path
) -> None:
    """As a library is that was warmed elsewhere and is mounted to be served from."""
    with tmpfs(tmp_path / "disk", "4m") as place:
        with make_engine(llama, DiskStore(place / "kv")) as engine:
            engine.warm(PASSAGES, sources=["a.md", "b.md", "c.md"], bases=(FRAMED,))
        if how == "full":
            fill(place)
        else:
            remount(place, "ro")
        with make_engine(llama, DiskStore(place / "kv")) as engine:
            prompt = engine.prompt_from_text("\n\n".join([*PASSAGES, QUESTION]))
            report = engine.prefill(prompt, method=make_method("reuse", base=FRAMED)).report
            assert [lookup.hit for lookup in report.lookups] == [True] * len(PASSAGES)
            assert engine.corpus.open_sources().names() == ["a.md", "b.md", "c.md"]
            again = engine.warm(PASSAGES, sources=["a.md", "b.md", "c.md"], bases=(FRAMED,))
            assert (again.present, again.warmed) == (len(PASSAGES), 0), "nothing need be written"
            with pytest.raises(StoreError, match="cannot write"):
                engine.forget("a.md")


@pytest.mark.slow
def test_damage_that_cannot_be_put_away(llama: LanguageModel, tmp_path: Path) -> None:
    """On a disk that cannot be written, a damaged entry stays where it is, and is refused every time."""
    tally = Tally("damaged entries on a read-only mount")
    with tmpfs(tmp_path / "disk", "4m") as place:
        with DiskStore(place / "kv") as store:
            warm(make_engine(llama, store))
            for _, path in store.files.entries():
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        remount(place, "ro")
        with DiskStore(place / "kv") as store:
            for _ in range(3):
                answers_in_full(make_engine(llama, store), tally, "checksum of block value.3 differs")
    tally.finish()


@pytest.mark.slow
@pytest.mark.parametrize("after_pages", [0, 3], ids=["from-the-header-on", "in-the-blocks"])
def test_sectors_that_cannot_be_read(llama: LanguageModel, tmp_path: Path, after_pages: int) -> None:
    """A page that a mapped file cannot get is an error like any other, not a signal that ends the process."""
    tally = Tally("sectors that cannot be read")
    with disk(tmp_path) as ext4:
        with DiskStore(ext4.place / "kv") as store:
            warm(make_engine(llama, store))
        ext4.unmount()
        ext4.mount()
        with DiskStore(ext4.place / "kv") as store:
            paths = [path for _, path in store.files.entries()]
            ext4.lose_sectors(paths, after_pages)
            answers_in_full(make_engine(llama, store), tally, "cannot be read")
    tally.finish()
