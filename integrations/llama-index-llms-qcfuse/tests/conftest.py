"""An LLM over a store on disk, documents it has warmed, and the reports of what it prefills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from llama_index.llms.qcfuse import FusionEndEvent, QCFuseLLM
from qcfuse_rag import LanguageModel, open_store
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.llama_index_documents import warmed_index
from tests.support.passages import PASSAGES


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=8192), build_tokenizer(lambda: PASSAGES))


@pytest.fixture
def llm(lm: LanguageModel, tmp_path: Path) -> Iterator[QCFuseLLM]:
    with make_engine(lm, open_store(tmp_path / "kv")) as engine:
        llm = QCFuseLLM.from_engine(engine, max_new_tokens=12)
        yield llm
        llm.close()


@pytest.fixture
def index(llm: QCFuseLLM) -> VectorStoreIndex:
    return warmed_index(llm)


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """Collect the reports of fused prefills from LlamaIndex's instrumentation."""
    seen: list[dict[str, Any]] = []

    class Collect(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            if isinstance(event, FusionEndEvent):
                seen.append(event.report)

    root, handler = get_dispatcher(), Collect()
    root.add_event_handler(handler)
    yield seen
    root.event_handlers.remove(handler)
