"""Settings of a chat model, in every way that LangChain has to set them, and invalid input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.runnables import ConfigurableField

from langchain_qcfuse import ChatQCFuse, create_qcfuse_chain
from qcfuse_rag import EngineConfig, FusionEngine, LanguageModel, MemoryStore, PromptTemplate, make_method
from qcfuse_rag.errors import MisplacedSetting
from qcfuse_rag.integrations import SAMPLING_SETTINGS
from tests.support.passages import PASSAGES, QUESTION

DOCUMENTS = [Document(page_content=text) for text in PASSAGES]


@pytest.fixture
def folder(lm: LanguageModel, tmp_path: Path) -> str:
    """Return a folder with the model."""
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of models when they are loaded."""
    names, load = list[str](), FusionEngine.load

    def loading(config: EngineConfig) -> FusionEngine:
        names.append(config.model or "")
        return load(config)

    monkeypatch.setattr(FusionEngine, "load", loading)
    return names


@pytest.mark.filterwarnings("ignore::qcfuse_rag.errors.UnverifiedMethod")
def test_configured_copies_share_the_model_and_the_store(folder: str, loaded: list[str]) -> None:
    chat = ChatQCFuse(model=folder, max_tokens=2, method="reuse")
    chat.warm(DOCUMENTS)
    fields = {"temperature": ConfigurableField(id="t"), "method": ConfigurableField(id="m")}
    changed = chat.configurable_fields(**fields)
    for temperature in (0.0, 0.5):
        message = changed.invoke("Who?", documents=DOCUMENTS, config={"configurable": {"t": temperature}})
        assert message.response_metadata["fusion"]["reused_tokens"] > 0
    assert loaded == [folder]
    with pytest.raises(MisplacedSetting, match="method changed after the engine was loaded"):
        changed.invoke("Who?", config={"configurable": {"m": "full"}})
    chat.close()


@pytest.mark.filterwarnings("ignore::qcfuse_rag.errors.UnverifiedMethod")
def test_a_copy_with_another_method_loads_its_own_engine_or_raises(folder: str) -> None:
    chat = ChatQCFuse(model=folder, max_tokens=2, method="qcfuse")
    other = chat.model_copy(update={"method": "full"})
    chat.ratio = 0.5
    for model, method in ((chat, "qcfuse"), (other, "full")):
        assert model.invoke("Who?").response_metadata["fusion"]["method"] == method
    assert other.engine is not chat.engine
    for late in (chat.model_copy(update={"ratio": 0.1}), ChatQCFuse.from_engine(chat.engine)):
        late.base = "framed"
        with pytest.raises(MisplacedSetting, match="changed after the engine was loaded"):
            late.invoke("Who?")
    assert chat.invoke("Who?").content


def test_none_means_the_default(chat: ChatQCFuse) -> None:
    plain = chat.invoke(QUESTION).content
    assert chat.invoke(QUESTION, temperature=None, max_tokens=None, top_p=None, stop=None).content == plain
    assert ChatQCFuse(model="M", temperature=None, max_tokens=None, stop=None).temperature == 0


def test_sampling_settings_are_those_of_the_engine(chat: ChatQCFuse) -> None:
    settings = dict.fromkeys(SAMPLING_SETTINGS, 1.0) | {"top_k": 3, "presence_penalty": 2.0, "top_p": 0.9}
    settings |= {"seed": 4, "fidelity": "exact"}
    _, sampling = chat._request([HumanMessage("Who?")], None, dict(settings))(chat.engine)
    assert {name: getattr(sampling, name) for name in SAMPLING_SETTINGS} == settings


def test_answers_of_other_engines_are_not_taken_from_langchains_cache(chat: ChatQCFuse) -> None:
    lm, template = chat.engine.lm, PromptTemplate(messages=(("user", "{context}{question}"),))
    engines = [
        chat.engine,
        FusionEngine(lm, MemoryStore(), method=make_method("full")),
        FusionEngine(lm, MemoryStore(), method=make_method("full"), template=template),
    ]
    set_llm_cache(InMemoryCache())
    try:
        for engine in engines:
            model = ChatQCFuse.from_engine(engine, max_tokens=3)
            first = model.invoke(QUESTION, documents=DOCUMENTS).response_metadata["fusion"]
            assert first["method"] == engine.method.name
            again = ChatQCFuse.from_engine(engine, max_tokens=3).invoke(QUESTION, documents=DOCUMENTS)
            assert again.response_metadata["fusion"] == first, "that is what the cache is for"
            assert model._get_llm_string() != ChatQCFuse.from_engine(engine, max_tokens=5)._get_llm_string()
    finally:
        set_llm_cache(None)


def test_tokens_are_counted_by_the_models_own_tokenizer(chat: ChatQCFuse) -> None:
    tokenizer = chat.engine.lm.tokenizer
    assert chat.get_token_ids(PASSAGES[0]) == tokenizer(PASSAGES[0], add_special_tokens=False).input_ids
    messages = [
        SystemMessage("Be brief."),
        *(HumanMessage(PASSAGES[0]), AIMessage(PASSAGES[1])) * 3,
        HumanMessage("Why?"),
    ]
    usage = chat.invoke(messages).usage_metadata
    assert usage is not None
    assert chat.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    kept = trim_messages(messages, max_tokens=150, token_counter=chat, strategy="last", include_system=True)
    assert 2 < len(kept) < len(messages)
    assert chat.get_num_tokens_from_messages(kept) <= 150
    assert chat.get_num_tokens_from_messages([]) == 0


@pytest.mark.parametrize(
    ("messages", "documents", "message"),
    [
        ([], None, "give at least one message"),
        ([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])], None, "leave out blocks of image_url"),
        ("Why?", ["a text"], "documents are a list of langchain_core's Document, not of str"),
        ("Why?", "a text", "documents are a list of langchain_core's Document, not of str"),
        ("Why?", DOCUMENTS[0], "documents are a list of langchain_core's Document, not of tuple"),
    ],
)
def test_invalid_input_raises_a_clear_error(chat: ChatQCFuse, messages: Any, documents: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        chat.invoke(messages, documents=documents)


def test_a_chain_without_a_history_yet(chat: ChatQCFuse) -> None:
    inputs = {"input": QUESTION, "context": DOCUMENTS}
    chain = create_qcfuse_chain(chat)
    assert chain.invoke({**inputs, "chat_history": None}) == chain.invoke(inputs)
