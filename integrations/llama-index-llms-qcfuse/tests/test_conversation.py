"""A chat engine of LlamaIndex over several turns computes what is new in each."""

from __future__ import annotations

from itertools import pairwise

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from llama_index.llms.qcfuse import QCFuseLLM
from qcfuse_rag import LanguageModel, MemoryStore
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES


def test_every_turn_reuses_the_turns_before(lm: LanguageModel) -> None:
    engine = make_engine(lm, MemoryStore(), prefix_bytes=1 << 30)
    llm = QCFuseLLM.from_engine(engine, max_new_tokens=6)
    memory = ChatMemoryBuffer.from_defaults(token_limit=1500)
    chat = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt=" ".join(PASSAGES))
    plain = QCFuseLLM.from_engine(make_engine(lm, engine.store), max_new_tokens=6)
    reports = []
    engine.observe(reports.append)
    for turn in range(10):
        answer = chat.chat(f"And {turn}?")
        asked = [ChatMessage(" ".join(PASSAGES), role="system"), *chat.chat_history[:-1]]
        assert answer.response == plain.chat(asked).message.content
    told = [(report.prompt_tokens, report.prefix_tokens) for report in reports]
    assert len(told) == 10
    assert told[0][1] == 0
    for (before, _), (tokens, prefix) in pairwise(told):
        assert tokens > prefix >= before - 8, "but the opening of the answer, which the next turn closes"
    engine.close()
