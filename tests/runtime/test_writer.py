"""The writer of a store: it is on while primed passages are computed, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, open_store
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.methods import make_method
from qcfuse_rag.runtime.writer import WriterWeights, adapted_view, linear_layers, save_writer
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED, PRIMED, hash_ids
from tests.support.passages import PASSAGES, QUESTION

FULL, FUSED = make_method("full"), make_method("auto", ratio=0.1).unguarded


def random_writer(lm: LanguageModel, scale: float = 0.1) -> WriterWeights:
    generator = torch.Generator().manual_seed(1)
    return {
        name: (
            torch.randn(2, inputs, generator=generator) / inputs**0.5,
            scale * torch.randn(outputs, 2, generator=generator),
        )
        for name, (inputs, outputs) in linear_layers(lm.model).items()
    }


def passage_hash(lm: LanguageModel, text: str) -> str:
    return hash_ids(FusionEngine(lm, MemoryStore()).prompts.chunk_ids(text))


def engine_over(lm: LanguageModel, folder: Path) -> FusionEngine:
    return FusionEngine.load("unused", lm=lm, store=folder, method=FUSED, verdict="ignore", compiled=False)


@pytest.fixture
def tuned(llama: LanguageModel, tmp_path: Path) -> Path:
    """Return a store's folder with a writer of the tiny Llama, tuned on all passages but the last."""
    with open_store(tmp_path / "store") as store:
        assert store.folder is not None
        path = llama.fingerprint.writer_path(store.folder)
    save_writer(path, random_writer(llama), [passage_hash(llama, text) for text in PASSAGES[:-1]], {})
    return tmp_path / "store"


def test_a_view_adds_the_writer_and_the_model_stays(llama: LanguageModel) -> None:
    ids = torch.tensor([[5, 9, 2]])
    with torch.inference_mode():
        before = llama.model(ids).logits
        assert torch.equal(adapted_view(llama.model, random_writer(llama, 0.0))(ids).logits, before)
        assert (adapted_view(llama.model, random_writer(llama))(ids).logits - before).abs().max() > 1e-3
        assert torch.equal(llama.model(ids).logits, before)


def test_the_product_is_that_of_the_merged_weights(llama: LanguageModel) -> None:
    weights = {name: pair for name, pair in random_writer(llama).items() if name == "layers.0.mlp.up_proj"}
    linear = llama.model.model.layers[0].mlp.up_proj
    adapted = adapted_view(llama.model, weights).model.layers[0].mlp.up_proj
    ((down, up),) = weights.values()
    given = torch.randn(3, linear.in_features)
    torch.testing.assert_close(adapted(given), given @ (linear.weight + 2 * up @ down).T)


def test_it_computes_the_primed_passages_that_it_was_tuned_on(
    llama: LanguageModel, tuned: Path, tmp_path: Path
) -> None:
    stored = {}
    for name, folder in (("without", tmp_path / "other"), ("with", tuned)):
        with engine_over(llama, folder) as engine:
            engine.warm(PASSAGES, bases=(FRAMED, PRIMED))
            for text in PASSAGES:
                for base in (FRAMED, PRIMED):
                    key = engine.lm.key(base, engine.prompts.prefix_ids, engine.prompts.chunk_ids(text))
                    assert (key.fingerprint.writer != "") == (
                        name == "with" and base is PRIMED and text != PASSAGES[-1]
                    )
                    chunk = engine.store.get(key)
                    assert isinstance(chunk, ChunkKV)
                    stored[name, base.name, text] = chunk.layer(llama.n_layers - 1)[1]
    for text in PASSAGES:
        assert torch.equal(stored["with", "framed", text], stored["without", "framed", text])
        alike = torch.allclose(stored["with", "primed", text], stored["without", "primed", text], atol=1e-3)
        assert alike == (text == PASSAGES[-1])


def test_full_prefill_is_unchanged_and_fused_prompts_are_not(llama: LanguageModel, tuned: Path, tmp_path: Path) -> None:
    logits = {}
    for name, folder in (("without", tmp_path / "other"), ("with", tuned)):
        with engine_over(llama, folder) as engine:
            engine.warm(PASSAGES)
            prompt = engine.prompt(QUESTION, PASSAGES)
            for method in (FULL, FUSED):
                logits[name, method.name] = engine.prefill(prompt, method=method).logits
    assert torch.equal(logits["with", "full"], logits["without", "full"])
    assert not torch.allclose(logits["with", "auto"], logits["without", "auto"], atol=1e-4)


def test_primed_passages_of_before_are_not_reused_with_it(llama: LanguageModel, tuned: Path) -> None:
    path = llama.fingerprint.writer_path(tuned)
    data = path.read_bytes()
    path.unlink()
    with engine_over(llama, tuned) as engine:
        engine.warm(PASSAGES)
        assert engine.lm is llama
    path.write_bytes(data)
    with engine_over(llama, tuned) as engine:
        assert engine.lm.fingerprint.differences(llama.fingerprint.fields()) == ["writer"]
        report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
        notes = [lookup.note for lookup in report.lookups if lookup.role == "chunk"]
        assert notes == [None, "framed instead of primed", None], "the first is framed, and the last was not tuned on"
    path.unlink()
    with engine_over(llama, tuned) as engine:
        report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
        assert report.rows < report.prompt_tokens


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_writer_that_cannot_be_used_is_one_error(llama: LanguageModel, tuned: Path, content: bytes | None) -> None:
    path = llama.fingerprint.writer_path(tuned)
    if content is None:
        save_writer(path, {"layers.0.mlp.up_proj": (torch.ones(2, 3), torch.ones(5, 2))}, ["00" * 16], {})
    else:
        path.write_bytes(content)
    with pytest.raises(QCFuseError, match=r"delete it, or run `qcfuse tune` again"):
        engine_over(llama, tuned)
