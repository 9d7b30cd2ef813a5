"""Profiles of critical layers: measured against transformers' own eager attention, labelled to the token, picked up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.samples import Sample, find_answers
from qcfuse_rag import FusionEngine, LanguageModel, make_method, open_store
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.methods.qcfuse.layers import PROFILE_FILE, critical_layers, layers_by_depth
from qcfuse_rag.store.prefill_base import BLIND
from tests.support.passages import PASSAGES, QUESTION

ANSWERED = Sample(QUESTION, tuple(PASSAGES), answers=("the harbour school",), supporting=(1,))


def profile_of(lm: LanguageModel, layers: tuple[int, ...]) -> Profile:
    recall = tuple(0.5 if layer in layers else 0.1 for layer in range(lm.n_layers))
    return Profile(lm.name, lm.fingerprint.fields(), layers, recall, "answers", 7, {}, 0.0)


# What is measured


def test_the_best_layers_are_chosen_less_a_penalty_for_depth() -> None:
    recall = (0.1, 0.5, 0.4, 0.5, 0.6)
    assert choose_layers(recall, 1) == (4,)
    assert choose_layers(recall, 2) == (1, 4), "of equals, the earlier"
    assert choose_layers(recall, 3) == (1, 3, 4)
    assert choose_layers(recall, 1, depth_penalty=0.2) == (1,), "0.6 - 0.2 x 4/5 < 0.5 - 0.2 x 1/5"
    with pytest.raises(ValueError, match="the model has 5 layers; choose 1 to 5 of them, not 6"):
        choose_layers(recall, 6)


# What counts as the answer


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("In 15 of 1590 cases, 15.", ["15"], ["15", "15"]),
        ("The Long\n Glass and the long glass", ["Long Glass"], ["Long\n Glass", "long glass"]),
        ("a 4.1 metre surge (4.1)", ["4.1", "4.1 metre"], ["4.1", "4.1 metre", "4.1"]),
        ("He owns 40,000 crowns", ["40,000"], ["40,000"]),
        ("no, nobody says yes", ["no", "Yes", "", " "], []),
        ("在东京举行", ["东京"], ["东京"]),
        ("Ελλάδα, Ελλάδας", ["ελλάδα"], ["Ελλάδα"]),
        ("na na na", ["na na"], ["na na", "na na"]),
    ],
)
def test_answers_are_found_as_whole_words(text: str, answers: list[str], expected: list[str]) -> None:
    assert [text[start:stop] for start, stop in find_answers(text, answers)] == expected


# Without answers


# Where questions come from


def test_distractors_are_the_passages_that_are_not_needed() -> None:
    known = Sample("Q", ("a", "b", "c", "d"), ("A",), supporting=(2,))
    assert known.with_distractors(1) == Sample("Q", ("a", "c"), ("A",), supporting=(1,))
    assert known.with_distractors(9) == known
    found = Sample("Q", ("a", "b", "A!", "d"), ("A!",))
    assert found.with_distractors(0) == Sample("Q", ("A!",), ("A!",))


# Kept in a file


def test_a_profile_survives_its_file(llama: LanguageModel, tmp_path: Path) -> None:
    profile = profile_of(llama, (0, 2))
    profile.save(tmp_path / "new" / "p.json")
    assert Profile.load(tmp_path / "new" / "p.json") == profile
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.json"], "nothing else is left"
    with pytest.raises(ProfileError, match=r"cannot write .*name another path"):
        profile.save(tmp_path / "new" / "p.json" / "below")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "its format is not qcfuse-profile-1"),
        ({"layers": [2, 9]}, "layers must be ascending indices of the 4 layers"),
        ({"layers": [2, 0]}, "layers must be ascending"),
        ({"layers": []}, "layers must be ascending"),
        ({"layers": "02"}, "layers must be a list"),
        ({"layers": [True]}, "layers must be ascending"),
        ({"recall": [0.1, 0.2, 0.3, 7]}, "recall must be numbers from 0 to 1"),
        ({"recall": [0.1, 0.2, 0.3, float("nan")]}, "recall must be numbers from 0 to 1"),
        ({"fingerprint": {"weights": 3}}, "fingerprint must be an object of strings"),
        ({"labels": "guessed"}, "labels must be one of answers, leave-one-out"),
        ({"samples": 0}, "samples must be a number above 0"),
        ({"skipped": None}, "skipped must be an object of numbers"),
        ({"depth_penalty": "much"}, "depth_penalty must be a number"),
    ],
)
def test_a_damaged_profile_says_what_is_wrong(
    llama: LanguageModel, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**profile_of(llama, (1,)).to_dict(), **change}))
    with pytest.raises(
        ProfileError, match=f"cannot read the profile .*{reason}.*make it again with `python -m benchmarks profile`"
    ):
        Profile.load(path)


@pytest.mark.parametrize("content", [b"", b'{"format": "qcfuse-pro', b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_profile_is_ignored_beside_a_store(
    llama: LanguageModel, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(content)
    with pytest.raises(ProfileError, match="cannot read the profile"):
        Profile.load(tmp_path / PROFILE_FILE)
    assert critical_layers(llama, tmp_path) == layers_by_depth(4)
    assert "is not used: " in caplog.text


def test_a_profile_that_lacks_something_says_what(llama: LanguageModel, tmp_path: Path) -> None:
    data = profile_of(llama, (1,)).to_dict()
    del data["recall"], data["samples"]
    (tmp_path / PROFILE_FILE).write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="it has no recall, samples"):
        Profile.load(tmp_path / PROFILE_FILE)


# Picked up


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
    profile_of(lm, (0,)).save(tmp_path / PROFILE_FILE)
    with load(model_folder, tmp_path) as engine:
        assert selected(engine) == wanted
        assert selected(engine, layers=(1, 2, 3)) == by_depth, "layers that are named win"
    with open_store(tmp_path) as store:
        assert selected(load(model_folder, store)) == wanted, "an open store has a folder too"
    assert selected(load(model_folder, None)) == by_depth


def test_a_profile_of_another_model_is_ignored_beside_a_store(
    llama: LanguageModel, lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile_of(llama, (0,)).save(tmp_path / PROFILE_FILE)
    assert critical_layers(lm, tmp_path) == (1, 2, 3)
    assert (
        "is not used: it is of another model (llama): config differ; make it again with `python -m benchmarks profile`"
        in caplog.text
    )


def test_a_profile_edited_to_have_more_layers_than_the_model_is_not_of_it(
    lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = profile_of(lm, (0,))
    replace(profile, recall=(*profile.recall, 0.5), layers=(4,)).save(tmp_path / PROFILE_FILE)
    assert critical_layers(lm, tmp_path) == (1, 2, 3)
    assert "it has 5 layers and the model 4" in caplog.text


# The command
