"""`qcfuse tune`: the writer's file, the figures before and after, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qcfuse_rag.library.jobs import job_lock
from qcfuse_rag.tuning import tune as tuning
from qcfuse_rag.tuning.tune import Schedule
from tests.support.cli import Run

TEXTS = [f"The {what} of pier {pier} is old. It is red." for what in ("ferry", "mill", "lamp") for pier in range(8)]


@pytest.fixture
def library(run: Run, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library of 24 short documents, to be tuned quickly."""
    monkeypatch.setattr("qcfuse_rag.tuning.trainer.ANSWER_TOKENS", 3)
    monkeypatch.setattr(tuning, "HELD_OUT_PROMPTS", 4)
    monkeypatch.setattr(tuning, "TAUGHT_STEPS", 1)
    monkeypatch.setattr(tuning, "WARM_UP_STEPS", 1)
    documents = tmp_path / "documents"
    documents.mkdir()
    for index, text in enumerate(TEXTS):
        (documents / f"{index}.txt").write_text(text)
    run.json("warm", "run", documents, "--store", tmp_path / "library", "--model", model_folder, "--device", "cpu")
    return tmp_path / "library"


@pytest.mark.slow
def test_a_writer_is_kept_beside_the_librarys_caches(run: Run, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ON_CPU", Schedule(32, 4, 4, 5e-3))
    code, out, err = run("tune", "--store", library, "--device", "cpu", "--prompts", 32)
    assert code == 0, err
    (writer,) = (library / "kv").glob("writer-*")
    said = " ".join(out.split())
    assert "delete this file to go back" in said
    assert f"`qcfuse warm run DOCUMENTS --store {library}`" in said
    assert f"`qcfuse verify --store {library}`" in said
    assert "after 0 prompts: held-out divergence" in err
    assert "a writer needs a new warming (the last took" in err
    assert "█" in out
    assert writer.suffix == ".safetensors"
    again = run.json("warm", "run", library.parent / "documents", "--store", library, "--device", "cpu")
    assert (again["chunks"], again["present"]) == (48, 24), "the framed ones are as before"


@pytest.mark.slow
def test_a_writer_that_wins_nothing_is_not_kept(run: Run, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ON_CPU", Schedule(32, 4, 4, 0.0))
    code, out, _ = run("tune", "--store", library, "--device", "cpu", "--prompts", 8, "--json")
    found = json.loads(out)
    assert (code, found["path"], found["prompts"], found["passages"]) == (1, None, 8, 24)
    assert found["after"] == found["before"]
    assert not list((library / "kv").glob("writer-*"))


def test_a_missing_or_busy_library_is_refused_before_a_model_is_loaded(run: Run, tmp_path: Path) -> None:
    code, _, err = run("tune", "--store", tmp_path / "misspelt")
    assert (code, "misspelt" in err, (tmp_path / "misspelt").exists()) == (1, True, False)
    with job_lock(tmp_path / "busy"):
        code, _, err = run("tune", "--store", tmp_path / "busy")
    assert (code, "another job" in err) == (1, True)
