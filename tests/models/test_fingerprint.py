"""Keys: the same for the same thing, different for anything that changes what is stored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.fingerprint import Fingerprint, fingerprint_model
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.families import build_model, build_tokenizer


def of(tokenizer: PreTrainedTokenizerFast, family: str = "llama", **changes: object) -> Fingerprint:
    return LanguageModel.wrap(build_model(family, **changes), tokenizer).fingerprint  # type: ignore[arg-type]


def test_the_same_model_loaded_twice_is_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    assert of(tokenizer) == of(tokenizer)


def test_a_single_changed_weight_is_another_model(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] += 1e-3
    changed = LanguageModel.wrap(model, tokenizer).fingerprint
    assert of(tokenizer).differences(changed.fields()) == ["weights"]


def test_each_cause_has_its_own_field(tokenizer: PreTrainedTokenizerFast) -> None:
    reference = of(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert reference.differences(of(tokenizer, rope_parameters=rope).fields()) == ["config", "rope"]
    assert reference.differences(of(tokenizer, rms_norm_eps=1e-3).fields()) == ["config"]
    other = build_tokenizer(lambda: ["quite another text to learn merges from"])
    assert reference.differences(of(other).fields()) == ["tokenizer"]
    half = build_model("llama").to(torch.bfloat16)
    assert "dtype" in reference.differences(LanguageModel.wrap(half, tokenizer).fingerprint.fields())


def test_where_a_model_came_from_does_not_matter(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("llama")
    model.config._name_or_path = "elsewhere"
    assert LanguageModel.wrap(model, tokenizer, name="other").fingerprint == of(tokenizer)


def test_keys_tell_bases_frames_and_chunks_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    fingerprint = of(tokenizer)
    keys = [
        base.key(fingerprint, prefix_ids, ids)
        for base in (BLIND, FRAMED)
        for prefix_ids in ((1, 2), (1,))
        for ids in ((5,), (6,))
    ]
    addresses = {key.address for key in keys}
    # A blind chunk does not depend on the frame: 2 of those, 4 framed ones.
    assert len(addresses) == 6
    assert all(len(address) == 32 for address in addresses)
    assert copy.deepcopy(keys[0]).address == keys[0].address


def test_weights_that_consist_of_others_are_read_in_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    """As torchao's do, whose numbers cannot be viewed as bytes."""

    def packed(scale: float) -> Fingerprint:
        model = build_model("llama")
        own = model.model.layers[1].mlp.up_proj.weight.data
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
            TwoTensor(own, torch.full_like(own, scale)), requires_grad=False
        )
        return fingerprint_model(model, tokenizer, ())

    assert packed(0.5) == packed(0.5)
    assert packed(0.5).differences(packed(0.25).fields()) == ["weights"]


def test_weights_that_cannot_be_read_are_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def view(tensor: torch.Tensor, *_: object) -> None:
        raise NotImplementedError("dispatch: attempting to run aten.view")

    monkeypatch.setattr(torch.Tensor, "view", view)
    with pytest.raises(UnsupportedModel, match="is a Tensor, whose numbers cannot be read"):
        fingerprint_model(build_model("llama"), tokenizer, ())
