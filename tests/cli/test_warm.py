"""`qcfuse warm plan|run|resume|status`, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.library.files import HIDDEN, LOOPS
from qcfuse_rag.library.folder import KV_FOLDER
from qcfuse_rag.library.index import PassageIndex
from qcfuse_rag.library.jobs import RECORD_NAME, job_lock
from qcfuse_rag.library.readers import NO_TEXT
from qcfuse_rag.store.documents.sources import Sources
from tests.support.cli import Run
from tests.support.engines import METHOD_OPTIONS
from tests.support.passages import PASSAGES

FRAMED = ("--base", "framed")
"""One cache of each passage."""


@pytest.mark.slow
def test_a_plan_says_bytes_and_seconds_and_changes_nothing(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    options = (documents, "--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", *FRAMED)
    plan = run.json("warm", "plan", *options)
    assert (plan["documents"], plan["to_warm"], plan["present"]) == (3, 3, 0)
    assert plan["all_bytes"]["int8"] == plan["size_bytes"]
    two = run.json("warm", "plan", *options[: -len(FRAMED)])
    assert two["all_bytes"] == {name: 2 * taken for name, taken in plan["all_bytes"].items()}
    assert not (tmp_path / "s").exists()
    run.json("warm", "run", *options)
    size = run.json("store", "stats", "--store", tmp_path / "s")["size_bytes"]
    passages = 3 / 4  # of four entries; the plan leaves out the system prefix's
    assert 0.7 * passages * size < plan["size_bytes"] < size
    wide = run.json("warm", "plan", *options, "--kv-dtype", "model", "--limit-gb", 0.000001)
    assert (wide["present"], wide["to_warm"], wide["left_out"]) == (3, 0, 0)
    assert run.json("store", "stats", "--store", tmp_path / "s")["settings"]["kv_dtype"] == "int8"
    shown = run.text("warm", "plan", *options)
    assert "would take" in shown
    assert "all passages, in 1 cache(s) of each: " in shown


def test_what_does_not_fit_is_said_before_and_after(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    about = ("--model", model_folder, "--device", "cpu", *FRAMED, "--limit-gb", 0.0002)
    options = (documents, "--store", tmp_path / "s", *about)
    assert run.json("warm", "plan", *options)["left_out"] == 2
    summary = run.json("warm", "run", *options)
    assert (summary["warmed"], summary["left_out"]) == (1, 2)
    stats = run.json("store", "stats", "--store", tmp_path / "s")
    assert stats["size_bytes"] <= stats["limit_bytes"] == 200_000


def test_status_and_resume(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    monkeypatch.chdir(documents.parent)
    model = os.path.relpath(model_folder, documents.parent)
    run.json("warm", "run", documents.name, "--store", store, "--model", model, "--device", "cpu", "--base", "framed")
    status = run.json("warm", "status", "--store", store)
    assert (status["state"], status["summary"]["warmed"]) == ("finished", 3)
    assert status["done_tokens"] == status["total_tokens"] == status["summary"]["tokens"]
    (documents / "3.txt").write_text("A fourth document, about lanterns.")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    summary = run.json("warm", "resume", "--store", store)
    assert (summary["present"], summary["warmed"]) == (3, 1), "with the options it had"
    assert "finished" in run.text("warm", "status", "--store", store)


@pytest.mark.slow
def test_a_script_that_the_embedding_model_was_not_made_for_is_noted(
    run: Run, model_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "渡轮.txt").write_text("渡轮到岛上需要两个小时。旧磨坊属于镇议会。每周一开会。")
    options = (tmp_path / "渡轮.txt", "--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", *FRAMED)
    code, _, err = run("warm", "run", *options)
    assert (code, "--embedder intfloat/multilingual-e5-small" in err.replace("\n", " ")) == (0, True), err
    assert "multilingual" in run.json("warm", "run", *options)["script_note"]


@pytest.mark.slow
def test_a_document_that_becomes_empty_is_forgotten_and_so_is_the_last(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    options = (documents, "--store", store, "--model", model_folder, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", *options)
    first, *others = sorted(documents.iterdir())
    first.write_text("")
    run.json("warm", "run", *options)
    assert sorted(run.json("store", "sources", "--store", store)["sources"]) == [str(path) for path in others]
    assert run.json("store", "stats", "--store", store)["entries"] == 3, "two passages and the system prefix"
    for path in documents.iterdir():
        path.unlink()
    code, _, err = run("warm", "run", *options)
    assert (code, "if all were deleted, `warm run --allow-empty` forgets them" in err) == (1, True), "or not mounted?"
    assert run.json("warm", "run", *options, "--allow-empty")["documents"] == 0
    assert run.json("store", "sources", "--store", store)["sources"] == {}
    assert PassageIndex.load(store / "passages").passages == []


@pytest.mark.slow
def test_a_folder_that_is_not_mounted_is_not_forgotten_beside_one_that_is(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    store, mounted = tmp_path / "s", tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "far.txt").write_text("What lies on another machine's disk.")
    options = (documents, mounted, "--store", store, "--model", model_folder, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", *options)
    (mounted / "far.txt").unlink()
    code, _, err = run("warm", "run", *options)
    assert (code, f"no files to read in {mounted}; " in err, "--allow-empty" in err) == (1, True, True)
    assert len(run.json("store", "sources", "--store", store)["sources"]) == 4, "nothing was forgotten"
    run.json("warm", "run", *options, "--allow-empty")
    assert len(run.json("store", "sources", "--store", store)["sources"]) == 3


def test_workers_with_gpus_are_not_told_the_dtype_of_a_machine_without(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    options = (documents, "--store", tmp_path / "s", "--model", model_folder, "--device", "cpu")
    code, _, err = run("warm", "run", *options, "--ray", "auto", "--gpus-per-worker", 1)
    assert (code, "the --dtype of the machine that answers" in err, err.count("\n")) == (1, True, 1)
    assert not (tmp_path / "s").exists(), "before anything is loaded or made"


@pytest.mark.slow
def test_one_job_at_a_time_and_one_that_cannot_begin_leaves_the_record(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    options = (documents, "--store", store, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", *options, "--model", model_folder)
    assert run("warm", "run", *options, "--model", "no/such-model")[0] == 1
    assert run.json("warm", "status", "--store", store)["state"] == "finished"
    assert run.json("warm", "resume", "--store", store)["present"] == 3
    monkeypatch.setitem(sys.modules, "qcfuse_rag.cli.warm", None)  # nothing is imported that could load a model
    with job_lock(store):
        for command in (("resume",), ("run", documents)):
            code, _, err = run("warm", *command, "--store", store)
            assert (code, f"another job is warming {store}" in err) == (1, True)
    monkeypatch.undo()
    assert run.json("warm", "status", "--store", store)["state"] == "finished"


def test_what_cannot_be_read_is_told_and_the_rest_is_warmed(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    """Each reason once, with paths under the folder."""
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", "--base", "framed")
    (documents / "scanned.txt").write_text("\n \f\n")
    (documents / ".git").mkdir()
    for number in range(30):
        (documents / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (documents / "loop").symlink_to("loop")
    for what in ("plan", "run"):
        summary = run.json("warm", what, documents, *options)
        assert (summary["passages"], summary["documents"]) == (3, 3)
        images = summary["unread"].pop("not text")
        assert sorted(images) == sorted(f"{number}.png" for number in range(30))
        assert summary["unread"] == {HIDDEN: [".git/"], LOOPS: ["loop"], NO_TEXT: ["scanned.txt"]}
    told = [line for line in run("warm", "run", documents, *options)[2].splitlines() if "passed over" in line]
    assert len(told) == 4
    assert next(line for line in told if "not text" in line).endswith("17.png and 20 more (--json lists all)")
    (documents / "many.jsonl").write_text("".join(f'{{"text": "", "source": "s{n}"}}\n' for n in range(30)))
    told = [line for line in run("warm", "run", documents, *options)[2].splitlines() if NO_TEXT in line]
    assert len(told) == 1


def test_the_text_of_a_library_is_its_owners(run: Run, documents: Path, model_folder: str, tmp_path: Path) -> None:
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", documents, *options)
    for path in (tmp_path / "s").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_a_job_that_was_killed_is_called_so_and_resumed(run: Run, model_folder: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"Passage {i} about boats.", "source": str(i)}) for i in range(40)))
    store = tmp_path / "s"
    program = (
        "import os, signal, sys; from qcfuse_rag.cli import app; from qcfuse_rag.library import jobs\n"
        "def advance(self, done, total):\n"
        "    self.done_tokens, self.total_tokens = done, total; self.save()\n"
        "    if done * 2 > total: os.kill(os.getpid(), signal.SIGKILL)\n"
        "jobs.JobRecord.advance = advance\n"
        "app.main()\n"
    )
    command = [sys.executable, "-c", program, "warm", "run", str(rows), "--store", str(store)]
    options = ["--model", model_folder, "--device", "cpu", "--batch-tokens", "60", *FRAMED]
    killed = subprocess.run([*command, *options], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    status = run.json("warm", "status", "--store", store)
    assert status["state"] == "killed"
    assert 0 < status["done_tokens"] < status["total_tokens"]
    assert "qcfuse warm resume" in run.text("warm", "status", "--store", store)
    summary = run.json("warm", "resume", "--store", store)
    assert summary["warmed"] > 0
    assert summary["present"] > 0
    assert summary["warmed"] + summary["present"] == 40
    assert run.json("store", "fsck", "--store", store)["damaged"] == []


def test_a_failed_job_says_why(run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = tmp_path / "s"
    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("warm", "run", documents, "--store", store, "--model", model_folder, "--device", "cpu")
    monkeypatch.undo()
    assert (code, "No space left on device" in err) == (1, True)
    status = run.json("warm", "status", "--store", store)
    assert status["state"] == "failed"
    assert "No space left on device" in status["error"]


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["library", "."])
def test_a_library_inside_the_folder_of_its_documents_is_not_read(
    run: Run, documents: Path, model_folder: str, inside: str
) -> None:
    """Its passages are JSON lines under the documents' own names, and would keep what was changed or deleted."""
    store = documents / inside
    options = (documents, "--store", store, "--model", model_folder, "--device", "cpu", *FRAMED)
    for _ in range(2):
        summary = run.json("warm", "run", *options)
        assert (summary["documents"], summary["passages"], summary["failed"]) == (3, 3, [])
    (documents / "0.txt").write_text("The ferry has been sold.")
    (documents / "1.txt").unlink()
    assert run.json("warm", "run", *options)["passages"] == 2
    texts = {passage.text for passage in PassageIndex.load(store / "passages").passages}
    assert texts == {"The ferry has been sold.", PASSAGES[2]}


