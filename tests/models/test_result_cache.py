"""Files that were hashed are not read again for their hash, until anything about them differs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.models import load, result_cache
from qcfuse_rag.models.fingerprint import hash_weights
from qcfuse_rag.models.result_cache import FileState, hash_once
from qcfuse_rag.models.source import snapshot_folder
from tests.support.families import build_model

HASHES = ("0" * 32, "1" * 32)


@pytest.fixture(autouse=True)
def hashes(assets: Path) -> Path:
    return assets / "hashes"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the hashes of loaded weights that are computed, as they are."""
    computed: list[str] = []

    def count(model: PreTrainedModel) -> str:
        computed.append(hash_weights(model))
        return computed[-1]

    monkeypatch.setattr(load, "hash_weights", count)
    return computed


def test_a_later_start_does_not_hash_the_weights(
    folder: Path, hashed: list[str], tokenizer: PreTrainedTokenizerFast, hashes: Path
) -> None:
    loaded = [LanguageModel.load(str(folder), device="cpu").fingerprint for _ in range(3)]
    assert len(hashed) == 1
    wrapped = LanguageModel.wrap(build_model("llama"), tokenizer).fingerprint
    assert {each.weights for each in loaded} == {wrapped.weights}
    (file,) = hashes.rglob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("times", ["new times", "old times"])
def test_changed_weights_are_hashed_again(folder: Path, hashed: list[str], times: str) -> None:
    before = LanguageModel.load(str(folder), device="cpu").fingerprint
    file = folder / "model.safetensors"
    stat, weights = file.stat(), load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"] + 1e-3
    save_file(weights, folder / "other", metadata={"format": "pt"})
    file.write_bytes((folder / "other").read_bytes())  # the same inode
    (folder / "other").unlink()
    if times == "old times":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (stat.st_size, stat.st_ino)
    after = LanguageModel.load(str(folder), device="cpu").fingerprint
    assert before.differences(after.fields()) == ["weights"]
    assert len(hashed) == 2


def test_each_dtype_has_its_own_hash(folder: Path, hashed: list[str]) -> None:
    for _ in range(2):
        for dtype in ("float32", "bfloat16"):
            LanguageModel.load(str(folder), device="cpu", dtype=dtype)
    assert len(hashed) == len(set(hashed)) == 2


def test_weights_that_are_quantised_while_they_are_loaded_are_always_hashed(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "hf_quantizer", object(), raising=False)  # as bitsandbytes' has
    first, again = (load.load_model(str(folder), device="cpu").weights_hash for _ in range(2))
    assert first == again
    assert len(hashed) == 2


def test_other_versions_hash_anew(folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    LanguageModel.load(str(folder), device="cpu")
    monkeypatch.setattr(load, "version", lambda _: "5.99")
    LanguageModel.load(str(folder), device="cpu")
    assert len(hashed) == 2


def test_a_wrapped_model_is_always_hashed(folder: Path, hashed: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.load(str(folder), device="cpu")
    with torch.no_grad():
        lm.model.model.layers[0].input_layernorm.weight[0] += 1
    assert lm.fingerprint.differences(LanguageModel.wrap(lm.model, tokenizer).fingerprint.fields()) == ["weights"]


def test_a_file_that_was_just_changed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")
    monkeypatch.setattr(result_cache, "SETTLED_S", 60.0)
    state = FileState.read(file)
    assert [hash_once(state, {}, lambda value=value: value) for value in HASHES] == list(HASHES)  # type: ignore[misc]


def test_a_file_that_changes_while_it_is_hashed_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")

    def change() -> str:
        file.write_bytes(b"22")
        return HASHES[0]

    state = FileState.read(file)
    assert hash_once(state, {}, change) == HASHES[0]
    assert hash_once(state, {}, lambda: HASHES[1]) == HASHES[1]
    assert hash_once(FileState.read(file), {}, lambda: HASHES[1]) == HASHES[1]


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff\xfe", b'{"hash": 3}', None])
def test_a_kept_hash_that_cannot_be_read_is_made_again(tmp_path: Path, hashes: Path, damage: bytes | None) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"1")
    state = FileState.read(file)
    assert hash_once(state, {"of": "a"}, lambda: HASHES[0]) == HASHES[0]
    assert hash_once(state, {"of": "b"}, lambda: HASHES[1]) == HASHES[1]
    first, other = sorted(hashes.rglob("*.json"), key=lambda path: path.read_text())
    first.write_bytes(other.read_bytes() if damage is None else damage)
    assert hash_once(state, {"of": "a"}, lambda: HASHES[1]) == HASHES[1]
    assert hash_once(state, {"of": "a"}, lambda: HASHES[0]) == HASHES[1]


def test_a_file_in_place_of_the_folder_keeps_nothing(tmp_path: Path, hashes: Path) -> None:
    hashes.parent.mkdir(parents=True)
    hashes.write_text("not a folder")
    assert [hash_once(FileState.read(tmp_path), {}, lambda value=value: value) for value in HASHES] == list(HASHES)  # type: ignore[misc]


def test_the_state_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "inner").mkdir()
    state = FileState.read(tmp_path)
    assert state is not None
    assert [Path(file[0]).name for file in state.files] == ["a"]
    (tmp_path / "b").write_bytes(b"1")
    assert not state.is_current()
    assert FileState.read(tmp_path / "missing") is None


def test_a_folder_whose_index_names_weights_elsewhere_has_no_state(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "model-00001-of-00002.safetensors"}}')
    assert FileState.read(tmp_path) is not None
    index.write_text('{"weight_map": {"x": "parts/model.safetensors"}}')
    assert FileState.read(tmp_path) is None


def test_the_files_of_an_id_are_those_of_its_snapshot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    found = partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", found)
    assert snapshot_folder("some/model") == snapshot
    assert snapshot_folder("some/other") is None
    assert snapshot_folder("no/id/at all") is None


def test_no_hash_is_kept_for_files_that_a_hub_replaced_while_they_were_loaded(
    folder: Path, hashed: list[str], hashes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The load begins with an old snapshot in the cache and reads a newer snapshot, which is another folder."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"older weights")
    found = iter([FileState.read(old), FileState.read(folder)])
    monkeypatch.setattr(load, "_weight_files", lambda *_: next(found))
    LanguageModel.load(str(folder), device="cpu")
    assert len(hashed) == 1
    assert list(hashes.rglob("*.json")) == []
