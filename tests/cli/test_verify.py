"""`qcfuse verify`: a verdict on the screen, as JSON, as an exit code, and beside the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcfuse_rag.verification.sweep import RATIOS
from tests.support.cli import Run

SMALL = ("--size", 1, "--tokens", 1200, "--device", "cpu")
LOOSE = ("--kl", 100, "--agreement", 0, "--loss", 1)


@pytest.mark.slow
def test_a_method_that_passes_and_one_that_does_not(run: Run, model_folder: str) -> None:
    passed = run.json("verify", "--model", model_folder, *SMALL, *LOOSE)
    assert (passed["version"], passed["passed"], passed["ratio"], passed["saved"]) == (4, True, 0.05, None)
    assert [(trial["ratio"], trial["passed"]) for trial in passed["tried"]] == [(0.05, True)]
    assert passed["recommendation"] == "auto over primed passes at ratio 0.05"
    code, out, _ = run("verify", "--model", model_folder, *SMALL, "--kl", 0, "--method", "reuse")
    assert code == 1
    assert "reuse over framed does not pass at ratio 0: kl" in " ".join(out.split())


@pytest.mark.slow
def test_the_table_has_a_row_for_each_ratio_that_was_tried(run: Run, model_folder: str) -> None:
    code, out, _ = run("verify", "--model", model_folder, *SMALL, "--kl", 0)
    assert code == 1
    rows = [line for line in out.splitlines() if line.startswith("│ ratio")]
    ratios = [row.split()[2] for row in rows]
    assert ratios == [f"{ratio:g}" for ratio in RATIOS for _ in ("without residuals", "with residuals")]
    assert all("failed" in row for row in rows)
    for column in ("kl", "top-1", "identical", "needle", "multi-hop"):
        assert column in out
    tried_last = f"at ratio {RATIOS[-1]:g} with residuals it fails: kl"
    assert f"auto over primed passes at none of the ratios tried; {tried_last}" in " ".join(out.split())


def test_a_quick_verdict_asks_less_and_says_how_sure_it_is(run: Run, model_folder: str) -> None:
    quick = ("verify", "--model", model_folder, "--quick", "--tokens", 1200, "--device", "cpu")
    code, out, _ = run(*quick, *LOOSE)
    said = " ".join(out.split())
    assert (code, "answers to 15 prompts, nats a token; could be between" in said) == (0, True)
    found = json.loads(run(*quick, "--kl", 0, "--size", 1, "--json")[1])
    assert [trial["label"] for trial in found["tried"]] == ["ratio 0.1", "ratio 0.2", "ratio 0.4"]
    assert "to 3 prompts" in found["tried"][0]["checks"][1]["detail"], "what the user names counts"


def test_a_ratio_that_the_user_names_is_the_only_one_tried(run: Run, model_folder: str) -> None:
    code, out, _ = run("verify", "--model", model_folder, *SMALL, "--kl", 0, "--ratio", 0.1, "--json")
    found = json.loads(out)
    labels = [trial["label"] for trial in found["tried"]]
    assert (code, found["ratio"], labels) == (1, None, ["ratio 0.1", "ratio 0.1 with residuals"])


@pytest.mark.slow
def test_a_question_is_answered_at_the_ratio_that_passed(
    run: Run, model_folder: str, corpus_file: Path, tmp_path: Path
) -> None:
    store, about = tmp_path / "s", ("--model", model_folder)
    run.json("warm", "run", corpus_file, "--store", store, *about)
    saved = Path(run.json("verify", "--store", store, *about, *SMALL, *LOOSE)["saved"])
    verdict = json.loads(saved.read_text())
    for trial in verdict["tried"]:
        trial["ratio"] = 0.4
    saved.write_text(json.dumps(verdict))
    answered = run.json("ask", "Who keeps the paint?", "--store", store, *about, "--max-new-tokens", 1)
    assert answered["report"]["ratio"] in (0.4, 1.0), "1 where the guard has the whole prompt computed"
    _, _, noted = run("ask", "Who?", "--store", store, *about, "--max-new-tokens", 1, "--ratio", 0.3)
    assert "not been verified on this model at ratio 0.3; use ratio 0.4, which passed" in " ".join(noted.split())
    _, _, noted = run("ask", "Who?", "--store", store, *about, "--max-new-tokens", 1, "--ratio", 0.4)
    assert "verified" not in noted


@pytest.mark.slow
def test_a_verdict_on_a_librarys_own_passages_is_kept_and_spares_the_note(
    run: Run, model_folder: str, corpus_file: Path, tmp_path: Path
) -> None:
    store, about = tmp_path / "s", ("--model", model_folder)
    warmed = run.text("warm", "run", corpus_file, "--store", store, *about)
    assert f"`qcfuse verify --quick --store {store}` finds the share to recompute" in warmed
    _, _, noted = run("ask", "Who keeps the paint?", "--store", store, *about, "--max-new-tokens", 1)
    assert "has not been verified on this model; `qcfuse verify --quick" in " ".join(noted.split())
    found = run.json("verify", "--store", store, *about, *SMALL, *LOOSE)
    assert found["own_passages"] >= 1
    assert json.loads(Path(found["saved"]).read_text())["passed"] is True
    assert "qcfuse verify" not in run.text("warm", "run", corpus_file, "--store", store, *about)
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
