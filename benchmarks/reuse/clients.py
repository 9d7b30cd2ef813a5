"""Set-ups of clients: OpenAI's own, against the application of `qcfuse serve` in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unicodedata import normalize

import httpx
import numpy as np
from openai import AsyncOpenAI

from benchmarks.reuse.recording import ANSWER_TOKENS, TOP_K, RecordingEngine, Setting, SetUp
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend

OPEN_WEBUI = """### Task:
Respond to the user query using the provided context, incorporating inline citations in the format [id] **only when the
<source> tag includes an explicit id attribute** (e.g., <source id="1">).

<context>
{}
</context>
"""
"""The text that Open WebUI 0.12 puts in front of a question, without its guidelines."""

FOLDED = {"\u2019": "'", "\u201c": '"', "\ufb01": "fi", "\ufb02": "fl"} | {chr(0xFF10 + i): str(i) for i in range(10)}
"""Quotes, ligatures and full-width digits, as ftfy writes them in the texts that Open WebUI reads."""


class _Even:
    """Embeds all texts alike."""

    def windows(self, texts: Iterable[str]) -> list[Any]:
        return [np.ones((1, 1), np.float32) for _ in texts]


EVEN: Any = _Even()
"""An embedder to which every text is as near as any other."""

Change = Callable[[str], str]


def as_ftfy(text: str) -> str:
    """Return a text as ftfy leaves it."""
    return text.translate({ord(written): plain for written, plain in FOLDED.items()})


def typeset(text: str) -> str:
    """Return a text with all characters that folding takes back."""
    for written, plain in FOLDED.items():
        text = text.replace(plain, written)
    return text


def chat(
    setting: Setting, *, change: Change = str, written: Change = str, web: bool = False, retrieve: bool = False
) -> RecordingEngine:
    """Warm documents and ask about some of them, which the client shows, or about the library that is served.

    `written` and `change` change a text before it is warmed and before it is shown; `web` shows it as Open WebUI does.
    """
    engine, texts, library = setting.engine(), {name: written(text) for name, text in setting.texts.items()}, None
    engine.warm(texts.values(), sources=[*texts])
    shown = [change(text) for text in [*texts.values()][:TOP_K]]
    if retrieve:
        shown, index = [], PassageIndex(DEFAULT_EMBEDDER)
        index.replace({name: [text] for name, text in texts.items()}, EVEN.windows(texts))
        index.save(setting.folder)
        library = ServedLibrary(Retriever(setting.folder, index, EVEN), engine, count=TOP_K, editable=False)
    context = "\n\n".join(shown)
    if web:
        tags = (f'<source id="{i}" name="{i}.md">{text}</source>' for i, text in enumerate(shown, start=1))
        context = OPEN_WEBUI.format("\n".join(tags))
    asyncio.run(_ask(engine, library, f"{context}\n\n{setting.question}"))
    return engine


async def _ask(engine: RecordingEngine, library: ServedLibrary | None, content: str) -> None:
    backend = EngineBackend(EngineHandle.wrap(engine), "model", library=library, retrieve=library is not None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(backend, library=library))) as http:
        completions = AsyncOpenAI(api_key="any", base_url="http://here/v1", http_client=http).chat.completions
        asked: Any = {"role": "user", "content": content}
        await completions.create(model="model", messages=[asked], max_tokens=ANSWER_TOKENS)
    backend.close()


SET_UPS: dict[str, SetUp] = {
    "client: passages in the message": chat,
    "client: Open WebUI": partial(chat, web=True),
    "client: Open WebUI, ftfy": partial(chat, web=True, written=typeset, change=as_ftfy),
    "client: Open WebUI, NFKC": partial(chat, web=True, written=typeset, change=partial(normalize, "NFKC")),
    "client: --retrieve": partial(chat, retrieve=True),
}
