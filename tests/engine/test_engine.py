"""The engine where users stumble: duplicates, nothing found, things missing, things too long."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from qcfuse_rag import (
    DiskStore,
    FusionEngine,
    KVStore,
    LanguageModel,
    MemoryStore,
    PromptTemplate,
    SamplingParams,
    make_method,
    open_store,
)
from qcfuse_rag.errors import PromptTooLong, StoreError
from qcfuse_rag.prompts.recognition import RecognitionIndex
from qcfuse_rag.runtime.learned_costs import read_samples
from qcfuse_rag.store.entry.codec import MappedFile, StoredBlocks, open_chunk
from qcfuse_rag.store.key import BLIND, FRAMED, Base
from tests.support import references, seams
from tests.support.cases import cases
from tests.support.engines import make_engine, make_warmed_engine, stored_chunk
from tests.support.passages import PASSAGES, QUESTION

QCFUSE = make_method("qcfuse", ratio=0.3, base=FRAMED)


def full_logits(engine: FusionEngine, ids: tuple[int, ...]) -> torch.Tensor:
    return references.plain_forward(engine.lm, ids)[0][-1]


def test_the_same_chunk_twice_in_a_prompt(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, [PASSAGES[0], PASSAGES[1], PASSAGES[0]])
    done = engine.prefill(prompt, method=QCFUSE)
    assert [lookup.hit for lookup in done.report.lookups] == [True] * 4
    every = engine.prefill(prompt, method=make_method("random", ratio=1.0))
    assert torch.allclose(every.logits, full_logits(engine, prompt.ids), atol=1e-4)


def test_answers_do_not_depend_on_who_asked_before_and_nothing_of_them_is_stored(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompt, before = engine.prompt(QUESTION, PASSAGES), engine.store.stats()[0].entries
    alone = engine.prefill(prompt, method=QCFUSE)
    for order in (PASSAGES, PASSAGES[::-1], PASSAGES[1:], [PASSAGES[2], PASSAGES[0]]):
        engine.generate(engine.prompt("Something else?", order), SamplingParams(max_new_tokens=4))
    again = engine.prefill(prompt, method=QCFUSE)
    assert torch.equal(again.logits, alone.logits)
    assert again.report.selected == alone.report.selected
    assert engine.store.stats()[0].entries == before, "neither question nor fused caches are kept"


@pytest.mark.parametrize("method", ["full", "reuse", "qcfuse"])
def test_an_empty_retrieval_is_full_prefill(engine: FusionEngine, method: str) -> None:
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION)
    done = engine.prefill(prompt, method=make_method(method))
    assert torch.allclose(done.logits, full_logits(engine, prompt.ids), atol=1e-4)
    assert done.report.context_tokens == 0


@pytest.mark.parametrize("method", ["reuse", "qcfuse"])
def test_a_question_of_one_token(engine: FusionEngine, method: str) -> None:
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt("?", PASSAGES)
    assert len(prompt.spans[-2]) == 1
    done = engine.prefill(prompt, method=make_method(method))
    assert torch.isfinite(done.logits).all()
    assert done.report.rows < len(prompt)


@pytest.mark.parametrize("missing", cases([[0], [1], [2], [0, 2], [0, 1, 2]], [1], [0, 1, 2]), ids=str)
@pytest.mark.parametrize("method", cases(["reuse", "prophetkv", "qcfuse"], "qcfuse"))
def test_chunks_that_are_missing_are_rows(engine: FusionEngine, method: str, missing: list[int]) -> None:
    engine.warm([p for i, p in enumerate(PASSAGES) if i not in missing], bases=(BLIND,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method(method, base=BLIND))
    assert [i for i, lookup in enumerate(done.report.lookups[-3:]) if not lookup.hit] == missing
    assert done.report.fallback == f"{len(missing)} of 3 passages computed in full: absent"
    rows = set(done.report.selected) | set(range(prompt.chunks[-1].stop, len(prompt)))
    rows |= {p for i in missing for p in range(prompt.chunks[i].start, prompt.chunks[i].stop)}
    if not engine.store.stats()[0].entries:
        rows |= set(range(prompt.chunks[0].start))
    table = references.stored_table(engine.lm, prompt, BLIND)
    expected, _ = references.sequential_fusion(engine.lm, prompt.ids, sorted(rows), table)
    assert done.report.rows == len(rows)
    assert torch.allclose(done.logits, expected, atol=1e-4)


def test_a_prompt_beyond_the_context_window_is_one_clear_error(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES * 8)
    with pytest.raises(PromptTooLong, match=r"a prompt of 1,\d\d\d tokens with an answer exceeds .* of 512"):
        engine.generate(prompt)


def nested(value: Any, depth: int) -> Any:
    return nested([value], depth - 1) if depth else value


@pytest.mark.parametrize(
    "parameters",
    [{"description": "x" * 2_000_000}, {"enum": [1] * 100_000}, {"enum": nested(["x"] * 10_000, 100)}],
    ids=["a long text", "many numbers", "what a template may indent"],
)
def test_tools_beyond_the_context_window_are_refused(llama: LanguageModel, parameters: dict[str, Any]) -> None:
    tokenizer = copy.deepcopy(llama.tokenizer)
    tokenizer.chat_template = f"{{{{ tools | tojson(indent=4) }}}}{tokenizer.chat_template}"
    engine = make_engine(LanguageModel.wrap(llama.model, tokenizer), MemoryStore())
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with pytest.raises(PromptTooLong, match="exceeds the context window of 512 tokens"):
        engine.prompt(QUESTION, PASSAGES, tools=[tool])
    with pytest.raises(PromptTooLong, match="exceeds the context window of 512 tokens"):
        engine.prompt_from_text([("user", QUESTION)], [tool])


def test_a_text_beyond_the_context_window_is_refused_before_passages_are_sought_in_it(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[str] = []
    monkeypatch.setattr(RecognitionIndex, "find", lambda _, text, *tokens: sought.append(text) or [])
    engine.prompt_from_text("x" * 1_000)
    assert len(sought) == 1
    for conversation in ("x" * 2_000_000, [("user", "Why?"), ("assistant", "x" * 2_000_000), ("user", "Why?")]):
        with pytest.raises(PromptTooLong, match="tokens exceeds the context window of 512 tokens"):
            engine.prompt_from_text(conversation)
    assert len(sought) == 1


def test_a_passage_beyond_the_context_window_is_reported_and_the_rest_is_stored_once(engine: FusionEngine) -> None:
    texts = [PASSAGES[0], PASSAGES[0], PASSAGES[1] * 40, PASSAGES[2]]
    summary = engine.warm(texts)
    assert (summary.chunks, summary.warmed, summary.present) == (3, 2, 0)
    assert [index for index, _ in summary.failed] == [2], "counted as they were given"
    assert "split the document into smaller passages" in summary.failed[0][1]
    again = engine.warm(texts)
    assert (again.warmed, again.present, again.tokens) == (0, 2, 0)


def test_chunks_warmed_alone_are_the_same_bytes_whatever_is_warmed_beside_or_before(llama: LanguageModel) -> None:
    engines = [make_engine(llama, MemoryStore()) for _ in range(3)]
    engines[0].warm(PASSAGES, batch_tokens=1)
    engines[1].warm(PASSAGES[::-1], batch_tokens=1)
    engines[2].warm([PASSAGES[1]], batch_tokens=1)
    first, other, alone = (stored_chunk(engine, PASSAGES[1]) for engine in engines)
    for name in first.names():
        assert torch.equal(first.blocks[name], other.blocks[name])
        assert torch.equal(first.blocks[name], alone.blocks[name])


def test_stored_keys_are_unrotated(engine: FusionEngine) -> None:
    """A layer's keys at position 0 are what is stored, whatever the position; layer 0 depends on the token alone."""
    engine.warm(["one one one one"], bases=(BLIND,))
    ids = engine.prompts.chunk_ids("one one one one")
    keys, _ = stored_chunk(engine, "one one one one", BLIND).layer(0)
    again = [i for i, token in enumerate(ids) if token == ids[-3]]
    assert len(again) > 1
    assert torch.allclose(keys[:, again[0]], keys[:, again[-1]], atol=1e-5)
    at_zero = references.alone_at(engine.lm, (ids[-3],), 0)[0][0][0, :, 0]
    assert torch.allclose(keys[:, again[0]], at_zero, atol=1e-5)


