"""The critical layers of `qcfuse`: those of a profile beside the store, if it is of this very model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qcfuse_rag import FusionEngine, LanguageModel, make_method, open_store
from qcfuse_rag.methods.qcfuse import FORMAT, PROFILE_FILE, critical_layers, layers_by_depth
from qcfuse_rag.store.key import BLIND
from tests.support.passages import PASSAGES, QUESTION


def profile_of(lm: LanguageModel, layers: tuple[int, ...]) -> dict[str, Any]:
    recall = [0.5 if layer in layers else 0.1 for layer in range(lm.n_layers)]
    fields = {"format": FORMAT, "model": lm.name, "fingerprint": lm.fingerprint.fields()}
    return {**fields, "layers": list(layers), "recall": recall}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"format": "other"}, "its format is not qcfuse-profile-1"),
        ({"layers": [2, 9]}, "layers must be indices of the 4 layers"),
        ({"layers": []}, "layers must be indices"),
        ({"layers": [True]}, "layers must be indices"),
        ({"fingerprint": 3}, "is not used"),
        ({"recall": [0.5] * 5, "layers": [4]}, "it has 5 layers and the model 4"),
        *(
            (content, "is not used: ")
            for content in (b"", b'{"format": "qcfuse-pro', b"[]", b"\xff\xfe", b"[" * 100_000)
        ),
    ],
)
def test_a_damaged_profile_is_ignored_and_the_log_says_what_is_wrong(
    llama: LanguageModel, tmp_path: Path, content: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = content if isinstance(content, bytes) else json.dumps({**profile_of(llama, (0,)), **content}).encode()
    (tmp_path / PROFILE_FILE).write_bytes(whole)
    assert critical_layers(llama, tmp_path) == layers_by_depth(4)
    assert reason in caplog.text


def load(model: str, store: Any, **options: Any) -> FusionEngine:
    return FusionEngine.load(model, store=store, device="cpu", check=False, **options)


@pytest.fixture
def lm(model_folder: str) -> LanguageModel:
    return LanguageModel.load(model_folder, device="cpu")


@pytest.mark.slow
def test_a_profile_beside_the_store_chooses_what_qcfuse_recomputes(
    lm: LanguageModel, model_folder: str, tmp_path: Path
) -> None:
    def selected(engine: FusionEngine, **options: Any) -> tuple[int, ...]:
        engine.warm(PASSAGES, bases=(BLIND,))
        return engine.prefill(
            engine.prompt(QUESTION, PASSAGES), method=make_method("qcfuse", **options)
        ).report.selected

    with load(model_folder, tmp_path) as engine:
        assert critical_layers(engine.lm, tmp_path) == layers_by_depth(4) == (1, 2, 3)
        by_depth, wanted = selected(engine), selected(engine, layers=(0,))
        assert by_depth != wanted, "other layers must choose otherwise here"
    (tmp_path / PROFILE_FILE).write_text(json.dumps(profile_of(lm, (0,))))
    with load(model_folder, tmp_path) as engine:
        assert selected(engine) == wanted
        assert selected(engine, layers=(1, 2, 3)) == by_depth, "layers that are named win"
    with open_store(tmp_path) as store:
        assert selected(load(model_folder, store)) == wanted, "an open store has a folder too"
    assert selected(load(model_folder, None)) != wanted, "a store in memory has none"


def test_a_profile_of_another_model_is_ignored_beside_a_store(
    llama: LanguageModel, lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROFILE_FILE).write_text(json.dumps(profile_of(llama, (0,))))
    assert critical_layers(lm, tmp_path) == (1, 2, 3)
    assert (
        "is not used: it is of another model (llama): config differ; make it again with `python -m benchmarks profile`"
        in caplog.text
    )
