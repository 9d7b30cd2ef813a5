"""Retrieval from a library's index: what follow-ups find, and the names that people see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, embedder_source
from qcfuse_rag.library.retriever import QUERY_CHARACTERS, Retriever

TEXTS = {
    "harbour.md": "A remote that does not answer is not asked again for 30 seconds.",
    "mill.md": "The old mill belongs to the council, which meets on Mondays.",
    "ferry.md": "The ferry takes two hours to the island, longer when the sea is high.",
    "bakery.md": "The bakery bakes rye bread for the market and keeps its oven hot all night.",
}
REMOTE = "What happens to a remote that does not answer?"


@pytest.fixture(scope="module")
def embed() -> Embedder:
    return Embedder(embedder_source(DEFAULT_EMBEDDER))


@pytest.fixture
def retriever(embed: Embedder, tmp_path: Path) -> Callable[[str], Retriever]:
    """Return a function that makes a retriever whose documents have names in a folder."""

    def make(folder: str) -> Retriever:
        index = PassageIndex(DEFAULT_EMBEDDER)
        index.replace({f"{folder}{name}": [text] for name, text in TEXTS.items()}, embed([*TEXTS.values()]))
        index.save(tmp_path / "passages")
        return Retriever(tmp_path / "passages")

    return make


def test_a_follow_up_is_searched_for_behind_the_earlier_question(retriever: Callable[[str], Retriever]) -> None:
    found = retriever("")
    [alone] = found.retrieve("How long does that take?", 1)
    [behind] = found.retrieve("How long does that take?", 1, after=REMOTE)
    assert (alone.source, behind.source) == ("ferry.md", "harbour.md")
    assert behind.score > alone.score


def test_a_question_about_something_else_finds_it_after_an_earlier_one(retriever: Callable[[str], Retriever]) -> None:
    found = retriever("")
    for question in ("Who owns the old mill?", "Which bread does the bakery bake?"):
        [alone], [after] = found.retrieve(question, 1), found.retrieve(question, 1, after=REMOTE)
        assert after.source == alone.source
        assert after.score == pytest.approx(alone.score, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("", [*TEXTS]),  # as `POST /v1/documents` names them
        ("/home/ada/docs/", [*TEXTS]),
        ("/", [*TEXTS]),
    ],
)
def test_names_of_files_have_no_shared_folder(
    retriever: Callable[[str], Retriever], folder: str, names: list[str]
) -> None:
    found = retriever(folder)
    passages = sorted(found.retrieve("What?", 4), key=lambda each: [*TEXTS.values()].index(each.text))
    assert found.short_names(passages) == names
    assert [each.source for each in passages] == [f"{folder}{name}" for name in names], "the whole name is kept"


def test_folders_that_differ_are_shown(embed: Embedder, tmp_path: Path) -> None:
    index = PassageIndex(DEFAULT_EMBEDDER)
    sources = ["/home/ada/docs/a.md", "/home/ada/docs/deep/a.md", "/home/ada/notes.txt", "sent by a client"]
    index.replace(
        {source: [text] for source, text in zip(sources, TEXTS.values(), strict=True)}, embed([*TEXTS.values()])
    )
    index.save(tmp_path)
    found = Retriever(tmp_path)
    passages = found.retrieve("What?", 4)
    names = dict(zip((each.source for each in passages), found.short_names(passages), strict=True))
    assert names == dict(zip(sources, ["docs/a.md", "docs/deep/a.md", "notes.txt", "sent by a client"], strict=True))


@pytest.mark.slow
def test_no_question_takes_long_to_embed(
    retriever: Callable[[str], Retriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding models tokenise whole texts before they cut them."""
    found, embedded = retriever(""), list[int]()
    embed = found._embed
    monkeypatch.setattr(
        found,
        "_embed",
        lambda queries: embedded.extend(map(len, queries)) or embed(queries),  # type: ignore[func-returns-value]
    )
    question = "Who owns the old mill? "
    for after in (None, REMOTE, question * 100_000):
        [passage] = found.retrieve(question * 400_000, 1, after=after)
        assert passage.source == "mill.md"
    assert max(embedded) == QUERY_CHARACTERS
