"""Prompts to tune on: tasks about a library's own passages, such as a number hidden in one of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Role

SENTENCE = re.compile(r"(?<=[.!?]) ")
PROPER_NAME = re.compile(r"[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+)+")
NAMES = ("Aster", "Birch", "Cedar", "Dahlia", "Elm", "Fern", "Ginkgo", "Hazel", "Iris", "Juniper", "Kestrel", "Lark")
PEOPLE = ("Amara Okafor", "Lena Brandt", "Tomas Reyes", "Yuki Mori", "Priya Nair", "Jonas Weber", "Sofia Conti")
PLACES = ("Porto", "Lyon", "Graz", "Bergen", "Gdansk", "Turin", "Leeds", "Ghent", "Malmo", "Basel")
NUMBERED = ("access code", "serial number", "ticket number", "room number", "order number", "phone extension")

MOST_PASSAGES = 6
WINDOW_SHARE = 8
"""A passage takes at most this part of the context window: an eighth."""

Task = Callable[[random.Random, list[str]], str]
"""Changes passages, and returns the question."""


@dataclass(slots=True, eq=False)
class TuningPrompt:
    """A prompt, and what full prefill gives for it.

    Attributes:
        known: `[T]` bool, positions of stored text.
        answer: full prefill's greedy answer.
        teacher: `[A, hidden]`, full prefill's last hidden states from which the answer's tokens are chosen.
        question_teacher: `[Q, hidden]`, those of the rows from the question up to the answer.
        first: each layer's keys and values up to the end of the first passage, `[Hkv, F, D]`.
        order: passage positions, but those of the first passage, by falling attention of the question.
    """

    ids: list[int]
    chunks: list[tuple[int, int]]
    question_start: int
    known: Tensor
    answer: list[int] = field(default_factory=list)
    teacher: Tensor = field(default_factory=lambda: torch.empty(0))
    question_teacher: Tensor = field(default_factory=lambda: torch.empty(0))
    first: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def of(cls, prompts: PromptBuilder, question: str, passages: Sequence[str]) -> TuningPrompt:
        """Build the prompt of a question over passages."""
        prompt = prompts.build(question, list(passages))
        chunks = [(span.start, span.stop) for span in prompt.chunks]
        known = torch.zeros(len(prompt), dtype=torch.bool)
        for start, stop in [(0, len(prompt.prefix_ids)), *chunks]:
            known[start:stop] = True
        asked = next(span.start for span in prompt.spans if span.segment.role is Role.QUESTION)
        return cls(list(prompt.ids), chunks, asked, known)

    def __len__(self) -> int:
        return len(self.ids)


def usable_passages(prompts: PromptBuilder, texts: Sequence[str], window: int) -> list[str]:
    """Return the different texts of which several fit a context window of so many tokens.

    Long ones are not cut: a writer that has seen short passages alone makes long ones worse.
    """
    limit = window // WINDOW_SHARE
    return [text for text in dict.fromkeys(texts) if text.strip() and len(prompts.chunk_ids(text)) <= limit]


def task_prompt(prompts: PromptBuilder, pool: Sequence[str], chance: random.Random, only: str = "") -> TuningPrompt:
    """Make a task of two to six passages; half of them ask about a name in a passage."""
    name = only or ("about" if chance.random() < 0.5 else chance.choice([*TASKS]))
    passages = chance.sample(pool, chance.randint(2, min(len(pool), MOST_PASSAGES)))
    return TuningPrompt.of(prompts, TASKS[name](chance, passages), passages)


def _insert(chance: random.Random, passages: list[str], sentences: Sequence[str]) -> None:
    """Put each sentence into another passage, between two sentences."""
    for index, sentence in zip(chance.sample(range(len(passages)), len(sentences)), sentences, strict=True):
        parts = SENTENCE.split(passages[index])
        parts.insert(chance.randint(1, len(parts)), sentence)
        passages[index] = " ".join(parts)


def _number(chance: random.Random, passages: list[str]) -> str:
    (name, other), what = chance.sample(NAMES, 2), chance.choice(NUMBERED)
    numbers = (chance.randint(1000, 9_999_999) for _ in range(2))
    _insert(chance, passages, [f"The {what} of {of} is {n}." for of, n in zip((name, other), numbers, strict=True)])
    return f"What is the {what} of {name}?"


def _compare(chance: random.Random, passages: list[str]) -> str:
    name, other = chance.sample(NAMES, 2)
    _insert(chance, passages, [f"Project {of} had {chance.randint(12, 980)} members." for of in (name, other)])
    return f"Which project had more members, {name} or {other}?"


def _chain(chance: random.Random, passages: list[str]) -> str:
    name, leader = chance.choice(NAMES), chance.choice(PEOPLE)
    _insert(chance, passages, [f"Project {name} is led by {leader}.", f"{leader} works in {chance.choice(PLACES)}."])
    return f"In which city does the leader of project {name} work?"


def _copy(chance: random.Random, passages: list[str]) -> str:
    body = chance.choice(passages).strip().split("\n")[-1]
    return f'Repeat the sentence that begins with "{" ".join(body.split()[:4])}".'


def _about(chance: random.Random, passages: list[str]) -> str:
    body = chance.choice(passages).strip().split("\n")[-1]
    names = PROPER_NAME.findall(body) or [" ".join(body.split()[:3])]
    return f"What do the passages say about {chance.choice(names)}?"


def _count(chance: random.Random, passages: list[str]) -> str:
    name = chance.choice(NAMES)
    _insert(chance, passages, [f"Project {name} is mentioned here."] * chance.randint(1, len(passages)))
    return f"How many of the passages mention project {name}?"


TASKS: dict[str, Task] = {
    "number": _number, "compare": _compare, "chain": _chain, "copy": _copy, "count": _count, "about": _about
}  # fmt: skip
