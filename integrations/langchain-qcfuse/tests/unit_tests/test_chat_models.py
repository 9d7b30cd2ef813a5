"""LangChain's own unit tests of chat models."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_qcfuse import ChatQCFuse
from tests.support.families import build_model, build_tokenizer


@cache
def tiny_model() -> str:
    folder = tempfile.mkdtemp()
    build_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    build_tokenizer(lambda: ["Hello there."]).save_pretrained(folder)
    return folder


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatQCFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": tiny_model()}
