"""The measurement `tune`: its passes are the engine's, and its adapters learn."""

from __future__ import annotations

import copy
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.questions import Example
from benchmarks.tune import EVERY, KV, VARIANTS, Batch, Trainer, read_adapters, write_adapters
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
def batch(engine: FusionEngine, trainer: Trainer) -> Batch:
    """Return two prompts of different lengths, with full prefill's answers."""
    made = [TuningPrompt.of(engine.prompts, QUESTION, PASSAGES[:count], "test") for count in (3, 2)]
    return trainer.teach(made, 4)


def stored_caches(trainer: Trainer, batch: Batch) -> KV:
    """Return stored caches without a writer; the tokens to recompute are chosen over them."""
    stored = trainer.write(batch, {}, {})
    trainer.choose(batch, stored, {})
    return stored


def test_rows_of_every_token_give_full_prefills_answer(trainer: Trainer, batch: Batch) -> None:
    question, answer = trainer.read(batch, stored_caches(trainer, batch), [1.0, 1.0], {})
    for rows, teacher in ((question, "question_teacher"), (answer, "teacher")):
        expected = torch.cat([getattr(prompt, teacher) for prompt in batch.prompts])
        assert trainer.divergence(expected, rows).abs().max() < 1e-4
    assert all(len(prompt.teacher) == len(prompt.answer) <= 4 for prompt in batch.prompts)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_the_first_tokens_are_those_of_auto(engine: FusionEngine, trainer: Trainer, batch: Batch, ratio: float) -> None:
    engine.warm(PASSAGES, bases=(FRAMED, PRIMED))
    method = auto(ratio=ratio, guard=False)
    _, answers = trainer.read(batch, stored_caches(trainer, batch), [ratio, ratio], {})
    firsts = [answer[:1] for answer in answers.split([len(prompt.answer) for prompt in batch.prompts])]
    for count, first in zip((3, 2), firsts, strict=True):
        fused = engine.prefill(engine.prompt(QUESTION, PASSAGES[:count]), method=method)
        torch.testing.assert_close(trainer.logits(first)[0], fused.logits, atol=2e-3, rtol=0)


@pytest.mark.parametrize("variant", ["reader_all", "writer", "both", "shared"])
def test_adapters_learn_and_change_nothing_while_they_are_off(trainer: Trainer, batch: Batch, variant: str) -> None:
    reader, writer = (trainer.adapter(modules, 8) for modules in VARIANTS[variant])
    if variant == "shared":
        writer = reader
    weights = dict.fromkeys(weight for part in (reader, writer) for pair in part.values() for weight in pair)
    step, before = torch.optim.AdamW([*weights], 2e-3), float(trainer.loss(batch, [0.0, 0.3], {}, {}))
    losses = []
    for _ in range(12):
        losses.append(loss := trainer.loss(batch, [0.0, 0.3], reader, writer))
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
        step.zero_grad()
    assert float(losses[0].detach()) == pytest.approx(before, rel=1e-4)
    assert float(losses[-1].detach()) < 0.9 * before
    assert float(trainer.loss(batch, [0.0, 0.3], {}, {})) == before


def test_a_batch_in_parts_has_the_same_loss(trainer: Trainer, batch: Batch) -> None:
    one, other = (float(trainer.loss(part, [0.3], {}, {})) for part in batch.parts(1))
    assert float(trainer.loss(batch, [0.3, 0.3], {}, {})) == pytest.approx((one + other) / 2, rel=1e-3)


def test_the_tokens_to_recompute_are_chosen_over_the_writers_caches(trainer: Trainer, batch: Batch) -> None:
    stored_caches(trainer, batch)
    before = [prompt.order for prompt in batch.prompts]
    writer = trainer.adapter(EVERY, 8)
    trainer.loss(batch, [0.3, 0.3], {}, writer)
    assert all(torch.equal(prompt.order, order) for prompt, order in zip(batch.prompts, before, strict=True))
    for _, up in writer.values():
        torch.nn.init.normal_(up)
    trainer.loss(batch, [0.3, 0.3], {}, writer)
    assert not torch.equal(batch.prompts[0].order, before[0])


def test_adapters_are_read_as_they_were_written(trainer: Trainer, tmp_path: Path) -> None:
    adapters = {"both": [trainer.adapter(modules, 8) for modules in VARIANTS["both"]]}
    write_adapters(tmp_path, adapters)
    fresh = {"both": [trainer.adapter(modules, 8) for modules in VARIANTS["both"]]}
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
