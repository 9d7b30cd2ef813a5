"""A chain with a message history computes what is new in each turn."""

from __future__ import annotations

from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory

from langchain_qcfuse import ChatQCFuse
from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.fusion.prefix_cache import PREFIX_BYTES
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES


def test_every_turn_reuses_the_turns_before_of_its_own_session(lm: LanguageModel) -> None:
    engine = make_engine(lm, MemoryStore(), prefix_bytes=PREFIX_BYTES)
    chat = ChatQCFuse.from_engine(engine, max_tokens=6)
    prompt = ChatPromptTemplate.from_messages(
        [("system", " ".join(PASSAGES)), MessagesPlaceholder("history"), ("human", "{input}")]
    )
    plain = prompt | ChatQCFuse.from_engine(make_engine(lm, engine.store), max_tokens=6)
    histories = {session: InMemoryChatMessageHistory() for session in "ab"}
    chain = RunnableWithMessageHistory(
        prompt | chat, lambda session: histories[session], input_messages_key="input", history_messages_key="history"
    )
    before = dict.fromkeys(histories, 0)
    for turn in range(10):
        for session in histories:
            message = chain.invoke({"input": f"{session} {turn}?"}, config={"configurable": {"session_id": session}})
            usage = message.usage_metadata
            assert usage is not None
            reused = usage["input_token_details"]["cache_read"]
            assert usage["input_tokens"] > reused >= before[session] - 8
            assert reused == message.response_metadata["fusion"]["prefix_tokens"]
            before[session] = usage["input_tokens"]
            earlier = histories[session].messages[:-2]
            assert message.content == plain.invoke({"history": earlier, "input": f"{session} {turn}?"}).content
    engine.close()
