"""Latent attention: what hooks change before rows attend is what is expanded, and requests read their own buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.ingestion.prefill import prefill_chunk
from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_rows, forward_step
from qcfuse_rag.runtime.graphs.recorder import missing_kernels
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.rows import RowsPlan
from tests.support.families import LATENT, build_model
from tests.support.references import error

IDS = torch.arange(5, 45)
CHANGED = torch.tensor([3, 4, 11])


@pytest.fixture(params=["llama", "deepseek2-latent", "minicpm3-latent"], scope="module")
def lm(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model(request.param), tokenizer)


def prefilled(lm: LanguageModel, ids: Tensor, capacity: int) -> KVBuffer:
    buffer = lm.empty_buffer(capacity)
    forward_rows(lm, ids, RowsPlan.between(0, len(ids), lm.device, lm.sliding), buffer)
    return buffer


class Change(LayerHook):
    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        buffer.keys[layer][:, :, CHANGED] += 1
        buffer.values[layer][:, :, CHANGED] -= 2


def test_rows_attend_to_what_a_hook_has_changed(lm: LanguageModel) -> None:
    rows = torch.arange(30, 40)
    changed, hooked, plain = (prefilled(lm, IDS, 40) for _ in range(3))
    for layer in range(lm.n_layers):
        Change().after_write(layer, rows, changed)
    run = HookedPass(RowsPlan.of(rows, lm.sliding), Change(), hooked)
    logits = forward_rows(lm, IDS[rows], run.plan, hooked, run)
    assert error(logits, forward_rows(lm, IDS[rows], RowsPlan.of(rows, lm.sliding), changed)) <= 1e-4
    assert error(logits, forward_rows(lm, IDS[rows], RowsPlan.of(rows, lm.sliding), plain)) > 1e-2


@torch.inference_mode()
def test_requests_of_a_step_are_those_computed_alone(lm: LanguageModel) -> None:
    """Of other lengths: each row sees the keys of its own buffer, up to itself."""
    lengths = (40, 17)
    buffers = [prefilled(lm, IDS[:length], length + 1) for length in lengths]
    found = forward_step(lm, [3, 3], lengths, buffers)
    for length, step in zip(lengths, found, strict=True):
        assert error(step, lm.model(torch.cat([IDS[:length], torch.tensor([3])])[None]).logits[0, -1]) <= 1e-4


def test_what_is_stored_are_latents_and_the_keys_that_heads_share(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("deepseek2-latent"), tokenizer)
    assert set(lm.shapes) == {KVShape(1, LATENT["qk_rope_head_dim"], LATENT["kv_lora_rank"], latent=True)}
    assert lm.kv_bytes_per_token == 4 * 4 * (8 + 24)
    chunk = prefill_chunk(lm, tuple(IDS.tolist()))
    assert sum(block.nbytes for layer in range(4) for block in chunk.layer(layer)) == len(IDS) * lm.kv_bytes_per_token
    assert missing_kernels(lm) == "torch expands the latents of layers"
