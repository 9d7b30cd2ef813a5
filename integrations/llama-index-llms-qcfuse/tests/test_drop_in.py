"""In place of HuggingFaceLLM, on a real model: every node reused, and with all rows recomputed the same answers."""

from __future__ import annotations

from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import resolve_embed_model
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter

from llama_index.llms.qcfuse import FusionEndEvent, QCFuseLLM, QCFuseWarmup
from qcfuse_rag.bundled import corpus, default_embedder
from tests.support.smollm2 import TAKES_MINUTES, smollm2_questions

pytestmark = TAKES_MINUTES
COUNT = 30


class Reports(BaseEventHandler):
    """Keeps the report of every prompt."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012 - a field of a pydantic model

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, FusionEndEvent):
            self.seen.append(event.report)


def test_the_same_answers_as_huggingface_llm_and_every_node_reused(smollm2_folder: str) -> None:
    # Takes seconds, which no other test should wait for.
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    from llama_index.llms.huggingface import HuggingFaceLLM

    theirs = HuggingFaceLLM(
        model_name=smollm2_folder,
        tokenizer_name=smollm2_folder,
        device_map="cpu",
        is_chat_model=True,
        max_new_tokens=16,
        context_window=8192,
        generate_kwargs={"do_sample": False},
        model_kwargs={"dtype": "float32"},
    )
    ours = QCFuseLLM(model=smollm2_folder, device="cpu", method="qcfuse", ratio=1.0, max_new_tokens=16)

    documents = [Document(text=text, id_=name) for name, text in corpus().items()]
    nodes = SentenceSplitter(chunk_size=200, chunk_overlap=0)(documents)
    index = VectorStoreIndex(nodes, embed_model=resolve_embed_model(HuggingFaceEmbedding(default_embedder())))
    QCFuseWarmup(ours)(nodes)  # the warming line; the LLM line follows
    engines = [index.as_query_engine(llm=llm, similarity_top_k=3) for llm in (theirs, ours)]

    root, reports = get_dispatcher(), Reports()
    root.add_event_handler(reports)
    try:
        answers = [[str(engine.query(question)) for engine in engines] for question in smollm2_questions(COUNT)]
    finally:
        root.event_handlers.remove(reports)
        ours.close()
    assert [mine for _, mine in answers] == [yours for yours, _ in answers]
    assert len(reports.seen) == COUNT
    for report in reports.seen:
        assert all(lookup["hit"] for lookup in report["lookups"])
        # The beginning that a prompt shares with an earlier one is reused without a lookup.
        assert len(report["lookups"]) == 3 or report["prefix_tokens"]
