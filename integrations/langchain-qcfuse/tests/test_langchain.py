"""The LangChain objects in real chains, over a tiny random model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_qcfuse import ChatQCFuse, create_qcfuse_chain
from qcfuse_rag import LanguageModel, QCFuseError, SamplingParams, make_method
from qcfuse_rag.errors import MisplacedSetting, PromptTooLong, UnusedSetting
from tests.support.passages import PASSAGES, QUESTION

DOCUMENTS = [Document(page_content=text, metadata={"n": i}) for i, text in enumerate(PASSAGES)]
INPUTS = {"input": QUESTION, "context": DOCUMENTS}


def fusion(message: Any) -> dict[str, Any]:
    report: dict[str, Any] = message.response_metadata["fusion"]
    return report


def test_warmed_documents_are_reused(chat: ChatQCFuse) -> None:
    assert chat.warm(DOCUMENTS).warmed == 3
    message = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert [lookup["hit"] for lookup in fusion(message)["lookups"]] == [True] * 4
    prompt = chat.engine.prompt(QUESTION, PASSAGES)
    assert message.content == chat.engine.generate(prompt, SamplingParams(max_new_tokens=12)).text
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    usage, details = message.usage_metadata, message.usage_metadata["input_token_details"]
    assert details["cache_read"] == fusion(message)["reused_tokens"] > 0
    assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_a_prompt_that_is_too_long_is_langchains_error_and_a_long_answer_is_none(chat: ChatQCFuse) -> None:
    window = chat.engine.lm.context_window.tokens
    for length in (window, 50 * window):  # measured in tokens, and refused by its characters
        long = "x " * length
        for ask in (chat.invoke, lambda text: list(chat.stream(text))):
            with pytest.raises(ContextOverflowError, match="exceeds the context window"):
                ask(long)
        with pytest.raises(PromptTooLong):
            await chat.ainvoke(long)
        with pytest.raises(ContextOverflowError):
            [chunk async for chunk in chat.astream(long)]
    message = chat.bind(max_tokens=10**9).invoke("x " * (window // 2 - 40))
    assert "no more fit the context window" in fusion(message)["answer_limit"]


async def test_streaming_and_asynchronous_forms_give_the_same_answer_and_one_usage(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    chunks = list(chat.stream(QUESTION, documents=DOCUMENTS))
    assert len(chunks) > 2
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    expected = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert total.content == expected.content
    assert total.usage_metadata == expected.usage_metadata  # type: ignore[attr-defined]
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1  # type: ignore[attr-defined]
    assert (await chat.ainvoke(QUESTION, documents=DOCUMENTS)).content == expected.content
    pieces = [chunk.content async for chunk in chat.astream(QUESTION, documents=DOCUMENTS)]
    assert "".join(map(str, pieces)) == expected.content


def test_an_exact_answer_is_full_prefills(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    engine = chat.engine
    prompt, params = engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=12)
    expected = engine.generate(prompt, params, method=make_method("full"))
    for model in (chat.bind(fidelity="exact"), ChatQCFuse.from_engine(engine, max_tokens=12, fidelity="exact")):
        message = model.invoke(QUESTION, documents=DOCUMENTS)
        assert message.content == expected.text
        assert message.response_metadata["verified_upto"] == len(expected.ids)
    assert chat.invoke(QUESTION, documents=DOCUMENTS).response_metadata["verified_upto"] is None


def test_log_probabilities_are_where_chat_openai_has_them(chat: ChatQCFuse) -> None:
    bound = chat.bind(logprobs=True, top_logprobs=2)
    message = bound.invoke(QUESTION)
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == message.content
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 12
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    total = None
    for chunk in bound.stream(QUESTION):
        total = chunk if total is None else total + chunk
    assert isinstance(total, AIMessageChunk)
    assert total.response_metadata["logprobs"] == message.response_metadata["logprobs"]
    assert "logprobs" not in chat.invoke(QUESTION).response_metadata
    with pytest.raises(ValueError, match="needs logprobs=True"):
        chat.bind(top_logprobs=2).invoke(QUESTION)


async def test_a_chain_takes_what_the_stuff_chain_takes(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    chain = create_qcfuse_chain(chat)
    answer = chain.invoke(INPUTS)
    assert answer == chat.invoke(QUESTION, documents=DOCUMENTS).content
    assert "".join(chain.stream(INPUTS)) == answer
    assert len(list(chain.stream(INPUTS))) > 2, "a stream, not one piece"
    assert chain.batch([INPUTS, INPUTS]) == [answer, answer]
    assert await chain.ainvoke(INPUTS) == answer
    assert "".join([piece async for piece in chain.astream(INPUTS)]) == answer


def test_earlier_turns_reach_the_model_and_chunks_are_still_found(chat: ChatQCFuse) -> None:
    chat.warm(DOCUMENTS)
    turns = [HumanMessage("Hello."), AIMessage("Hello!")]
    message = chat.invoke([*turns, HumanMessage(QUESTION)], documents=DOCUMENTS)
    chunks = [lookup for lookup in fusion(message)["lookups"] if lookup["role"] == "chunk"]
    assert [lookup["hit"] for lookup in chunks] == [True] * 3
    alone = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert fusion(message)["prompt_tokens"] > fusion(alone)["prompt_tokens"]
    assert create_qcfuse_chain(chat).invoke({**INPUTS, "chat_history": turns}) == message.content


def test_without_documents_it_is_a_plain_chat_model(chat: ChatQCFuse) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{input}")])
    message = (prompt | chat).invoke({"input": "The ferry"})
    tokenizer = chat.engine.lm.tokenizer
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The ferry"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = chat.engine.lm.model.generate(**ids, max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    # A character cut in half by the length limit is left out of the answer.
    assert message.content == expected.rstrip("\ufffd")


def test_stop_strings_and_settings_of_one_call(chat: ChatQCFuse) -> None:
    free = str(chat.invoke("The ferry").content)
    assert chat.invoke("The ferry", stop=[free[3:5]]).content == free[: free.index(free[3:5])]
    assert chat.invoke("The ferry", max_tokens=2).usage_metadata["output_tokens"] == 2  # type: ignore[index]
    bound = chat.bind(stop=[free[3:5]])
    assert bound.invoke([SystemMessage("Be brief."), HumanMessage("The ferry")]).content is not None


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="methd"):
        ChatQCFuse(model="anything", methd="full")  # type: ignore[call-arg]


def test_load_settings_beside_an_engine_are_refused(chat: ChatQCFuse) -> None:
    with pytest.raises(MisplacedSetting, match="set store when you load it"):
        ChatQCFuse.from_engine(chat.engine, store="kv")


def test_settings_without_effect_raise_a_warning_at_the_callers_line(chat: ChatQCFuse) -> None:
    with pytest.warns(UnusedSetting, match="timeout: no effect on a model in this process"):
        ChatQCFuse(model="anything", timeout=5)  # type: ignore[call-arg]
    with pytest.warns(UnusedSetting, match="max_new_tokens: no effect here; a call takes max_tokens") as warned:
        chat.invoke("Ada", max_new_tokens=2)
    assert [warning.filename for warning in warned] == [__file__]


def test_another_process_gets_the_same_chat_model_and_loads_it_for_itself(lm: LanguageModel, tmp_path: Path) -> None:
    for part in (lm.model, lm.tokenizer):
        part.save_pretrained(tmp_path / "model")
    chat = ChatQCFuse(model=str(tmp_path / "model"), store=str(tmp_path / "kv"), method="reuse", max_tokens=5)
    chat.warm(DOCUMENTS)
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    unpickled = pickle.loads(pickle.dumps(chat))
    assert unpickled.model_dump() == chat.model_dump()
    chat.close()
    again = unpickled.invoke(QUESTION, documents=DOCUMENTS)
    assert again.content == answer.content
    assert all(lookup["hit"] for lookup in fusion(again)["lookups"])
    unpickled.close()


def test_an_engine_stays_in_its_process(chat: ChatQCFuse) -> None:
    """Another process could only load it without its store, and would silently reuse nothing."""
    unpickled = pickle.loads(pickle.dumps(chat))
    with pytest.raises(QCFuseError, match=r"create it with model=\.\.\. and store=\.\.\."):
        unpickled.invoke(QUESTION)
    assert chat.invoke(QUESTION).content
