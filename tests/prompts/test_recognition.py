"""Parts of warmed passages are found in the text that a framework made of them, and only those."""

from __future__ import annotations

import json
import sqlite3
import threading
import unicodedata
import zlib
from contextlib import closing
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, PromptTemplate, make_method, open_store
from qcfuse_rag.prompts import recognition
from qcfuse_rag.prompts.passage_blocks import MIN_RUN, TokenisedText, blocks_of
from qcfuse_rag.prompts.recognition import MOST_ALIKE, StoredRun
from qcfuse_rag.prompts.segments import Role
from qcfuse_rag.store.chunk import RANKING, ChunkKV, slice_chunk, to_format
from qcfuse_rag.store.documents.sources import PassageRows
from qcfuse_rag.store.key import BLIND, FRAMED, ChunkKey, hash_ids
from tests.support import references
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

QCFUSE, ALL = make_method("qcfuse", ratio=0.3, base=FRAMED), make_method("random", ratio=1.0, base=FRAMED)
LINES = "Opening hours\n\n  Monday\t9-12\n  Tuesday\tclosed\n\nThe harbour office is in the old customs house."
LONG = "\n".join([*PASSAGES, LINES, *(passage.replace("mill", "barn") for passage in PASSAGES)])
CURLY = (
    "Orla\u2019s ferry \u2013 the \u201cM\u00f6we\u201d \u2013 leaves at \uff17 o\u2019clock, \ufb01ve minutes "
    "after the \ufb01rst bus\u2026 Nobody may board without a ticket, and the crew\u2019s dog sleeps on the deck."
)
CHINESE = "这座桥建于一九二三年、连接老城和港口。桥上有三盏灯、每天傍晚六点点亮。守桥人住在北岸的小屋里、名叫李文。"
JAPANESE = "この橋は一九二三年に建てられ、旧市街と港を結んでいる。橋には三つの灯りがあり、毎晩六時に点灯する。"


def find(engine: FusionEngine, text: str) -> list[StoredRun]:
    ids, offsets = engine.prompts.tokens.encode(text)
    return engine.corpus.index.find(text, ids, offsets)


def share(engine: FusionEngine, text: str, passage: str) -> float:
    """Return how much of a passage that stands in a text is found, by tokens."""
    found = sum(run.stop - run.start for run in find(engine, f"Context:\n{text}\nQuestion?"))
    return found / len(engine.prompts.tokens.ids(passage))


@pytest.fixture
def engine(llama: LanguageModel) -> FusionEngine:
    engine = FusionEngine(llama, MemoryStore(), method=QCFUSE)
    engine.warm([*PASSAGES, LINES], sources=["ferry", "hull", "mill", "office"])
    return engine


@pytest.mark.parametrize(
    "joined",
    [
        "\n\n".join(text.strip() for text in [*PASSAGES, LINES]),
        "\r\n".join([*PASSAGES, LINES]).replace("\n", "\r\n"),
        "\n".join(f"    {line}" for text in [*PASSAGES, LINES] for line in text.splitlines()),
        str([*PASSAGES, LINES]),
        json.dumps({"context": " ".join([*PASSAGES, LINES])}),
    ],
    ids=["joined", "windows", "indented", "printed as a list", "quoted"],
)
def test_frameworks_may_strip_join_indent_and_quote(engine: FusionEngine, joined: str) -> None:
    found = find(engine, f"Read this.\n{joined}\nWho?")
    warmed = [engine.prompts.chunk_ids(text) for text in [*PASSAGES, LINES]]
    assert {run.part.ids_hash for run in found} == set(map(hash_ids, warmed))
    assert sum(run.stop - run.start for run in found) > 0.8 * sum(map(len, warmed))


