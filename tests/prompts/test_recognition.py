"""Warmed passages are found in the text that a framework made of them, and only those."""

from __future__ import annotations

import re
import sqlite3
import threading
import zlib
from contextlib import closing
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, PromptTemplate, make_method, open_store
from qcfuse_rag.prompts import recognition
from qcfuse_rag.prompts.recognition import (
    ANCHOR,
    PIECES,
    PassageMatch,
    PassageSignature,
    find_passages,
    passage_signature,
)
from qcfuse_rag.prompts.segments import Role
from qcfuse_rag.store.chunk import RANKING, ChunkKV, slice_chunk, to_format
from qcfuse_rag.store.key import BLIND, FRAMED, ChunkKey
from tests.support import references
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

SEED = 7
QCFUSE, ALL = make_method("qcfuse", ratio=0.3, base=FRAMED), make_method("random", ratio=1.0, base=FRAMED)
LINES = "Opening hours\n\n  Monday\t9-12\n  Tuesday\tclosed\n\nThe harbour office is in the old customs house."


def by_anchor(passages: list[str]) -> dict[int, list[PassageSignature]]:
    known: dict[int, list[PassageSignature]] = {}
    for passage in passages:
        signature = passage_signature(passage, SEED)
        if signature is not None:
            known.setdefault(signature.anchor, []).append(signature)
    return known


def find(text: str, passages: list[str]) -> list[PassageMatch]:
    known = by_anchor(passages)
    return find_passages(text, SEED, lambda anchor: known.get(anchor, []))


def find_by_words(text: str, passages: list[str]) -> list[PassageMatch]:
    """Find passages by comparing all their words at every place; of equally long ones the first given."""
    atoms = [piece for piece in PIECES.finditer(text) if piece[1] is None]
    said = [piece[0] for piece in atoms]
    wanted = [[piece[0] for piece in PIECES.finditer(passage) if piece[1] is None] for passage in passages]
    found, at = list[PassageMatch](), 0
    while at < len(said):
        fits = [i for i, p in enumerate(wanted) if len(p) >= ANCHOR and said[at : at + len(p)] == p]
        if fits:
            longest = max(fits, key=lambda i: len(wanted[i]))
            last = at + len(wanted[longest])
            found.append(PassageMatch(atoms[at].start(), atoms[last - 1].end(), passages[longest]))
            at = last
        else:
            at += 1
    return found


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
texts = st.lists(words, min_size=ANCHOR, max_size=60).map(" ".join)


HEADS = (
    "Example Corporation: all rights reserved, copyright notice, page number",
    " ".join("ab" * 7),
    " ".join("a" * 13),
)
"""What many pages begin with, the last two also in the midst of it."""
gaps = st.sampled_from([" ", "\n", "\\n  "])
tails = st.lists(st.sampled_from(["a", "b", "é", ";"]), max_size=8).map(" ".join)
pages = st.builds(lambda head, tail, gap: f"{head} {tail}".replace(" ", gap), st.sampled_from(HEADS), tails, gaps)


@given(st.data())
def test_of_pages_that_begin_alike_those_are_found_whose_every_word_stands_there(data: st.DataObject) -> None:
    passages = data.draw(st.lists(pages, min_size=1, max_size=8))
    text = data.draw(st.lists(st.one_of(st.sampled_from(passages), pages, tails), max_size=8).map(" ".join))
    text = text[: data.draw(st.integers(0, len(text)))]
    assert find(text, passages) == find_by_words(text, passages)


def test_pages_that_begin_alike_are_not_tried_one_by_one() -> None:
    passages = [f"{HEADS[0]} {number} " + "x " * (number % 3) for number in range(300)]
    known, asked, named = by_anchor(passages), list[int](), list[str]()

    def of(anchor: int) -> list[PassageSignature]:
        asked.append(anchor)
        return known.get(anchor, [])

    def name(digest: str) -> str:
        named.append(digest)
        return digest

    text = f"{HEADS[0]} none.\n" * 5 + passages[7]
    assert [found.text for found in find_passages(text, SEED, of, name)] == [passages[7]]
    assert len(named) <= 6 * 3, "one for each length at each place"
    assert [asked.count(anchor) for anchor in known] == [1]


def test_what_passages_are_known_by_is_what_stores_have_kept() -> None:
    own, other = (
        passage_signature(PASSAGES[0], SEED),
        passage_signature("Die Fähre 'Möwe' \\n läuft\tum 7 Uhr aus; 海港 liegt im Norden.\n", SEED),
    )
    assert own is not None
    assert other is not None
    assert (own.anchor, own.atoms, own.name) == (-1609495418946347143, 21, "b755c304999bc534f1a5df956494906c")
    assert (other.anchor, other.atoms, other.name) == (5884275364728671247, 16, "8ba046f5c6aa6463e231e06b42069f1b")


