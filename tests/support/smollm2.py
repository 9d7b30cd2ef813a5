"""SmolLM2 as a folder, from which it loads in a second; taking a GGUF file apart takes ten seconds."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from qcfuse_rag import LanguageModel
from qcfuse_rag.bundled import corpus, default_model, questions

TAKES_MINUTES = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("QCFUSE_STRESS") != "full", reason="takes minutes: make drop-in"),
]
"""Marks of tests that compare the real model with others over many questions."""


def save_smollm2(folder: Path) -> None:
    """Save the real SmolLM2-135M-Instruct to a folder."""
    lm = LanguageModel.load(default_model(), device="cpu")
    config = copy.deepcopy(lm.model.config)
    config.__dict__.pop("quantization_config", None)  # a model read from GGUF cannot be saved
    plain = AutoModelForCausalLM.from_config(config, dtype=lm.dtype)
    plain.load_state_dict(lm.model.state_dict())
    plain.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)


def smollm2_questions(count: int) -> list[str]:
    """Return questions about the demonstration's corpus: its own, then one about each document."""
    own = [question.question for question in questions()]
    about = [f"What is {text.splitlines()[0].strip('# ')} known for?" for text in corpus().values()]
    return [*own, *about][:count]
