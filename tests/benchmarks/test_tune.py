"""The measurement `tune`: its passes are the engine's, and its adapters learn."""

from __future__ import annotations

import copy
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.questions import Example
from benchmarks.tune import EVERY, VARIANTS, Trainer, read_adapters, write_adapters
from benchmarks.tuning_prompts import NAMES, TuningPrompt, task_prompt, training_prompts
from qcfuse_rag import FusionEngine, LanguageModel
from qcfuse_rag.ingestion.primer import PRIMER, primer_ids
from qcfuse_rag.methods.auto import auto
from qcfuse_rag.store.key import FRAMED, PRIMED

PASSAGES = (
    "The ferry leaves at noon. It is red. It carries forty people.",
    "The mill grinds rye. Its wheel is old. The miller is called Ann.",
    "The harbour is deep. Boats sleep there. The lamp burns all night.",
)
QUESTION = "Who is the miller?"


@pytest.fixture
def trainer(engine: FusionEngine) -> Trainer:
    """Return a trainer of a copy of the engine's model."""
    lm = LanguageModel.wrap(copy.deepcopy(engine.lm.model), engine.lm.tokenizer)
    primer = primer_ids([engine.prompts.chunk_ids(text) for text in PRIMER], lm.context_window.tokens)
    return Trainer(lm, engine.prompts.prefix_ids, primer)


@pytest.fixture
def prompt(engine: FusionEngine, trainer: Trainer) -> TuningPrompt:
    made = TuningPrompt.of(engine.prompts, QUESTION, PASSAGES, "test")
    trainer.teach([made, TuningPrompt.of(engine.prompts, QUESTION, PASSAGES[:2], "shorter")], 4)
    trainer.prepare(made)
    return made


def test_rows_of_every_token_give_full_prefills_answer(trainer: Trainer, prompt: TuningPrompt) -> None:
    question, answer = trainer.read(prompt, prompt.stored, 1.0, {})
    assert trainer.divergence(prompt.teacher, answer).abs().max() < 1e-4
    assert trainer.divergence(prompt.question_teacher, question).abs().max() < 1e-4
    assert len(prompt.teacher) == len(prompt.answer) <= 4


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_the_first_token_is_that_of_auto(
    engine: FusionEngine, trainer: Trainer, prompt: TuningPrompt, ratio: float
) -> None:
    engine.warm(PASSAGES, bases=(FRAMED, PRIMED))
    method = auto(ratio=ratio, guard=False)
    fused = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=method)
    _, answer = trainer.read(prompt, prompt.stored, ratio, {})
    torch.testing.assert_close(trainer.logits(answer[:1])[0], fused.logits, atol=2e-3, rtol=0)


@pytest.mark.parametrize("variant", ["reader_all", "writer", "both"])
def test_adapters_learn_and_change_nothing_while_they_are_off(
    trainer: Trainer, prompt: TuningPrompt, variant: str
) -> None:
    reader, writer = map(trainer.adapter, VARIANTS[variant])
    weights = [weight for part in (reader, writer) for pair in part.values() for weight in pair]
    step, before = torch.optim.AdamW(weights, 2e-3), float(trainer.loss(prompt, 0.0, {}, {}))
    losses = []
    for _ in range(12):
        losses.append(loss := trainer.loss(prompt, 0.0, reader, writer))
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
        step.zero_grad()
    assert float(losses[0].detach()) == pytest.approx(before, rel=1e-4)
    assert float(losses[-1].detach()) < 0.7 * before
    assert float(trainer.loss(prompt, 0.0, {}, {})) == before


def test_the_tokens_to_recompute_are_chosen_over_the_writers_caches(trainer: Trainer, prompt: TuningPrompt) -> None:
    _, writer = map(trainer.adapter, VARIANTS["writer"])
    before = prompt.order
    trainer.loss(prompt, 0.3, {}, writer)
    assert torch.equal(prompt.order, before), "a new adapter changes nothing"
    for _, up in writer.values():
        torch.nn.init.normal_(up)
    trainer.loss(prompt, 0.3, {}, writer)
    assert not torch.equal(prompt.order, before)


def test_adapters_are_read_as_they_were_written(trainer: Trainer, tmp_path: Path) -> None:
    adapters = {"both": tuple(map(trainer.adapter, VARIANTS["both"]))}
    write_adapters(tmp_path, adapters)
    fresh = {"both": tuple(map(trainer.adapter, VARIANTS["both"]))}
    read_adapters(tmp_path, fresh)
    for old, new in zip(adapters["both"], fresh["both"], strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name][0], new[name][0]) for name in old)
    assert {name.rpartition(".")[2] for name in fresh["both"][0]} == set(EVERY)


def test_no_held_out_passage_is_trained_on(engine: FusionEngine) -> None:
    pool = tuple(f"{text} Number {number}." for text in PASSAGES for number in range(4))
    example = Example(QUESTION, pool, ("Ann",), supporting=(0, 4), dataset="d", id="1")
    held_out = {text for text in pool if "ferry" in text}
    for made in islice(training_prompts(engine.prompts, [example], held_out, 1), 20):
        texts = [engine.lm.tokenizer.decode(made.ids[start:stop]) for start, stop in made.chunks]
        assert 2 <= len(texts) <= 4
        assert not any("ferry" in text for text in texts)
        assert made.task != "d" or any("mill" in text for text in texts)


@pytest.mark.parametrize(
    ("task", "fact"),
    [("number", "The {what} of {name} is"), ("compare", "Project {name} had"), ("chain", "Project {name} is led by")],
)
def test_the_fact_that_a_task_asks_for_stands_in_a_passage(engine: FusionEngine, task: str, fact: str) -> None:
    pool = [f"{text} Number {number}." for text in PASSAGES for number in range(3)]
    for seed in range(5):
        made = task_prompt(engine.prompts, pool, random.Random(seed), task)
        texts = " ".join(engine.lm.tokenizer.decode(made.ids[start:stop]) for start, stop in made.chunks)
        asked = engine.lm.tokenizer.decode(made.ids[made.question_start :])
        names = [name for name in NAMES if name in asked]
        assert names
        for name in names:
            what = asked.partition("What is the ")[2].partition(" of ")[0]
            assert fact.format(name=name, what=what) in texts
