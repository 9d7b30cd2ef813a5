"""Agents and tools of LlamaIndex, over a tiny model whose chat template shows tools and whose answers are scripted."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, CodeActAgent, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ImageBlock, ToolCallBlock
from llama_index.core.memory import Memory
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from llama_index.llms.qcfuse import QCFuseLLM
from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.errors import InvalidTemplate
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.llama_index_documents import warmed_index
from tests.support.passages import PASSAGES, QUESTION
from tests.support.thinking import answer_in_turn
from tests.support.tool_templates import tool_model


class Boat(BaseModel):
    """A boat."""

    afloat: bool


class Choice(BaseModel):
    """Which boat."""

    boat: Literal["ferry", "tug"]


def look_up(boat: str) -> str:
    """Look a boat up."""
    return f"The {boat} is moored."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOOL = FunctionTool.from_defaults(look_up, fn_schema=Choice)
TUG, FERRY = call("look_up", boat="tug"), call("look_up", boat="ferry")


@pytest.fixture
def llm() -> Iterator[QCFuseLLM]:
    with make_engine(tool_model(window=8192), MemoryStore(), prefix_bytes=1 << 30) as engine:
        llm = QCFuseLLM.from_engine(engine, max_new_tokens=200)
        yield llm
        llm.close()


async def four_ways(llm: QCFuseLLM, **options: Any) -> list[ChatResponse]:
    """Return the answers to a question with tools; a stream's deltas are its text."""
    asked: dict[str, Any] = {"tools": [TOOL], "user_msg": QUESTION, **options}
    pieces = list(llm.stream_chat_with_tools(**asked))
    awaited = [piece async for piece in await llm.astream_chat_with_tools(**asked)]
    for streamed in (pieces, awaited):
        text = "".join(piece.delta or "" for piece in streamed)
        assert text.rstrip() == (streamed[-1].message.content or "")
    return [llm.chat_with_tools(**asked), await llm.achat_with_tools(**asked), pieces[-1], awaited[-1]]


@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_all_four_ways(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch, parallel: bool) -> None:
    answer_in_turn(monkeypatch, *[f"Let me see.\n{TUG}\n{FERRY}"] * 4)
    for response in await four_ways(llm, allow_parallel_tool_calls=parallel):
        assert (response.message.content or "").rstrip() == "Let me see."
        calls = llm.get_tool_calls_from_response(response)
        boats = [{"boat": "tug"}, {"boat": "ferry"}][: 1 + parallel]
        assert [selection.tool_kwargs for selection in calls] == boats
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        assert [block.tool_call_id for block in blocks] == [selection.tool_id for selection in calls]
        assert len(calls[0].tool_id) == 9


async def test_a_required_call_follows_its_schema(llm: QCFuseLLM) -> None:
    """The model is not trained, so that nothing but the grammar makes it call."""
    for response in await four_ways(llm, tool_required=True) + await four_ways(llm, tool_choice="look_up"):
        (selection,) = llm.get_tool_calls_from_response(response)
        assert selection.tool_kwargs["boat"] in ("ferry", "tug")
        assert response.message.content is None


