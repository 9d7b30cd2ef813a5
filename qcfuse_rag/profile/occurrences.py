"""Where an answer stands in a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

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
