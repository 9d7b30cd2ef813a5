"""Models that think: variables of their chat templates, and reasoning apart from answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag import FusionEngine
from qcfuse_rag.errors import InvalidTemplate, MisplacedSetting
from tests.support.engines import make_warmed_engine
from tests.support.passages import QUESTION
from tests.support.thinking import answer_with, thinking_model
from tests.support.tool_templates import MOOR

ANSWER = "<think>\nHm.\n</think>\n\nYes."
NO_THINKING = {"enable_thinking": False}


class Boat(BaseModel):
    """A boat."""

    afloat: bool


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    return make_warmed_engine(thinking_model())


@pytest.fixture
def chat(engine: FusionEngine) -> ChatQCFuse:
    return ChatQCFuse.from_engine(engine, max_tokens=100)


def prompt_tokens(message: BaseMessage) -> int:
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return message.usage_metadata["input_tokens"]


async def test_reasoning_is_a_block_all_four_ways(chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ANSWER)
    streamed, awaited = AIMessageChunk(""), AIMessageChunk("")
    for chunk in chat.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        assert not (chunk.content and chunk.additional_kwargs), "a piece is of the answer or of its reasoning"
        streamed += chunk
    async for chunk in chat.astream(QUESTION):
        awaited += chunk
    for message in (chat.invoke(QUESTION), await chat.ainvoke(QUESTION), streamed, awaited):
        assert message.content == "Yes."
        assert message.additional_kwargs == {"reasoning_content": "Hm."}
        blocks = [(block["type"], block.get("reasoning") or block.get("text")) for block in message.content_blocks]
        assert blocks == [("reasoning", "Hm."), ("text", "Yes.")]


@pytest.mark.slow
def test_a_call_sets_variables_of_the_chat_template(chat: ChatQCFuse) -> None:
    plain, quiet = chat.invoke(QUESTION), chat.invoke(QUESTION, chat_template_kwargs=NO_THINKING)
    bound = chat.bind(chat_template_kwargs=NO_THINKING).invoke(QUESTION)
    tokens = len(chat.get_token_ids("<think>\n\n</think>\n\n"))
    assert prompt_tokens(quiet) == prompt_tokens(bound) == prompt_tokens(plain) + tokens
    with pytest.raises(InvalidTemplate, match="cannot set mood"):
        chat.invoke(QUESTION, chat_template_kwargs={"mood": "calm"})


def test_a_model_has_variables_that_documents_are_warmed_behind(engine: FusionEngine, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    engine.lm.model.save_pretrained(model)
    engine.lm.tokenizer.save_pretrained(model)
    effort = {"reasoning_effort": "low", **NO_THINKING}
    chat = ChatQCFuse(model=model, chat_template_kwargs=effort, store=str(tmp_path / "kv"), device="cpu")
    with pytest.warns(UserWarning, match="verif"):
        assert chat.engine
    assert chat._identifying_params["chat_template_kwargs"] == effort
    text = "".join(segment.text for segment in chat.engine.prompt(QUESTION).segments)
    assert text.startswith("<s>Effort: low.")
    assert text.endswith("</think>\n\n")
    chat.close()
    with pytest.raises(MisplacedSetting, match="chat_template_kwargs"):
        ChatQCFuse.from_engine(engine, chat_template_kwargs=effort)


def test_reasoning_comes_back_with_the_tools_result(chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "moor", "arguments": {}}\n</tool_call>'
    answer_with(monkeypatch, f"<think>\nMoor first.\n</think>\n\n{call}")
    asked = HumanMessage(QUESTION)
    message = chat.bind_tools([MOOR]).invoke([asked], max_tokens=200)
    assert (message.content, message.additional_kwargs) == ("", {"reasoning_content": "Moor first."})
    assert [called["name"] for called in message.tool_calls] == ["moor"]
    result = ToolMessage("Moored.", tool_call_id=message.tool_calls[0]["id"])
    blocks = AIMessage([{"type": "reasoning", "reasoning": "Moor first."}], tool_calls=message.tool_calls)
    bare = AIMessage("", tool_calls=message.tool_calls)
    counts = [chat.get_num_tokens_from_messages([asked, each, result]) for each in (message, blocks, bare)]
    assert counts[0] == counts[1] == counts[2] + len(chat.get_token_ids("<think>\nMoor first.\n</think>\n\n"))


def test_chains_pass_the_answer_on_without_its_reasoning(chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(chat.with_structured_output(Boat).invoke(QUESTION), Boat)
    answer_with(monkeypatch, ANSWER)
    chain = ChatPromptTemplate.from_messages([("human", "{question}")]) | chat
    assert str(chain.invoke({"question": QUESTION}).text) == "Yes."