HALF = len(LONG) // 2
CUTS = {
    "whole": (LONG, 1.0),
    "its end": (LONG[HALF:], 0.75),
    "its beginning": (LONG[:HALF], 0.75),
    "its middle": (LONG[HALF // 2 : HALF + HALF // 2], 0.7),
    "one word changed": (LONG.replace("Orla", "Oda"), 0.75),
    "a sentence put in": (LONG.replace("\n", "\nNobody knows who had the idea for that. ", 1), 0.75),
    "without a sentence": (LONG.replace(PASSAGES[1], ""), 0.75),
    "with a header": (f"file: ferry.md\npage: 3\n\n{LONG}", 0.9),
}


@pytest.mark.parametrize(("text", "least"), CUTS.values(), ids=CUTS)
def test_what_is_left_of_a_passage_is_found(llama: LanguageModel, text: str, least: float) -> None:
    engine = make_warmed_engine(llama, texts=[LONG])
    left = text if len(text) < len(LONG) else LONG
    assert share(engine, text, left) >= least


def test_a_parent_is_found_by_its_children(llama: LanguageModel) -> None:
    engine = make_warmed_engine(llama, texts=[f"file: a.md\n\n{text}" for text in [*PASSAGES, LINES]])
    parent = " ".join([*PASSAGES, LINES])
    assert share(engine, f"file: a.md\n\n{parent}", parent) > 0.75


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: text.translate({0x2019: "'", 0x2013: "-", 0x201C: '"', 0x201D: '"'}),
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace(" ", "\n"),
        lambda text: json.dumps(text)[1:-1],
    ],
    ids=["quotes and dashes", "NFKC", "decomposed", "gaps", "JSON"],
)
def test_what_clients_rewrite_is_the_same_text(llama: LanguageModel, rewrite: object) -> None:
    """Tokens that a client changed are computed; those beside them are not."""
    rewritten = rewrite(CURLY)  # type: ignore[operator]
    for warmed, asked in ((CURLY, rewritten), (rewritten, CURLY)):
        engine = make_warmed_engine(llama, texts=[warmed])
        ids = [engine.prompts.tokens.ids(text) for text in (warmed, asked)]
        blocks = SequenceMatcher(None, *ids, autojunk=False).get_matching_blocks()
        equal = sum(block.size for block in blocks if block.size >= MIN_RUN)
        assert sum(run.stop - run.start for run in find(engine, f"Context:\n{asked}\n?")) > 0.6 * equal - MIN_RUN


