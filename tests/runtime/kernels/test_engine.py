"""The engine with kernels against the same engine without."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.key import FRAMED
from tests.support import seams
from tests.support.engines import damaged, make_engine
from tests.support.families import build_model

pytest.importorskip("triton")


from qcfuse_rag.engine import first_passes as warming
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.forward import forward_step
from qcfuse_rag.runtime.kernels import context_score, launch
from qcfuse_rag.runtime.kernels import placement as place
from qcfuse_rag.runtime.kernels import sparse_attention as attention
from qcfuse_rag.runtime.kernels import split_k as parts
from tests.runtime.kernels.operands import relative_error, watched
from tests.runtime.kernels.passages import PASSAGES, QUESTION, Nearby
from tests.support.engines import look_up
from tests.support.recorders import DEVICE


@pytest.mark.parametrize(
    "warmed",
    [
        ("llama", "int8"),
        ("gemma2-softcap", "model"),
        ("gpt-oss-sinks", "model"),
        ("cohere2-interleaved", "int8"),
        ("deepseek2-latent", "int8"),
    ],
    indirect=True,
    ids=lambda case: "-".join(case),
)
def test_the_engine_answers_alike_with_and_without_kernels(
    warmed: FusionEngine, with_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lm = warmed, warmed.lm
    prompt, method = engine.prompt(QUESTION, PASSAGES), make_method("prophetkv", ratio=0.3, base=FRAMED)
    with_kernels_result = engine.prefill(prompt, method=method, answer_tokens=4)
    assert set(with_kernels) == {"attention", "score", "place"}
    with_kernels.clear()
    followed = forward_step(lm, [7], [len(prompt)], [with_kernels_result.buffer])
    assert set(with_kernels) == (set() if lm.needs_torch_steps else {"by table", "append"})
    seams.transfer(monkeypatch, lambda transfers: None)
    seams.engine_has_kernels(monkeypatch, lambda *_: False)
    with_kernels.clear()
    without_kernel_result = engine.prefill(prompt, method=method, answer_tokens=4)
    assert not with_kernels
    assert with_kernels_result.report.selected == without_kernel_result.report.selected
    assert (
        with_kernels_result.report.bytes_loaded == without_kernel_result.report.bytes_loaded
        or engine.store.stats()[0].kv_dtype != "model"
    )
    assert relative_error(with_kernels_result.logits, without_kernel_result.logits) < 1e-4
    assert relative_error(followed, forward_step(lm, [7], [len(prompt)], [without_kernel_result.buffer])) < 1e-4


@pytest.mark.parametrize("at_once", [True, False])
def test_layers_that_have_arrived_are_placed_by_one_launch(
    at_once: bool, warmed: FusionEngine, with_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one layer, then as many as were placed before; a layer that has not arrived is never waited for early."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(place, "place", watched(place.place, launched))
    seams.transfer(monkeypatch, lambda transfers: Nearby(at_once=at_once))
    # each layer is sent alone, as from ordinary memory
    monkeypatch.setattr("qcfuse_rag.runtime.loading.layer_loader.GROWTH", 1)
    monkeypatch.setattr("qcfuse_rag.runtime.loading.slab_source.slabs_by_format", lambda chunks, *_: ([], chunks))
    lm, prompt = warmed.lm, warmed.prompt(QUESTION, PASSAGES)
    fused = FusedPrompt.empty(warmed.runner, prompt, len(prompt))
    fused.load(look_up(warmed.lm, warmed.store, prompt, make_method("reuse", base=FRAMED)), WaitBudget(None))
    for thread in threading.enumerate():
        if thread.name == "qcfuse-loading":
            thread.join(60)
    assert fused.loading_buffer.wait_for_layer is not None
    fused.loading_buffer.wait_for_layer(0)
    assert len(launched) == 1, "keys and values together"
    fused.loading_buffer.wait_for_layer(lm.n_layers - 1)
    assert lm.n_layers == 4
    assert len(launched) == (3 if at_once else 4), "one layer, one more, then two"


def test_passages_are_warmed_alike_with_and_without_kernels(warmed: FusionEngine, with_kernels: list[str]) -> None:
    other = make_engine(warmed.lm, MemoryStore())
    other.warm(PASSAGES[:1], bases=(FRAMED,))
    assert set(with_kernels) == {"attention", "score"}
    [key] = other.corpus.keys(other.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
    with_kernels_result, without_kernel_result = other.store.get(key), warmed.store.get(key)
    assert isinstance(with_kernels_result, ChunkKV)
    assert isinstance(without_kernel_result, ChunkKV)
    for name in without_kernel_result.names():
        assert torch.allclose(
            with_kernels_result.blocks[name].float(), without_kernel_result.blocks[name].float(), rtol=1e-4, atol=1e-4
        )


def test_a_damaged_block_is_a_miss_with_kernels_too(warmed: FusionEngine, with_kernels: list[str]) -> None:
    """No part of the chunk is placed; its tokens are computed."""
    engine = warmed
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
    chunk = engine.store.get(key)
    assert isinstance(chunk, ChunkKV)

    broken, get = damaged(chunk, "value.1"), engine.store.get
    engine.store.discard(key)
    engine.store.get = lambda wanted: broken if wanted == key else get(wanted)  # type: ignore[method-assign]
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=make_method("reuse", base=FRAMED))
    assert [lookup.hit for lookup in done.report.lookups] == [True, True, False, True]
    assert done.logits.isfinite().all()


def test_a_chunk_that_does_not_fit_is_a_miss(warmed: FusionEngine, with_kernels: list[str]) -> None:
    engine = warmed
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
    chunk = engine.store.get(key)
    assert isinstance(chunk, ChunkKV)
    tensors = {name: chunk.blocks[name] for name in chunk.names()}
    tensors["key.0"] = tensors["key.0"][:, :1].contiguous()
    engine.store.discard(key)
    engine.store.put(key, replace(chunk, blocks=Blocks(tensors)))
    done = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=make_method("reuse", base=FRAMED))
    assert "not go into" in str([lookup.reason for lookup in done.report.lookups])
    assert done.logits.isfinite().all()


def test_first_passes_compile_all_kernels_of_other_lengths(
    with_kernels: list[str], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For short and long questions over few and many keys, and for very many rows; no request waits for a compiler."""
    assert warming.MANY_PASSAGES * warming.TOKENS > 2 * parts.KEYS_PER_SPLIT > 2 * warming.FEW_PASSAGES * warming.TOKENS
    monkeypatch.setattr(warming, "TOKENS", 16)  # the interpreter is slow
    monkeypatch.setattr(parts, "KEYS_PER_SPLIT", 100)
    for module in (parts, launch):
        monkeypatch.setattr(module, "concurrent_programs", lambda device: 8)
    monkeypatch.setattr(attention, "supports_large_tile", lambda *_: True)
    monkeypatch.setattr(warming, "kernels_available", lambda *_: True)
    attended: list[dict[str, Any]] = []
    scored: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "attend", watched(attention.attend, attended))
    monkeypatch.setattr(context_score, "weights_of_keys", watched(context_score.weights_of_keys, scored))
    model = build_model("llama", num_hidden_layers=2, max_position_embeddings=2048)
    lm = LanguageModel.wrap(model.to(DEVICE, torch.float16), tokenizer)
    engine = make_engine(lm, MemoryStore())
    warming.run_first_passes(engine.runner, engine.prompts)
    all_ways = {(rows, split) for rows in (16, 64) for split in (False, True)}
    launched = {(constants["BLOCK_ROWS"], constants["SPLIT"]) for constants in attended if not constants["BY_TABLE"]}
    assert launched == {*all_ways, (launch.LARGE_TILE.rows, False)}
    assert {(constants["BLOCK_ROWS"], constants["BLOCK_SPLITS"] > 1) for constants in scored} == all_ways
    assert {constants["BLOCK_SPLITS"] for constants in scored} == {1, parts.FEW_SPLITS}
