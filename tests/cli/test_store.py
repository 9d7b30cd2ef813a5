"""`qcfuse store ...`: looking after a store from the command line."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qcfuse_rag import DiskStore, open_store
from qcfuse_rag.library.index import IndexedPassage, PassageIndex, RetrievalLog
from qcfuse_rag.library.jobs import JobRecord
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.support.cli import Run


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
    stats = run.json("store", "stats", "--store", folder)
    assert (stats["kind"], stats["entries"], len(stats["models"])) == ("disk", 4, 1)
    assert stats["settings"]["eviction"] == "cost"
    assert run.json("store", "stats", "--store", folder.parent)["entries"] == 4
    assert "4 chunks" in run.text("store", "stats", "--store", folder)


def test_stats_say_what_the_model_warmed_last_cannot_reuse_and_why(run: Run, folder: Path) -> None:
    """After an update the same weights may have another configuration; another dtype is another model too."""
    fingerprint = example_key().fingerprint
    with DiskStore(folder) as store:
        for number, fields in enumerate(({"config": "later"}, {"config": "later", "dtype": "bfloat16"})):
            changed = replace(fingerprint, **fields)
            store.put(replace(example_key(7), fingerprint=changed), example_chunk(7))
            os.utime(folder / "models" / f"{changed.digest}.json", (0, 2**31 + number))
    models = run.json("store", "stats", "--store", folder)["models"]
    assert [(model["entries"], model["differs"]) for model in models] == [
        (4, ["config", "dtype"]),
        (1, ["dtype"]),
        (1, []),
    ]
    assert sum(model["size_bytes"] for model in models) == run.json("store", "stats", "--store", folder)["size_bytes"]
    text = run.text("store", "stats", "--store", folder)
    assert "4 chunks" in text
    assert text.count("not reused by the model warmed last") == 2
    assert "config, dtype differ" in text


def test_stats_of_a_library_take_the_model_of_its_last_job(run: Run, folder: Path) -> None:
    last = {**example_key().fingerprint.fields(), "tokenizer": "another"}
    LibrarySettings(folder=folder.parent, fingerprint=last, template=PromptTemplate()).save()
    [model] = run.json("store", "stats", "--store", folder.parent)["models"]
    assert (model["entries"], model["differs"]) == (4, ["tokenizer"])


def test_health(run: Run, folder: Path) -> None:
    with DiskStore(folder, limit_bytes=1 << 20):
        pass
    assert run.json("store", "health", "--store", folder)["ok"]
    assert "healthy" in run.text("store", "health", "--store", folder)


def test_sources_and_lookup(run: Run, folder: Path) -> None:
    assert run.json("store", "sources", "--store", folder)["sources"] == {
        "boats": {"chunks": 2, "missing": 0},
        "mills": {"chunks": 2, "missing": 0},
    }
    chunks = run.json("store", "lookup", "--store", folder, "boats")["chunks"]
    assert chunks == dict.fromkeys(sorted(addresses(0, 1)), "disk")
    assert "boats: 2 chunks" in run.text("store", "sources", "--store", folder)


@pytest.mark.parametrize("name", ["report[final].pdf", "notes [/old].txt"])
def test_a_document_is_listed_by_the_name_it_has(run: Run, folder: Path, name: str) -> None:
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        sources.replace(name, [example_key(3)])
    assert f"{name}: 1 chunks" in run.text("store", "sources", "--store", folder)


@pytest.mark.parametrize("named_by", ["library", "store", "link"])
def test_no_name_or_hash_stays_in_a_library_after_forget(run: Run, folder: Path, named_by: str) -> None:
    """Whatever path names the store: not in the databases, their logs, the retrieval log or the job's record."""
    library, name, text = folder.parent, "minutes-of-the-board.txt", "the board met in secret"
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        sources.replace(name, [example_key(number) for number in range(10, 200)])
    passages = [IndexedPassage(name, text), IndexedPassage("boats", "boats")]
    PassageIndex("e", passages, np.zeros((2, 1), np.float32)).save(library / "passages")
    log = RetrievalLog(library / "passages")
    log.note([text, "boats"])
    log.note([text])
    record = JobRecord(library, {"paths": [f"/home/{name}", "/home/boats"]}, error=f"cannot read {name}")
    record.finish("failed", summary={"unread": {"without text": [name, "boats"], "not text": [name]}})
    (library / "link").symlink_to(folder)
    named = {"library": library, "store": folder, "link": library / "link"}[named_by]
    assert run.json("store", "forget", "--store", named, name)["passages"] == 1
    traces = [name.encode(), text.encode(), digest(text.encode()).encode()]
    files = [path for path in library.rglob("*") if path.is_file()]
    assert {"sources.db", "retrievals.jsonl", "warm.json"} <= {path.name for path in files}
    assert [(path.name, trace) for path in files for trace in traces if trace in path.read_bytes()] == []
    assert log.counts(["boats"]) == [1.0]
    kept = JobRecord.load(library)
    assert (kept.arguments["paths"], kept.summary) == (["/home/boats"], {"unread": {"without text": ["boats"]}})


