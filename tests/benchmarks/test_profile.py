"""Profiles of critical layers: measured against transformers' own eager attention, labelled to the token, picked up."""

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

from benchmarks.profile import measure as proxy
from benchmarks.profile.layer_profile import LayerProfile as Profile
from benchmarks.profile.measure import (
    answer_log_probability,
    answer_positions,
    attention_by_layer,
    choose_layers,
    decisive_positions,
    profile_layers,
    recall_by_layer,
)
from benchmarks.questions import demo_samples, read_samples
from benchmarks.samples import Sample, find_answers
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, make_method, open_store
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.methods.qcfuse.layers import PROFILE_FILE, critical_layers, layers_by_depth
from qcfuse_rag.store.prefill_base import BLIND
from tests.support import references
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

ANSWERED = Sample(QUESTION, tuple(PASSAGES), answers=("the harbour school",), supporting=(1,))


def profile_of(lm: LanguageModel, layers: tuple[int, ...]) -> Profile:
    recall = tuple(0.5 if layer in layers else 0.1 for layer in range(lm.n_layers))
    return Profile(lm.name, lm.fingerprint.fields(), layers, recall, "answers", 7, {}, 0.0)


# What is measured


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
        Sample("Is the hull green?", tuple(PASSAGES[:2]), answers=("green",)),
        Sample("When does the council meet?", tuple(PASSAGES[::-1]), answers=("Mondays",)),
    ]
    expected = torch.zeros(4, dtype=torch.float64)
    for sample in samples:
        prompt = engine.prompt(sample.question, sample.passages)
        expected += torch.tensor(slow_recall(engine.lm, prompt, set(answer_positions(engine.prompts, prompt, sample))))
    found = profile_layers(engine, samples, layers=2)
    assert found.recall == pytest.approx((expected / 3).tolist())
    assert len(set(found.recall)) > 1, "layers must differ here, or the comparison shows nothing"
    assert found.layers == choose_layers(found.recall, 2)
    assert (found.samples, found.labels, found.skipped) == (3, "answers", {})
    assert found.mismatch(engine.lm) is None


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


def test_the_best_layers_are_chosen_less_a_penalty_for_depth() -> None:
    recall = (0.1, 0.5, 0.4, 0.5, 0.6)
    assert choose_layers(recall, 1) == (4,)
    assert choose_layers(recall, 2) == (1, 4), "of equals, the earlier"
    assert choose_layers(recall, 3) == (1, 3, 4)
    assert choose_layers(recall, 1, depth_penalty=0.2) == (1,), "0.6 - 0.2 x 4/5 < 0.5 - 0.2 x 1/5"
    with pytest.raises(ValueError, match="the model has 5 layers; choose 1 to 5 of them, not 6"):
        choose_layers(recall, 6)


# What counts as the answer


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
    found = answer_positions(engine.prompts, prompt, Sample("Which?", passages, answers=(answer,)))

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
    everywhere = answer_positions(engine.prompts, prompt, Sample(QUESTION, tuple(PASSAGES), answers=("the",)))
    needed = answer_positions(engine.prompts, prompt, replace(ANSWERED, answers=("the",)))
    second = prompt.chunks[1]
    assert needed == tuple(p for p in everywhere if second.start <= p < second.stop)
    assert 0 < len(needed) < len(everywhere)


def test_questions_that_cannot_be_used_are_counted(engine: FusionEngine) -> None:
    elsewhere = replace(ANSWERED, answers=("in Lisbon",))
    long = replace(ANSWERED, passages=tuple(PASSAGES) * 20)
    seen: list[tuple[int, int]] = []
    found = profile_layers(engine, [elsewhere, ANSWERED, long], progress=lambda *at: seen.append(at))
    assert found.samples == 1
    assert found.skipped == {
        "the answer does not stand in the passages": 1,
        "longer than the context window": 1,
    }
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(ProfileError, match=r"no question can be used \(1 times the answer does not stand"):
        profile_layers(engine, [elsewhere])


# Without answers


def test_the_decisive_passage_is_the_one_the_models_answer_misses_most(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "ANSWER_TOKENS", 4)
    prompt = engine.prompt(QUESTION, PASSAGES)
    answer = references.greedy_continuation(engine.lm, prompt.ids, 4)

    def log_probability(ids: tuple[int, ...]) -> float:
        logits, _ = references.plain_forward(engine.lm, ids + tuple(answer))
        return sum(float(logits[len(ids) - 1 + i].log_softmax(-1)[token]) for i, token in enumerate(answer))

    whole = log_probability(prompt.ids)
    assert answer_log_probability(engine.lm, prompt.ids, tuple(answer)) == pytest.approx(whole, abs=1e-3)
    lost = [whole - log_probability(engine.prompt(QUESTION, PASSAGES[:i] + PASSAGES[i + 1 :]).ids) for i in range(3)]
    span = prompt.chunks[max(range(3), key=lambda i: lost[i])]
    assert max(lost) > 0
    assert decisive_positions(engine, ANSWERED) == tuple(range(span.start, span.stop))


