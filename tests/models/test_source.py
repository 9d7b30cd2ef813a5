"""Where a model is loaded from: a folder, its only GGUF file, or a hub, which may not answer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from qcfuse_rag.errors import ModelNotFound, UnsupportedModel
from qcfuse_rag.models import source
from qcfuse_rag.models.load import load_model, load_tokenizer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses that the hub was asked for; it does not answer."""
    addresses: list[str] = []

    def head(address: str, timeout: float) -> None:
        addresses.append(address)
        threading.Event().wait(60)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    return addresses


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return what transformers was asked to load."""
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda source, **options: calls.append((source, options)) or SimpleNamespace()
    )
    return calls


def test_a_hub_that_does_not_answer_is_an_error_within_seconds(asked: list[str]) -> None:
    for load in (load_tokenizer, load_model):
        with pytest.raises(
            ModelNotFound, match=r"'some/model': https://.* does not answer, and the model is not complete"
        ):
            load("some/model")
    assert asked == [constants.ENDPOINT] * 2


def test_a_model_in_the_cache_is_loaded_although_the_hub_does_not_answer(
    asked: list[str], loaded: list[tuple[str, dict[str, Any]]]
) -> None:
    load_tokenizer("some/model")
    assert loaded == [("some/model", {"trust_remote_code": False, "local_files_only": True})]


@pytest.mark.parametrize("failure", [ConnectionRefusedError(), RuntimeError("a proxy")])
def test_a_refused_connection_is_known_at_once(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def head(address: str, timeout: float) -> None:
        raise failure

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    assert not source.hub_answers()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=lambda address, timeout: None))
    assert source.hub_answers()


def test_no_hub_is_asked_for_a_folder(
    asked: list[str], loaded: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").touch()
    load_tokenizer(str(tmp_path))
    assert (asked, loaded) == ([], [(str(tmp_path), {"trust_remote_code": False})])


@pytest.mark.parametrize("name", ["tiny.gguf", "TINY.GGUF", "tiny-00001-of-00001.gguf", "tiny-1-of-2.Gguf"])
def test_a_folder_with_one_whole_gguf_file_is_that_file(
    loaded: list[tuple[str, dict[str, Any]]], tmp_path: Path, name: str
) -> None:
    for file in ("README.md", name, "tiny-00001-of-00002.gguf"):
        (tmp_path / file).touch()
    load_tokenizer(str(tmp_path))
    load_tokenizer(str(tmp_path / name))
    assert loaded == [(str(tmp_path), {"trust_remote_code": False, "gguf_file": name})] * 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["notes.txt"], r"no model in .*: it has neither a config\.json nor a GGUF file"),
        (["q4.gguf", "q8.GGUF"], r"holds 2 GGUF files; name one of them: q4\.gguf, q8\.GGUF"),
        (
            ["q4-00001-of-00002.gguf", "q4-00002-of-00002.gguf"],
            r"^q4-00001-of-00002\.gguf is one of 2 parts .*`llama-gguf-split --merge q4-00001-of-00002.gguf q4.gguf`$",
        ),
        (["a.b-00003-of-00011.GGUF"], r"is one of 11 parts .*--merge a\.b-00001-of-00011\.gguf a\.b\.gguf`$"),
    ],
)
def test_a_folder_without_one_model_says_so(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    for named in [tmp_path, *(tmp_path / name for name in files if " parts " in message)]:
        with pytest.raises((ModelNotFound, UnsupportedModel), match=message.replace("^q4-00001", "^q4-0000[12]")):
            load_tokenizer(str(named))


def test_a_saved_model_beside_gguf_files_is_the_saved_model(
    loaded: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for name in ("config.json", "q4.gguf", "q8.gguf"):
        (tmp_path / name).touch()
    load_tokenizer(str(tmp_path))
    assert "gguf_file" not in loaded[0][1]