async def test_what_is_called_is_done(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_in_turn(monkeypatch, TUG, f"{TUG}\n{FERRY}", "I cannot.", call("sink"), "I cannot.")
    assert str(llm.predict_and_call([TOOL], QUESTION)) == "The tug is moored."
    both = await llm.apredict_and_call([TOOL], QUESTION, allow_parallel_tool_calls=True)
    assert [str(source) for source in both.sources] == ["The tug is moored.", "The ferry is moored."]
    with pytest.raises(ValueError, match=r"calls no tool: it is text: 'I cannot.'"):
        llm.predict_and_call([TOOL], QUESTION)
    with pytest.raises(ValueError, match=r"names none of the tools look_up: '.*sink"):
        llm.predict_and_call([TOOL], QUESTION)
    assert str(llm.predict_and_call([TOOL], QUESTION, error_on_no_tool_call=False)) == "I cannot."


def test_whether_a_model_calls_tools_is_that_of_its_template(llm: QCFuseLLM) -> None:
    assert llm.metadata.is_function_calling_model
    lm = LanguageModel.wrap(build_model("llama"), build_tokenizer(lambda: PASSAGES))
    silent = QCFuseLLM.from_engine(make_engine(lm, MemoryStore()), max_new_tokens=4)
    assert not silent.metadata.is_function_calling_model
    with pytest.raises(InvalidTemplate, match="has no place for tools"):
        silent.chat_with_tools([TOOL], QUESTION)
    with pytest.raises(ValueError, match="leave out blocks of the type image"):
        llm.chat([ChatMessage(blocks=[ImageBlock(url="http://x/y.png")])])


@pytest.mark.parametrize("mode", [PydanticProgramMode.LLM, PydanticProgramMode.FUNCTION])
async def test_objects_follow_their_schema_as_text_and_as_calls(llm: QCFuseLLM, mode: PydanticProgramMode) -> None:
    llm.pydantic_program_mode = mode
    prompt = PromptTemplate("Is the {boat} afloat?")
    assert isinstance(llm.structured_predict(Boat, prompt, boat="tug"), Boat)
    assert isinstance(await llm.astructured_predict(Boat, prompt, boat="tug"), Boat)
    streams = "stream_call" in vars(LLMTextCompletionProgram)  # not in 0.14.5
    if mode is PydanticProgramMode.LLM and streams:  # as calls, LlamaIndex requires none in streams
        *_, last = llm.stream_structured_predict(Boat, prompt, boat="tug")
        assert last.afloat in (True, False)


async def test_a_function_agent_answers_from_a_query_engine(
    llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, Any]]
) -> None:
    """Each call reuses the one before it, tools' schemas and results too, and the passages come from the store."""
    index: VectorStoreIndex = warmed_index(llm)
    search = QueryEngineTool.from_defaults(
        index.as_query_engine(llm=llm, similarity_top_k=2), name="search", description="Search the reports."
    )
    answer_in_turn(monkeypatch, call("search", input=QUESTION), "The miller.", "It is the miller.", TUG, "So it is.")
    agent = FunctionAgent(tools=[search, TOOL], llm=llm, system_prompt="Be brief.")
    workflow = AgentWorkflow(agents=[agent])
    memory = Memory.from_defaults()
    handler = workflow.run(user_msg=QUESTION, memory=memory)
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == ["The miller."]
    assert str(await handler) == "It is the miller."
    asked, queried, answered = reports
    assert asked["prefix_tokens"] == 0
    assert queried["reused_tokens"] > 0
    assert answered["prefix_tokens"] >= asked["prompt_tokens"] - 4, "the system message, both tools and the question"

    await workflow.run(user_msg="And the tug?", memory=memory)
    follow_up, last = reports[3:]
    assert follow_up["prefix_tokens"] >= answered["prompt_tokens"] - 4, "the first tool's result too"
    assert last["prefix_tokens"] >= follow_up["prompt_tokens"] - 4


async def test_a_function_agent_answers_by_a_schema(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_in_turn(monkeypatch, TUG, "It is moored.")
    agent = FunctionAgent(tools=[TOOL], llm=llm, output_cls=Boat, streaming=False)
    output = await agent.run(user_msg=QUESTION)
    assert isinstance(output.get_pydantic_model(Boat), Boat)


async def test_a_react_agent(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    act = 'Thought: I need to look it up.\nAction: look_up\nAction Input: {"boat": "ferry"}'
    answer_in_turn(monkeypatch, act, "Thought: I can answer.\nAnswer: It is moored.")
    agent = ReActAgent(tools=[TOOL], llm=llm)
    handler = agent.run(user_msg=QUESTION)
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == ["The ferry is moored."]
    assert str(await handler) == "It is moored."


@pytest.mark.parametrize("kind", [FunctionAgent, ReActAgent])
async def test_a_workflow_hands_off(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    handoff: dict[str, Any] = {"to_agent": "writer", "reason": "It is found."}
    said = "Thought: Done.\nAnswer: All is well." if kind is ReActAgent else "All is well."
    step = f"Thought: Found.\nAction: handoff\nAction Input: {json.dumps(handoff)}"
    answer_in_turn(monkeypatch, step if kind is ReActAgent else call("handoff", **handoff), said)
    finder = kind(name="finder", description="Finds.", tools=[TOOL], llm=llm, can_handoff_to=["writer"])
    writer = kind(name="writer", description="Writes.", tools=[], llm=llm)
    result = await AgentWorkflow(agents=[finder, writer], root_agent="finder").run(user_msg=QUESTION)
    assert (str(result), result.current_agent_name) == ("All is well.", "writer")


async def test_a_code_act_agent(llm: QCFuseLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(code: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"look_up": look_up})
        return printed.getvalue()

    answer_in_turn(monkeypatch, 'I run:\n<execute>\nprint(look_up("tug"))\n</execute>', "It is moored.")
    agent = CodeActAgent(code_execute_fn=execute, tools=[TOOL], llm=llm)
    handler = agent.run(user_msg=QUESTION)
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output).strip() for result in results] == ["The tug is moored."]
    assert str(await handler) == "It is moored."
