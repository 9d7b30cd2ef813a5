"""`qcfuse chat`: a conversation over a library, from standard input."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcfuse_rag import LanguageModel
from qcfuse_rag.cli.ask import Conversation, _obey
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.library.retriever import RetrievedPassage
from qcfuse_rag.library.session import LibraryAnswer
from qcfuse_rag.prompts.template import Message
from tests.support.cli import Run
from tests.support.families import build_model


@pytest.fixture
def library(run: Run, model_folder: str, corpus_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    run.json("warm", "run", corpus_file, "--store", folder, "--model", model_folder, "--device", "cpu")
    return folder


@pytest.fixture
def say(run: Run, library: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def lines(*written: str, options: tuple[object, ...] = ("--max-new-tokens", 3)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in written)))
        return run("chat", "--store", library, *options)

    return lines


def test_each_answer_names_its_sources_and_the_model_is_loaded_once(say, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    loaded = []
    load = LanguageModel.load
    monkeypatch.setattr(LanguageModel, "load", lambda *args, **rest: loaded.append(args) or load(*args, **rest))
    code, out, err = say("Who keeps the paint?", "", "And when?")
    assert (code, len(loaded)) == (0, 1)
    assert len(re.findall(r"sources: harbour\.md", err)) == 2
    assert len(out.splitlines()) >= 2


def test_explain_writes_the_page_of_the_last_answer_and_names_it(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "last page.html"
    page.touch(mode=0o644)
    questions = ("Who keeps the paint?", "And when?")
    code, out, _ = say("/help", "/hello there", "/explain", *questions, f"/explain {page}", "/quit", "Never asked?")
    assert code == 0
    assert all(command in out for command in ("/explain", "/help", "/quit"))
    assert "There is no command /hello; /help lists the commands." in out
    assert "There is no answer to explain yet; ask a question first." in out
    assert f"The page is {page.as_uri()}" in out
    assert "<h1>And when?</h1>" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    assert "Passage 1: harbour.md" in page.read_text(), "without the folders of this machine"


def test_a_question_that_never_fits_is_retrieved_for_once_and_leaves_the_conversation_as_it_was() -> None:
    retrieved_after, answered_after = list[list[Message]](), list[list[Message]]()

    def retrieve(question: str, history: list[Message]) -> list[RetrievedPassage]:
        retrieved_after.append(list(history))
        return []

    def answer(
        question: str, passages: list[RetrievedPassage], *, history: list[Message], **_: object
    ) -> LibraryAnswer:
        assert passages == []
        answered_after.append(list(history))
        raise PromptTooLong(f"{question} exceeds the context window")

    turns: list[Message] = [("user", "Who?"), ("assistant", "Orla."), ("user", "When?"), ("assistant", "Today.")]
    session: Any = SimpleNamespace(answer=answer, retrieve=retrieve)
    conversation = Conversation(session, 3, list(turns))
    with pytest.raises(PromptTooLong):
        conversation.ask("too long")
    assert conversation.history == turns
    assert retrieved_after == [turns]
    assert answered_after == [turns, turns[2:], []]


def test_an_unknown_error_does_not_end_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    _obey(Conversation(SimpleNamespace(retrieve=fail), 3), "Why?")  # type: ignore[arg-type]
    assert "RuntimeError: no memory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_context_leaves_out_the_oldest_turns(
    run: Run,
    corpus_file: Path,
    tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    model, store = tmp_path / "short", tmp_path / "s"
    build_model("llama", max_position_embeddings=512).save_pretrained(model)
    tokenizer.save_pretrained(model)
    run.json("warm", "run", corpus_file, "--store", store, "--model", model, "--device", "cpu")
    questions = "".join(f"Question {i}: {'who keeps the paint ' * 12}?\n" for i in range(6))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{questions}{'too long ' * 600}\nWho?\n"))
    code, _, err = run("chat", "--store", store, "--max-new-tokens", 2)
    assert code == 0
    assert "the model's context is full" in err
    assert re.search(r"error: .*context window", err), "a question that never fits is an error, and not the end"
    assert err.count("sources: ") == 7


def test_no_question_is_stored_on_disk(say, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    say("Who keeps the vermilion paint?")
    files = [path for path in (*library.rglob("*"), *home.rglob("*")) if path.is_file()]
    assert files
    assert not [path for path in files if b"vermilion" in path.read_bytes()]


@pytest.mark.slow
def test_a_terminal_offers_earlier_questions_by_arrow_keys(library: Path, tmp_path: Path) -> None:
    """Ctrl-P, which is the arrow up on every terminal, brings the last line back."""
    program = "from qcfuse_rag.cli.app import run; run()"
    command = [sys.executable, "-c", program, "chat", "--store", str(library), "--max-new-tokens", "2"]
    controller, terminal = pty.openpty()
    chat = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "HOME": str(tmp_path)}
    )
    try:
        os.close(terminal)
        wait_for(controller, "> ", timeout=120)
        os.write(controller, b"/hello\n")
        wait_for(controller, "no command /hello", "> ")  # keys are taken as they are from the next prompt on
        os.write(controller, b"\x10\x7f\x7fp\n")  # the line again, with `p` instead of its last two letters
        wait_for(controller, "explain.html by default")
        os.write(controller, b"/quit\n")
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(controller)


def wait_for(descriptor: int, *texts: str, timeout: float = 60) -> str:
    """Read a terminal until all texts are shown, each behind the one before."""
    shown, deadline = "", time.monotonic() + timeout
    while not re.search(".*".join(map(re.escape, texts)), shown, re.DOTALL):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown
        shown += os.read(descriptor, 4096).decode(errors="replace")
    return shown
