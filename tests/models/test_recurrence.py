"""Recurrent layers store those inputs of the recurrence on which later tokens depend; these are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.fingerprint import fingerprint_model
from qcfuse_rag.models.recurrence import measure_recurrence
from tests.support.families import build_model

STORED = {
    "qwen3.5-gated-delta": {"in_proj_qkv": (64, 64), "in_proj_z": (0, 32), "in_proj_b": (4, 4), "in_proj_a": (4, 4)},
    "qwen3-next-gated-delta": {"in_proj_qkvz": (64, 96), "in_proj_ba": (8, 8)},
    "lfm2-convolution": {"in_proj": (96, 144)},
    "bamba-mamba-2": {"in_proj": (134, 230)},
    "jamba-mamba": {"in_proj": (96, 192)},
}
"""Channels that are stored and all that there are: queries, keys and values, but no gates."""


@pytest.mark.parametrize("name", STORED)
def test_inputs_that_only_their_own_token_reads_are_not_stored(name: str) -> None:
    layers = measure_recurrence(build_model(name), [0, 2])
    for layer in layers.values():
        found = zip(layer.projections, layer.used, strict=True)
        assert {linear: (int(used.sum()), len(used)) for linear, used in found} == STORED[name]


def model_that_forgets(layer: int) -> PreTrainedModel:
    """Draw a model of which one layer's state is gone after each token."""
    model = build_model("qwen3.5-gated-delta")
    model.model.layers[layer].linear_attn.A_log.data.fill_(60.0)
    return model


@pytest.mark.parametrize("forgetful", [0, 2])
def test_a_layer_that_forgets_at_once_stores_what_layers_of_its_class_do(forgetful: int) -> None:
    """Of the text before it sees the convolution alone; that says nothing of other weights."""
    layers = measure_recurrence(model_that_forgets(forgetful), [0, 2])
    assert [layer.n_channels for layer in layers.values()] == [72, 72]


def test_shapes_are_even_halves_that_hold_all_channels(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("bamba-mamba-2"), tokenizer)
    assert lm.attention_layers == (1, 3)
    assert [lm.shapes[layer].kv_heads for layer in (0, 2)] == [2, 2]
    assert {(shape.key_dim, shape.value_dim) for layer, shape in enumerate(lm.shapes) if layer in lm.recurrent} == {
        (64, 64)
    }
    assert 2 * 2 * 64 >= lm.recurrent[0].n_channels > 2 * 64


def test_what_is_stored_is_part_of_the_fingerprint(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("qwen3.5-gated-delta")
    layers = measure_recurrence(model, [0, 2])
    usual = fingerprint_model(model, tokenizer, (), recurrent=layers.values())
    layers[2].used[1][0] = True
    assert fingerprint_model(model, tokenizer, (), recurrent=layers.values()) != usual


class Scaled(nn.Module):
    """A mixer whose output is no linear layer's."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return 2 * self.mixer(*args, **kwargs)


def test_a_mixer_that_does_not_end_with_a_linear_layer_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("qwen3.5-gated-delta")
    model.model.layers[2].linear_attn = Scaled(model.model.layers[2].linear_attn)
    with pytest.raises(UnsupportedModel, match=r"layer 2 keeps a state .* does not begin and end with linear layers"):
        LanguageModel.wrap(model, tokenizer)


def test_a_model_without_attention_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("qwen3.5-gated-delta", layer_types=["linear_attention"] * 4)
    with pytest.raises(UnsupportedModel, match="no layer has attention"):
        LanguageModel.wrap(model, tokenizer)
