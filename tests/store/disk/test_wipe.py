"""Wiping destroys what the store wrote, and nothing else."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import wipe
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import KEY, in_a_child, put
from tests.support.cli import Run

SHARD, NAME = KEY.address[-2:], f"{KEY.address}.kv"


@pytest.fixture
def wiped(folder: Path) -> Path:
    """Give a closed store with a file of every kind."""
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        put(store, 0, 1, 2)
        sources.replace("document", [KEY])
        store.discard(example_key(1), "looks odd")
    own = ("verdicts/ab-cd.json", "verdicts/ab-cd.json.0123456789abcdef.part", "profile.json", "costs-ab.json")
    for name in (*own, "tmp/host-1-0123456789abcdef.part", "store.json.0123456789abcdef.part", "sources.db.damaged"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of the store")
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Give a folder that is nobody's business, with files that have the names of a store's."""
    folder = tmp_path / "outside"
    for name in ("thesis.kv", NAME, f"{SHARD}/{NAME}", "cache.db", "ab.json", "passages.jsonl", "deep/er/work.part"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("twenty years of work")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_the_store_is_overwritten_and_removed(wiped: Path) -> None:
    paths = [path for path in wiped.rglob("*") if path.is_file()]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        sizes = [path.stat().st_size for path in paths]
        assert max(sizes) > 20_000
        report = wipe(wiped)
        assert (report.files, report.linked, report.left) == (len(paths), [], [])
        assert list(wiped.iterdir()) == []
        data = [file.read() for file in files]
    assert [len(read) for read in data] == sizes
    assert [path for path, read in zip(paths, data, strict=True) if read.strip(b"\0")] == []


@pytest.mark.parametrize("name", ["quarantine", f"objects/{SHARD}", f"objects/{SHARD}/{NAME}", "store.json"])
def test_links_are_left_and_not_followed(wiped: Path, outside: Path, name: str) -> None:
    before, path = contents(outside), wiped / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(outside if "." not in name else outside / "thesis.kv")
    report = wipe(wiped)
    assert contents(outside) == before
    assert (report.linked, report.left) == ([], [str(path)])
    assert not any(path.is_file() and not path.is_symlink() for path in wiped.rglob("*"))


@pytest.mark.parametrize("name", [f"objects/{SHARD}/{NAME}", "sources.db"])
def test_a_file_with_another_name_is_removed_and_not_overwritten(wiped: Path, outside: Path, name: str) -> None:
    before = contents(outside)
    (wiped / name).unlink()
    os.link(outside / "thesis.kv", wiped / name)
    report = wipe(wiped)
    assert contents(outside) == before
    assert (report.linked, report.left) == ([str(wiped / name)], [])


STRAYS = (
    f"objects/{SHARD}/{KEY.address} (copy).kv",
    f"objects/{SHARD}/deeper/{NAME}",
    f"objects/zz/{NAME}",
    "tmp/notes.txt",
)
BESIDE = ("thesis.txt", "store.json.bak", "costs-of-living.json")


def test_what_the_store_did_not_write_stays(wiped: Path) -> None:
    for name in (*STRAYS, *BESIDE):
        (wiped / name).parent.mkdir(parents=True, exist_ok=True)
        (wiped / name).write_text("years of work")
    report = wipe(wiped)
    assert contents(wiped) == dict.fromkeys((*STRAYS, *BESIDE), b"years of work")
    assert sorted(report.left) == sorted(str(wiped / name) for name in STRAYS)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this process", "another process"])
def test_a_store_that_a_program_uses_is_not_wiped(wiped: Path, elsewhere: bool) -> None:
    """Mapped chunks would turn into zeros under its hands, and it would write on."""
    before = contents(wiped / "objects")

    def refused() -> None:
        with pytest.raises(StoreError, match=r"a program uses the store in .*; stop it, then wipe"):
            wipe(wiped)

    with DiskStore(wiped) as store:
        held = store.get(KEY)
        if elsewhere:
            assert in_a_child(refused) == 0
        else:
            refused()
        assert_same(held, example_chunk())
        assert contents(wiped / "objects") == before
    assert wipe(wiped).files


def test_what_is_no_store_is_not_wiped(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(StoreError, match="no store in"):
        wipe(tmp_path)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_a_library_is_wiped_without_following_links(run: Run, wiped: Path, outside: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    wiped.rename(library / "kv")
    (library / "passages").symlink_to(outside)
    (library / "passages-ab").mkdir()
    (library / "passages-ab" / "passages-0a.jsonl").symlink_to(outside / "passages.jsonl")
    os.link(outside / "thesis.kv", library / "passages-ab" / "embeddings-0a.npy")
    (library / "warm.json").symlink_to(outside / "thesis.kv")
    before = contents(outside)
    code, out, err = run("store", "wipe", "--store", library, "--yes")
    assert code == 0, err
    assert contents(outside) == before
    assert "has another name (a hard link)" in " ".join((out + err).split())
    assert "warm.json; left alone" in out + err
    assert not (library / "kv" / "objects").exists()
