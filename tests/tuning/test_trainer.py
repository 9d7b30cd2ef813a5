"""The passes of tuning are the engine's, and its writer learns."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel
from qcfuse_rag.methods.auto import auto
from qcfuse_rag.store.key import FRAMED, PRIMED
from qcfuse_rag.tuning.prompts import NAMES, TuningPrompt, task_prompt
from qcfuse_rag.tuning.trainer import KV, Trainer
from qcfuse_rag.verification.exactness import stock_attention

PASSAGES = (
    "The ferry leaves at noon. It is red. It carries forty people.",
    "The mill grinds rye. Its wheel is old. The miller is called Ann.",
    "The harbour is deep. Boats sleep there. The lamp burns all night.",
)
QUESTION = "Who is the miller?"


@pytest.fixture
def trainer(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """Return a trainer of a copy of the engine's model, whose answers are short."""
    monkeypatch.setattr("qcfuse_rag.tuning.trainer.ANSWER_TOKENS", 4)
    lm = LanguageModel.wrap(copy.deepcopy(engine.lm.model), engine.lm.tokenizer)
    with stock_attention(lm):
        yield Trainer(lm, engine.prompts)


@pytest.fixture
def taught(engine: FusionEngine, trainer: Trainer) -> list[TuningPrompt]:
    """Return two prompts of different lengths, with full prefill's answers."""
    made = [TuningPrompt.of(engine.prompts, QUESTION, PASSAGES[:count]) for count in (3, 2)]
    trainer.teach(made)
    return made


def stored_caches(trainer: Trainer, prompts: list[TuningPrompt]) -> KV:
    """Return stored caches without a writer; the tokens to recompute are chosen over them."""
    stored = trainer.write(prompts, {})
    trainer.choose(prompts, stored)
    return stored


def test_rows_of_every_token_give_full_prefills_answer(trainer: Trainer, taught: list[TuningPrompt]) -> None:
    question, answer = trainer.read(taught, stored_caches(trainer, taught), [1.0, 1.0])
    for rows, teacher in ((question, "question_teacher"), (answer, "teacher")):
        expected = torch.cat([getattr(prompt, teacher) for prompt in taught])
        assert trainer.divergence(expected, rows).abs().max() < 1e-4
    assert all(len(prompt.teacher) == len(prompt.answer) <= 4 for prompt in taught)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_the_first_tokens_are_those_of_auto(
    engine: FusionEngine, trainer: Trainer, taught: list[TuningPrompt], ratio: float
) -> None:
    engine.warm(PASSAGES, bases=(FRAMED, PRIMED))
    method = auto(ratio=ratio, guard=False)
    _, answers = trainer.read(taught, stored_caches(trainer, taught), [ratio, ratio])
    firsts = [answer[:1] for answer in torch.split(answers, [len(prompt.answer) for prompt in taught])]
    for count, first in zip((3, 2), firsts, strict=True):
        fused = engine.prefill(engine.prompt(QUESTION, PASSAGES[:count]), method=method)
        torch.testing.assert_close(trainer.logits(first)[0], fused.logits, atol=2e-3, rtol=0)


def test_a_writer_learns_and_the_model_stays_as_it_is(trainer: Trainer, taught: list[TuningPrompt]) -> None:
    writer = trainer.new_writer(1)
    before = {name: weight.clone() for name, weight in trainer.lm.model.state_dict().items()}
    step = torch.optim.AdamW([weight for pair in writer.values() for weight in pair], 2e-3)
    losses = list[torch.Tensor]()
    for _ in range(12):
        losses.append(loss := trainer.loss(taught, [0.0, 0.3], writer))
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
        step.zero_grad()
    assert float(losses[-1].detach()) < 0.9 * float(losses[0].detach())
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.lm.model.state_dict().items())
    assert float(trainer.loss(taught, [0.0, 0.3], trainer.new_writer(2)).detach()) == pytest.approx(
        float(losses[0].detach())
    )


def test_a_batch_in_parts_has_the_same_loss(trainer: Trainer, taught: list[TuningPrompt]) -> None:
    writer = trainer.new_writer(1)
    one, other = (float(trainer.loss([prompt], [0.3], writer).detach()) for prompt in taught)
    assert float(trainer.loss(taught, [0.3, 0.3], writer).detach()) == pytest.approx((one + other) / 2, rel=1e-3)


def test_the_tokens_to_recompute_are_chosen_over_the_writers_caches(
    trainer: Trainer, taught: list[TuningPrompt]
) -> None:
    stored_caches(trainer, taught)
    before = [prompt.order for prompt in taught]
    writer = trainer.new_writer(1)
    trainer.loss(taught, [0.3, 0.3], writer)
    assert all(torch.equal(prompt.order, order) for prompt, order in zip(taught, before, strict=True))
    for _, up in writer.values():
        torch.nn.init.normal_(up)
    trainer.loss(taught, [0.3, 0.3], writer)
    assert not torch.equal(taught[0].order, before[0])


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