def test_a_disk_that_fails_costs_time_and_nothing_else(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as store:
        engine = make_warmed_engine(llama, store)

        def broken(path: Path) -> MappedFile:
            raise OSError(5, "Input/output error")

        seams.mapped_file(monkeypatch, broken)
        prompt = engine.prompt(QUESTION, PASSAGES)
        done = engine.prefill(prompt, method=QCFUSE)
    assert torch.allclose(done.logits, full_logits(engine, prompt.ids), atol=1e-4)
    assert done.report.fallback == "3 of 3 passages computed in full: cannot be read: [Errno 5] Input/output error"


def damage(path: Path, block: str) -> None:
    """Flip one bit in a block of an entry."""
    blocks = open_chunk(MappedFile(path))[1].blocks
    assert isinstance(blocks, StoredBlocks)
    data = bytearray(path.read_bytes())
    data[blocks.start + blocks.ranges[block].offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("block", "method"), [("ranking", "qcfuse"), ("key.0", "reuse"), ("value.3", "reuse")])
def test_damage_in_any_block_is_recomputed_reported_and_healed(
    llama: LanguageModel, tmp_path: Path, block: str, method: str
) -> None:
    """Rows over the damaged chunk are those of full prefill, also if only the last layer shows the damage."""
    with DiskStore(tmp_path) as store:
        engine = make_warmed_engine(llama, store)
        prompt, chosen = engine.prompt(QUESTION, PASSAGES), make_method(method, base=FRAMED)
        sound = engine.prefill(prompt, method=chosen)
        key = FRAMED.key(llama.fingerprint, prompt.prefix_ids, prompt.chunks[1].segment.ids)
        damage(store.files.path(key.address), block)
        passage = prompt.chunks[1].start, prompt.chunks[1].stop
        done = engine.prefill(prompt, method=chosen)
        assert [lookup.hit for lookup in done.report.lookups] == [True, True, False, True]
        assert done.report.fallback == f"1 of 3 passages computed in full: checksum of block {block} differs"
        assert torch.isfinite(done.logits).all()
        if method == "reuse":
            at, table = slice(*passage), references.plain_forward(llama, prompt.ids[: passage[1]])[1]
            assert torch.allclose(done.buffer.values[3][:, :, at], table[3][1][:, :, at], atol=1e-4)
        assert store.stats()[0].discarded == 1
        assert engine.warm(PASSAGES).warmed == 1
        assert torch.equal(engine.prefill(prompt, method=chosen).logits, sound.logits)


def test_a_damaged_system_prefix_is_recomputed_when_questions_and_when_passages_come(
    llama: LanguageModel, tmp_path: Path
) -> None:
    with DiskStore(tmp_path) as store:
        engine = make_warmed_engine(llama, store, texts=PASSAGES[:1])
        prompt = engine.prompt(QUESTION, PASSAGES[:1])
        key = BLIND.key(llama.fingerprint, prompt.prefix_ids, prompt.prefix_ids)
        damage(store.files.path(key.address), "value.1")
        done = engine.prefill(prompt, method=make_method("reuse"))
        assert torch.allclose(done.logits, full_logits(engine, prompt.ids), atol=1e-4)
        assert engine.warm(PASSAGES).warmed == 2
        damage(store.files.path(key.address), "value.1")
        assert engine.warm([*PASSAGES, "One more."]).warmed == 1
        assert engine.prefill(prompt, method=make_method("reuse")).report.lookups[0].hit


def test_prompts_built_by_many_threads_are_right(engine: FusionEngine) -> None:
    """Special tokens are a switch on a tokenizer; switching it for one thread must not switch it for another."""
    passages = [f"</s> {text} <s>" for text in PASSAGES]
    expected, wrong = engine.prompt(QUESTION, passages).ids, []

    def work(_: int) -> None:
        wrong.extend(i for i in range(40) if engine.prompt(QUESTION, passages).ids != expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


def test_a_question_before_the_passages_chooses_all_the_same(llama: LanguageModel) -> None:
    template = PromptTemplate(messages=(("user", "Question: {question}\n\n{context}Answer:"),))
    engine = make_warmed_engine(llama, template=template, bases=(BLIND,))
    prompts = [engine.prompt(question, PASSAGES) for question in ("Who keeps paint?", "When is the council?")]
    chosen = [engine.prefill(prompt, method=make_method("qcfuse", ratio=0.2)).report for prompt in prompts]
    offset = len(prompts[1]) - len(prompts[0])
    assert chosen[0].selected != tuple(position - offset for position in chosen[1].selected)


def test_a_store_that_cannot_be_written_says_so(llama: LanguageModel) -> None:
    engine = make_engine(llama, MemoryStore(limit_bytes=1000))
    with pytest.raises(StoreError, match="does not fit a memory store of 1,000 bytes"):
        engine.warm(PASSAGES)


@pytest.mark.parametrize(
    ("base", "hits"), [(FRAMED, [False] * 4), (BLIND, [False, True, True, True])], ids=["framed", "blind"]
)
def test_framed_chunks_are_their_frames_alone_and_blind_ones_serve_every_template(
    llama: LanguageModel, base: Base, hits: list[bool]
) -> None:
    store = MemoryStore()
    make_engine(llama, store).warm(PASSAGES, bases=(base,))
    other = PromptTemplate(messages=(("user", "Read this.\n\n{context}Now: {question}"),))
    engine = make_engine(llama, store, template=other)
    done = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=make_method("reuse", base=base))
    assert [lookup.hit for lookup in done.report.lookups] == hits, "the system prefix is another in either case"


@pytest.mark.slow
def test_concurrent_requests_do_not_meet(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompts = [engine.prompt(f"{QUESTION} {i}", PASSAGES[: 1 + i % 3]) for i in range(6)]
    params = SamplingParams(max_new_tokens=8)
    expected = [engine.generate(prompt, params, method=QCFUSE).ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: engine.generate(prompt, params, method=QCFUSE).ids, prompts))
    assert found == expected


def test_prefetch_brings_passages_into_memory(llama: LanguageModel, tmp_path: Path) -> None:
    store: KVStore = open_store(tmp_path)
    with make_engine(llama, store) as engine:
        engine.warm(PASSAGES)
        store.near.clear()  # type: ignore[attr-defined]
        engine.corpus.prefetch(PASSAGES)
        store._reader.shutdown(wait=True)  # type: ignore[attr-defined]
        assert store.near.stats()[0].entries == 3  # type: ignore[attr-defined]


def test_warming_up_does_beforehand_what_the_first_request_would_wait_for(
    engine: FusionEngine,
) -> None:
    engine.method = make_method("auto")
    assert engine.compile() > 0
    assert engine.runner.costs() is None, "on a CPU nothing is timed: the first passes would tell what set-up takes"
    engine.warm(PASSAGES)
    entries = {entry.address for entry in engine.store.entries()}
    engine.compile()
    assert {entry.address for entry in engine.store.entries()} == entries, "nothing of it is stored"

    assert engine.generate(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=2)).ids


