"""Every Python block of the documentation runs, page by page, over a tiny model and the names that its page uses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

import langchain_qcfuse
import llama_index.llms.qcfuse as llama_qcfuse
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.store.key import FRAMED
from tests.support.cases import cases
from tests.support.engines import make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.tool_templates import teach

ROOT = Path(__file__).parent.parent
SECRET = b"sixteen or more random bytes"
LIBRARY = {f"report-{number}.pdf": text for number, text in enumerate(PASSAGES)}
METHOD = make_method("qcfuse", ratio=0.3, base=FRAMED)
Names = dict[str, Any]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


PAGES = [
    page
    for page in [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "integrations").glob("*/README.md"))]
    if blocks(page)
]


def core(lm: LanguageModel) -> Names:
    engine = make_warmed_engine(lm, method=METHOD)
    return {
        "engine": engine,
        "passages": PASSAGES,
        "documents": list(LIBRARY),
        "groups": [PASSAGES],
        "prompt": engine.prompt(QUESTION, PASSAGES),
        "SamplingParams": SamplingParams,
        "make_method": make_method,
    }


def llama(lm: LanguageModel) -> Names:
    embed = MockEmbedding(embed_dim=4)
    documents = [Document(text=text, id_=name) for name, text in LIBRARY.items()]
    VectorStoreIndex.from_documents(documents, embed_model=embed).storage_context.persist("storage")
    stock = (SentenceSplitter, SimpleDocumentStore, SimpleVectorStore, IngestionPipeline, DocstoreStrategy)
    return {
        **{stock_class.__name__: stock_class for stock_class in stock},
        **{name: getattr(llama_qcfuse, name) for name in llama_qcfuse.__all__},
        "llm": llama_qcfuse.QCFuseLLM.from_engine(FusionEngine(lm, MemoryStore(), method=METHOD), max_new_tokens=4),
        "embed": embed,
        "library": LIBRARY,
        "secret": SECRET,
        "documents": documents,
    }


def langchain(lm: LanguageModel) -> Names:
    embeddings = DeterministicFakeEmbedding(size=4)
    documents = [LangChainDocument(text, metadata={"source": name}) for name, text in LIBRARY.items()]
    InMemoryVectorStore.from_documents(documents, embeddings).dump("store.json")
    records = InMemoryRecordManager("docs")
    records.create_schema()
    return {
        **{name: getattr(langchain_qcfuse, name) for name in langchain_qcfuse.__all__},
        "InMemoryVectorStore": InMemoryVectorStore,
        "index": index,
        "record_manager": records,
        "embeddings": embeddings,
        "chat": langchain_qcfuse.ChatQCFuse.from_engine(FusionEngine(lm, MemoryStore(), method=METHOD), max_tokens=4),
        "library": LIBRARY,
        "secret": SECRET,
        "documents": documents,
    }


def page_names(page: Path) -> Callable[[LanguageModel], Names]:
    kind = page.stem if page.stem != "README" else page.parent.name
    return llama if "llama" in kind else langchain if "langchain" in kind else core


@pytest.fixture
def lm(llama: LanguageModel) -> LanguageModel:
    tokenizer = teach(copy.deepcopy(llama.tokenizer), "hermes")  # a page offers tools
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=4096), tokenizer)


@pytest.mark.parametrize(
    "page", cases({str(page.relative_to(ROOT)): page for page in PAGES}, "docs/guide/quick-start.md")
)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LanguageModel, "load", lambda *args, **settings: lm)  # models named on the pages are not here
    monkeypatch.setattr("qcfuse_rag.engine.engine.require_verdict", lambda *args, **settings: None)
    names = page_names(page)(lm)
    for block in blocks(page):
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
    if "engine" in names:
        names["engine"].close()  # ends what a page has left running


def test_pages_are_among_those_that_run() -> None:
    assert {"llamaindex.md", "langchain.md", "store.md", "observability.md", "recipes.md", "quick-start.md"} <= {
        page.name for page in PAGES
    }
