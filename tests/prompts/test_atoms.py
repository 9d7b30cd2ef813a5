"""Texts are read as atoms that spellings of one text share, and are written again as they were."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qcfuse_rag.prompts.atoms import Atoms, written_again

ODD = '\u201c\u2019\u2026\ufb01\uff17\u00bd\u00a0\u00ad\u200b\u0301e\u00e9`\\\\"n \t\nか゛が가각本สวัสดี🙂'
texts = st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8", exclude_characters="\0")), max_size=60)


@given(text=texts)
@example(text='\\u00e9\\n \\" \\\\')
@example(text="\ufb01\u2026\u00bd\u00ad")
def test_atoms_are_written_again_as_they_were(text: str) -> None:
    atoms = Atoms.of(text)
    *gaps, end = atoms.gaps()
    undo = atoms.undo()
    last = [how for how in undo if how[0] == len(atoms)]
    lost = len(undo) < len(atoms.rewritings)
    assert lost or written_again(atoms.words, gaps, undo, 0) + written_again([""], [end], last, len(atoms)) == text


@given(text=texts)
def test_places_in_the_text_grow_with_its_atoms(text: str) -> None:
    atoms = Atoms.of(text)
    characters = atoms.atom_characters(np.arange(len(text) + 1))
    assert characters[0] == 0
    assert characters[-1] == atoms.characters_before[-1]
    assert (np.diff(characters) >= 0).all()
    assert (np.diff(atoms.ends) >= 0).all()
    assert atoms.ends[-1] <= len(text)


SPELLINGS = {
    "quotes": ("\u201cDon\u2019t\u201d", '"Don\'t"'),
    "dashes": ("a \u2013 b \u2014 c", "a - b - c"),
    "ligatures": ("\ufb01sh o\ufb03ce", "fish office"),
    "wide": ("\uff21\uff22 \uff11\uff12", "AB 12"),
    "dots": ("wait\u2026", "wait..."),
    "accents": ("caf\u00e9 Mu\u0308ller", "cafe\u0301 M\u00fcller"),
    "invisible": ("soft\u00adware \ufeffzero\u200bwidth", "software zerowidth"),
    "JSON": (json.dumps('"\u00fcber" it\\s\nnext'), '"\\"\u00fcber\\" it\\\\s\nnext"'),
    "gaps": ("one  two\\nthree", "one\ttwo\nthree"),
}


@pytest.mark.parametrize(("left", "right"), SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_one_text_have_the_same_atoms(left: str, right: str) -> None:
    assert Atoms.of(left).words == Atoms.of(right).words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("桥建于1923年。", ["桥", "建", "于", "1923", "年", "。"]),
        ("橋にはABCが", ["橋", "に", "は", "ABC", "が"]),
        ("สะพาน 2 แห่ง", [*"สะพาน", "2", *"แห่ง"]),
        ("한국어 문장", ["한국어", "문장"]),
    ],
)
def test_scripts_without_spaces_are_read_by_characters(text: str, words: list[str]) -> None:
    assert Atoms.of(text).words == words


def test_letters_and_digits_are_not_kept() -> None:
    """Of a text in wide letters, or of a number in wide digits, everything would be."""
    assert {how for *_, how in Atoms.of("\uff34\uff48\uff45 mill, call \uff10\uff19\uff10").undo()} == {None}
    assert Atoms.of("\u2460\U0001d400").undo() == []
    kept = Atoms.of("The \ufb01rst mill, \u201cbelow\u201d").undo()
    assert [written for *_, written in kept] == ["\ufb01", "\u201c", "\u201d"]


@pytest.mark.parametrize("text", ["\U0001f642 at sea", "half \\ud83d of one"])
def test_escaped_characters_beyond_the_first_plane_are_read(text: str) -> None:
    assert "".join(Atoms.of(json.dumps(text)).words).encode()
    assert Atoms.of(json.dumps(text)).words[1:-1] == Atoms.of(text).words


def test_other_texts_are_other_atoms() -> None:
    for left, right in (("a.b", "a,b"), ("cafe", unicodedata.normalize("NFC", "cafe\u0301")), ("Mill", "mill")):
        assert Atoms.of(left).words != Atoms.of(right).words