def test_warming_and_answering_teach_what_passes_and_loads_take(llama: LanguageModel, tmp_path: Path) -> None:
    with open_store(tmp_path) as store, make_engine(llama, store) as engine:
        engine.warm(PASSAGES)
        [file] = tmp_path.glob("costs-*.json")
        batches = read_samples(file)
        assert {sample.kind for sample in batches.values()} == {"pass"}
        prompt = engine.prompt(QUESTION, PASSAGES)
        engine.generate(prompt, SamplingParams(max_new_tokens=4))
        for _ in engine.prefill_in_parts(prompt, method=make_method("full"), part_rows=lambda: len(prompt) // 4):
            pass
    learned = read_samples(file).values()
    assert {sample.kind for sample in learned} > {"pass"}
    assert any(sample.rows == 1 for sample in learned), "a decode step"
    assert any(sample.rows == len(prompt) / 4 for sample in learned), "parts"


def test_passes_of_a_gpu_are_timed_before_the_first_request(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine.first_passes", "runtime.learned_costs"):
        monkeypatch.setattr(f"qcfuse_rag.{module}.overlaps", lambda _: True)
    monkeypatch.setattr("qcfuse_rag.engine.first_passes.GPU_TOKENS", (0, 128, 256))
    engine.method = make_method("auto")
    engine.compile()
    costs = engine.runner.costs()
    assert costs is not None
    assert costs.overlaps
    assert costs.full_pass_s(256) >= costs.full_pass_s(16) > 0