def test_a_profile_without_labels_does_not_look_at_answers(engine: FusionEngine) -> None:
    found = profile_layers(engine, [ANSWERED], labelled=False)
    assert found == profile_layers(engine, [Sample(QUESTION, tuple(PASSAGES))], labelled=False)
    assert found.labels == "leave-one-out"
    assert decisive_positions(engine, Sample(QUESTION, (PASSAGES[0],))) == (), "one passage cannot be left out"


# Where questions come from


def test_the_demonstrations_questions_have_their_answers_in_the_documents_needed() -> None:
    samples = demo_samples(distractors=2)
    assert len(samples) == 24
    for sample in samples:
        assert len(sample.passages) == len(sample.supporting) + 2 == len(set(sample.passages))
        assert any(find_answers(sample.passages[i], sample.answers) for i in sample.supporting)
    assert {sample.supporting[0] for sample in samples} == {0, 1, 2}, "the evidence is not always in the same place"


def test_questions_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question": "Q", "answers": ["A"], "passages": [{"title": "T", "text": "x"}, "A y"], "supporting": [1]},
        {"question": "Q", "passages": ["x"]},
        {"input": "Q", "context": "Passage 1:\nx\ny\n\nPassage 2:\nz A", "answers": "A"},
        {"input": "Q", "context": "x\n\ny\n"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_samples(path) == [
        Sample("Q", ("T\nx", "A y"), ("A",), (1,)),
        Sample("Q", ("x",)),
        Sample("Q", ("x\ny", "z A"), ("A",)),
        Sample("Q", ("x", "y")),
    ]


def test_distractors_are_the_passages_that_are_not_needed() -> None:
    known = Sample("Q", ("a", "b", "c", "d"), ("A",), supporting=(2,))
    assert known.with_distractors(1) == Sample("Q", ("a", "c"), ("A",), supporting=(1,))
    assert known.with_distractors(9) == known
    found = Sample("Q", ("a", "b", "A!", "d"), ("A!",))
    assert found.with_distractors(0) == Sample("Q", ("A!",), ("A!",))


# Kept in a file


def test_a_profile_survives_its_file(llama: LanguageModel, tmp_path: Path) -> None:
    profile = profile_of(llama, (0, 2))
    profile.save(tmp_path / "new" / "p.json")
    assert Profile.load(tmp_path / "new" / "p.json") == profile
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.json"], "nothing else is left"
    with pytest.raises(ProfileError, match=r"cannot write .*name another path"):
        profile.save(tmp_path / "new" / "p.json" / "below")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "its format is not qcfuse-profile-1"),
        ({"layers": [2, 9]}, "layers must be ascending indices of the 4 layers"),
        ({"layers": [2, 0]}, "layers must be ascending"),
        ({"layers": []}, "layers must be ascending"),
        ({"layers": "02"}, "layers must be a list"),
        ({"layers": [True]}, "layers must be ascending"),
        ({"recall": [0.1, 0.2, 0.3, 7]}, "recall must be numbers from 0 to 1"),
        ({"recall": [0.1, 0.2, 0.3, float("nan")]}, "recall must be numbers from 0 to 1"),
        ({"fingerprint": {"weights": 3}}, "fingerprint must be an object of strings"),
        ({"labels": "guessed"}, "labels must be one of answers, leave-one-out"),
        ({"samples": 0}, "samples must be a number above 0"),
        ({"skipped": None}, "skipped must be an object of numbers"),
        ({"depth_penalty": "much"}, "depth_penalty must be a number"),
    ],
)
def test_a_damaged_profile_says_what_is_wrong(
    llama: LanguageModel, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**profile_of(llama, (1,)).to_dict(), **change}))
    with pytest.raises(
        ProfileError, match=f"cannot read the profile .*{reason}.*make it again with `python -m benchmarks profile`"
    ):
        Profile.load(path)