@given(passage=texts, before=st.sampled_from(["", "Context:\n", "- ", "['"]), behind=st.sampled_from(["", "\n", "']"]))
def test_a_passage_is_found_wherever_it_stands(passage: str, before: str, behind: str) -> None:
    found = find(f"{before} {passage.strip()} {behind}", [passage])
    assert [match.text for match in found] == ([] if passage_signature(passage, SEED) is None else [passage])


@pytest.mark.parametrize(
    "joined",
    [
        "\n\n".join(text.strip() for text in [*PASSAGES, LINES]),
        "\r\n".join([*PASSAGES, LINES]).replace("\n", "\r\n"),
        "\n".join(f"    {line}" for text in [*PASSAGES, LINES] for line in text.splitlines()),
        str([*PASSAGES, LINES]),
        '{"context": "' + " ".join([*PASSAGES, LINES]) + '"}',
    ],
    ids=["joined", "windows", "indented", "printed as a list", "quoted"],
)
def test_frameworks_may_strip_join_indent_and_quote(joined: str) -> None:
    assert [found.text for found in find(f"Read this.\n{joined}\nWho?", [*PASSAGES, LINES])] == [*PASSAGES, LINES]


def test_a_changed_word_is_another_text() -> None:
    changed = PASSAGES[0].replace("Orla", "Oda")
    assert find(f"{changed}\n\n{PASSAGES[1]}", PASSAGES) == find(f"{changed}\n\n{PASSAGES[1]}", PASSAGES[1:])


def test_short_passages_are_not_looked_for() -> None:
    assert passage_signature("Yes, at noon.", SEED) is None


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    engine = FusionEngine(llama, MemoryStore(), method=QCFUSE)
    engine.warm([*PASSAGES, LINES], sources=["ferry", "hull", "mill", "office"])
    return engine


def flat(passages: list[str]) -> str:
    context = "\n\n".join(text.strip() for text in passages)
    return f"Context information is below.\n-----\n{context}\n-----\nAnswer the query.\nQuery: {QUESTION}\nAnswer: "


def test_the_ids_are_those_of_the_models_own_pipeline(engine: FusionEngine) -> None:
    turns, text = [("system", "Be brief."), ("user", flat([*PASSAGES, LINES]))], flat(PASSAGES)
    tokenizer = engine.lm.tokenizer
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False, add_generation_prompt=True
    )
    assert engine.prompt_from_text(turns).ids == tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert engine.prompt_from_text(text).ids == tuple(tokenizer(text)["input_ids"])
    for span in (*engine.prompt_from_text(turns).chunks, *engine.prompt_from_text(text).chunks):
        part = span.segment.part
        assert part is not None
        assert part.ids[part.start : part.start + len(span)] == span.segment.ids


def test_passages_in_a_flat_prompt_are_reused(engine: FusionEngine) -> None:
    prompt = engine.prompt_from_text([("user", flat([PASSAGES[2], LINES, PASSAGES[0]]))])
    done = engine.prefill(prompt, method=make_method("reuse", base=FRAMED))
    assert [lookup.hit for lookup in done.report.lookups] == [True] * 3
    warmed = sum(len(engine.prompts.chunk_ids(text)) for text in (PASSAGES[2], LINES, PASSAGES[0]))
    assert done.report.reused_tokens > 0.8 * warmed
    assert done.report.fallback is None


@pytest.mark.parametrize("method", [ALL, make_method("full")], ids=["all rows", "full"])
def test_all_rows_of_a_flat_prompt_are_plain_prefill(engine: FusionEngine, method: object) -> None:
    prompt = engine.prompt_from_text([("user", flat(PASSAGES))])
    assert len(prompt.chunks) == 3
    expected = references.plain_forward(engine.lm, prompt.ids)[0][-1]
    assert torch.allclose(engine.prefill(prompt, method=method).logits, expected, atol=1e-4)  # type: ignore[arg-type]


def test_reused_parts_are_the_stored_tokens_at_their_places(engine: FusionEngine) -> None:
    prompt = engine.prompt_from_text(flat(PASSAGES))
    buffer = engine.prefill(prompt, method=make_method("reuse", base=FRAMED)).buffer
    for span in prompt.chunks:
        part = span.segment.part
        assert part is not None
        key = FRAMED.key(engine.lm.fingerprint, prompt.prefix_ids, part.ids)
        chunk = engine.store.get(key)
        assert isinstance(chunk, ChunkKV)
        stored = chunk.layer(1, part.start, part.start + len(span))[1]
        assert torch.equal(buffer.values[1][0, :, span.start : span.stop], stored)


