"""Models that think, on the command line: a library keeps the variables of its chat template; reasoning is apart."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from qcfuse_rag.library.session import LibrarySession
from qcfuse_rag.library.settings import LibrarySettings
from tests.support.cli import Run
from tests.support.thinking import answer_with, thinking_model

QUICK = ("--max-new-tokens", 2)
METHOD = ("--method", "reuse")
EFFORT = '{"reasoning_effort": "low"}'


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, lm = tmp_path_factory.mktemp("thinking"), thinking_model()
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def library(run: Run, thinking_folder: Path, corpus_file: Path, tmp_path: Path) -> Path:
    """Return a library that was warmed with an effort."""
    folder = tmp_path / "library"
    options = ("--store", folder, "--model", thinking_folder, "--device", "cpu", "--base", "framed")
    run.json("warm", "run", corpus_file, *options, "--chat-template-kwargs", EFFORT)
    return folder


@pytest.mark.slow
def test_a_library_keeps_its_variables(run: Run, library: Path, corpus_file: Path) -> None:
    template = LibrarySettings.load(library).template
    assert template is not None
    assert template.chat_template_kwargs == {"reasoning_effort": "low"}
    answered = run.json("ask", "Who keeps the paint?", "--store", library, *QUICK, *METHOD)
    assert answered["report"]["fallback"] is None
    again = run.json("warm", "run", corpus_file, "--store", library)
    assert (again["warmed"], again["present"]) == (0, 1)
    assert run.json("warm", "resume", "--store", library)["warmed"] == 0


@pytest.mark.slow
def test_a_command_sets_others(run: Run, library: Path) -> None:
    options = ("Who keeps the paint?", "--store", library, *QUICK, *METHOD, "--chat-template-kwargs")
    answered = run.json("ask", *options, '{"reasoning_effort": "low", "enable_thinking": false}')
    assert answered["report"]["fallback"] is None, "the prompt begins as it did"
    assert "absent" in run.json("ask", *options, '{"reasoning_effort": "high"}')["report"]["fallback"]
    template = LibrarySettings.load(library).template
    assert template is not None
    assert template.chat_template_kwargs == {"reasoning_effort": "low"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("{", "--chat-template-kwargs is not JSON"),
        ("[]", "has to be a JSON object"),
        ('{"mood": 1}', "cannot set mood"),
    ],
)
def test_bad_variables_are_one_clear_error(run: Run, library: Path, kwargs: str, message: str) -> None:
    code, _, err = run("ask", "Who?", "--store", library, "--chat-template-kwargs", kwargs)
    assert (code, message in " ".join(err.split())) == (1, True), err


def test_reasoning_is_printed_and_kept_apart(run: Run, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "<think>\nHm.\n</think>\n\nYes.")
    long = ("--store", library, "--max-new-tokens", 60)
    answered = run.json("ask", "Who?", *long)
    assert (answered["answer"], answered["reasoning"]) == ("Yes.", "Hm.")
    code, out, err = run("ask", "Who?", *long)
    assert (code, out.strip()) == (0, "Yes.")
    assert err.index("Hm.") < err.index("sources:")
    asked: list[list[tuple[str, str]]] = []
    answer = LibrarySession.answer

    def noted(self, question, retrieved, *, history=(), **options):  # type: ignore[no-untyped-def]
        asked.append(list(history))
        return answer(self, question, retrieved, history=history, **options)

    monkeypatch.setattr(LibrarySession, "answer", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd when?\n"))
    assert run("chat", *long)[0] == 0
    assert asked == [[], [("user", "Who?"), ("assistant", "Yes.")]]
