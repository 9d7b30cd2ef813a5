"""Record what a set-up reuses: an engine keeps its prompts and reports, and warmed text is found in the prompts.

Warmed text in a prompt is found without the engine's recognition: by words in a row, folded, whatever is between them.
That is slow and needs the texts, but does not depend on how they were cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
from pydantic import BaseModel
from tokenizers.decoders import DecodeStream

from benchmarks.runner import Record
from qcfuse_rag import (
    FusionEngine,
    FusionReport,
    KVStore,
    LanguageModel,
    MemoryStore,
    Prompt,
    SamplingParams,
    WarmSummary,
)
from qcfuse_rag.fusion.pipeline import Parts, Prefilled
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.template import as_mapping

ANSWER_TOKENS, CALL_TOKENS = 24, 96
TOP_K = 3
RUN_WORDS = 8
"""Words in a row that are warmed text if a warmed text has them; of a script without spaces, characters."""
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORDS = re.compile(rf"\\[nrt]|([^\W{UNSPACED}]+|[{UNSPACED}])")
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}Write a call as <tool_call>{}</tool_call>.\n"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""A chat template for agents: the default model's does not show tools."""


class Holder(BaseModel):
    """An answer."""

    kind: Literal["person", "council", "nobody"]


class RecordingEngine(FusionEngine):
    """An engine that keeps the warmed texts, its prompts with their reports, and how to build these prompts again."""

    def __init__(self, lm: LanguageModel, store: KVStore, **options: Any) -> None:
        super().__init__(lm, store, **options)
        self.warmed: list[str] = []
        self.seen: list[tuple[Prompt, FusionReport]] = []
        self.notes: list[str] = []  # what a set-up has to say besides
        self._again: dict[tuple[int, ...], Callable[[FusionEngine], Prompt]] = {}
        self._own_ids: dict[tuple[int, ...], tuple[int, ...]] = {}  # of text, by the tokenizer without this library

    def warm(self, texts: Iterable[str], **options: Any) -> WarmSummary:
        """Warm texts and keep them."""
        found = list(texts)
        self.warmed += found
        return super().warm(found, **options)

    def prompt(self, *args: Any, **options: Any) -> Prompt:
        """Build a prompt of separate passages and keep how."""
        prompt = super().prompt(*args, **options)
        self._again[prompt.ids] = lambda engine: engine.prompt(*args, **options)
        return prompt

    def prompt_from_text(self, conversation: Any, tools: Any = (), **options: Any) -> Prompt:
        """Build a prompt from text and keep how."""
        prompt, tokenizer = super().prompt_from_text(conversation, tools, **options), self.lm.tokenizer
        self._again[prompt.ids] = lambda engine: engine.prompt_from_text(conversation, tools, **options)
        if not isinstance(conversation, str):
            turns = [dict(as_mapping(turn)) for turn in conversation]
            text = tokenizer.apply_chat_template(turns, tools or None, add_generation_prompt=True, tokenize=False)
            self._own_ids[prompt.ids] = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return prompt

    def prefill_in_parts(self, prompt: Prompt, **options: Any) -> Parts[Prefilled]:
        """Prefill a prompt and keep its report."""
        prefilled = yield from super().prefill_in_parts(prompt, **options)
        self.seen.append((prompt, prefilled.report))
        return prefilled

    def has_right_ids(self, prompt: Prompt) -> bool:
        """Return whether recognition left a prompt's ids as they are, and as the tokenizer makes them of text."""
        with FusionEngine(self.lm, MemoryStore()) as empty:
            return self._again[prompt.ids](empty).ids == prompt.ids == self._own_ids.get(prompt.ids, prompt.ids)

    def answers_alike(self, prompt: Prompt) -> bool:
        """Return whether the greedy answer is full prefill's if all rows are recomputed."""
        params = SamplingParams(max_new_tokens=ANSWER_TOKENS)
        methods = (make_method("auto", ratio=1.0, guard=False), make_method("full"))
        recomputed, expected = (self.generate(prompt, params, method=method).ids for method in methods)
        return recomputed == expected

    def reuse(self) -> Record:
        """Return what the prompts reused of the warmed text in them, and why not more.

        `warmed` counts tokens of warmed text, `recognised` those of them that came from the store, whether the method
        then recomputed them or not, and `kept` those that it did not.
        """
        counted = ("prompts", "tokens", "warmed", "recognised", "kept")
        record: Record = dict.fromkeys(counted, 0) | {"ids": True, "answers": True, "reasons": [*self.notes]}
        for prompt, report in [*self.seen]:
            if expected := self.warmed_positions(prompt):
                hits = (range(found.start, found.start + found.tokens) for found in report.lookups if found.hit)
                recognised = expected & {position for positions in hits for position in positions}
                counts = (1, len(prompt), len(expected), len(recognised), len(recognised - {*report.selected}))
                record |= {name: record[name] + count for name, count in zip(counted, counts, strict=True)}
                record["ids"] &= self.has_right_ids(prompt)
                record["answers"] &= self.answers_alike(prompt)
                record["reasons"] += [report.fallback] if report.fallback else []
        return record | {"reasons": list(dict.fromkeys(record["reasons"]))}

    def warmed_positions(self, prompt: Prompt) -> set[int]:
        """Return the positions of a prompt's tokens that are in warmed text."""
        known = {run for text in self.warmed for run, _, _ in _runs(text)}
        text, edges, unfinished, stream = "", list[tuple[int, int]](), 0, DecodeStream(skip_special_tokens=False)
        for token in prompt.ids:
            unfinished += 1
            if (piece := stream.step(self.lm.tokenizer.backend_tokenizer, token)) is not None:
                edges += [(len(text), len(text) + len(piece))] * unfinished
                text, unfinished = text + piece, 0
        inside = np.zeros(len(text), bool)
        for run, start, stop in _runs(text):
            inside[start:stop] |= run in known
        return {position for position, (start, stop) in enumerate(edges) if inside[start:stop].any()}


def _runs(text: str) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield every run of words, folded, with the characters that it takes."""
    words = [(normalize("NFKC", word[0]), *word.span()) for word in WORDS.finditer(text) if word[1]]
    for first in range(len(words) - RUN_WORDS + 1):
        run = words[first : first + RUN_WORDS]
        yield tuple(word for word, _, _ in run), run[0][1], run[-1][2]


@dataclass(frozen=True)
class Setting:
    """The parts of a set-up: a model, documents by name, a question, and an empty folder."""

    lm: LanguageModel
    texts: Mapping[str, str]
    question: str
    folder: Path

    def engine(self, store: KVStore | None = None, *, guard: bool = False) -> RecordingEngine:
        """Return an engine with the default method, without its guard unless it is asked for."""
        return RecordingEngine(self.lm, store or MemoryStore(), method=make_method("auto", guard=guard))


SetUp = Callable[[Setting], RecordingEngine]
"""Warms documents, asks, and returns the engine that answered."""


def run(make: Callable[..., Any], ask: Callable[..., object], setting: Setting, tools: bool = False) -> RecordingEngine:
    """Ask with a framework's model over a new engine; an agent's has `tools` in its chat template."""
    if tools:
        setting = replace(setting, lm=replace(setting.lm, tokenizer=copy.deepcopy(setting.lm.tokenizer)))
        setting.lm.tokenizer.chat_template = TOOLS_TEMPLATE
    engine = setting.engine()
    with closing(make(engine, CALL_TOKENS if tools else ANSWER_TOKENS)) as llm:
        ask(setting, llm)
    return engine
