"""Circumstances: processes, versions and machines that change, and text that is not shown as it was warmed."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

from llama_index.core import Document

from benchmarks.reuse import with_langchain
from benchmarks.reuse.clients import chat
from benchmarks.reuse.recording import ANSWER_TOKENS, TOP_K, RecordingEngine, Setting, SetUp
from benchmarks.reuse.with_llama_index import warmed
from langchain_qcfuse import ChatQCFuse
from llama_index.llms.qcfuse import QCFuseLLM
from qcfuse_rag import LanguageModel, SamplingParams, open_store
from qcfuse_rag.models.fingerprint import fingerprint_model

QUESTIONS_UNDER_LOAD = 4
IN_ANOTHER_PROCESS = """
import sys
from qcfuse_rag import FusionEngine
model, folder, device, dtype, weights, *texts = sys.argv[1:]
with FusionEngine.load(model, store=folder, device=device, dtype=dtype, weights=weights, verdict="ignore") as engine:
    engine.warm(texts)
"""
CHINESE = {
    "渡轮": "开往岛上的渡轮每天早上七点从港口的北码头出发。船长奥拉在这条航线上工作了二十三年, 从来没有误过一次班。",
    "磨坊": "老磨坊归镇议会所有, 里面存放着渡轮用的绿色油漆和备用的缆绳。钥匙由住在面包店楼上的港务长保管。",
    "灯塔": "灯塔建于一八六二年, 它的灯光在晴朗的夜里可以照到十九海里以外。大雾的日子志愿者仍然会上去敲钟。",
}
JAPANESE = {
    "船": "島へ渡る船は毎朝七時に港の北の桟橋を出ます。船長のオルラは二十三年間働いて、一度も遅れたことがありません。",
    "水車": "古い水車小屋には緑色の塗料と予備の綱がしまってあります。鍵はパン屋の二階に住む港長が預かっています。",
    "灯台": "灯台は一八六二年に建てられ、晴れた夜には十九海里先まで光が届きます。霧の深い日には有志が鐘を鳴らします。",
}


def _ask(engine: RecordingEngine, setting: Setting) -> RecordingEngine:
    content = "\n\n".join([*[*setting.texts.values()][:TOP_K], setting.question])
    engine.generate(engine.prompt_from_text([("user", content)]), SamplingParams(max_new_tokens=ANSWER_TOKENS))
    return engine


def _reopened(setting: Setting, lm: LanguageModel | None = None) -> RecordingEngine:
    """Ask over a folder that another engine has warmed, with its model or another one."""
    engine = replace(setting, lm=lm or setting.lm).engine(open_store(setting.folder))
    engine.warmed += setting.texts.values()
    return _ask(engine, setting)


def restart(setting: Setting, lm: LanguageModel | None = None) -> RecordingEngine:
    """Ask over a folder that was warmed before."""
    with setting.engine(open_store(setting.folder)) as first:
        first.warm(setting.texts.values())
    return _reopened(setting, lm)


def second_process(setting: Setting) -> RecordingEngine:
    """Ask over a folder that another process has warmed, which loaded the model by its name."""
    lm = setting.lm
    loading = (lm.name, str(setting.folder), str(lm.device), lm.fingerprint.dtype, lm.weight_format)
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, *loading, *setting.texts.values()], check=True)
    return _reopened(setting)


def updated_transformers(setting: Setting) -> RecordingEngine:
    """Ask under a later transformers, whose configuration has one more field, at its default."""
    lm, model = setting.lm, copy.copy(setting.lm.model)

    class Later(type(model.config)):  # type: ignore[misc]
        later_switch: bool = False

    model.config = Later(**model.config.to_dict())
    known = (lm.fingerprint.weights, lm.fingerprint.weight_format, lm.recurrent.values())
    return restart(setting, replace(lm, fingerprint=fingerprint_model(model, lm.tokenizer, lm.ropes, *known)))


def both_frameworks(setting: Setting) -> RecordingEngine:
    """Warm by LlamaIndex and ask by LangChain, whose documents end with a newline; note what it warms again."""
    with setting.engine(open_store(setting.folder)) as first:
        warmed(QCFuseLLM.from_engine(first), [Document(text=text) for text in setting.texts.values()])
    engine = setting.engine(open_store(setting.folder))
    engine.warmed += first.warmed
    read = with_langchain.documents(setting, end="\n")
    with closing(ChatQCFuse.from_engine(engine, max_tokens=ANSWER_TOKENS)) as model:
        with_langchain.answer(setting, model, with_langchain.retriever_of(read))
        if (summary := model.warm(read)).warmed:
            engine.notes.append(f"LangChain warms {summary.warmed} of {summary.chunks} caches again")
    return engine


def under_load(setting: Setting) -> RecordingEngine:
    """Warm and ask with the guard while another process takes a core."""
    engine = setting.engine(guard=True)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process, ExitStack() as stack:
        stack.callback(process.kill)
        engine.warm(setting.texts.values())
        for _ in range(QUESTIONS_UNDER_LOAD):
            _ask(engine, setting)
    return engine


def _in_language(texts: Mapping[str, str], question: str, setting: Setting) -> RecordingEngine:
    return with_langchain.SET_UPS["LangChain: retrieval chain"](replace(setting, texts=texts, question=question))


SET_UPS: dict[str, SetUp] = {
    "restart": restart,
    "second process": second_process,
    "update of transformers": updated_transformers,
    "both frameworks on one store": both_frameworks,
    "machine under load, with the guard": under_load,
    "middle of a passage": partial(chat, change=lambda text: text[len(text) // 4 : -len(text) // 4]),
    "first half of a passage": partial(chat, change=lambda text: text[: len(text) // 2]),
    "one word changed": partial(chat, change=lambda text: f"{text[: len(text) // 2]}x{text[len(text) // 2 :]}"),
    "another header": partial(chat, change=lambda text: f"From the reports\n{text.partition(chr(10))[2]}"),
    "Chinese": partial(_in_language, CHINESE, "渡轮的油漆由谁保管?"),
    "Japanese": partial(_in_language, JAPANESE, "船の塗料は誰が預かっていますか。"),
}
