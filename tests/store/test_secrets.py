"""Whoever holds a secret never reads or writes plain entries, whatever lies in the store's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, open_store
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.factory import DEFAULT_KV_DTYPE
from qcfuse_rag.store.quantization import LOSSLESS
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import file_of
from tests.support.cli import Run

SECRET = b"sixteen or more random bytes"
NEW = 7
"""Number of the chunk that tests put; the chunks 0 and 1 are in the store before."""


@pytest.fixture(params=["argument", "environment", "tenant", "cipher"])
def open_with_secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], KVStore]:
    """Give each of the ways in which Python opens a store with a secret."""
    if request.param == "environment":
        monkeypatch.setenv("QCFUSE_SECRET", SECRET.decode())
    ways: dict[str, Callable[[Path], KVStore]] = {
        "argument": lambda folder: open_store(folder, secret=SECRET, memory_bytes=1),
        "environment": lambda folder: open_store(folder, memory_bytes=1),
        "tenant": lambda folder: open_store(folder, secret=SECRET, tenant="acme", memory_bytes=1),
        "cipher": lambda folder: DiskStore(folder, cipher=StoreCipher(SECRET)),
    }
    return ways[request.param]


def in_the_clear(folder: Path, number: int) -> list[Path]:
    """Return the files that contain a part of a chunk's numbers in the clear, in any format."""
    chunks = [to_format(example_chunk(number), kv_dtype) for kv_dtype in (LOSSLESS, DEFAULT_KV_DTYPE)]
    parts = [chunk.blocks["key.0"].numpy().tobytes()[:32] for chunk in chunks]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(part in path.read_bytes() for part in parts)]


def assert_kept(chunk: ChunkKV | Miss, number: int = 0) -> None:
    """Assert that a store returned a chunk in the format in which the store keeps it."""
    assert isinstance(chunk, ChunkKV), chunk
    assert_same(chunk, to_format(example_chunk(number), chunk.kv_dtype))


def forge(folder: Path, tmp_path: Path, *numbers: int) -> None:
    """Put plain entries with other content in the place of a store's, as anybody can who may write to its folder."""
    with DiskStore(tmp_path / "forger") as forger:
        for number in numbers:
            forger.put(example_key(number), example_chunk(100 + number))
            target = folder / forger.files.path(example_key(number).address).relative_to(forger.folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(forger.files.path(example_key(number).address).read_bytes())


def rewrite(**changes: object) -> Callable[[Path], None]:
    def tamper(settings: Path) -> None:
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **changes}))

    return tamper


@pytest.mark.parametrize("tamper", [rewrite(secret=None), lambda settings: settings.unlink()], ids=["null", "deleted"])
def test_nothing_in_the_folder_switches_encryption_off(
    tmp_path: Path, open_with_secret: Callable[[Path], KVStore], tamper: Callable[[Path], object]
) -> None:
    """Opening fails, or forged entries are misses and new ones sealed."""
    folder = tmp_path / "kv"
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        for number in (0, 1):
            store.put(example_key(number), example_chunk(number))
    forge(folder, tmp_path, 0, 1)
    tamper(folder / "store.json")
    try:
        store = open_with_secret(folder)
    except StoreError as error:
        assert re.search(r"secret|store\.json", str(error))  # noqa: PT017 - both outcomes are right
    else:
        with store:
            assert isinstance(store.get(example_key(0)), Miss)
            store.put(example_key(NEW), example_chunk(NEW))
            store.flush()
            assert store.encrypted
    assert in_the_clear(folder, NEW) == []


def test_a_new_store_made_with_a_secret_is_encrypted(
    tmp_path: Path, open_with_secret: Callable[[Path], KVStore]
) -> None:
    for _ in range(2):
        with open_with_secret(tmp_path) as store:
            store.put(example_key(NEW), example_chunk(NEW))
            assert_kept(store.get(example_key(NEW)), NEW)
            store.flush()
    assert json.loads((tmp_path / "store.json").read_text())["secret"] == StoreCipher(SECRET).proof
    assert in_the_clear(tmp_path, NEW) == []


@pytest.mark.parametrize("settings", ["kept", "lost"])
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (SECRET, None, r"encrypted and no secret was given; .*set QCFUSE_SECRET"),
        (SECRET, SECRET[::-1], "encrypted under another secret"),
        (None, SECRET, r"not encrypted and a secret was given; .*unset QCFUSE_SECRET"),
    ],
)
def test_a_wrong_secret_is_one_error_that_names_the_fix(
    tmp_path: Path, right: bytes | None, wrong: bytes | None, message: str, settings: str
) -> None:
    with open_store(tmp_path, secret=right, memory_bytes=1) as store:
        store.put(example_key(), example_chunk())
    if settings == "lost":
        (tmp_path / "store.json").unlink()
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path, secret=wrong)
    with open_store(tmp_path, secret=right, memory_bytes=1) as store:
        assert_kept(store.get(example_key()))
    kept = (tmp_path / "store.json").read_text()
    assert json.loads(kept)["secret"] == (right and StoreCipher(right).proof)
    assert SECRET.hex() not in kept