def test_forget_takes_what_nobody_else_has(run: Run, folder: Path) -> None:
    assert run.json("store", "forget", "--store", folder, "boats")["removed"] == 1
    with DiskStore(folder) as store:
        assert [example_key(n) in store for n in range(4)] == [False, True, True, True]


def test_pin_and_unpin(run: Run, folder: Path) -> None:
    assert run.json("store", "pin", "--store", folder, "--source", "boats")["entries"] == 2
    with DiskStore(folder) as store:
        assert {entry.address for entry in store.entries() if entry.pinned} == set(addresses(0, 1))
    assert run.json("store", "pin", "--store", folder, *addresses(0), "--off")["entries"] == 1
    with DiskStore(folder) as store:
        assert [entry.address for entry in store.entries() if entry.pinned] == addresses(1)


def test_what_names_documents_takes_the_remotes_password(run: Run, folder: Path, tmp_path: Path) -> None:
    remote = ("--remote", f"file://{tmp_path / 'bucket'}")
    assert list(run.json("store", "sources", "--store", folder, *remote)["sources"]) == ["boats", "mills"]
    assert len(run.json("store", "lookup", "--store", folder, "boats", *remote)["chunks"]) == 2
    assert run.json("store", "pin", "--store", folder, "--source", "boats", *remote)["entries"] == 2
    assert run.json("store", "forget", "--store", folder, "boats", *remote)["removed"] == 1


def test_compress(run: Run, folder: Path) -> None:
    report = run.json("store", "compress", "--store", folder, "--source", "boats")
    assert (report["done"], report["unchanged"]) == (2, 0)
    assert report["bytes_after"] < report["bytes_before"]
    code, _, err = run("store", "compress", "--store", folder, "0" * 64)
    assert code == 1
    assert "1 entries are left as they were" in err
    everything = run.json("store", "compress", "--store", folder)
    assert (everything["done"], everything["unchanged"]) == (2, 2)
    with DiskStore(folder) as store:
        assert {entry.kv_dtype for entry in store.entries()} == {"int8"}


def at_a_remote(bucket: Path) -> set[str]:
    return {path.stem for path in bucket.glob("*.kv")}


