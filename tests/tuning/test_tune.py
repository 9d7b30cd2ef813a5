"""`tune` writes a better writer, keeps an interrupted one, and refuses what cannot be tuned."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from qcfuse_rag import FusionEngine, LanguageModel
from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.tuning import tune as tuning
from qcfuse_rag.tuning.prompts import TuningPrompt
from qcfuse_rag.tuning.tune import Parts, Schedule, partial_path, tune
from tests.support.families import build_model

TEXTS = [f"The {what} of pier {pier} is old. It is red." for what in ("ferry", "mill", "lamp") for pier in range(8)]


@pytest.fixture
def lm(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """Return a copy of the engine's model, to be tuned quickly on short answers."""
    monkeypatch.setattr("qcfuse_rag.tuning.trainer.ANSWER_TOKENS", 3)
    monkeypatch.setattr(tuning, "HELD_OUT_PROMPTS", 4)
    monkeypatch.setattr(tuning, "TAUGHT_STEPS", 1)
    monkeypatch.setattr(tuning, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(tuning, "ON_CPU", Schedule(32, 4, 4, 5e-3))
    return LanguageModel.wrap(copy.deepcopy(engine.lm.model), engine.lm.tokenizer)


def test_a_better_writer_is_written(
    engine: FusionEngine, lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PATIENCE", 8)
    seen = list[int]()
    report = tune(lm, engine.prompts, TEXTS, tmp_path, count=32, measured=lambda done, _: seen.append(done))
    assert report.path == lm.fingerprint.writer_path(tmp_path)
    assert report.path.exists()
    assert report.after[0.05].kl <= 0.95 * report.before[0.05].kl
    assert seen[0] == 0
    assert seen[1:] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert lm.model.config._attn_implementation == "qcfuse"


def test_a_writer_that_is_not_better_is_not_written(
    engine: FusionEngine, lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ON_CPU", Schedule(32, 4, 4, 0.0))
    report = tune(lm, engine.prompts, TEXTS, tmp_path, count=32)
    assert (report.path, report.after) == (None, report.before)
    assert report.prompts == 12, "three measurements without a better one"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_tuning_goes_on(engine: FusionEngine, lm: LanguageModel, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(lm, engine.prompts, TEXTS, tmp_path, count=24, progress=stop)
    partial = partial_path(lm.fingerprint.writer_path(tmp_path))
    assert list(tmp_path.iterdir()) == [partial]
    with safe_open(partial, "pt") as file:
        assert file.metadata()["prompts"] == "8"
    seen = list[int]()
    report = tune(lm, engine.prompts, TEXTS, tmp_path, count=24, progress=lambda done, _: seen.append(done))
    assert seen[:2] == [0, 12]
    assert report.path is not None
    assert not partial.exists()


def test_too_few_passages_are_refused(engine: FusionEngine, lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(QCFuseError, match="needs 20 different passages, and 19 of 39 can be used"):
        tune(lm, engine.prompts, [*TEXTS[:19], *TEXTS[:19], "long " * 400], tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "nf4"}, "its weights are nf4"),
        ({"sliding": (8, None, None, None)}, "some layers attend in a window"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    engine: FusionEngine, lm: LanguageModel, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    if "fingerprint" in changes:
        changes = {"fingerprint": replace(lm.fingerprint, weight_format="nf4")}
    with pytest.raises(UnsupportedModel, match=reason):
        tune(replace(lm, **changes), engine.prompts, TEXTS, tmp_path)


def test_recurrent_layers_are_refused(engine: FusionEngine, tmp_path: Path) -> None:
    recurrent = LanguageModel.wrap(build_model("qwen3-next-gated-delta"), engine.lm.tokenizer)
    with pytest.raises(UnsupportedModel, match="some layers are recurrent"):
        tune(recurrent, engine.prompts, TEXTS, tmp_path)


def test_parts_are_halved_where_memory_does_not_suffice(engine: FusionEngine) -> None:
    made = [TuningPrompt.of(engine.prompts, "Who?", TEXTS[:2]) for _ in range(5)]

    def over(prompts: list[TuningPrompt]) -> int:
        if len(prompts) > 2:
            raise torch.OutOfMemoryError
        return len(prompts)

    parts = Parts(8)
    assert parts.compute(made, over) == [2, 2, 1]  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        Parts(1).compute(made * 3, lambda prompts: over([*prompts] * 3))
