"""A library knows what it was warmed with: commands need nothing but its folder, and refuse another model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qcfuse_rag import LanguageModel, QCFuseError
from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.library.index import METADATA
from qcfuse_rag.library.jobs import RECORD_NAME
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.server.settings import ServerSettings
from tests.support.cli import Run
from tests.support.families import build_model
from tests.support.passages import PASSAGES

QUICK = ("--max-new-tokens", 2)


@pytest.fixture
def library(run: Run, model_folder: str, corpus_file: Path, tmp_path: Path) -> Path:
    """Return a library of one document, warmed in bfloat16 without a guard against fusing short prompts."""
    folder = tmp_path / "library"
    options = ("--store", folder, "--model", model_folder, "--device", "cpu", "--dtype", "bfloat16")
    run.json("warm", "run", corpus_file, *options, "--base", "framed")
    return folder


@pytest.mark.slow
def test_its_folder_is_all_that_commands_need(run: Run, library: Path, corpus_file: Path) -> None:
    answered = run.json("ask", "Who keeps the paint?", "--store", library, *QUICK, "--method", "reuse")
    assert (answered["report"]["fallback"], answered["report"]["base"]) == (None, "framed")
    assert answered["report"]["reused_tokens"] > 0, "in the dtype and with the model that it was warmed with"
    page = library.parent / "page.html"
    assert run("explain", "Who keeps the paint?", "--store", library, "--out", page)[0] == 0
    assert "<h1>Who keeps the paint?</h1>" in page.read_text()
    again = run.json("warm", "run", corpus_file, "--store", library)
    assert (again["warmed"], again["present"]) == (0, 1)
    loose = ("--kl", 100, "--agreement", 0, "--loss", 1, "--size", 1, "--tokens", 1200)
    assert run.json("verify", "--store", library, *loose)["own_passages"] == 1


@pytest.mark.parametrize(
    ("command", "option", "own"),
    [
        (("ask", "Who?"), ("--model", "other/model"), "MODEL"),
        (("ask", "Who?"), ("--dtype", "float32"), "bfloat16"),
        (("serve",), ("--model", "other/model"), "MODEL"),
    ],
)
def test_other_settings_are_refused_with_both_names_before_anything_is_loaded(
    run: Run, library: Path, model_folder: str, command: tuple[str, ...], option: tuple[str, str], own: str
) -> None:
    code, _, err = run(*command, "--store", library, *option)
    own = str(Path(model_folder).resolve()) if own == "MODEL" else own
    assert (code, err.count("\n")) == (1, 1)
    assert f"was warmed with the {option[0][2:]} {own}, not {option[1]}; leave out {option[0]}" in err


@pytest.mark.slow
def test_weights_and_caches_that_it_does_not_have_are_refused(run: Run, library: Path, corpus_file: Path) -> None:
    code, _, err = run("ask", "Who?", "--store", library, "--weights", "int8")
    assert (code, "weights must be one of" in err) == (1, True)
    code, _, err = run("ask", "Who?", "--store", library, "--method", "reuse", "--base", "blind")
    assert (code, "was warmed for framed caches, but the method reuse reads blind ones" in err) == (1, True)
    code, _, err = run("warm", "run", corpus_file, "--store", library, "--model", "other/model")
    assert (code, "not other/model" in err) == (1, True)
    run.json("warm", "run", corpus_file, "--store", library, "--base", "blind")
    blind = run.json("ask", "Who?", "--store", library, "--method", "reuse", "--base", "blind", *QUICK)
    assert blind["report"]["fallback"] is None


def test_the_embedder_is_the_one_that_the_user_names_and_never_one_that_a_file_names(
    run: Run, library: Path, corpus_file: Path, tmp_path: Path
) -> None:
    """Whoever writes to the folder names a model of sentence-transformers, which may bring code, or a Ray cluster."""
    code, _, err = run("ask", "Who?", "--store", library, "--embedder", "other/embedder")
    assert (code, "embedded with 'all-MiniLM-L6-v2', not 'other/embedder'; leave out --embedder" in err) == (1, True)
    own = shutil.copytree(default_embedder(), tmp_path / "own")
    about = library / "passages" / METADATA
    about.write_text(json.dumps(json.loads(about.read_text()) | {"embedder": str(own)}))
    for command in (("ask", "Who?", *QUICK), ("warm", "run", corpus_file), ("chat",)):
        code, _, err = run(*command, "--store", library)
        assert (code, f"embedded with '{own}', not " in err, "if you trust it, name it by --embedder" in err) == (
            (1, True, True)
        ), (command, err)
    assert run.json("ask", "Who?", "--store", library, *QUICK, "--embedder", own)["documents"]
    assert run.json("warm", "run", corpus_file, "--store", library, "--embedder", own)["warmed"] == 0
    code, _, err = run("warm", "resume", "--store", library)
    assert (code, f"the last job had --embedder {own}; if you trust that, name it here too" in err) == (1, True)
    assert run.json("warm", "resume", "--store", library, "--embedder", own)["warmed"] == 0
    record = json.loads((library / RECORD_NAME).read_text())
    record["arguments"]["ray"] = "ray://attacker.example:10001"
    (library / RECORD_NAME).write_text(json.dumps(record))
    code, _, err = run("warm", "resume", "--store", library, "--embedder", own)
    assert (code, "the last job had --ray ray://attacker.example:10001" in err) == (1, True)


@pytest.mark.parametrize(
    ("embedder", "reason"),
    [
        ("BROKEN", "cannot load the embedding model '"),
        ("other/embedder", "embedded with 'all-MiniLM-L6-v2', not 'other/embedder'"),
        (None, "the model begins to load"),
    ],
)
def test_an_embedder_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    run: Run,
    library: Path,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embedder: str | None,
    reason: str,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise QCFuseError("the model begins to load")

    monkeypatch.setattr(LanguageModel, "load", load)
    about = library / "passages" / METADATA
    if embedder == "BROKEN":
        (tmp_path / "broken").mkdir()
        embedder = str(tmp_path / "broken")
        about.write_text(json.dumps(json.loads(about.read_text()) | {"embedder": embedder}))
    named = ("--embedder", embedder) if embedder else ()
    for command in (("warm", "run", corpus_file), *([("serve",)] * (embedder is not None))):
        code, _, err = run(*command, "--store", library, *named)
        assert (code, reason in err) == (1, True), err


@pytest.mark.slow
def test_a_model_that_was_changed_under_its_name_is_noticed(
    run: Run, corpus_file: Path, model_folder: str, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    options = ("--store", tmp_path / "s", "--device", "cpu")
    run.json("warm", "run", corpus_file, *options, "--model", model, "--base", "framed")
    build_model("llama", max_position_embeddings=2048, initializer_range=0.5).save_pretrained(model)
    code, _, err = run("ask", "Who?", *options, *QUICK)
    assert (code, f"the model {model} has changed since" in " ".join(err.split())) == (0, True)
    assert run.json("warm", "run", corpus_file, *options)["warmed"] == 1
    assert "has changed" not in run("ask", "Who?", *options, *QUICK)[2]


def test_the_wording_is_the_librarys_own(run: Run, library: Path) -> None:
    """A later version of this package may word prompts differently; a library that is warm stays so."""
    settings = LibrarySettings.load(library)
    assert settings.template == PromptTemplate()
    worded = replace(settings.template, chunk="Passage: {text}\n\n")
    replace(settings, template=worded).save()
    assert LibrarySettings.load(library / "kv").template == worded
    answered = run.json("ask", "Who?", "--store", library, *QUICK)
    assert "absent" in answered["report"]["fallback"], "what is stored is of the wording it was warmed with"


def test_settings_that_cannot_be_read_are_one_clear_error(run: Run, library: Path) -> None:
    (library / "library.json").write_text("{}")
    code, _, err = run("ask", "Who?", "--store", library)
    assert (code, "library.json" in err, "run `qcfuse warm run` again" in err, err.count("\n")) == (1, True, True, 1)


@pytest.mark.slow
def test_an_answer_in_json_names_its_documents_once_with_their_scores(run: Run, library: Path) -> None:
    answered = run.json("ask", "Who keeps the paint?", "--store", library, *QUICK)
    assert set(answered) == {
        *("question", "answer", "reasoning", "documents", "tokens", "finish_reason", "decode_s", "healing", "report"),
    }
    [document] = answered["documents"]
    assert set(document) == {"source", "title", "text", "score"}
    assert document["source"].endswith("harbour.md")
    assert PASSAGES[0] in document["text"]
    assert -1 <= document["score"] <= 1


def test_a_served_model_has_the_id_that_people_know_it_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    snapshot.mkdir(parents=True)
    (tmp_path / "smol.Q4_1.gguf").touch()
    served_name = ServerSettings().served_name
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert served_name(str(snapshot)) == "Qwen/Qwen3-0.6B"
    assert served_name(str(tmp_path / "smol.Q4_1.gguf")) == "smol.Q4_1"
    monkeypatch.chdir(snapshot.parent)
    assert served_name(".") == "snapshots", "not an empty name"
