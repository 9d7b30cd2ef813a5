"""The frameworks' stock OpenAI classes talk to the endpoint, as `qcfuse serve` runs it: a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from qcfuse_rag import FusionEngine, open_store
from qcfuse_rag.store.key import FRAMED
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import free_port

pytestmark = [pytest.mark.enable_socket, pytest.mark.timeout(300), pytest.mark.slow]
METHOD = ["--method", "prophetkv", "--ratio", "0.1", "--base", "framed"]
TOKEN = "a token of the tests"
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    library = tmp_path_factory.mktemp("library")
    with FusionEngine.load(model, store=open_store(library / "kv"), device="cpu", verdict="ignore") as engine:
        engine.warm(PASSAGES, bases=[FRAMED])
    port = free_port()
    command = [str(Path(sys.executable).parent / "qcfuse"), "serve", "--store", str(library), "--model", model]
    process = subprocess.Popen(
        [
            *command,
            "--name",
            "tiny",
            "--port",
            str(port),
            "--device",
            "cpu",
            "--origins",
            f"{PAGE}, https://a.example",
            *METHOD,
        ],
        env={**os.environ, "QCFUSE_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        time.sleep(0.2)
        try:
            if httpx.get(f"{url}/healthz").status_code == 200:
                break
        except httpx.TransportError:
            continue
    yield url, process
    process.kill()


def test_langchain(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    chat = ChatOpenAI(model="tiny", base_url=f"{server[0]}/v1", api_key=TOKEN, max_tokens=8, temperature=0)
    message = chat.invoke(QUESTION, extra_body={"documents": PASSAGES})
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0  # type: ignore[index]
    assert "".join(str(part.content) for part in chat.stream(QUESTION, extra_body={"documents": PASSAGES})) == (
        message.content
    )
    found = chat.invoke(f"{PASSAGES[0]}\n\n{QUESTION}")
    assert found.usage_metadata["input_token_details"]["cache_read"] > 0  # type: ignore[index]


def test_llama_index(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    llm = OpenAILike(
        model="tiny", api_base=f"{server[0]}/v1", api_key=TOKEN, is_chat_model=True, max_tokens=8, temperature=0
    )
    said = llm.chat([ChatMessage(QUESTION)], extra_body={"documents": PASSAGES})
    assert said.raw.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]
    streamed = list(llm.stream_chat([ChatMessage(QUESTION)], extra_body={"documents": PASSAGES}))
    assert streamed[-1].message.content == said.message.content


def test_pages_that_origins_names_may_ask(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for page, status in ((PAGE, 200), ("https://a.example", 200), ("https://b.example", 400)):
        asked = httpx.options(f"{server[0]}/v1/chat/completions", headers={"origin": page, **asks})
        allowed = asked.headers.get("access-control-allow-origin")
        assert (asked.status_code, allowed) == (status, page if status == 200 else None)


def test_an_interrupted_server_finishes_what_it_is_answering(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = server
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "stream": True}
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert process.wait(60) in (0, -signal.SIGTERM)
