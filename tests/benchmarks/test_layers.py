"""Recall of layers: measured against transformers' own eager attention, labelled to the token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from benchmarks import profile
from benchmarks.profile import answer_positions, attention_by_layer, choose_layers, recall_by_layer
from benchmarks.questions import Example, demo_examples, find_answers
from benchmarks.runner import Run as Records
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt
from qcfuse_rag.errors import ProfileError
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

ANSWERED = Example(QUESTION, tuple(PASSAGES), answers=("the harbour school",), supporting=(1,))


def profiled(engine: FusionEngine, samples: list[Example], **options: Any) -> dict[str, Any]:
    run = Records("profile")
    profile.profile_layers(engine, samples, profile.Options(**options), run)
    return profile.layer_profile(run)


@torch.inference_mode()
def eager_attention(lm: LanguageModel, prompt: Prompt) -> list[Tensor]:
    """Run a whole prompt with transformers' eager attention; per layer the `[H, T, T]` weights it used itself."""
    weights: dict[int, Tensor] = {}

    def capture(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        length = query.shape[2]
        additive = torch.full((1, 1, length, length), float("-inf")).triu(1)
        output, used = eager_attention_forward(module, query, key, value, additive, **kwargs)
        weights[int(module.layer_idx)] = used[0]  # type: ignore[arg-type]
        return output, used

    AttentionInterface.register("capture-all", capture)
    AttentionMaskInterface.register("capture-all", sdpa_mask)
    lm.model.set_attn_implementation("capture-all")
    try:
        lm.model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
    finally:
        lm.model.set_attn_implementation("qcfuse")
    return [weights[layer] for layer in range(lm.n_layers)]


def slow_recall(lm: LanguageModel, prompt: Prompt, targets: set[int]) -> list[float]:
    """Rank one token after the other in plain Python."""
    tokens = [p for span in prompt.chunks for p in range(span.start, span.stop)]
    asking = range(prompt.chunks[-1].stop, prompt.spans[-2].stop)
    recalls = []
    for weights in eager_attention(lm, prompt):
        looks = {p: float(sum(weights[:, row, p].mean() for row in asking)) for p in tokens}
        best = sorted(tokens, key=lambda p: -looks[p])[: len(tokens) // 10]
        recalls.append(sum(p in targets for p in best) / len(targets))
    return recalls


def test_recall_is_that_of_transformers_own_attention(engine: FusionEngine) -> None:
    samples = [
        ANSWERED,
        Example("Is the hull green?", tuple(PASSAGES[:2]), answers=("green",)),
        Example("When does the council meet?", tuple(PASSAGES[::-1]), answers=("Mondays",)),
    ]
    expected = torch.zeros(4, dtype=torch.float64)
    for sample in samples:
        prompt = engine.prompt(sample.question, sample.passages)
        expected += torch.tensor(slow_recall(engine.lm, prompt, set(answer_positions(engine.prompts, prompt, sample))))
    found = profiled(engine, samples, layers=2)
    assert found["recall"] == pytest.approx((expected / 3).tolist())
    assert len(set(found["recall"])) > 1, "layers must differ here, or the comparison shows nothing"
    assert found["layers"] == list(choose_layers(found["recall"], 2))
    assert (found["samples"], found["skipped"]) == (3, {})


def test_the_attention_of_every_layer_is_that_of_the_rows_a_probe_has(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    asking = list(range(prompt.chunks[-1].stop, prompt.spans[-2].stop))
    expected = torch.stack([weights[:, asking].mean((0, 1)) for weights in eager_attention(engine.lm, prompt)])
    assert torch.allclose(attention_by_layer(engine.lm, prompt), expected, atol=1e-6)


def test_all_families_can_be_profiled(family: LanguageModel) -> None:
    attention = attention_by_layer(family, make_engine(family, MemoryStore()).prompt(QUESTION, PASSAGES))
    assert torch.allclose(attention.sum(1), torch.ones(family.n_layers), atol=1e-4)


def test_recall_counts_the_targets_among_the_best_tenth_of_the_candidates() -> None:
    attention = torch.zeros(2, 30)
    attention[0, [5, 6]] = 1.0
    attention[1, [29, 7]] = 1.0  # 29 is the question's and does not compete
    candidates = range(5, 25)
    assert recall_by_layer(attention, candidates, [6, 7]).tolist() == [0.5, 0.5]
    assert recall_by_layer(attention, candidates, [6]).tolist() == [1.0, 0.0]
    assert recall_by_layer(attention, range(5, 10), [5]).tolist() == [1.0, 0.0], "of few tokens, one counts"


@pytest.mark.parametrize(
    ("passage", "answer"),
    [
        ("The paint is kept in the old mill.", "old mill"),
        ("Orla steers the ferry", "Orla"),
        ("The ferry is steered by Orla", "Orla"),
        ("Zoë, café; 東京 🚢 sells naïve paint", "東京 🚢"),
        ("Zoë, café; 東京 🚢 sells naïve paint", "naïve"),
        ("Zoë", "Zoë"),
    ],
    ids=["inside", "at the start", "at the end", "bytes that are no text", "behind them", "all of it"],
)
def test_a_span_is_the_tokens_that_hold_a_character_of_the_answer(
    engine: FusionEngine, passage: str, answer: str
) -> None:
    passages = ("Nothing here.", passage, "Nothing there, nor Zoëfer.")
    prompt = engine.prompt("Which?", passages)
    found = answer_positions(engine.prompts, prompt, Example("Which?", passages, answers=(answer,)))

    # The tokenizer's pieces are bytes: add up their lengths to see which of them the answer's bytes fall in.
    written, span = engine.prompts.template.format_chunk(passage).encode(), prompt.chunks[1]
    first = written.index(answer.encode())
    expected, at = [], 0
    for position in range(span.start, span.stop):
        size = len(engine.lm.tokenizer.convert_ids_to_tokens(prompt.ids[position]))  # one character stands for a byte
        if at < first + len(answer.encode()) and at + size > first:
            expected.append(position)
        at += size
    assert at == len(written)
    assert list(found) == expected


def test_only_needed_passages_count_if_those_are_known(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    everywhere = answer_positions(engine.prompts, prompt, Example(QUESTION, tuple(PASSAGES), answers=("the",)))
    needed = answer_positions(engine.prompts, prompt, replace(ANSWERED, answers=("the",)))
    second = prompt.chunks[1]
    assert needed == tuple(p for p in everywhere if second.start <= p < second.stop)
    assert 0 < len(needed) < len(everywhere)


def test_questions_that_cannot_be_used_are_counted(engine: FusionEngine) -> None:
    elsewhere = replace(ANSWERED, answers=("in Lisbon",))
    long = replace(ANSWERED, passages=tuple(PASSAGES) * 20)
    found = profiled(engine, [elsewhere, ANSWERED, long])
    assert found["samples"] == 1
    assert found["skipped"] == {
        "the answer does not stand in the passages": 1,
        "longer than the context window": 1,
    }
    with pytest.raises(ProfileError, match=r"no question can be used \(1 times the answer does not stand"):
        profiled(engine, [elsewhere])


def test_the_demonstrations_questions_have_their_answers_in_the_documents_needed() -> None:
    samples = demo_examples(distractors=2)
    assert len(samples) == 24
    for sample in samples:
        assert len(sample.passages) == len(sample.supporting) + 2 == len(set(sample.passages))
        assert any(find_answers(sample.passages[i], sample.answers) for i in sample.supporting)
    assert {sample.supporting[0] for sample in samples} == {0, 1, 2}, "the evidence is not always in the same place"


def test_the_best_layers_are_chosen_less_a_penalty_for_depth() -> None:
    recall = (0.1, 0.5, 0.4, 0.5, 0.6)
    assert choose_layers(recall, 1) == (4,)
    assert choose_layers(recall, 2) == (1, 4), "of equals, the earlier"
    assert choose_layers(recall, 3) == (1, 3, 4)
    assert choose_layers(recall, 1, depth_penalty=0.2) == (1,), "0.6 - 0.2 x 4/5 < 0.5 - 0.2 x 1/5"
    with pytest.raises(ValueError, match="the model has 5 layers; choose 1 to 5 of them, not 6"):
        choose_layers(recall, 6)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("In 15 of 1590 cases, 15.", ["15"], ["15", "15"]),
        ("The Long\n Glass and the long glass", ["Long Glass"], ["Long\n Glass", "long glass"]),
        ("a 4.1 metre surge (4.1)", ["4.1", "4.1 metre"], ["4.1", "4.1 metre", "4.1"]),
        ("He owns 40,000 crowns", ["40,000"], ["40,000"]),
        ("no, nobody says yes", ["no", "Yes", "", " "], []),
        ("在东京举行", ["东京"], ["东京"]),
        ("Ελλάδα, Ελλάδας", ["ελλάδα"], ["Ελλάδα"]),
        ("na na na", ["na na"], ["na na", "na na"]),
    ],
)
def test_answers_are_found_as_whole_words(text: str, answers: list[str], expected: list[str]) -> None:
    assert [text[start:stop] for start, stop in find_answers(text, answers)] == expected


def test_distractors_are_the_passages_that_are_not_needed() -> None:
    known = Example("Q", ("a", "b", "c", "d"), ("A",), supporting=(2,))
    assert known.with_distractors(1) == Example("Q", ("a", "c"), ("A",), supporting=(1,))
    assert known.with_distractors(9) == known
    found = Example("Q", ("a", "b", "A!", "d"), ("A!",))
    assert found.with_distractors(0) == Example("Q", ("A!",), ("A!",))


def test_a_profile_is_measured_written_and_used(
    run: Run, qcfuse: Run, model_folder: str, corpus_file: Path, tmp_path: Path
) -> None:
    questions, library = tmp_path / "q.jsonl", tmp_path / "library"
    questions.write_text(json.dumps({"question": QUESTION, "answers": ["harbour school"], "passages": PASSAGES}))
    options = ("--model", model_folder, "--device", "cpu")
    qcfuse.text("warm", "run", corpus_file, "--store", library, *options)
    written = library / "kv" / "profile.json"
    text = run.text("profile", *options, "--data", questions, "--layers", 1, "--out", written)
    assert "Recall@10 % of the answers, 1 questions" in text
    found = json.loads(written.read_text())
    assert f"* chosen: {found['layers'][0]}; mean recall" in text
    assert (found["samples"], len(found["recall"]), len(found["layers"])) == (1, 4, 1)
    code, _, err = qcfuse("ask", QUESTION, "--store", library, *options, "--max-new-tokens", 2)
    assert (code, "is not used" in err) == (0, False)
