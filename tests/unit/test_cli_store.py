"""`qcfuse store ...`: looking after a store from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, Sources
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.unit.cli import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store of four chunks, two of them of the document `boats`."""
    with DiskStore(tmp_path / "kv") as store:
        for number in range(4):
            store.put(example_key(number), example_chunk(number))
        sources = Sources(store)
        sources.replace("boats", [example_key(0), example_key(1)])
        sources.replace("mills", [example_key(1), example_key(2)])
        sources.close()
    return tmp_path / "kv"


def addresses(*numbers: int) -> list[str]:
    return [example_key(number).address for number in numbers]


def test_stats_of_a_store_and_of_the_library_around_it(run: Run, folder: Path) -> None:
    stats = run.json("store", "stats", folder)
    assert (stats["kind"], stats["entries"], len(stats["models"])) == ("disk", 4, 1)
    assert stats["settings"]["eviction"] == "cost"
    assert run.json("store", "stats", folder.parent)["entries"] == 4
    assert "4 chunks" in run.text("store", "stats", folder)


def test_health(run: Run, folder: Path) -> None:
    with DiskStore(folder, limit_bytes=1 << 20):
        pass
    assert run.json("store", "health", folder)["ok"]
    assert "healthy" in run.text("store", "health", folder)


def test_sources_and_lookup(run: Run, folder: Path) -> None:
    assert run.json("store", "sources", folder)["sources"] == {
        "boats": {"chunks": 2, "missing": 0},
        "mills": {"chunks": 2, "missing": 0},
    }
    assert run.json("store", "lookup", folder, "boats")["chunks"] == dict.fromkeys(sorted(addresses(0, 1)), "disk")
    assert "boats: 2 chunks" in run.text("store", "sources", folder)


def test_forget_takes_what_nobody_else_has(run: Run, folder: Path) -> None:
    assert run.json("store", "forget", folder, "boats")["removed"] == 1
    with DiskStore(folder) as store:
        assert [example_key(n) in store for n in range(4)] == [False, True, True, True]


def test_pin_and_unpin(run: Run, folder: Path) -> None:
    assert run.json("store", "pin", folder, "--source", "boats")["entries"] == 2
    with DiskStore(folder) as store:
        assert {entry.address for entry in store.entries() if entry.pinned} == set(addresses(0, 1))
    assert run.json("store", "pin", folder, *addresses(0), "--off")["entries"] == 1
    with DiskStore(folder) as store:
        assert [entry.address for entry in store.entries() if entry.pinned] == addresses(1)


def test_compress(run: Run, folder: Path) -> None:
    report = run.json("store", "compress", folder, "--source", "boats")
    assert (report["done"], report["unchanged"]) == (2, 0)
    assert report["bytes_after"] < report["bytes_before"]
    everything = run.json("store", "compress", folder)
    assert (everything["done"], everything["unchanged"]) == (2, 2)
    with DiskStore(folder) as store:
        assert {entry.numbers for entry in store.entries()} == {"int8"}


def test_move_to_a_remote_and_back(run: Run, folder: Path, tmp_path: Path) -> None:
    bucket = f"file://{tmp_path / 'bucket'}"
    assert run.json("store", "move", folder, "--to", bucket, "--source", "boats")["done"] == 2
    with DiskStore(folder) as store:
        assert [example_key(n) in store for n in range(4)] == [False, False, True, True]
    assert run.json("store", "move", folder, "--from", bucket, "--keep")["done"] == 2
    with DiskStore(folder) as store:
        assert all(example_key(n) in store for n in range(4))


def test_fsck_finds_damage_and_says_so_by_its_exit_code(run: Run, folder: Path) -> None:
    assert run.json("store", "fsck", folder)["clean"]
    [path] = folder.glob(f"objects/*/{addresses(3)[0]}.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, err = run("store", "fsck", folder)
    assert (code, "3 of 4 entries sound" in out, "checksum of block" in err) == (1, True, True)
    assert run.json("store", "fsck", folder)["checked"] == 3
    assert run.json("store", "gc", folder)["freed_bytes"] == len(data), "the quarantine is emptied"


def test_rebuild(run: Run, folder: Path) -> None:
    assert run.json("store", "rebuild", folder)["entries"] == 4


def test_what_destroys_must_be_meant(run: Run, folder: Path) -> None:
    for command in ("clear", "wipe"):
        code, _, err = run("store", command, folder)
        assert (code, "say --yes if you mean it" in err) == (1, True)
    assert run.json("store", "clear", folder, "--yes")["entries"] == 4
    assert run.json("store", "wipe", folder, "--yes")["files"] > 0
    assert list(folder.rglob("*.kv")) == []
    code, _, err = run("store", "stats", folder)
    assert (code, "no store in" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pin"], "name entries by address, or a document with --source"),
        (["pin", "--source", "lamps"], "no document 'lamps' in the store"),
        (["move"], "say where to with --to"),
        (["compress", "--numbers", "int4"], "no format of numbers 'int4'; there are model, int8, fp8"),
        (["compress", "--numbers", "model"], "precision that is gone does not come back"),
    ],
)
def test_errors_are_one_line(run: Run, folder: Path, arguments: list[str], message: str) -> None:
    command, *options = arguments
    code, _, err = run("store", command, folder, *options)
    assert (code, message in err, "Traceback" in err) == (1, True, False)
