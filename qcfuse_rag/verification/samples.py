"""Questions over passages, with gold answers where they are known."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

JUDGEMENTS = {"yes", "no"}
"""Answers that say something about the passages and are not taken from them, though the words may stand there."""


def find_answers(text: str, answers: Iterable[str]) -> list[tuple[int, int]]:
    """Find every place where one of the answers stands as whole words.

    Case and the kind of white space do not matter. `15` does not stand in `1590`; in scripts written without spaces,
    such as Chinese, every character may begin or end a word.

    Args:
        text: where to look.
        answers: what to look for; the empty one, `yes` and `no` are never found.

    Returns:
        Ranges of characters, `start <= c < stop`, ascending; those of different answers may overlap.
    """
    found = set()
    for answer in answers:
        words = answer.split()
        if not words or answer.strip().lower() in JUDGEMENTS:
            continue
        pattern = r"\s+".join(re.escape(word) for word in words)
        for match in re.finditer(f"(?=({pattern}))", text, re.IGNORECASE):  # ahead, so that occurrences may overlap
            if not _inside_word(text, match.start(1)) and not _inside_word(text, match.end(1)):
                found.add(match.span(1))
    return sorted(found)


def _inside_word(text: str, at: int) -> bool:
    """Return whether the characters before and after a place belong to one word."""
    return 0 < at < len(text) and _joins(text[at - 1]) and _joins(text[at])


def _joins(character: str) -> bool:
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


@dataclass(frozen=True, slots=True)
class Sample:
    """A question over passages.

    Attributes:
        question: the question.
        passages: what was retrieved, in order.
        answers: strings any of which is the answer; none where it is not known.
        supporting: indices of the passages that are known to be needed; empty where that is not known.
    """

    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...] = ()
    supporting: tuple[int, ...] = ()

    def with_distractors(self, count: int) -> Self:
        """Keep the passages needed, in their order, and only the first `count` of the others.

        Where it is not known which are needed, those that an answer stands in are.
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
    """A question with gold answers, one at least; passages are in the order in which they are given to the model.

    Attributes:
        id: unique within the dataset.
        dataset: its name.
        needs_all: the answers are parts of one answer, as in RULER's tasks; else any of them is right.
        max_new_tokens: most tokens of the generated answer.
    """

    id: str
    dataset: str
    needs_all: bool = False
    max_new_tokens: int = 32

    @property
    def gold(self) -> str:
        """The answer whose likelihood is measured: the first one, or all of them if all are needed."""
        return ", ".join(self.answers) if self.needs_all else self.answers[0]
