"""LangChain's own tests of chat models: none skipped that the model can do, none overridden.

`ChatQCFuse` passes them, and `ChatOpenAI` over the server.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.generation.response_format import ResponseFormat
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.serve import make_server
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.thinking import answer_by
from tests.support.tool_templates import teach

FULL = os.environ.get("QCFUSE_STRESS") == "full"

ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "pirate"},
    "get_weather": {"location": "San Francisco"},
    "unicode_customer": {"customer_name": "你好啊集团 こんにちは株式会社", "description": "x"},
    "Joke": {"setup": "Why?", "punchline": "Moo."},
}
"""Of the tools of LangChain's tests, which they ask for; a tiny model does not."""


def scripted(form: ResponseFormat) -> Sequence[str] | None:
    """Return the call or the object that a test asks for; None: what the model writes itself."""
    if form.schema is not None:
        keys = form.schema.get("required") or ["setup", "punchline"]
        return [json.dumps(dict.fromkeys(keys, "Moo."))]
    for tool in form.required_tools or form.visible_tools:
        name = tool["function"]["name"]
        if name in ARGUMENTS:
            given = tool["function"].get("parameters", {}).get("properties", {})
            arguments = dict(zip(given, ARGUMENTS[name].values(), strict=False)) if given else {}
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            return [f"<tool_call>\n{call}\n</tool_call>"]
    return None


@contextmanager
def listening(lm: LanguageModel) -> Iterator[str]:
    """Serve a model as `tiny` in a thread; yield the address of the API."""
    backend = EngineBackend(EngineHandle.wrap(make_engine(lm, MemoryStore())), "tiny")
    server = make_server(make_app(backend, on_shutdown=backend.close), max_requests=8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        running.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        running.join()


class LocalTests(ChatModelIntegrationTests):
    """All engines share the weights, which take longer to load than a test."""

    folder: str
    address: str

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatQCFuse


class TestTools(LocalTests):
    """A tiny model that can call tools; its calls and objects are scripted."""

    @pytest.fixture(scope="class", autouse=True)
    def saved_model(self, request: pytest.FixtureRequest) -> Iterator[None]:
        request.cls.folder = tempfile.mkdtemp()
        build_model("llama", max_position_embeddings=4096).save_pretrained(request.cls.folder)
        teach(build_tokenizer(lambda: ["Hello there."]), "hermes").save_pretrained(request.cls.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageModel, "load", cache(LanguageModel.load))
            answer_by(patch, scripted)
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder, "device": "cpu", "max_tokens": 256}

    @property
    def supports_json_mode(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.enable_socket
class TestServer(TestTools):
    """`ChatOpenAI` over a server that has such a model."""

    @pytest.fixture(scope="class", autouse=True)
    def saved_model(self, request: pytest.FixtureRequest) -> Iterator[None]:
        tokenizer = teach(build_tokenizer(lambda: ["Hello there."]), "hermes")
        lm = LanguageModel.wrap(build_model("llama", max_position_embeddings=4096), tokenizer)
        with pytest.MonkeyPatch.context() as patch, listening(lm) as request.cls.address:
            answer_by(patch, lambda form: scripted(form) or ["Hello there."])
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        from langchain_openai import ChatOpenAI  # takes seconds, which no other test should wait for

        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny", "base_url": self.address, "api_key": "any", "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return "tiny"

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_prompt_that_is_too_long_overflows_the_context(self, model: BaseChatModel, streaming: bool) -> None:
        with pytest.raises(ContextOverflowError, match="exceeds the context window"):
            list(model.stream("x " * 5000)) if streaming else model.invoke("x " * 5000)


@pytest.mark.real
class TestIntegration(LocalTests):
    @pytest.fixture(scope="class", autouse=True)
    def saved_model(self, request: pytest.FixtureRequest, smollm2_folder: str) -> Iterator[None]:
        request.cls.folder = smollm2_folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageModel, "load", cache(LanguageModel.load))
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # By the likeliest tokens so small a model repeats itself in a JSON string and never ends it.
        structured = {"max_tokens": 64, "temperature": 0.8, "seed": 0}
        return {"model": self.folder, "device": "cpu", **(structured if FULL else {"max_tokens": 24})}

    @property
    def has_structured_output(self) -> bool:
        return FULL  # a minute and a half

    @property
    def has_tool_calling(self) -> bool:
        return False  # its chat template has no place for tools

    @property
    def has_tool_choice(self) -> bool:
        return False