@pytest.mark.slow
def test_what_is_asked_for_often_is_warmed_first(run: Run, documents: Path, model_folder: str, tmp_path: Path) -> None:
    """Asking counts what it retrieves; a store with room for one then keeps the most retrieved."""
    store, options = tmp_path / "s", ("--model", model_folder, "--device", "cpu")
    run.json("warm", "run", documents, "--store", store, *options, *FRAMED)
    few = ("--top-k", 1, "--max-new-tokens", 1)
    asked = run.json("ask", "When does the council meet?", "--store", store, *options, *METHOD_OPTIONS, *few)
    [source] = [document["source"] for document in asked["documents"]]
    run.text("store", "clear", "--store", store, "--yes")
    run.json("warm", "run", documents, "--store", store, *options, *FRAMED, "--limit-gb", 0.0002)
    missing = {name: s["missing"] for name, s in run.json("store", "sources", "--store", store)["sources"].items()}
    assert missing.pop(source) == 0
    assert list(missing.values()) == [1, 1]
    assert "council" not in (store / "passages" / "retrievals.jsonl").read_text()


@pytest.mark.slow
def test_an_exact_answer_is_full_prefills_and_says_how_far_the_draft_agreed(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu")
    run.json("warm", "run", documents, *options, *FRAMED)
    asked = ("ask", "When does the council meet?", *options, "--max-new-tokens", 8)
    full = run.json(*asked, "--method", "full")
    exact = run.json(*asked, *METHOD_OPTIONS, "--fidelity", "exact")
    assert exact["report"]["reused_tokens"] > 0
    assert (exact["answer"], exact["healing"]["verified_upto"]) == (full["answer"], exact["tokens"])
    assert full["healing"] is None
    _, out, err = run(*asked, *METHOD_OPTIONS, "--fidelity", "exact")
    assert out.strip() == exact["answer"].strip()
    prompt, answer = exact["report"]["prompt_tokens"], exact["tokens"]
    assert f"{prompt:,} of {prompt:,} prompt tokens are exact, {answer} of {answer} answer tokens verified" in err


def test_tenants_see_only_their_own(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QCFUSE_SECRET", "a secret of more than sixteen bytes")
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu")
    run.json("warm", "run", documents, *options, "--tenant", "acme")
    answer = run.json("ask", "Who?", *options, *METHOD_OPTIONS, "--tenant", "acme", "--max-new-tokens", 1)
    assert answer["report"]["fallback"] is None
    code, _, err = run("ask", "Who?", *options, "--tenant", "other", "--max-new-tokens", 1)
    assert (code, "no passages" in err) == (1, True)
    assert run.json("warm", "run", documents, *options, "--tenant", "other")["present"] == 0


def test_an_encrypted_library_needs_its_secret(
    run: Run, documents: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu")
    code, _, err = run("warm", "run", documents, *options, *FRAMED, "--encrypt")
    assert (code, "set QCFUSE_SECRET" in err) == (1, True)
    monkeypatch.setenv("QCFUSE_SECRET", "a secret of more than sixteen bytes")
    run.json("warm", "run", documents, *options, *FRAMED, "--encrypt")
    assert run.json("ask", "Who?", *options, *METHOD_OPTIONS, "--max-new-tokens", 1)["report"]["fallback"] is None
    assert run.json("store", "fsck", "--store", tmp_path / "s")["sound"] == 4
    monkeypatch.delenv("QCFUSE_SECRET")
    code, _, err = run("ask", "Who?", *options)
    assert (code, "QCFUSE_SECRET" in err) == (1, True)


def test_a_record_that_cannot_be_read_is_said_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).write_text('{"arguments": {"paths": []}}')
    code, _, err = run("warm", "resume", "--store", tmp_path)
    assert (code, "start it with `qcfuse warm run`" in err) == (1, True)


def test_a_tag_says_who_may_read_documents(run: Run, corpus_file: Path, model_folder: str, tmp_path: Path) -> None:
    options = ("--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", *FRAMED)
    run.json("warm", "run", corpus_file, *options, "--access", "board")
    with DiskStore(tmp_path / "s" / KV_FOLDER) as kept, closing(Sources(kept)) as sources:
        opened = [kept.open(entry.address) for entry in kept.entries()]
        readers = [sources.readers(entry[0]) for entry in opened if isinstance(entry, tuple)]
    assert (len(readers), readers.count({"board"})) == (2, 1), "the passage, and the system prefix, which all have"


def test_a_plan_for_a_format_that_there_is_not_is_refused(
    run: Run, documents: Path, model_folder: str, tmp_path: Path
) -> None:
    options = (documents, "--store", tmp_path / "s", "--model", model_folder, "--device", "cpu", "--kv-dtype", "int9")
    for command in ("plan", "run"):
        code, _, err = run("warm", command, *options)
        assert (code, "there is no kv_dtype 'int9'" in " ".join(err.split())) == (1, True)
