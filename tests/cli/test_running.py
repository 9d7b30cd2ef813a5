"""`qcfuse ask` lets the server that runs over a library answer, and starts alone where none does."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from qcfuse_rag.cli.running import ask_server
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library import local_socket

pytestmark = pytest.mark.enable_socket

REPORT = {
    **{"method": "auto", "base": "primed", "ratio": 0.15, "prompt_tokens": 100, "context_tokens": 80, "rows": 30},
    **{"reused_tokens": 70, "selected": [], "row_layers": 60, "n_layers": 2, "lookups": [], "bytes_loaded": 2_000_000},
    **{"timings": {"load_s": 0.1, "probe_s": 0, "select_s": 0, "recompute_s": 0.2, "others_s": 0, "ttft_s": 0.3}},
    **{"fallback": None, "verified_upto": None},
}


def event(*, text: str = "", **fields: object) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}], **fields})}\n\n"


DOCUMENTS = [{"source": "/docs/ferry.md", "title": "Hull"}, {"source": "/docs/mill.md", "title": None}]
ANSWER = (
    ": waiting\n\n"
    + event(
        text="In the ",
        documents=[{"source": "/docs/ferry.md", "title": "Hull"}, {"source": "/docs/mill.md", "title": None}],
    )
    + event(text="harbour.")
    + event(fusion=REPORT)
    + "data: [DONE]\n\n"
)


class FakeServer:
    """Sends the same bytes to every client of a library's socket, and keeps what was asked."""

    def __init__(self, library: Path, answer: bytes) -> None:
        listener = local_socket.listen(library)
        assert listener is not None
        self.listener, self.answer, self.asked = listener, answer, list[bytes]()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                asked = b""
                while b"stream_options" not in asked and (part := client.recv(65536)):
                    asked += part
                if asked:
                    self.asked.append(asked)
                    client.sendall(self.answer)


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lib")


def response(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()


def ask(library: Path) -> bool:
    return ask_server("Where is the ferry?", library, max_new_tokens=8)


def test_the_answer_its_sources_and_its_counts_are_printed(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(library, response(ANSWER))
    assert ask(library)
    out, said = capsys.readouterr()
    assert out == "In the harbour.\n"
    assert "server that runs over this library" in said
    assert "sources: ferry.md (Hull), mill.md\n" in said
    assert "auto, ratio 0.15: computed 30 of 100 tokens (30% over all layers)" in said
    assert json.loads(server.asked[0].partition(b"\r\n\r\n")[2])["documents"] == "library"


@pytest.mark.parametrize(("fields", "shown"), [({"reranking": {"passages": 8, "reused": 7}}, 1), ({}, 0)])
def test_what_the_server_reranked_is_printed(
    library: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object], shown: int
) -> None:
    FakeServer(library, response(event(text="In.", fusion={**REPORT, **fields}) + "data: [DONE]\n\n"))
    assert ask(library)
    assert capsys.readouterr().err.count("reranked: 7 of 8 passages reused") == shown


@pytest.mark.parametrize("status", ["401 Unauthorized", "400 Bad Request", "429 Too Many Requests"])
def test_a_server_that_refuses_is_not_asked_further(library: Path, status: str) -> None:
    FakeServer(library, response("{}", status))
    assert not ask(library)


@pytest.mark.parametrize("then", ["data: {\n\n", ""])
def test_an_answer_that_breaks_off_is_an_error(library: Path, then: str) -> None:
    FakeServer(library, response(event(text="In") + then))
    with pytest.raises(QCFuseError, match="does not go on"):
        ask(library)


def test_a_failure_midway_is_told(library: Path) -> None:
    FakeServer(library, response(event(text="In") + 'data: {"error": {"message": "the disk is full"}}\n\n'))
    with pytest.raises(QCFuseError, match="the disk is full"):
        ask(library)


@pytest.mark.parametrize("first", ['data: {"error": {"message": "it stops"}}\n\n', "data: {\n\n", ""])
def test_a_server_that_fails_before_the_answer_begins_is_not_asked_further(library: Path, first: str) -> None:
    FakeServer(library, response(f": waiting\n\n{first}"))
    assert not ask(library)


def test_without_a_server_nothing_is_asked(library: Path) -> None:
    assert not ask(library)
    (library / local_socket.NAME).write_text("no socket")
    assert not ask(library)


def test_only_the_owner_can_use_the_socket_and_only_the_owners_socket_is_used(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeServer(library, response(ANSWER))
    assert (library / local_socket.NAME).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not ask(library)


def test_a_second_server_leaves_the_socket_to_the_first_and_one_after_a_kill_takes_it(library: Path) -> None:
    first = local_socket.listen(library)
    assert first is not None
    assert local_socket.listen(library) is None
    first.close()  # the file stays, as after a kill
    second = local_socket.listen(library)
    assert second is not None
    second.close()


def test_a_folder_that_cannot_hold_a_socket_has_none(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    assert local_socket.listen(deep) is None
    assert not ask(deep)