@pytest.mark.parametrize("content", [b"", b'{"format": "qcfuse-pro', b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_profile_is_ignored_beside_a_store(
    llama: LanguageModel, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROFILE_FILE).write_bytes(content)
    with pytest.raises(ProfileError, match="cannot read the profile"):
        Profile.load(tmp_path / PROFILE_FILE)
    assert critical_layers(llama, tmp_path) == layers_by_depth(4)
    assert "is not used: " in caplog.text


def test_a_profile_that_lacks_something_says_what(llama: LanguageModel, tmp_path: Path) -> None:
    data = profile_of(llama, (1,)).to_dict()
    del data["recall"], data["samples"]
    (tmp_path / PROFILE_FILE).write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="it has no recall, samples"):
        Profile.load(tmp_path / PROFILE_FILE)


# Picked up


def load(model: str, store: Any, **options: Any) -> FusionEngine:
    return FusionEngine.load(model, store=store, device="cpu", check=False, **options)


@pytest.fixture
def lm(model_folder: str) -> LanguageModel:
    return LanguageModel.load(model_folder, device="cpu")


@pytest.mark.slow
def test_a_profile_beside_the_store_chooses_what_qcfuse_recomputes(
    lm: LanguageModel, model_folder: str, tmp_path: Path
) -> None:
    def selected(engine: FusionEngine, **options: Any) -> tuple[int, ...]:
        engine.warm(PASSAGES, bases=(BLIND,))
        return engine.prefill(
            engine.prompt(QUESTION, PASSAGES), method=make_method("qcfuse", **options)
        ).report.selected

    with load(model_folder, tmp_path) as engine:
        assert critical_layers(engine.lm, tmp_path) == layers_by_depth(4) == (1, 2, 3)
        by_depth, wanted = selected(engine), selected(engine, layers=(0,))
        assert by_depth != wanted, "other layers must choose otherwise here"
    profile_of(lm, (0,)).save(tmp_path / PROFILE_FILE)
    with load(model_folder, tmp_path) as engine:
        assert selected(engine) == wanted
        assert selected(engine, layers=(1, 2, 3)) == by_depth, "layers that are named win"
    with open_store(tmp_path) as store:
        assert selected(load(model_folder, store)) == wanted, "an open store has a folder too"
    assert selected(load(model_folder, None)) == by_depth


def test_a_profile_of_another_model_is_ignored_beside_a_store(
    llama: LanguageModel, lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile_of(llama, (0,)).save(tmp_path / PROFILE_FILE)
    assert critical_layers(lm, tmp_path) == (1, 2, 3)
    assert (
        "is not used: it is of another model (llama): config differ; make it again with `python -m benchmarks profile`"
        in caplog.text
    )


def test_a_profile_edited_to_have_more_layers_than_the_model_is_not_of_it(
    lm: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = profile_of(lm, (0,))
    replace(profile, recall=(*profile.recall, 0.5), layers=(4,)).save(tmp_path / PROFILE_FILE)
    assert critical_layers(lm, tmp_path) == (1, 2, 3)
    assert "it has 5 layers and the model 4" in caplog.text


# The command


def test_profile_needs_nothing_but_a_model(run: Run, model_folder: str) -> None:
    found = run.json("profile", "--model", model_folder, "--device", "cpu", "--size", 2, "--distractors", 0)
    assert (found["samples"], found["labels"], len(found["recall"]), len(found["layers"])) == (2, "answers", 4, 3)
    assert found["written"] == []


@pytest.mark.slow
def test_profile_writes_beside_the_store_and_ask_uses_it(
    run: Run, qcfuse: Run, model_folder: str, corpus_file: Path, tmp_path: Path
) -> None:
    questions, library, plot = tmp_path / "q.jsonl", tmp_path / "library", tmp_path / "layers.png"
    questions.write_text(json.dumps({"question": QUESTION, "answers": ["harbour school"], "passages": PASSAGES}))
    options = ("--model", model_folder, "--device", "cpu", "--data", questions, "--layers", 1)
    code, _, err = run("profile", *options, "--store", library)
    assert (code, library.exists()) == (1, False)
    assert "there is no store" in err
    warming = ("warm", "run", corpus_file, "--store", library, "--model", model_folder, "--device", "cpu")
    qcfuse.text(*warming)
    text = run.text("profile", *options, "--store", library, "--plot", plot, "--out", tmp_path / "p.json")
    assert "Recall@10 % of the answers, 1 questions" in text
    assert "* chosen: " in text
    assert f"wrote {library / 'kv' / PROFILE_FILE}" in text
    assert plot.stat().st_size > 1000
    profile = Profile.load(library / "kv" / PROFILE_FILE)
    assert Profile.load(tmp_path / "p.json") == profile
    qcfuse.text(*warming)
    assert Profile.load(library / "kv" / PROFILE_FILE) == profile
    asking = ("ask", QUESTION, "--store", library, "--model", model_folder, "--device", "cpu", "--max-new-tokens", 2)
    code, _, err = qcfuse(*asking)
    assert (code, "is not used" in err) == (0, False)
    replace(profile, fingerprint={}).save(library / "kv" / PROFILE_FILE)
    code, _, err = qcfuse(*asking)
    assert code == 0
    assert "is not used: it is of another model" in " ".join(err.split())


def test_profile_without_answers(run: Run, model_folder: str, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": QUESTION, "passages": PASSAGES}))
    options = ("profile", "--model", model_folder, "--device", "cpu", "--data", questions)
    assert run.json(*options, "--unlabelled")["labels"] == "leave-one-out"
    assert run(*options)[0] == 1
    assert "the answer does not stand in the passages" in run(*options)[2]
    code, _, err = run(*options, "--unlabelled", "--distractors", 1)
    assert (code, "questions that say which passages are `supporting`" in err) == (1, True)
    code, _, err = run(*options, "--unlabelled", "--layers", 9)
    assert (code, "the model has 4 layers; choose 1 to 4 of them, not 9" in err) == (1, True)
