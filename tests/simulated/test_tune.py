"""The passes of tuning compute on a device what they compute on a CPU, from operands that are there."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag.tuning.prompts import TuningPrompt
from qcfuse_rag.tuning.trainer import Trainer
from qcfuse_rag.verification.exactness import stock_attention
from tests.simulated.device import Device
from tests.simulated.test_engine import PASSAGES, QUESTION, engine_on


def passes(device: Device | None, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the loss of two prompts with a writer, and what is measured."""
    engine = engine_on(device, tokenizer)
    with stock_attention(engine.lm):
        trainer = Trainer(engine.lm, engine.prompts)
        writer = trainer.new_writer(1)
        for _, up in writer.values():
            up.data.fill_(0.01)
        prompts = [TuningPrompt.of(engine.prompts, QUESTION, [*PASSAGES, *PASSAGES][:count]) for count in (3, 2)]
        trainer.teach(prompts)
        loss = float(trainer.loss(prompts, [0.0, 0.3], writer))
        return torch.tensor([loss, *trainer.measure(prompts, [0.3], writer)[0][0]])


def test_the_passes_of_a_step(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcfuse_rag.tuning.trainer.ANSWER_TOKENS", 4)
    torch.testing.assert_close(passes(device, tokenizer), passes(None, tokenizer), atol=1e-3, rtol=1e-3)
