"""Broken model files of every kind are one clear error, in whatever way their parser fails."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.models.load import load_model, load_tokenizer


class Command:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, ("never",)


OFFSETS = b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
BROKEN_WEIGHTS = {
    "empty.safetensors": b"",
    "endless header.safetensors": struct.pack("<Q", 2**63) + b"{}",
    "no JSON.safetensors": struct.pack("<Q", 4) + b"{{{{",
    "offsets outside.safetensors": struct.pack("<Q", len(OFFSETS)) + OFFSETS,
    "text.bin": b"no weights",
    "of a command.bin": pickle.dumps(Command()),
    "cut.bin": pickle.dumps({"a": [1] * 100})[:-9],
    "zip.bin": b"PK\x03\x04" + b"\x00" * 40,
}
BROKEN_JSON = (b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a": 1}')


@pytest.mark.parametrize("kind", BROKEN_WEIGHTS)
def test_broken_weights_are_one_error(folder: Path, kind: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / ("pytorch_model.bin" if kind.endswith(".bin") else "model.safetensors")).write_bytes(BROKEN_WEIGHTS[kind])
    with pytest.raises(ModelNotFound) as caught:
        load_model(str(folder), device="cpu")
    assert "weights_only" not in str(caught.value), "nobody is told to run what the file asks for"
    assert not Path("never").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_broken_descriptions_are_one_error(folder: Path, name: str) -> None:
    messages: list[str] = []
    for content in BROKEN_JSON:
        (folder / name).write_bytes(content)
        try:
            load_tokenizer(str(folder))
            load_model(str(folder), device="cpu")
        except QCFuseError as error:
            messages.append(str(error))
    assert messages
    assert all(message and "\n" not in message for message in messages)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 4096\n")
    with pytest.raises(ModelNotFound, match=rf"{name} is a pointer of git-lfs .*; run `git lfs pull` in its folder$"):
        load_model(str(folder / name if name.endswith(".gguf") else folder), device="cpu")


@pytest.mark.parametrize("value", [None, "x", [], -1, 1.5])
def test_wrong_fields_of_a_configuration_are_one_error(folder: Path, value: object) -> None:
    path = folder / "config.json"
    config, messages = json.loads(path.read_text()), list[str]()
    for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "model_type", "rms_norm_eps"):
        path.write_text(json.dumps({**config, field: value}))
        try:
            load_model(str(folder), device="cpu")
        except QCFuseError as error:
            messages.append(str(error))
    assert all(messages)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"GGUF" + b"\x00" * 4000])
def test_broken_gguf_files_are_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelNotFound):
        load_model(str(path), device="cpu")


@pytest.mark.parametrize(
    "changed",
    [{"num_hidden_layers": 10**7}, {"num_local_experts": 1e300}, {"text_config": {"num_hidden_layers": 10**12}}],
)
def test_a_model_that_would_be_built_for_hours_is_refused_at_once(folder: Path, changed: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(UnsupportedModel, match=r"sets .* to .*; the limit is 10,000"):
        load_model(str(folder), device="cpu")
