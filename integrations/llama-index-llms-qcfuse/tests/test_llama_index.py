"""The LlamaIndex objects in real pipelines and query engines, over a tiny random model."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import PromptTemplate as Wording
from llama_index.core.schema import MetadataMode, TextNode

from llama_index.llms.qcfuse import QCFuseLLM, QCFusePostprocessor, QCFuseSynthesizer, QCFuseWarmup
from qcfuse_rag import LanguageModel, PromptTemplate, QCFuseError
from qcfuse_rag.errors import MisplacedSetting, UnusedSetting
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.llama_index_documents import warmed_index
from tests.support.passages import PASSAGES, QUESTION


def query_engine(llm: QCFuseLLM, index: VectorStoreIndex, **options: Any) -> Any:
    return index.as_query_engine(
        llm=llm,
        similarity_top_k=3,
        node_postprocessors=[QCFusePostprocessor(llm=llm)],
        response_synthesizer=QCFuseSynthesizer(llm, **options),
        **options,
    )


def test_classes_are_what_llama_index_expects() -> None:
    assert {"FunctionCallingLLM", "LLM", "BaseLLM"} <= {base.__name__ for base in QCFuseLLM.__mro__}
    assert "BaseSynthesizer" in {base.__name__ for base in QCFuseSynthesizer.__mro__}
    assert "BaseNodePostprocessor" in {base.__name__ for base in QCFusePostprocessor.__mro__}
    assert "TransformComponent" in {base.__name__ for base in QCFuseWarmup.__mro__}


def test_a_query_over_warmed_nodes_reuses_all_of_them(llm: QCFuseLLM, reports: list[dict[str, Any]]) -> None:
    response = query_engine(llm, warmed_index(llm)).query(QUESTION)
    assert len(response.source_nodes) == 3
    [report] = reports
    assert [lookup["hit"] for lookup in report["lookups"]] == [True] * 4
    assert report["fallback"] is None
    texts = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in response.source_nodes]
    assert "page: " in texts[0], "metadata is part of what is warmed and prompted"
    engine = llm.engine
    assert str(response) == engine.generate(engine.prompt(QUESTION, texts), llm.sampling()).text


def test_streaming_yields_the_same_answer_in_pieces(llm: QCFuseLLM) -> None:
    index = warmed_index(llm)
    pieces = list(query_engine(llm, index, streaming=True).query(QUESTION).response_gen)
    assert len(pieces) > 1
    assert "".join(pieces) == str(query_engine(llm, index).query(QUESTION))


def test_log_probabilities_are_where_llama_index_has_them(llm: QCFuseLLM) -> None:
    response = llm.complete(QUESTION, logprobs=True, top_logprobs=2)
    assert response.logprobs is not None
    assert [len(place) for place in response.logprobs] == [2] * llm.max_new_tokens
    assert "".join(place[0].token for place in response.logprobs) == response.text, "a greedy answer is the likeliest"
    alone = llm.chat([ChatMessage(QUESTION)], logprobs=True)
    assert alone.logprobs == [[place[0]] for place in response.logprobs]
    *pieces, last = llm.stream_complete(QUESTION, logprobs=True)
    assert last.logprobs == alone.logprobs
    assert {piece.logprobs for piece in [*pieces, llm.complete(QUESTION)]} == {None}
    with pytest.raises(ValueError, match="needs logprobs=True"):
        llm.complete(QUESTION, top_logprobs=2)


async def test_asynchronous_queries_answer_alike_and_let_the_loop_run(llm: QCFuseLLM) -> None:
    index, ticks = warmed_index(llm), 0

    async def clock() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(clock())
    response = await query_engine(llm, index).aquery(QUESTION)
    streamed = await query_engine(llm, index, streaming=True).aquery(QUESTION)
    pieces = [piece async for piece in streamed.async_response_gen()]
    ticking.cancel()
    assert "".join(pieces) == str(response) == str(query_engine(llm, index).query(QUESTION))
    assert ticks > 3


def test_the_pipelines_own_cache_does_not_hide_a_change(llm: QCFuseLLM) -> None:
    """IngestionPipeline skips a transform it has seen; another model or another wording must not be skipped."""
    lm, store = llm.engine.lm, llm.engine.store
    other_model = make_engine(LanguageModel.wrap(build_model("llama", seed=1), lm.tokenizer), store)
    wording = PromptTemplate(messages=(("user", "Read.\n\n{context}{question}"),))
    pipeline = IngestionPipeline(transformations=[])
    warmed = []
    for engine in (llm.engine, llm.engine, other_model, make_engine(lm, store, template=wording)):
        warmup = QCFuseWarmup(QCFuseLLM.from_engine(engine))
        pipeline.transformations = [warmup]
        pipeline.run(documents=[Document(text=text, id_=text[:9]) for text in PASSAGES])
        warmed.append(warmup.summary.warmed if warmup.summary else 0)
    assert warmed == [3, 0, 3, 3]


def test_complete_and_chat_are_the_models_own_answers(llm: QCFuseLLM) -> None:
    tokenizer = llm.engine.lm.tokenizer
    for ask, text in (
        (lambda: llm.complete("The ferry", formatted=True).text, "The ferry"),
        (
            lambda: llm.chat([ChatMessage(role="user", content="The ferry")]).message.content,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "The ferry"}], tokenize=False, add_generation_prompt=True
            ),
        ),
    ):
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        expected = llm.engine.lm.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        # A character cut in half by the length limit is left out of the answer.
        assert ask() == tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")


def test_usage_and_report_are_plain_data(llm: QCFuseLLM) -> None:
    completion = llm.complete("The ferry", max_new_tokens=3)
    counts = completion.additional_kwargs
    assert counts["completion_tokens"] == 3, "settings of one call win"
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert completion.raw["report"]["method"] == "qcfuse"
    assert llm.metadata.context_window == 8192
    assert llm.metadata.is_chat_model


def test_an_exact_answer_says_how_far_it_is_verified(llm: QCFuseLLM) -> None:
    exact = QCFuseLLM.from_engine(llm.engine, max_new_tokens=12, fidelity="exact").complete("The ferry")
    assert exact.raw["verified_upto"] == exact.additional_kwargs["completion_tokens"]
    assert llm.complete("The ferry", fidelity="exact").raw["healing"]["fidelity"] == "exact"
    assert llm.complete("The ferry").raw["verified_upto"] is None


def test_unsupported_options_of_the_synthesizer_are_refused(llm: QCFuseLLM) -> None:
    with pytest.raises(ValueError, match="answers in text only; leave out output_cls"):
        QCFuseSynthesizer(llm, output_cls=Document)


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="methd"):
        QCFuseLLM(model="anything", methd="full")  # type: ignore[call-arg]


def test_serialised_settings_restore_the_same_llm() -> None:
    llm = QCFuseLLM(model="anything", seed=3)
    assert QCFuseLLM.from_dict(llm.to_dict()).seed == 3
    assert QCFuseLLM.model_validate(llm.model_dump()).seed == 3


def test_load_settings_beside_an_engine_are_refused(llm: QCFuseLLM) -> None:
    with pytest.raises(MisplacedSetting, match="set model, method, ratio when you load it"):
        QCFuseLLM.from_engine(llm.engine, ratio=0.1, method="qcfuse", model="another")
    assert QCFuseLLM.from_engine(llm.engine, method=None).engine is llm.engine


def test_settings_of_a_call_without_effect_raise_a_warning_at_the_callers_line(llm: QCFuseLLM) -> None:
    with pytest.warns(UnusedSetting, match="max_tokens: no effect here; a call takes max_new_tokens") as warned:
        llm.complete("Ada", max_tokens=2)
    assert [warning.filename for warning in warned] == [__file__]


def test_changing_the_wording_says_how(llm: QCFuseLLM) -> None:
    synthesizer = QCFuseSynthesizer(llm)
    with pytest.raises(ValueError, match="give QCFuseLLM other `rag_messages` and warm again"):
        synthesizer.update_prompts({"text_qa_template": MockLLM()})


async def test_the_methods_that_llama_index_derives_agree(llm: QCFuseLLM) -> None:
    """As in its own tests of LLMs: chat, completion and their streams give the same text, awaited or not."""
    message = [ChatMessage(QUESTION)]
    text = llm.chat(message).message.content
    assert text == llm.complete(QUESTION).text == (await llm.acomplete(QUESTION)).text
    assert text == (await llm.achat(message)).message.content
    assert text == list(llm.stream_chat(message))[-1].message.content
    assert text == [piece async for piece in await llm.astream_chat(message)][-1].message.content
    assert text == "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION))
    assert text == [piece async for piece in await llm.astream_complete(QUESTION)][-1].text
    assert text == llm.predict(Wording(QUESTION)) == await llm.apredict(Wording(QUESTION))
    assert text == "".join(llm.stream(Wording(QUESTION)))
    assert QCFuseLLM.class_name() == type(llm).class_name() == llm.to_dict()["class_name"]


def test_other_processes_get_the_same_llm_and_load_it_for_themselves(
    lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `IngestionPipeline(num_workers=...)` sends it to them, and what warms nodes with it."""
    for part in (lm.model, lm.tokenizer):
        part.save_pretrained(tmp_path / "model")
    llm = QCFuseLLM(model=str(tmp_path / "model"), store=str(tmp_path / "kv"), method="reuse", max_new_tokens=5)
    warmup, unpickled = pickle.loads(pickle.dumps((QCFuseWarmup(llm, bases=["framed"]), llm)))
    assert unpickled.to_dict() == llm.to_dict()
    assert warmup.bases == ["framed"]
    warmup([TextNode(text=text) for text in PASSAGES])
    prompt = unpickled.engine.prompt(QUESTION, PASSAGES)
    assert all(lookup.hit for lookup in unpickled.engine.prefill(prompt).report.lookups)
    assert "Removing unpickleable" not in caplog.text
    for model in (warmup.llm, unpickled, llm):
        model.close()


def test_an_engine_stays_in_its_process(llm: QCFuseLLM) -> None:
    """Another process could only load it without its store, and would silently reuse nothing.

    LlamaIndex removes attributes that cannot be pickled from the objects that hold them, in this process too, so an LLM
    has to be picklable.
    """
    holder = QCFusePostprocessor(llm=llm)
    for unpickled in (pickle.loads(pickle.dumps(llm)), pickle.loads(pickle.dumps(holder)).llm):
        with pytest.raises(QCFuseError, match=r"create it with model=\.\.\. and store=\.\.\."):
            unpickled.complete("Hello")
    assert holder.llm is llm
    assert llm.complete("Hello").text


@pytest.mark.parametrize("how", ["of an engine", "of a model without a folder"])
def test_warming_in_other_processes_is_refused_if_its_caches_would_be_lost(how: str, llm: QCFuseLLM) -> None:
    portable = QCFuseWarmup(llm)
    if how != "of an engine":
        portable.llm = QCFuseLLM(model="some/model")
    with pytest.raises(TypeError, match="and store=FOLDER"):
        pickle.dumps(portable)
