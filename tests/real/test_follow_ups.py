"""Follow-up questions over this project's guide: what they find by their own words and behind an earlier question."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag.bundled import default_model
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, embedder_source
from qcfuse_rag.library.readers import read_passages
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.models.load import load_tokenizer

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
COUNT = 6
FOLLOW_UPS = (
    # an earlier question, one after it, and words of the passage that answers the second one
    (
        "What happens when the server gets too many requests?",
        "And how many at once?",
        "Sixteen requests are answered together",
    ),
    ("How does the server treat slow clients?", "After how many seconds?", "within 15 seconds"),
    ("Does a remote that does not answer stop the store?", "And for how long?", "not asked again for"),
    ("Which number formats can the store keep?", "How many bytes does the second take?", "27 % of float32"),
    (
        "What is forgotten when a document is deleted?",
        "What if another is warming it?",
        "a job warms it stays forgotten",
    ),
    (
        "How do I encrypt a store?",
        "Where does it come from in Python?",
        "`secret=...` or the environment variable",
    ),
    ("What does fidelity exact do?", "And what does it cost?", "about the time of full prefill before the first text"),
    ("How is a corpus warmed on many machines?", "What if one of them is lost?", "another one computes its batch"),
    ("What does qcfuse serve --editable allow?", "How many in a request?", "at most 256 documents"),
    ("What is sentence window retrieval?", "How much more do these take?", "seven times with the parser"),
    (
        "What does qcfuse warm plan say?",
        "How do I go on with one that was stopped?",
        "with the options of the last job",
    ),
    ("Which eviction policy is the default?", "What else is there?", "`lru` and `lfu`"),
    ("How large is the installation?", "And with CUDA?", "6.1 GB"),
    ("Which Python versions are supported?", "And of transformers?", "transformers from 5.15"),
)
CHANGES = (
    ("How does the server treat slow clients?", "How do I encrypt a store?", "AES-256-GCM"),
    ("Which Python versions are supported?", "What does --editable allow?", "With `--editable`"),
    ("What does fidelity exact do?", "How does warming on Ray work?", "Pools of workers on Ray"),
    ("How large is the installation?", "Which metrics does Prometheus get?", "qcfuse_prefills_total"),
    ("Which eviction policy is the default?", "How do I use sentence windows?", "SentenceWindowNodeParser"),
    ("What is sentence window retrieval?", "What if the store's index is damaged?", "it is built again from the files"),
    (
        "Which number formats can the store keep?",
        "How are requests routed to replicas?",
        "A router in Ray Serve",
    ),
    ("How do I encrypt a store?", "Does it make generation faster?", "Does it make generation faster"),
    ("How is a corpus warmed on many machines?", "Who can read the store?", "Who can read the store"),
    ("What does qcfuse warm plan say?", "What does exact do?", "shows no text before all of the prompt is recomputed"),
)


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    documents = read_passages(sorted(GUIDE.glob("*.md")), load_tokenizer(default_model()), max_tokens=384)
    index, folder = PassageIndex(DEFAULT_EMBEDDER), tmp_path_factory.mktemp("passages")
    texts = [text for passages in documents.values() for text in passages]
    index.replace(documents, Embedder(embedder_source(DEFAULT_EMBEDDER)).windows(texts))
    index.save(folder)
    return Retriever.open(folder)


def found(guide: Retriever, question: str, words: str, after: str | None) -> bool:
    assert any(words in passage.text for passage in guide.index.passages), f"the guide no longer says {words!r}"
    return any(words in passage.text for passage in guide.retrieve(question, COUNT, after=after))


@pytest.mark.slow
def test_follow_ups_find_more_behind_the_earlier_question_and_changes_of_topic_lose_little(guide: Retriever) -> None:
    """The figures of docs/guide/command-line.md."""
    counts = []
    for asked in (FOLLOW_UPS, CHANGES):
        alone = sum(found(guide, question, words, None) for _, question, words in asked)
        after = sum(found(guide, question, words, earlier) for earlier, question, words in asked)
        counts.append((alone, after, len(asked)))
    print(f"{len(guide.index.passages)} passages; found alone, found after the earlier question, asked: {counts}")
    follow_ups, changes = counts
    assert follow_ups[1] >= 2 * follow_ups[0]
    assert changes[1] >= changes[0] - 3
