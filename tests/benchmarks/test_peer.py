"""`python -m benchmarks peer`: the same tokens on both sides, and answers of the lengths asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality.configurations import configurations
from benchmarks.speed import peer
from benchmarks.speed.peer import PeerOptions, compare_peer
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, QCFuseError, SamplingParams
from qcfuse_rag.generation.completion import end_tokens
from tests.support import seams
from tests.support.cli import Run

OTHER_SIDES = {
    "llama.cpp, nothing kept",
    "llama.cpp, after the same order",
    "llama.cpp, after another order",
    "llama.cpp, after another order, cache reuse",
}


@pytest.mark.real
def test_all_sides_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    seams.pause_between_sides(monkeypatch, 0)  # no figure here is compared
    result = run.json("peer", "--context", 64, "--answers", "3", "--repeats", 1, "--ratios", ".05,.2")
    assert 64 < result["prompt_tokens"] < 192
    assert "float16 weights" in result["about"]["dtype"]
    assert {row["side"] for row in result["rows"]} == {"full", "auto, 5 %", "auto, 20 %"} | OTHER_SIDES
    for row in result["rows"]:
        assert row["first_token_s"] > 0
        assert list(row["answer_s"]) == ["3"]


@pytest.mark.real
def test_prompts_have_the_length_asked_for_and_share_what_their_names_say(smollm2: LanguageModel) -> None:
    texts, prompts = peer._prompts(FusionEngine(smollm2, MemoryStore()), 700)
    sizes = [len(smollm2.tokenizer(text)["input_ids"]) for text in texts]
    assert abs(sum(sizes) - 700) < 5
    shared = _shared(prompts.measured, prompts.same_order)
    assert 700 < shared < len(prompts.measured)
    assert _shared(prompts.measured, prompts.other_order) < shared - sum(sizes[1:])


def test_end_tokens_are_never_chosen(llama: LanguageModel) -> None:
    sampler = peer._EndlessSampler(SamplingParams(), llama)
    logits = torch.zeros(llama.model.config.vocab_size)
    logits[7] = 1
    for token in end_tokens(llama):
        logits[token] = 9
    assert sampler(logits) == 7


def test_another_file_than_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QCFuseError, match="needs a GGUF file"):
        compare_peer(PeerOptions(gguf=tmp_path / "model.safetensors", methods=tuple(configurations(()))))


def _shared(first: peer.Ids, second: peer.Ids) -> int:
    return next(i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])


def test_answers_of_one_token_are_refused_before_anything_is_timed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        PeerOptions(gguf=tmp_path / "model.gguf", methods=(), answers=(1, 32))
