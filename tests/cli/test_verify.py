"""`qcfuse verify`: a verdict on the screen, as JSON, as an exit code, and beside the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import Run

SMALL = ("--size", 1, "--tokens", 1200, "--device", "cpu")
LOOSE = ("--kl", 100, "--agreement", 0, "--loss", 1)


def test_a_method_that_passes_and_one_that_does_not(run: Run, model_folder: str) -> None:
    passed = run.json("verify", "--model", model_folder, *SMALL, *LOOSE)
    assert passed["passed"] is True
    assert passed["label"] == "auto over primed at ratio 0.05"
    assert passed["saved"] is None
    code, out, _ = run("verify", "--model", model_folder, *SMALL, "--kl", 0, "--method", "reuse")
    assert code == 1
    assert "did not pass" in out


def test_a_verdict_on_a_librarys_own_passages_is_kept_and_spares_the_note(
    run: Run, model_folder: str, corpus_file: Path, tmp_path: Path
) -> None:
    store, about = tmp_path / "s", ("--model", model_folder)
    run.json("warm", "run", corpus_file, "--store", store, *about)
    _, _, noted = run("ask", "Who keeps the paint?", "--store", store, *about, "--max-new-tokens", 1)
    assert "has not been verified on this model; run `qcfuse verify`" in " ".join(noted.split())
    found = run.json("verify", "--store", store, *about, *SMALL, *LOOSE)
    assert found["own_passages"] >= 1
    assert json.loads(Path(found["saved"]).read_text())["passed"] is True
    _, _, noted = run("ask", "Who keeps the paint?", "--store", store, *about, "--max-new-tokens", 1)
    assert "verified" not in noted


def test_prompts_too_short_for_what_is_hidden_in_them_are_refused_before_a_model_is_loaded(run: Run) -> None:
    code, _, error = run("verify", "--model", "no/such-model", "--tokens", 511)
    assert (code, "--tokens" in error, "512" in error) == (2, True, True)


@pytest.mark.parametrize("wrong", [("--size", 0), ("--tokens", 10), ("--method", "nope")])
def test_what_cannot_be_is_refused(run: Run, model_folder: str, wrong: tuple[str, object]) -> None:
    code, _, error = run("verify", "--model", model_folder, *wrong)
    assert code in (1, 2)
    assert "Traceback" not in error
