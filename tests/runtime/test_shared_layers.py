"""Layers that read another layer's keys and values are computed where logits are wanted, and nothing else sees them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.ingestion.prefill import prefill_chunk
from qcfuse_rag.models.compatibility import shared_layer
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from tests.support.families import build_model

IDS = torch.arange(5, 45)
OWN = [0, 1, 2, 3]


@pytest.fixture(params=["gemma3n-shared-keys", "gemma4-shared-keys"], scope="module")
def lm(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model(request.param), tokenizer)


def test_only_layers_with_keys_of_their_own_are_stored(lm: LanguageModel) -> None:
    assert (lm.n_layers, lm.n_sharing, lm.sliding) == (4, 3, (24, None, 24, None))
    chunk = prefill_chunk(lm, tuple(IDS.tolist()))
    assert chunk.n_layers == 4
    kept = sum(block.nbytes for layer in OWN for block in chunk.layer(layer))
    assert kept == len(IDS) * lm.kv_bytes_per_token


def test_the_others_read_the_last_layer_of_their_kind(lm: LanguageModel) -> None:
    assert [shared_layer(lm.model.config, layer, lm.n_layers) for layer in (4, 5, 6)] == [2, 2, 3]


def test_a_pass_that_only_writes_keys_ends_with_the_last_layer_that_has_some(lm: LanguageModel) -> None:
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(lm.model.get_decoder().layers)
    ]
    plan = RowsPlan.between(0, len(IDS), lm.device, lm.sliding)
    forward_hidden(lm, IDS, plan, lm.empty_buffer(len(IDS)), depth=lm.n_layers)
    written = ran.copy()
    forward_rows(lm, IDS, plan, lm.empty_buffer(len(IDS)))
    for hook in hooks:
        hook.remove()
    assert written == OWN
    assert ran[len(written) :] == [*OWN, 4, 5, 6]


class Seen(LayerHook):
    """Drops a row in each layer and notes what it is asked and shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        self.calls.append(("rows", layer, len(rows)))
        return rows[1:]

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        self.calls.append(("written", layer, len(rows)))

    def on_attention(self, layer: int, rows: Tensor, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        self.calls.append(("seen", layer, len(rows)))


@pytest.mark.parametrize("left", [36, 1])
def test_hooks_see_each_layer_with_keys_once(lm: LanguageModel, left: int) -> None:
    buffer = lm.empty_buffer(len(IDS))
    expected = forward_rows(lm, IDS, RowsPlan.between(0, len(IDS), lm.device, lm.sliding), buffer)
    hook, rows = Seen(), torch.arange(len(IDS) - left - 4, len(IDS))
    hooked = HookedPass(RowsPlan.of(rows, lm.sliding), hook, buffer)
    logits = forward_rows(lm, IDS[rows], hooked.plan, buffer, hooked)
    called = [
        (what, layer, left + 3 - layer + (what == "rows")) for layer in OWN for what in ("rows", "written", "seen")
    ]
    assert hook.calls == called
    assert hooked.row_layers == sum(left + 3 - layer for layer in OWN)
    assert torch.allclose(logits, expected, atol=1e-4), "the dropped rows were right before"
