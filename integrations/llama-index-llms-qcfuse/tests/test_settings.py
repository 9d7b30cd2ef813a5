"""Settings of an LLM, in every way that LlamaIndex has to set them, and invalid input."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, TextBlock
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from pydantic import BaseModel

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseSynthesizer, QCFuseVectorStore, QCFuseWarmup
from llama_index.llms.qcfuse.messages import turn_of
from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import MisplacedSetting, NotStored
from qcfuse_rag.integrations import SAMPLING_SETTINGS
from tests.support.llama_index_documents import warmed_index
from tests.support.passages import PASSAGES, QUESTION


class Boat(BaseModel):
    """A boat."""

    afloat: bool


ABOUT_A_BOAT = PromptTemplate("Is the {boat} afloat?")


@pytest.mark.filterwarnings("ignore::qcfuse_rag.errors.UnverifiedMethod")
def test_a_copy_with_another_method_loads_its_own_engine_or_raises(lm: LanguageModel, tmp_path: Path) -> None:
    for part in (lm.model, lm.tokenizer):
        part.save_pretrained(tmp_path)
    llm = QCFuseLLM(model=str(tmp_path), max_new_tokens=2, method="qcfuse")
    other = llm.model_copy(update={"method": "full"})
    llm.ratio = 0.5
    for model, method in ((llm, "qcfuse"), (other, "full")):
        assert model.complete("Who?").raw["report"]["method"] == method
    assert llm.model_copy(update={"temperature": 0.5}).engine is llm.engine
    for late in (llm.model_copy(update={"ratio": 0.1}), QCFuseLLM.from_engine(llm.engine)):
        late.base = "framed"
        with pytest.raises(MisplacedSetting, match="changed after the engine was loaded"):
            late.complete("Who?")


def test_sampling_settings_are_those_of_the_engine(llm: QCFuseLLM) -> None:
    settings = dict.fromkeys(SAMPLING_SETTINGS, 0.5) | {"top_k": 3, "seed": 4, "fidelity": "exact"}
    copied = llm.model_copy(update=settings).sampling()
    assert {name: getattr(copied, name) for name in SAMPLING_SETTINGS} == settings
    assert llm.sampling(**settings) == copied
    assert llm.sampling(stop="END").stop == ("END",), "a single string is one string"


def test_a_prompt_that_is_too_long_is_a_value_error_and_a_long_answer_is_none(llm: QCFuseLLM) -> None:
    window = llm.metadata.context_window
    for ask in (llm.complete, lambda text: list(llm.stream_complete(text)), lambda text: llm.chat([ChatMessage(text)])):
        with pytest.raises(ValueError, match="exceeds the context window"):
            ask("x " * window)
    report = llm.complete("x " * (window // 2 - 40), max_new_tokens=10**9).raw["report"]
    assert "no more fit the context window" in report["answer_limit"]


def test_given_functions_word_the_prompts(llm: QCFuseLLM) -> None:
    worded = QCFuseLLM.from_engine(
        llm.engine,
        max_new_tokens=2,
        messages_to_prompt=lambda messages: f"<s>{messages[0].content}</s>",
        completion_to_prompt=lambda text: f"<s>Q: {text}",
    )
    ids = llm.engine.lm.tokenizer("<s>Who?</s>", add_special_tokens=False).input_ids
    assert worded.chat([ChatMessage("Who?")]).raw["report"]["prompt_tokens"] == len(ids)
    ids = llm.engine.lm.tokenizer("<s>Q: Who?", add_special_tokens=False).input_ids
    assert worded.complete("Who?").raw["report"]["prompt_tokens"] == len(ids)
    assert worded.complete("<s>Q: Who?", formatted=True).raw["report"]["prompt_tokens"] == len(ids)


def test_the_synthesizer_uses_the_system_prompt(llm: QCFuseLLM, reports: list[dict[str, Any]]) -> None:
    pirate = QCFuseLLM.from_engine(llm.engine, max_new_tokens=2, system_prompt="You are a pirate.")
    for model in (llm, pirate):
        model.engine.warm(PASSAGES)
        QCFuseSynthesizer(model).get_response(QUESTION, PASSAGES)
    plain, piratical = reports
    system_tokens = len(llm.engine.lm.tokenizer("You are a pirate.", add_special_tokens=False).input_ids)
    assert piratical["prompt_tokens"] >= plain["prompt_tokens"] + system_tokens
    assert all(lookup["hit"] for lookup in piratical["lookups"])


async def test_objects_follow_their_schema_when_they_are_streamed_too(llm: QCFuseLLM) -> None:
    pytest.importorskip("llguidance")
    if "stream_call" not in vars(LLMTextCompletionProgram):
        pytest.skip("this LlamaIndex streams no objects")
    roomy = llm.model_copy(update={"max_new_tokens": 60})
    expected = roomy.structured_predict(Boat, ABOUT_A_BOAT, boat="ferry")
    *_, last = roomy.stream_structured_predict(Boat, ABOUT_A_BOAT, boat="ferry")
    assert last.model_dump() == expected.model_dump()
    *_, last = [boat async for boat in await roomy.astream_structured_predict(Boat, ABOUT_A_BOAT, boat="ferry")]
    assert last.model_dump() == expected.model_dump()
    messages, structured = [ChatMessage("Is the ferry afloat?")], roomy.as_structured_llm(Boat)
    *_, last = structured.stream_chat(messages)
    assert last.raw.model_dump() == expected.model_dump()
    queries = warmed_index(llm).as_query_engine(llm=structured, similarity_top_k=3)
    assert isinstance(queries.query(QUESTION).response, Boat)


def test_the_text_of_citable_blocks_is_read() -> None:
    citable = CitableBlock(title="Harbour", source="a.md", content=[TextBlock(text="Orla.")])
    blocks = [TextBlock(text="Who paints?"), citable]
    assert turn_of(ChatMessage(blocks=blocks))["content"] == "Who paints?\nOrla."


async def test_passages_that_cannot_be_stored_raise_a_warning(llm: QCFuseLLM) -> None:
    long = TextNode(text="All of it. " * 9000, embedding=[1.0, 0.0])
    message = "1 passages were not stored, the first because of: a passage of"
    with pytest.warns(NotStored, match=message) as warned:
        QCFuseVectorStore(SimpleVectorStore(), llm).add([long])
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.warns(NotStored):
        QCFuseWarmup(llm)([long])


async def test_warming_in_a_pipeline_leaves_the_event_loop_alone(llm: QCFuseLLM) -> None:
    nodes = [TextNode(text=f"{number} boats. {PASSAGES[number % 3]}") for number in range(12)]
    ticks = 0
    warming = asyncio.create_task(QCFuseWarmup(llm).acall(nodes))
    while not warming.done():
        await asyncio.sleep(0.002)
        ticks += 1
    assert await warming == nodes
    assert ticks > 5, "other tasks ran meanwhile"


def test_a_base_that_does_not_exist_is_refused_when_it_is_named(llm: QCFuseLLM) -> None:
    with pytest.raises(ValueError, match="there is no base 'nonsense'; there are blind, framed"):
        QCFuseWarmup(llm, bases=["nonsense"])


def test_a_call_can_switch_log_probabilities_off(llm: QCFuseLLM) -> None:
    asking = llm.model_copy(update={"logprobs": True, "top_logprobs": 2})
    assert asking.top_count({}) == 2
    assert asking.top_count({"logprobs": False}) is None
    with pytest.raises(ValueError, match="top_logprobs needs logprobs"):
        asking.top_count({"logprobs": False, "top_logprobs": 3})
