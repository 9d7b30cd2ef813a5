"""LangChain's own tests of chat models: none skipped that the model can do, none overridden."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag import LanguageModel
from tests.support.families import build_model, build_tokenizer

FULL = os.environ.get("QCFUSE_STRESS") == "full"


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


@pytest.mark.real
class TestIntegration(ChatModelIntegrationTests):
    folder: str

    @pytest.fixture(scope="class", autouse=True)
    def saved_model(self, request: pytest.FixtureRequest, smollm2_folder: str) -> Iterator[None]:
        """Name the model's folder; all engines share the weights, which take longer to load than a test."""
        request.cls.folder = smollm2_folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LanguageModel, "load", cache(LanguageModel.load))
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatQCFuse

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
