"""The real SmolLM2-135M-Instruct, from its GGUF file: exact at both ends, and a demonstration that holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.bundled import corpus, questions
from qcfuse_rag.store.key import BLIND, FRAMED
from qcfuse_rag.verification.exactness import stock_attention
from tests.support import references
from tests.support.engines import make_engine

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(smollm2: LanguageModel) -> FusionEngine:
    engine = make_engine(smollm2, MemoryStore())
    engine.warm(passages(), bases=(BLIND, FRAMED))
    return engine


def passages() -> list[str]:
    return [text.split("\n\n")[1] for text in list(corpus().values())[:3]]


def test_all_rows_equal_the_models_own_forward_and_continue_alike(engine: FusionEngine) -> None:
    prompt = engine.prompt(questions()[0].question, passages())
    logits, table = references.plain_forward(engine.lm, prompt.ids)
    done = engine.prefill(prompt, method=make_method("full"))
    assert float((done.logits - logits[-1]).abs().max()) <= 1e-4
    assert all(torch.allclose(done.buffer.keys[i], keys, atol=1e-4) for i, (keys, _) in enumerate(table))
    with torch.inference_mode(), stock_attention(engine.lm):
        ids = torch.tensor([prompt.ids])
        expected = engine.lm.model.generate(
            ids, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(ids)
        )
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=32), method=make_method("full"))
    assert list(answer.ids) == expected[0, ids.shape[1] :].tolist()


def test_selected_rows_equal_one_token_at_a_time(engine: FusionEngine) -> None:
    prompt = engine.prompt(questions()[0].question, passages())
    done = engine.prefill(prompt, method=make_method("qcfuse", ratio=0.1, base=BLIND))
    table = references.stored_table(engine.lm, prompt, BLIND)
    rows = [*done.report.selected, *range(prompt.chunks[-1].stop, len(prompt))]
    logits, _ = references.sequential_fusion(engine.lm, prompt.ids, rows, table)
    assert len(done.report.selected) > 10
    assert float((done.logits - logits).abs().max()) <= 1e-4


def test_recomputing_what_the_question_needs_brings_the_answer_nearer(engine: FusionEngine) -> None:
    """Mean divergence over questions falls from no recomputation to half, which is what the method is for."""
    from qcfuse_rag.verification.divergence import divergence

    texts = list(corpus().values())[:4]
    engine.warm(texts, bases=(FRAMED,))
    prompts = [engine.prompt(question.question, texts) for question in questions()[:4]]
    exact = [engine.prefill(prompt, method=make_method("full")).logits for prompt in prompts]
    means = []
    for ratio in (0.0, 0.15, 0.5):
        method = make_method("qcfuse", ratio=ratio, base=FRAMED)
        pairs = zip(exact, prompts, strict=True)
        means.append(sum(divergence(full, engine.prefill(prompt, method=method).logits) for full, prompt in pairs) / 4)
    assert means[0] > means[1] > means[2], means


@pytest.mark.slow
def test_the_demonstration_shows_what_is_sooner_and_whether_it_is_as_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loaded_once: None, tmp_path: Path
) -> None:
    from qcfuse_rag.cli.app import main

    few = {name: text for name, text in corpus().items() if "10" <= name[:2] <= "14"}  # prefilling takes the time
    monkeypatch.setattr("qcfuse_rag.cli.demo.corpus", lambda: few)
    page, question = tmp_path / "demo.html", "Who was the architect of Ashlock Library?"
    arguments = ["qcfuse", "demo", "--json", "--question", question, "--device", "cpu", "--html", str(page)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    data = json.loads(capsys.readouterr().out)
    [asked] = data["questions"]
    assert "Perrin Dovell" in asked["full"]["answer"]
    assert asked["fused"]["fallback"] is None
    assert asked["fused"]["rows"] < 0.3 * asked["full"]["rows"]
    assert asked["fused"]["ttft_s"] < asked["full"]["ttft_s"]
    assert "Perrin Dovell" in page.read_text("utf-8")