def test_every_family_finds_and_fuses(family: LanguageModel) -> None:
    engine = make_warmed_engine(family, method=QCFUSE)
    done = engine.prefill(engine.prompt_from_text([("user", flat(PASSAGES))]))
    assert len(done.report.lookups) == 3
    assert done.report.fallback is None
    assert done.logits.isfinite().all()


def test_passages_of_a_few_words_repeated_are_matched_token_by_token(engine: FusionEngine) -> None:
    """Number tables, whose line breaks a framework rewrote."""
    table = "\n".join(" ".join(str((row * column) % 10) for column in range(1, 40)) for row in range(150))
    engine.warm([table])
    text = "Rows:\n" + table.replace("\n", "\n  ") + "\nWhich is largest?"
    prompt = engine.prompt_from_text(text)
    stored = engine.prompts.chunk_ids(table)
    expected = SequenceMatcher(None, stored[:400], prompt.ids[:400], autojunk=False).get_matching_blocks()
    found = [(span.segment.part.start, span.start) for span in prompt.chunks if span.segment.part is not None]
    assert found[0] == next((block.a, block.b) for block in expected if block.size >= 16)
    assert sum(len(span) for span in prompt.chunks) > 0.5 * len(stored)


def test_nothing_is_no_prompt(engine: FusionEngine) -> None:
    with pytest.raises(ValueError, match="must end with text"):
        engine.prompt_from_text("")


def test_text_that_ends_with_a_passage_still_leaves_something_to_compute(engine: FusionEngine) -> None:
    prompt = engine.prompt_from_text(f"Repeat: {PASSAGES[0]}")
    assert prompt.segments[-1].role is Role.TEXT
    assert len(engine.prefill(prompt).report.lookups) == 1


def test_what_was_never_warmed_is_text(engine: FusionEngine) -> None:
    prompt = engine.prompt_from_text("The tide tables hang at the harbour office door." * 5)
    assert [segment.role for segment in prompt.segments] == [Role.TEXT]


def test_what_is_forgotten_is_not_recognised_any_more(engine: FusionEngine) -> None:
    engine.forget("hull")
    assert len(engine.prompt_from_text(flat(PASSAGES)).chunks) == 2
    engine.warm(PASSAGES[1:2], sources=["hull again"])
    assert len(engine.prompt_from_text(flat(PASSAGES)).chunks) == 3
    engine.warm(["The ferry does not go in winter. Ask at the office in the old customs house."], sources=["ferry"])
    assert len(engine.prompt_from_text(flat(PASSAGES)).chunks) == 2


def test_a_passage_that_lost_its_last_source_before_it_is_noted_is_not_recognised(engine: FusionEngine) -> None:
    text = "The lock is closed from ten at night; ask for its keeper at the small office by the bridge."
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(text), [BLIND])
    for needs_source, found in ((True, 0), (False, 1)):
        engine.corpus.signatures.add([(text, key, needs_source)])
        assert len(engine.corpus.signatures.find(text)) == found


def test_the_shortest_run_of_equal_tokens_that_is_worth_a_read_is_read(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, engine.prompt_from_text(flat(PASSAGES[:1])).chunks))
    for fewest, found in ((longest, 1), (longest + 1, 0)):
        monkeypatch.setattr(recognition, "MIN_RUN", fewest)
        assert len(engine.prompt_from_text(flat(PASSAGES[:1])).chunks) == found


def test_what_another_process_warms_is_recognised(llama: LanguageModel, tmp_path: Path) -> None:
    with open_store(tmp_path) as mine, open_store(tmp_path) as theirs:
        here, there = make_engine(llama, mine), make_engine(llama, theirs)
        assert here.prompt_from_text(flat(PASSAGES)).chunks == ()
        there.warm(PASSAGES)
        assert len(here.prompt_from_text(flat(PASSAGES)).chunks) == 3


def test_texts_are_read_while_a_slow_store_forgets(llama: LanguageModel, tmp_path: Path) -> None:
    class Slow(DiskStore):
        def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
            removing.set()
            go_on.wait(10)
            return super().discard(key, reason)

    removing, go_on = threading.Event(), threading.Event()
    with Slow(tmp_path) as store:
        engine = FusionEngine(llama, store, method=QCFUSE)
        engine.warm(PASSAGES, sources=["a", "b", "c"])
        forgetting = threading.Thread(target=engine.forget, args=("a",))
        forgetting.start()
        assert removing.wait(10)
        assert len(engine.prompt_from_text(flat(PASSAGES)).chunks) == 2
        assert not go_on.is_set()
        go_on.set()
        forgetting.join()


