"""Questions over passages, with gold answers if they are known, and the search for answers in text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

JUDGEMENTS = {"yes", "no"}
"""Answers that judge the passages and do not quote them, even if a passage contains the word."""


def find_answers(text: str, answers: Iterable[str]) -> list[tuple[int, int]]:
    """Find all occurrences of the answers as whole words: ascending ranges `(start, stop)`, `stop` exclusive.

    Case and the kind of white space do not matter. `15` does not occur in `1590`. In scripts without spaces, such as
    Chinese, every character may begin or end a word. Empty strings, `yes` and `no` are never found. Ranges of different
    answers may overlap.
    """
    spans = set()
    for answer in answers:
        words = answer.split()
        if not words or answer.strip().lower() in JUDGEMENTS:
            continue
        pattern = r"\s+".join(re.escape(word) for word in words)
        for match in re.finditer(f"(?=({pattern}))", text, re.IGNORECASE):  # a lookahead, so that matches may overlap
            if not _inside_word(text, match.start(1)) and not _inside_word(text, match.end(1)):
                spans.add(match.span(1))
    return sorted(spans)


def _inside_word(text: str, index: int) -> bool:
    return 0 < index < len(text) and _joins_words(text[index - 1]) and _joins_words(text[index])


def _joins_words(character: str) -> bool:
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


@dataclass(frozen=True, slots=True)
class Sample:
    """A question over retrieved passages, with alternative right answers and indices of needed passages, if known."""

    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...] = ()
    supporting: tuple[int, ...] = ()

    def with_distractors(self, count: int) -> Self:
        """Keep the needed passages and the first `count` of the others, in their order.

        If it is unknown which passages are needed, the passages that contain an answer are.
        """
        needed = set(self.supporting) or {
            index for index, passage in enumerate(self.passages) if find_answers(passage, self.answers)
        }
        others = islice((index for index in range(len(self.passages)) if index not in needed), count)
        kept = sorted(needed | set(others))
        return replace(
            self,
            passages=tuple(self.passages[index] for index in kept),
            supporting=tuple(kept.index(index) for index in self.supporting),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Sample):
    """A question with at least one gold answer; its id is unique within its dataset.

    With `needs_all` a right answer contains all answers, as in RULER's tasks; else any of them is right.
    """

    id: str
    dataset: str
    needs_all: bool = False
    max_new_tokens: int = 32

    @property
    def gold(self) -> str:
        """The answer to measure the likelihood of: the first answer, or all of them joined if all are needed."""
        return ", ".join(self.answers) if self.needs_all else self.answers[0]
