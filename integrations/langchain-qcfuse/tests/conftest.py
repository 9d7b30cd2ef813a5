"""A chat model over a store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag import LanguageModel, MemoryStore
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), build_tokenizer(lambda: PASSAGES))


@pytest.fixture
def chat(lm: LanguageModel) -> Iterator[ChatQCFuse]:
    with make_engine(lm, MemoryStore()) as engine:
        yield ChatQCFuse.from_engine(engine, max_tokens=12)