def test_two_wordings_over_one_store_do_not_take_each_others_passages(llama: LanguageModel, tmp_path: Path) -> None:
    other = PromptTemplate(chunk="- {text}\n")
    with DiskStore(tmp_path) as store:
        mine, theirs = FusionEngine(llama, store, method=QCFUSE), make_engine(llama, store, template=other)
        mine.warm(PASSAGES, sources=["a", "b", "c"])
        theirs.warm(PASSAGES, sources=["x", "y", "z"])
        theirs.forget("x")
        assert len(mine.prompt_from_text(flat(PASSAGES)).chunks) == 3


def test_no_text_is_kept(llama: LanguageModel, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        engine = make_engine(llama, store)
        engine.warm(PASSAGES, sources=["a", "b", "c"])
        engine.prompt_from_text(flat(PASSAGES))
        engine.close()
    rows = sqlite3.connect(tmp_path / "sources.db").execute("SELECT gaps FROM located").fetchall()
    gaps = b"".join(zlib.decompress(row[0]) for row in rows)
    assert len(rows) == 3
    assert re.fullmatch(rb"[\s\0]*", gaps)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for word in ("captain", "Orla", "council", "paint"):
        assert word.encode() not in kept


@pytest.mark.parametrize("values", ["atoms = 'x'", "gaps = X'8080'", "gaps = 'text'", "name = X'80'", "gaps = NULL"])
def test_values_that_others_wrote_recognise_nothing(llama: LanguageModel, tmp_path: Path, values: str) -> None:
    with open_store(tmp_path) as store:
        engine = make_warmed_engine(llama, store)
        with closing(sqlite3.connect(tmp_path / "sources.db")) as database, database:
            database.execute(f"UPDATE located SET {values}")
        assert engine.prompt_from_text(flat(PASSAGES)).chunks == ()


def test_passages_of_other_models_and_tenants_are_not_recognised(llama: LanguageModel, tmp_path: Path) -> None:
    from tests.support.families import build_model

    other = LanguageModel.wrap(build_model("llama", seed=3), llama.tokenizer)
    with open_store(tmp_path) as store:
        make_engine(llama, store).warm(PASSAGES)
        assert make_engine(other, store).prompt_from_text(flat(PASSAGES)).chunks == ()
    with open_store(tmp_path, tenant="acme", secret=b"s" * 32, encrypt=False) as theirs:
        assert make_engine(llama, theirs).prompt_from_text(flat(PASSAGES)).chunks == ()


@pytest.mark.parametrize("failure", ["damaged", "closed"])
def test_a_manifest_that_cannot_be_read_costs_time_and_is_reported(
    llama: LanguageModel, tmp_path: Path, failure: str
) -> None:
    with FusionEngine(llama, DiskStore(tmp_path), method=QCFUSE) as engine:
        engine.warm(PASSAGES)
    for file in tmp_path.glob("sources.db*") if failure == "damaged" else ():
        file.write_bytes(b"no database" * 500)
    with FusionEngine(llama, DiskStore(tmp_path), method=QCFUSE) as engine:
        if failure == "closed":
            engine.corpus.open_sources().close()
        prompt = engine.prompt_from_text(flat(PASSAGES))
        prefilled = engine.prefill(prompt)
    assert torch.allclose(prefilled.logits, references.plain_forward(llama, prompt.ids)[0][-1], atol=1e-4)
    assert str(prefilled.report.fallback).startswith("no passages were looked for: ")


@pytest.mark.parametrize(("kv_dtype", "on_disk"), [("model", False), ("int8", True), ("int8", False), ("rank16", True)])
def test_a_cut_chunk_is_that_part_of_the_whole(
    llama: LanguageModel, tmp_path: Path, kv_dtype: str, on_disk: bool
) -> None:
    engine = make_warmed_engine(llama, texts=PASSAGES[:1], bases=(BLIND,))
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[0]), (BLIND,))
    whole = engine.store.get(key)
    assert isinstance(whole, ChunkKV)
    whole = to_format(whole, kv_dtype)
    if on_disk:
        store = DiskStore(tmp_path)
        store.put(key, whole)
        found = store.get(key)
        assert isinstance(found, ChunkKV)
        whole = found
    part = slice_chunk(whole, 5, 29)
    assert part.n_tokens == 24
    for layer in range(whole.n_layers):
        for mine, theirs in zip(part.layer(layer), whole.layer(layer, 5, 29), strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(part.layer(layer, 3, 9), whole.layer(layer, 8, 14), strict=True):
            assert torch.equal(mine, theirs)
        order = [token - 5 for token in whole.blocks[RANKING][layer].tolist() if 5 <= token < 29]
        assert part.blocks[RANKING][layer].tolist() == order
    assert part.anchors(0.5)[0].tolist() == sorted(part.blocks[RANKING][0, :12].tolist())
    with pytest.raises(ValueError, match="has none from 30 to 30"):
        slice_chunk(whole, 30, 30)
