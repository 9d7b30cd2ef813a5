"""Recall of layers: measured against transformers' own eager attention, labelled to the token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.profile import answer_positions, attention_by_layer, choose_layers, recall_by_layer
from benchmarks.questions import Example, find_answers
from qcfuse_rag import FusionEngine
from tests.support import references
from tests.support.cli import Run
from tests.support.passages import PASSAGES, QUESTION

ANSWERED = Example(QUESTION, tuple(PASSAGES), answers=("the harbour school",), supporting=(1,))


def test_the_attention_of_every_layer_is_that_of_the_rows_a_probe_has(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    asking = list(range(prompt.chunks[-1].stop, prompt.spans[-2].stop))
    expected = references.eager_attention(engine.lm, prompt.ids)[:, :, asking].mean((1, 2))
    assert torch.allclose(attention_by_layer(engine.lm, prompt), expected, atol=1e-6)


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
        ("Zoë, café; 東京 🚢 sells naïve paint", "東京 🚢"),
        ("Zoë", "Zoë"),
    ],
    ids=["inside", "bytes that are no text", "all of it"],
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


def test_the_best_layers_are_chosen() -> None:
    recall = (0.1, 0.5, 0.4, 0.5, 0.6)
    assert choose_layers(recall, 1) == (4,)
    assert choose_layers(recall, 2) == (1, 4), "of equals, the earlier"
    assert choose_layers(recall, 3) == (1, 3, 4)
    with pytest.raises(ValueError, match="the model has 5 layers; choose 1 to 5 of them, not 6"):
        choose_layers(recall, 6)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("In 15 of 1590 cases, 15.", ["15"], ["15", "15"]),
        ("The Long\n Glass and the long glass", ["Long Glass"], ["Long\n Glass", "long glass"]),
        ("a 4.1 metre surge (4.1)", ["4.1", "4.1 metre"], ["4.1", "4.1 metre", "4.1"]),
        ("no, nobody says yes", ["no", "Yes", "", " "], []),
        ("在东京举行", ["东京"], ["东京"]),
        ("na na na", ["na na"], ["na na", "na na"]),
    ],
)
def test_answers_are_found_as_whole_words(text: str, answers: list[str], expected: list[str]) -> None:
    assert [text[start:stop] for start, stop in find_answers(text, answers)] == expected


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
