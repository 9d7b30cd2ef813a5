"""Prompts to train on: questions of datasets over other passages too, and tasks made of passages."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.questions import Example
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Role

SENTENCE = re.compile(r"(?<=[.!?]) ")
PROPER_NAME = re.compile(r"[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+)+")
NAMES = ("Aster", "Birch", "Cedar", "Dahlia", "Elm", "Fern", "Ginkgo", "Hazel", "Iris", "Juniper", "Kestrel", "Lark")
PEOPLE = ("Amara Okafor", "Lena Brandt", "Tomas Reyes", "Yuki Mori", "Priya Nair", "Jonas Weber", "Sofia Conti")
PLACES = ("Porto", "Lyon", "Graz", "Bergen", "Gdansk", "Turin", "Leeds", "Ghent", "Malmo", "Basel")
NUMBERED = ("access code", "serial number", "ticket number", "room number", "order number", "phone extension")
MOST_PASSAGES = 4
LONGEST = 1200  # characters of a passage

Task = Callable[[random.Random, list[str]], str]
"""Changes passages, and returns the question."""


@dataclass(slots=True, eq=False)
class TuningPrompt:
    """A prompt, what full prefill gives for it, and its stored caches.

    Attributes:
        known: `[T]` bool, positions of stored text.
        answer: full prefill's greedy answer.
        teacher: `[A, hidden]`, full prefill's last hidden states from which the answer's tokens are chosen.
        question_teacher: `[Q, hidden]`, those of the rows from the question up to the answer.
        order: passage positions, but those of the first passage, by falling attention of the question.
    """

    ids: list[int]
    chunks: list[tuple[int, int]]
    question_start: int
    known: Tensor
    task: str
    answer: list[int] = field(default_factory=list)
    teacher: Tensor = field(default_factory=lambda: torch.empty(0))
    question_teacher: Tensor = field(default_factory=lambda: torch.empty(0))
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def of(cls, prompts: PromptBuilder, question: str, passages: Sequence[str], task: str) -> TuningPrompt:
        """Build the prompt of a question over passages."""
        prompt = prompts.build(question, list(passages))
        chunks = [(span.start, span.stop) for span in prompt.chunks]
        known = torch.zeros(len(prompt), dtype=torch.bool)
        for start, stop in [(0, len(prompt.prefix_ids)), *chunks]:
            known[start:stop] = True
        asked = next(span.start for span in prompt.spans if span.segment.role is Role.QUESTION)
        return cls(list(prompt.ids), chunks, asked, known, task)

    def __len__(self) -> int:
        return len(self.ids)


def training_prompts(
    prompts: PromptBuilder, examples: Sequence[Example], held_out: set[str], seed: int
) -> Iterator[TuningPrompt]:
    """Yield prompts without end; no held-out passage is used.

    Of ten, four are datasets' questions, three ask about a name in a passage, three are other tasks.

    A question stands over its gold passages and others, two to six in all, in any order.
    """
    chance = random.Random(seed)
    pool = list(dict.fromkeys(text for example in examples for text in example.passages))
    pool = [text for text in pool if text not in held_out and len(text) < LONGEST]
    while True:
        count = chance.randint(2, MOST_PASSAGES)
        example = chance.choice(examples)
        gold = [example.passages[index] for index in example.supporting if example.passages[index] in pool][:count]
        if gold and chance.random() < 0.4:
            others = [text for text in chance.sample(pool, count) if text not in gold]
            passages = [*gold, *others[: count - len(gold)]]
            chance.shuffle(passages)
            yield TuningPrompt.of(prompts, example.question, passages, example.dataset)
        else:
            yield task_prompt(prompts, pool, chance, "about" if chance.random() < 0.5 else "")


def task_prompt(prompts: PromptBuilder, pool: Sequence[str], chance: random.Random, only: str = "") -> TuningPrompt:
    """Make a task of two to six passages: what `qcfuse verify` counts, such as hidden numbers and chains."""
    name = only or chance.choice([*TASKS])
    passages = chance.sample(pool, chance.randint(2, MOST_PASSAGES))
    return TuningPrompt.of(prompts, TASKS[name](chance, passages), passages, name)


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
    body = chance.choice(passages).split("\n")[-1]
    return f'Repeat the sentence that begins with "{" ".join(body.split()[:4])}".'


def _about(chance: random.Random, passages: list[str]) -> str:
    body = chance.choice(passages).split("\n")[-1]
    names = PROPER_NAME.findall(body) or [" ".join(body.split()[:3])]
    return f"What do the passages say about {chance.choice(names)}?"


def _count(chance: random.Random, passages: list[str]) -> str:
    name = chance.choice(NAMES)
    _insert(chance, passages, [f"Project {name} is mentioned here."] * chance.randint(1, len(passages)))
    return f"How many of the passages mention project {name}?"


TASKS: dict[str, Task] = {
    "number": _number, "compare": _compare, "chain": _chain, "copy": _copy, "count": _count, "about": _about
}  # fmt: skip