def test_a_document_is_forgotten_at_the_remote_behind_the_folder_too(run: Run, folder: Path, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    with open_store(folder, disk_bytes=1 << 20, remote=f"file://{bucket}") as store:
        for number in range(4):
            store.put(example_key(number), example_chunk(number))
    assert at_a_remote(bucket) == set(addresses(0, 1, 2, 3))
    assert run.json("store", "health", "--store", folder)["remote"]["ok"]
    report = run.json("store", "forget", "--store", folder, "boats")
    assert (report["removed"], report["waiting"]) == (1, 0)
    assert at_a_remote(bucket) == set(addresses(1, 2, 3))


def test_what_a_remote_that_is_away_still_has_is_removed_once_it_is_back(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    bucket, away = tmp_path / "bucket", tmp_path / "away"
    with open_store(folder, remote=f"file://{bucket}") as store:
        for number in range(4):
            store.put(example_key(number), example_chunk(number))
    bucket.rename(away)
    bucket.write_text("not a folder")
    assert not json.loads(run("store", "health", "--store", folder, "--json")[1])["ok"]
    assert run.json("store", "forget", "--store", folder, "boats")["waiting"] == 1
    assert "3 are in a remote that cannot be reached" in run.text("store", "forget", "--store", folder, "mills")
    bucket.unlink()
    away.rename(bucket)
    assert run.json("store", "gc", "--store", folder)["unwanted"] == 3
    assert at_a_remote(bucket) == set(addresses(3))


def test_a_library_forgets_passages_as_well_and_is_wiped_with_them(run: Run, folder: Path) -> None:
    library = folder.parent
    passages = [IndexedPassage("boats", "It floats."), IndexedPassage("mills", "It turns.")]
    index = PassageIndex("M", passages, np.eye(2, dtype="f4"))
    index.save(library / "passages")
    for file in (library / "warm.json", library / "library.json", folder / "profile.json"):
        file.write_text("{}")
    (library / "mine.txt").write_text("mine")
    (library / "passages_of_mine").mkdir()
    (library / "passages_of_mine" / "passages.jsonl").write_text("mine")
    assert run.json("store", "forget", "--store", library, "boats")["passages"] == 1
    assert [passage.source for passage in PassageIndex.load(library / "passages").passages] == ["mills"]
    run.json("store", "wipe", "--store", library, "--yes")
    assert {path.name for path in library.rglob("*") if path.is_file()} == {"mine.txt", "passages.jsonl"}
    assert not (library / "passages").exists()


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [True, False])
def test_tenants_are_looked_after_one_by_one(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setenv("QCFUSE_SECRET" if encrypted else "QCFUSE_TENANT_SECRET", "sixteen or more random bytes")
    folder = tmp_path / "encrypted" if encrypted else folder
    with open_store(folder, tenant="acme") as store, closing(Sources(store)) as manifest:
        store.put(example_key(7), example_chunk(7))
        manifest.replace("lamps", [example_key(7)])
    acme = ("--tenant", "acme")
    assert list(run.json("store", "sources", "--store", folder, *acme)["sources"]) == ["lamps"]
    assert set(run.json("store", "lookup", "--store", folder, "lamps", *acme)["chunks"].values()) == {"disk"}
    assert run.json("store", "pin", "--store", folder, "--source", "lamps", *acme)["entries"] == 1
    assert run.json("store", "forget", "--store", folder, "lamps", *acme)["removed"] == 1
    assert "no document 'lamps'" in run("store", "forget", "--store", folder, "lamps", *acme)[2]


def test_move_to_a_remote_and_back(run: Run, folder: Path, tmp_path: Path) -> None:
    bucket = f"file://{tmp_path / 'bucket'}"
    assert run.json("store", "move", "--store", folder, "--to", bucket, "--source", "boats")["done"] == 2
    with DiskStore(folder) as store:
        assert [example_key(n) in store for n in range(4)] == [False, False, True, True]
    assert run.json("store", "move", "--store", folder, "--from", bucket, "--keep")["done"] == 2
    with DiskStore(folder) as store:
        assert all(example_key(n) in store for n in range(4))


def test_fsck_finds_damage_and_says_so_by_its_exit_code(run: Run, folder: Path) -> None:
    assert run.json("store", "fsck", "--store", folder)["clean"]
    [path] = folder.glob(f"objects/*/{addresses(3)[0]}.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, err = run("store", "fsck", "--store", folder)
    assert (code, "3 of 4 entries sound" in out, "checksum of block" in err) == (1, True, True)
    assert run.json("store", "fsck", "--store", folder)["checked"] == 3
    assert run.json("store", "gc", "--store", folder)["freed_bytes"] == len(data), "the quarantine is emptied"


@pytest.mark.parametrize("later", [False, True], ids=["from its first byte", "behind its first page"])
def test_a_damaged_manifest_is_told_of_and_put_aside(run: Run, folder: Path, later: bool) -> None:
    with DiskStore(folder, limit_bytes=1 << 20):
        pass
    assert run.json("store", "rebuild", "--store", folder) == {"entries": 4, "manifest_aside": None}
    with closing(sqlite3.connect(folder / "sources.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = (folder / "sources.db").read_bytes()
    damaged = whole[:4096] + bytes(reversed(whole[4096:])) if later else b"noise" * 999
    (folder / "sources.db").write_bytes(damaged)
    code, out, _ = run("store", "health", "--store", folder, "--json")
    assert (code, "qcfuse store rebuild" in json.loads(out)["problems"][0]) == (1, True)
    aside = run.json("store", "rebuild", "--store", folder)["manifest_aside"]
    assert Path(aside).read_bytes() == damaged, "for someone to look at"
    assert run.json("store", "health", "--store", folder)["ok"]
    assert run.json("store", "sources", "--store", folder)["sources"] == {}
    with DiskStore(folder) as store:
        assert all(example_key(n) in store for n in range(4)), "no cache is lost"


def test_what_destroys_must_be_meant(run: Run, folder: Path) -> None:
    for command in ("clear", "wipe"):
        code, _, err = run("store", command, "--store", folder)
        assert (code, "say --yes if you mean it" in err) == (1, True)
    assert run.json("store", "clear", "--store", folder, "--yes")["entries"] == 4
    assert run.json("store", "wipe", "--store", folder, "--yes")["files"] > 0
    assert list(folder.rglob("*.kv")) == []
    code, _, err = run("store", "stats", "--store", folder)
    assert (code, "no store in" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pin", "0" * 64], "none of the 1 entries is in the store"),
        (["forget", "lamps"], "no document 'lamps' in the store"),
        (["pin"], "name entries by address, or a document with --source"),
        (["pin", "--source", "lamps"], "no document 'lamps' in the store"),
        (["move"], "name the remote with --to or with --from"),
    ],
)
def test_errors_are_one_line(run: Run, folder: Path, arguments: list[str], message: str) -> None:
    command, *options = arguments
    code, _, err = run("store", command, "--store", folder, *options)
    assert (code, message in err, "Traceback" in err) == (1, True, False)


def test_a_default_store_on_a_small_disk_is_healthy_and_says_how_small(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for the default limit of 64 GiB; a limit that was given is a promise."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=20 << 30, used=10 << 30, free=10 << 30))
    health = run.json("store", "health", "--store", folder)
    assert (health["ok"], health["notes"]) == (True, ["the store may grow to 68.7 GB, the disk has 10.7 GB free"])
    with DiskStore(folder, 32 << 30, cipher=None):
        pass
    code, out, _ = run("store", "health", "--store", folder)
    assert (code, "the disk has 10,737,418,240; lower the limit" in " ".join(out.split())) == (1, True)
