# ruff: noqa: RUF001
"""The whole of a passage is searched: in windows that the embedding model reads, of which the nearest counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from qcfuse_rag.bundled import corpus, default_embedder, default_model
from qcfuse_rag.library.documents import index_passages
from qcfuse_rag.library.embedder import OVERLAP, Embedder, _cut
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex
from qcfuse_rag.models.load import load_tokenizer

FRONT, SIDE, BACK = np.eye(3, dtype=np.float32)
LIMIT = 128
"""Half of the tokens that all-MiniLM-L6-v2 reads."""


def embed_words(texts: Sequence[str]) -> list[NDArray[np.float32]]:
    """Stand in for an embedding model that reads one word at a time: its windows are the words."""
    directions = {"front": FRONT, "back": BACK}
    return [np.array([directions.get(word, SIDE) for word in text.split()]) for text in texts]


@pytest.fixture(scope="module")
def embed() -> Embedder:
    return Embedder(default_embedder())


@pytest.fixture
def index() -> PassageIndex:
    index = PassageIndex("words")
    documents = {"a": ["front side side", "side"], "b": ["side back"]}
    index.replace(documents, embed_words([text for texts in documents.values() for text in texts]))
    return index


def found(index: PassageIndex, query: NDArray[np.float32]) -> list[tuple[str, float]]:
    return [(index.passages[row].text, score) for row, score in index.search(query[None], 3)]


def test_a_passage_is_as_near_as_its_nearest_window(index: PassageIndex) -> None:
    assert found(index, BACK)[0] == ("side back", 1.0)
    assert found(index, FRONT) == [("front side side", 1.0), ("side", 0.0), ("side back", 0.0)]
    assert [score for _, score in found(index, SIDE)] == [1.0, 1.0, 1.0]


def test_windows_stay_with_their_passages(index: PassageIndex, tmp_path: Path) -> None:
    """When others are removed and replaced, and after the index was saved."""
    index.replace({"a": ["side", "side side front"]}, embed_words(["side", "side side front"]))
    index.save(tmp_path)
    index = PassageIndex.load(tmp_path)
    assert found(index, BACK)[0] == ("side back", 1.0)
    assert found(index, FRONT)[0] == ("side side front", 1.0)
    index.remove({"b"})
    assert [text for text, _ in found(index, BACK)] == ["side", "side side front"]
    assert len(index.embeddings) == 4


def test_a_passage_has_one_direction_for_its_neighbours(index: PassageIndex) -> None:
    np.testing.assert_allclose(index.vectors(["side back", "side"]), [(SIDE + BACK) / np.sqrt(2), SIDE])


def test_an_index_of_an_earlier_version_is_read_and_made_anew_by_the_next_job(
    index: PassageIndex, tmp_path: Path
) -> None:
    index.save(tmp_path)
    [passages], [vectors] = tmp_path.glob("passages-*"), tmp_path.glob("embeddings-*")
    lines = [json.loads(line) for line in passages.read_text().splitlines()]
    passages.write_text("".join(json.dumps({"source": o["source"], "text": o["text"]}) + "\n" for o in lines))
    np.save(vectors, np.array([FRONT, SIDE, SIDE]))
    old = PassageIndex.load(tmp_path)
    assert found(old, FRONT)[0] == ("front side side", 1.0)
    assert found(old, BACK)[0][1] == 0.0
    assert old.outdated == old.by_source() == index.by_source()
    index_passages(old, tmp_path, {"a": old.by_source()["a"]}, embed_words, at_once=1, progress=lambda *_: None)
    again = PassageIndex.load(tmp_path)
    assert found(again, BACK)[0] == ("side back", 1.0), "also of documents that are no part of the job"
    assert again.outdated == {}


@pytest.mark.parametrize("length", [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 370, 384, 3 * LIMIT, 5000])
def test_windows_are_within_the_limit_and_overlap(length: int) -> None:
    text, spans = "x" * length, [(place, place + 1) for place in range(length)]
    sizes = [len(part) for part in _cut(text, spans, LIMIT)]
    overlap = LIMIT // OVERLAP
    assert (len(sizes) == 1) == (length <= LIMIT)
    assert max(sizes) <= LIMIT
    assert sum(sizes) == length + (len(sizes) - 1) * overlap
    assert max(sizes) - min(sizes) <= len(sizes)


def test_a_text_within_the_limit_has_the_vector_of_the_whole_text(embed: Embedder) -> None:
    """Also one of exactly as many tokens; one token more are two windows."""
    exact = " ".join(["ferry"] * LIMIT)
    short, whole, longer = embed.windows(["The old mill.", exact, f"{exact} ferry"])
    assert np.array_equal(np.concatenate([short, whole]), embed(["The old mill.", exact]))
    assert len(longer) == 2


FACTS = {
    "How many sheep did Doctor Amsel inoculate?": "Doctor Amsel inoculated forty sheep against bluetongue in March.",
    "How often does the comet Ferrand-Ito come back?": "The comet Ferrand-Ito returns every seventy-one years.",
    "What is the membership fee of the chess club?": "Chess club members pay a yearly fee of eleven shillings.",
    "How many eggs go into the saffron buns?": "The recipe for saffron buns needs twelve eggs and cardamom.",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_facts_are_found_wherever_they_stand_in_a_passage(embed: Embedder, place: float) -> None:
    """Among the documents of the demonstration, in passages of 370 tokens of the model that answers."""
    tokenizer = load_tokenizer(default_model()).backend_tokenizer
    documents = {}
    for (question, fact), text in zip(FACTS.items(), corpus().values(), strict=False):
        words = text.split()
        while len(tokenizer.encode(" ".join([fact, *words]), add_special_tokens=False).ids) > 370:
            words.pop()
        at = round(place * len(words))
        documents[question] = [" ".join([*words[:at], fact, *words[at:]])]
    documents |= {name: [text] for name, text in list(corpus().items())[len(FACTS) :]}
    index = PassageIndex(DEFAULT_EMBEDDER)
    index.replace(documents, embed.windows([text for [text] in documents.values()]))
    for question in FACTS:
        nearest = index.search(np.concatenate(embed.windows([question])), 6)
        assert question in {index.passages[row].source for row, _ in nearest}


@pytest.mark.slow
def test_a_model_without_a_limit_reads_a_text_at_once(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = Tokenizer.from_file(f"{default_embedder()}/tokenizer.json")
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)]).save(str(tmp_path / "model"))
    embed = Embedder(str(tmp_path / "model"))
    assert [vectors.shape for vectors in embed.windows(["ferry " * 5000, "mill"])] == [(1, 8), (1, 8)]
    assert embed.script_note(["渡轮到岛上需要两个小时"]) is None, "it cannot be told"


SCRIPTS = {
    "English": ("The ferry takes two hours to the island, longer when the sea is high.", False),
    "German": ("Die Donaudampfschifffahrtsgesellschaft übernimmt die Überprüfung der Fähre.", False),
    "French": ("Le traversier met deux heures pour atteindre l'île quand la mer est forte.", False),
    "Polish": ("Prom płynie na wyspę dwie godziny, dłużej przy wysokiej fali, a źdźbło rośnie.", False),
    "Vietnamese": ("Chuyến phà mất hai giờ để đến đảo, lâu hơn khi biển động.", False),
    "numbers and code": ("def f(a1b2c3): return {x: y_z for x in range(10)}  # 0xdeadbeef, 2026-11-29", False),
    "nothing": ("", False),
    "Russian": ("Паром идёт до острова два часа, дольше, когда море неспокойно.", True),
    "Greek": ("Το πλοίο χρειάζεται δύο ώρες για το νησί όταν η θάλασσα είναι φουρτουνιασμένη.", True),
    "Arabic": ("تستغرق العبارة ساعتين للوصول إلى الجزيرة، وأكثر عندما يكون البحر هائجا.", True),
    "Chinese": ("渡轮到岛上需要两个小时，海浪大时需要更久。旧磨坊属于镇议会，每周一开会。", True),
    "Japanese": ("フェリーは島まで二時間かかり、海が荒れるともっと長くなります。", True),
    "Korean": ("여객선은 섬까지 두 시간이 걸리며 바다가 거칠면 더 오래 걸립니다.", True),
    "Thai": ("เรือข้ามฟากใช้เวลาสองชั่วโมงไปยังเกาะ และนานกว่านั้นเมื่อทะเลมีคลื่นสูง", True),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_documents_of_a_script_that_the_model_was_not_made_for_are_noted(embed: Embedder, script: str) -> None:
    text, is_noted = SCRIPTS[script]
    assert (embed.script_note([text]) is not None) == is_noted
    mostly_english = [SCRIPTS["English"][0]] * 3
    assert embed.script_note([*mostly_english, text[:60]]) is None
