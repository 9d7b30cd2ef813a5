"""Retrieval from a library's index: what follow-ups find, and the names that people see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import (
    DEFAULT_EMBEDDER,
    IndexedPassage,
    PassageIndex,
    RetrievalLog,
    embedder_source,
    forget_passages,
)
from qcfuse_rag.library.retriever import QUERY_CHARACTERS, SEARCHES, Retriever, _title

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
def found(embed: Embedder, tmp_path: Path) -> Retriever:
    index = PassageIndex(DEFAULT_EMBEDDER)
    index.replace({name: [text] for name, text in TEXTS.items()}, embed.windows([*TEXTS.values()]))
    index.save(tmp_path / "passages")
    return Retriever.open(tmp_path / "passages")


def test_a_follow_up_is_searched_for_behind_the_earlier_question(found: Retriever) -> None:
    [alone] = found.retrieve("How long does that take?", 1)
    [behind] = found.retrieve("How long does that take?", 1, after=REMOTE)
    assert (alone.source, behind.source) == ("ferry.md", "harbour.md")
    assert behind.score > alone.score


def test_a_question_about_something_else_finds_it_after_an_earlier_one(found: Retriever) -> None:
    for question in ("Who owns the old mill?", "Which bread does the bakery bake?"):
        [alone], [after] = found.retrieve(question, 1), found.retrieve(question, 1, after=REMOTE)
        assert after.source == alone.source
        assert after.score == pytest.approx(alone.score, abs=1e-5)


SOURCES = {
    "": [*TEXTS],  # as `POST /v1/documents` names them
    "/home/ada/docs/": [*TEXTS],
    "/": [*TEXTS],
    "mixed": ["docs/a.md", "docs/deep/a.md", "notes.txt", "sent by a client"],
}


@pytest.mark.parametrize("folder", SOURCES)
def test_names_of_files_have_no_shared_folder(embed: Embedder, tmp_path: Path, folder: str) -> None:
    """Folders that differ are shown, and the whole name is kept."""
    sources = [f"{folder}{name}" for name in TEXTS]
    if folder == "mixed":
        sources = [f"/home/ada/{name}" for name in SOURCES["mixed"][:3]] + ["sent by a client"]
    index = PassageIndex(DEFAULT_EMBEDDER)
    vectors = embed.windows([*TEXTS.values()])
    index.replace({s: [text] for s, text in zip(sources, TEXTS.values(), strict=True)}, vectors)
    index.save(tmp_path)
    found = Retriever.open(tmp_path)
    passages = found.retrieve("What?", 4)
    names = dict(zip((each.source for each in passages), found.short_names(passages), strict=True))
    assert names == dict(zip(sources, SOURCES[folder], strict=True))


@pytest.mark.slow
def test_no_question_takes_long_to_embed(found: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding models tokenise whole texts before they cut them."""
    embedded, embed = list[int](), Embedder.windows
    monkeypatch.setattr(
        Embedder,
        "windows",
        lambda self, queries: embedded.extend(map(len, queries)) or embed(self, queries),  # type: ignore[func-returns-value]
    )
    question = "Who owns the old mill? "
    for after in (None, REMOTE, question * 100_000):
        [passage] = found.retrieve(question * 400_000, 1, after=after)
        assert passage.source == "mill.md"
    assert max(embedded) == QUERY_CHARACTERS


def test_copies_count_once_and_are_all_named(embed: Embedder, tmp_path: Path) -> None:
    """Also with other ends of lines, and where one document repeats itself."""
    ferry = TEXTS["ferry.md"]
    documents = {f"/d/copy{number}.md": [f"# Trips\r\n{ferry}"] for number in range(3)}
    documents |= {"/d/unix.md": [f"# Trips\n{ferry}"], "/d/again.txt": ["The mill, the mill."] * 5}
    documents |= {f"/d/{name}": [text] for name, text in TEXTS.items()}
    index = PassageIndex(DEFAULT_EMBEDDER)
    index.replace(documents, embed.windows([text for texts in documents.values() for text in texts]))
    index.save(tmp_path)
    found = Retriever.open(tmp_path)
    for after in (None, REMOTE):
        passages = found.retrieve("How long does the ferry take, and the mill?", 4, after=after)
        assert len({" ".join(passage.text.split()) for passage in passages}) == 4
    [best] = found.retrieve(f"# Trips {ferry}", 1)
    assert found.places(found.with_copies([best])) == ["copy0.md (Trips)", "copy1.md", "copy2.md", "unix.md"]


def test_all_copies_are_found_in_one_pass_over_the_index(found: Retriever, monkeypatch: pytest.MonkeyPatch) -> None:
    passages = found.retrieve("What?", 4)
    passes = list[int]()

    class Counted(list[IndexedPassage]):
        def __iter__(self) -> Iterator[IndexedPassage]:
            passes.append(1)
            return super().__iter__()

    monkeypatch.setattr(found.index, "passages", Counted(found.index.passages))
    assert [copy.source for copy in found.with_copies(passages)] == [passage.source for passage in passages]
    assert found.with_copies([]) == []
    assert len(passes) == 2


def test_a_search_ends_while_documents_keep_changing(
    found: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, search = list(TEXTS), PassageIndex.search

    def search_and_forget(*arguments: Any) -> list[tuple[int, float]]:
        rows = search(*arguments)
        forget_passages(tmp_path / "passages", names.pop(0))
        return rows

    monkeypatch.setattr(PassageIndex, "search", search_and_forget)
    assert [passage.source for passage in found.retrieve(REMOTE, 4)] == names == [*TEXTS][SEARCHES:]


@pytest.mark.parametrize("when", ["embedded", "searched", "noted"])
def test_what_is_forgotten_while_a_question_is_searched_for_is_not_found(
    found: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nor does the log have it; the next nearest passages take its place."""
    owner, name = {
        "embedded": (Embedder, "windows"),
        "searched": (PassageIndex, "search"),
        "noted": (RetrievalLog, "note"),
    }[when]
    original, folder = getattr(owner, name), tmp_path / "passages"

    def forget_and_go_on(*arguments: object) -> object:
        result = original(*arguments)
        forget_passages(folder, "harbour.md")
        return result

    assert found.retrieve(REMOTE, 1)[0].source == "harbour.md"
    monkeypatch.setattr(owner, name, forget_and_go_on)
    passages = found.retrieve(REMOTE, 3)
    assert {passage.source for passage in passages} == TEXTS.keys() - {"harbour.md"}
    noted = RetrievalLog(folder).counts([TEXTS["harbour.md"], passages[0].text])
    assert (noted[0], noted[1] > 0) == (0, True)


def test_a_title_is_the_last_heading_up_to_the_passage_in_its_document() -> None:
    texts = ["# Harbour\n\nBoats.", "More boats.", "## Paint\n\nAnn keeps it.", "Only on Mondays."]
    passages = [*(IndexedPassage("d.md", text) for text in texts), IndexedPassage("e.md", "Another document.")]
    titles = [_title(passages, row) for row in range(len(passages))]
    assert titles == ["Harbour", "Harbour", "Paint", "Paint", None]