def test_a_remote_with_a_secret_neither_reads_nor_writes_plain_entries(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/bucket"
    with open_store(remote=remote, memory_bytes=1) as plain:
        plain.put(example_key(), example_chunk())
    with open_store(remote=remote, secret=SECRET, memory_bytes=1) as store:
        assert store.get(example_key()) == Miss("is not encrypted, in a store that is")
        store.put(example_key(NEW), example_chunk(NEW))
        assert_kept(store.get(example_key(NEW)), NEW)
        assert store.encrypted
    assert in_the_clear(tmp_path, NEW) == []


# A secret for names alone.


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_plain_store_of_tenants_opens_as_before_if_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    with open_store(tmp_path, tenant="acme", secret=SECRET, encrypt=False) as store:
        store.put(example_key(), example_chunk())
        assert not store.encrypted
    if by == "environment":
        monkeypatch.setenv("QCFUSE_TENANT_SECRET", SECRET.decode())
        opened = open_store(tmp_path, tenant="acme", memory_bytes=1)
    else:
        opened = open_store(tmp_path, tenant="acme", secret=SECRET, encrypt=False, memory_bytes=1)
    with opened as store:
        assert_kept(store.get(example_key()))


def test_a_secret_for_names_alone_opens_no_encrypted_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path, secret=SECRET).close()
    monkeypatch.setenv("QCFUSE_TENANT_SECRET", SECRET.decode())
    with pytest.raises(StoreError, match="is encrypted and no secret was given"):
        open_store(tmp_path, tenant="acme")
    with pytest.raises(StoreError, match="encryption needs a secret"):
        open_store(tmp_path, tenant="acme", encrypt=True)


# A secret that is given and not used, or missing.


def test_a_secret_that_nothing_would_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="a secret and nothing to use it for"):
        open_store(tmp_path, secret=SECRET, encrypt=False)
    monkeypatch.setenv("QCFUSE_SECRET", SECRET.decode())
    with pytest.raises(StoreError, match="a secret and nothing to use it for"):
        open_store(tmp_path, encrypt=False)
    monkeypatch.setenv("QCFUSE_TENANT_SECRET", SECRET.decode())
    with pytest.raises(StoreError, match="not both"):
        open_store(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("secret", [b"", b"fifteen letters"])
def test_a_secret_that_is_empty_or_short_is_no_reason_to_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    with pytest.raises(StoreError, match=f"the secret has {len(secret)} bytes"):
        open_store(tmp_path, secret=secret)
    monkeypatch.setenv("QCFUSE_SECRET", secret.decode())
    with pytest.raises(StoreError, match=f"the secret has {len(secret)} bytes"):
        open_store(tmp_path)


# The command line.


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a library whose store was encrypted and now says that it is plain, with forged entries."""
    folder = tmp_path / "library" / "kv"
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        store.put(example_key(), example_chunk())
    forge(folder, tmp_path, 0, 1)
    rewrite(secret=None)(folder / "store.json")
    (tmp_path / "document.md").write_text("The ferry leaves at noon.")
    passages = folder.parent / "passages"
    passages.mkdir()
    monkeypatch.setenv("QCFUSE_SECRET", SECRET.decode())
    monkeypatch.setattr("qcfuse_rag.server.serve.ServerSettings.listen", lambda settings: None)  # tests have no network
    return folder.parent


@pytest.mark.parametrize(
    "command",
    [
        "store fsck --store {library}",
        "store forget doc --store {library}",
        "store move --from file://{library}/bucket --store {library}",
        "warm run {library}/../document.md --store {library} --tenant acme",
        "warm run {library}/../document.md --store {library} --ray local",
        "serve --store {library}/kv",
        "verify --store {library}",
    ],
)
def test_no_command_uses_a_plain_store_if_there_is_a_secret(
    run: Run, library: Path, tmp_path: Path, command: str
) -> None:
    files = {path: path.read_bytes() for path in library.rglob("*.kv")}
    arguments = [part.format(library=library) for part in command.split()]
    code, out, err = run(*arguments)
    assert code == 1, out
    assert "is not encrypted and a secret was given" in err
    assert {path: path.read_bytes() for path in library.rglob("*.kv")} == files


# Ray workers.


def test_workers_of_a_process_with_a_secret_need_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = RayWorkers(model="model", store={"folder": str(tmp_path)})
    monkeypatch.setenv("QCFUSE_SECRET", SECRET.decode())
    by_environment = RayWorkers(model="model", store={"folder": str(tmp_path)})
    monkeypatch.delenv("QCFUSE_SECRET")
    for workers in (by_environment, plain.requiring_encryption()):
        with pytest.raises(StoreError, match=r"encryption needs a secret; .*QCFUSE_SECRET"):
            open_store(**workers.store)
    assert dict(plain.store) == {"folder": str(tmp_path)}
    monkeypatch.setenv("QCFUSE_SECRET", SECRET.decode())
    with open_store(**by_environment.store) as store:
        assert store.encrypted
    with pytest.raises(StoreError, match="under another secret"):
        open_store(**{**by_environment.store, "secret": SECRET[::-1]})


def test_an_older_copy_of_an_entry_is_taken_for_the_entry_and_that_of_another_key_or_secret_is_not(
    tmp_path: Path,
) -> None:
    """An older copy is not detected; see SECURITY.md."""
    ciphers = {"kv": StoreCipher(SECRET), "forged": StoreCipher(SECRET[::-1])}
    for folder, key in (("kv", example_key()), ("kv", example_key(1)), ("forged", example_key())):
        with DiskStore(tmp_path / folder, cipher=ciphers[folder]) as store:
            store.put(key, example_chunk(1))
    with DiskStore(tmp_path / "kv", cipher=ciphers["kv"]) as store:
        path = file_of(store)
        older = path.read_bytes()
        store.put(example_key(), example_chunk(2))
        path.write_bytes(older)
        assert_same(store.get(example_key()), example_chunk(1))
        for copied in (file_of(store, 1), tmp_path / "forged" / path.relative_to(tmp_path / "kv")):
            path.write_bytes(copied.read_bytes())
            assert isinstance(store.get(example_key()), Miss)