@pytest.mark.parametrize("text", [CHINESE, JAPANESE], ids=["Chinese", "Japanese"])
def test_scripts_without_spaces_are_read_by_characters(llama: LanguageModel, text: str) -> None:
    engine = make_warmed_engine(llama, texts=[text])
    assert share(engine, text, text) > 0.9
    cut = text[len(text) // 3 :]
    assert share(engine, cut, cut) > 0.5


def test_edges_of_white_space_make_no_other_passage(llama: LanguageModel) -> None:
    engine = make_warmed_engine(llama, texts=PASSAGES)
    for text in (f"{PASSAGES[0]}\n", f"\n \n{PASSAGES[0]} \n\n", f"{PASSAGES[0]}\t"):
        assert engine.warm([text]).warmed == 0
        assert engine.prompt(QUESTION, [text]).ids == engine.prompt(QUESTION, PASSAGES[:1]).ids
    assert engine.warm([f"  {PASSAGES[0]}"]).warmed > 0, "indentation is text"


pieces = st.sampled_from([*PASSAGES, LINES, CURLY, CHINESE])
changes = st.sampled_from(
    [
        str,
        lambda text: text[len(text) // 5 :],
        lambda text: text[: -len(text) // 4],
        lambda text: text.replace("the", "a", 1),
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: text.replace(" ", "  "),
        json.dumps,
    ]
)
texts = st.lists(st.builds(lambda change, piece: change(piece), changes, pieces), max_size=6).map("\n".join)


@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_whatever_is_found_are_the_stored_tokens(text: str, known: FusionEngine) -> None:
    chunks = {hash_ids(ids): ids for ids in map(known.prompts.chunk_ids, [*PASSAGES, LINES, CURLY, CHINESE])}
    ids, end = known.prompts.tokens.ids(text), 0
    for run in find(known, text):
        stored = chunks[run.part.ids_hash]
        assert run.part.n_tokens == len(stored)
        assert stored[run.part.start :][: run.stop - run.start] == ids[run.start : run.stop]
        assert end <= run.start, "no token is in two parts"
        end = run.stop


@pytest.fixture(scope="module")
def known(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, texts=[*PASSAGES, LINES, CURLY, CHINESE])


HEAD = "Example Corporation: all rights reserved, copyright notice, page number"


def test_pages_that_begin_alike_are_not_tried_one_by_one(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [f"{HEAD} {number} " + f"{PASSAGES[number % 3]} {number * 7919} x" for number in range(3 * MOST_ALIKE)]
    engine = make_engine(llama, MemoryStore())
    [*keys] = (engine.corpus.keys(engine.prompts.chunk_ids(page), [BLIND])[0] for page in pages)
    engine.corpus.index.add([(page, key, False) for page, key in zip(pages, keys, strict=True)])
    read, row = list[int](), PassageRows.row
    monkeypatch.setattr(PassageRows, "row", lambda self, number: read.append(number) or row(self, number))
    text = "\n".join([*(f"{HEAD} none." for _ in range(5)), pages[7]])
    found = find(engine, text)
    assert sum(run.stop - run.start for run in found if run.part.ids_hash == keys[7].ids) > 0.5 * len(
        engine.prompts.chunk_ids(pages[7])
    )
    assert len(read) <= 6 * MOST_ALIKE


def test_what_passages_are_known_by_is_what_stores_have_kept() -> None:
    text = "Die Fähre 'Möwe' \\n läuft\tum 7 Uhr aus; 海港 liegt im Norden.\n"
    blocks = blocks_of(TokenisedText.of(text, range(len(text)), [(i, i + 1) for i in range(len(text))]), 0, 17, 7)
    assert blocks is not None
    assert blocks.to_bytes().hex() == STORED


STORED = "000000003c000000f6b8f642000000000c0529001200c2350e0b820be3b8940495c9c38c6753"


def test_tool_results_with_escaped_characters_are_found(llama: LanguageModel) -> None:
    text = f"{PASSAGES[0]} \U0001f642 {PASSAGES[1]}"
    engine = make_warmed_engine(llama, texts=[text])
    assert share(engine, json.dumps(text), text) > 0.5
    assert share(engine, json.dumps(text).replace("\\ude42", ""), text) > 0.3


def test_a_passage_that_is_updated_often_is_found(engine: FusionEngine) -> None:
    for _ in range(MOST_ALIKE + 2):
        engine.forget("ferry")
        engine.warm(PASSAGES[:1], sources=["ferry"])
        assert len(engine.prompt_from_text(flat(PASSAGES[:1])).chunks) == 1
    assert len(engine.corpus.index._table.numbers) <= 2 * (4 + MOST_ALIKE)


def test_short_passages_are_not_looked_for(engine: FusionEngine) -> None:
    engine.warm(["Yes, at noon."])
    assert find(engine, "Yes, at noon. Yes, at noon. Yes, at noon.") == []


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
        [ids] = (ids for ids in map(engine.prompts.chunk_ids, [*PASSAGES, LINES]) if hash_ids(ids) == part.ids_hash)
        assert ids[part.start : part.start + len(span)] == span.segment.ids


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
        key = FRAMED.key(engine.lm.fingerprint, prompt.prefix_ids, part.ids_hash)
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
        engine.corpus.index.add([(text, key, needs_source)])
        assert len(find(engine, text)) == found


def test_the_shortest_run_of_equal_tokens_that_is_worth_a_read_is_read(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, engine.prompt_from_text(flat(PASSAGES[:1])).chunks))
    for fewest, found in ((longest, 1), (longest + 1, 0)):
        monkeypatch.setattr(recognition, "MIN_TOKENS", fewest)
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
        engine.warm([*PASSAGES, CURLY], sources=["a", "b", "c", "d"])
        engine.prompt_from_text(flat(PASSAGES))
        engine.close()
    rows = sqlite3.connect(tmp_path / "sources.db").execute("SELECT gaps FROM recognised").fetchall()
    assert len(rows) == 4
    for row in rows:
        gaps, undo = json.loads(zlib.decompress(row[0]))
        assert not gaps.replace("\0", "").strip()
        assert not any(written and written.isalnum() and written != "\ufb01" for *_, written in undo)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for word in ("captain", "Orla", "council", "paint", "ticket"):
        assert word.encode() not in kept


@pytest.mark.parametrize(
    "values",
    [
        "blocks = 'x'",
        "blocks = X'8080'",
        "blocks = zeroblob(54)",
        "ids = X'80'",
        "ids = 7",
        "gaps = NULL",
    ],
)
def test_values_that_others_wrote_recognise_nothing(llama: LanguageModel, tmp_path: Path, values: str) -> None:
    with open_store(tmp_path) as store:
        engine = make_warmed_engine(llama, store)
        with closing(sqlite3.connect(tmp_path / "sources.db")) as database, database:
            database.execute(f"UPDATE recognised SET {values}")
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
