"""Keys: the same for the same thing, different for anything that changes what is stored."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.fingerprint import Fingerprint, fingerprint_model, hash_config
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.families import build_model, build_tokenizer

SAVED = Path(__file__).parent.parent / "data" / "configs"
"""What versions of transformers save of the nine families whose fields they changed, and the hash that each gave."""
VERSIONS = ("5.15.0", "5.23.0")


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


def saved_configs(version: str) -> dict[str, dict[str, Any]]:
    return json.loads((SAVED / f"transformers-{version}.json").read_text())


@pytest.mark.parametrize("family", saved_configs(VERSIONS[0]))
def test_a_version_of_transformers_that_adds_moves_or_derives_fields_gives_the_same_hash(family: str) -> None:
    configs = [saved_configs(version)[family] for version in VERSIONS]
    classes = [CONFIG_MAPPING[saved["config"]["model_type"]] for saved in configs]
    read = [hash_config(made.from_dict(saved["config"])) for made, saved in zip(classes, configs, strict=True)]
    assert {*read, *(saved["hash"] for saved in configs)} == {read[0]}
    assert configs[0]["config"].keys() != configs[1]["config"].keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"num_attention_heads": 16},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 2048},
        {"use_sliding_window": True, "max_window_layers": 20},
        {"layer_types": ["sliding_attention", "full_attention"] * 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=str,
)
def test_what_changes_keys_and_values_changes_the_hash(changes: dict[str, Any]) -> None:
    others = [{}, {"use_sliding_window": True}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}]
    hashes = {hash_config(Qwen2Config(**other)) for other in others if other.keys() != changes.keys()}
    assert hash_config(Qwen2Config(**changes)) not in hashes


@pytest.mark.parametrize(
    "changes",
    [
        LlamaConfig().to_dict(),
        {"num_key_value_heads": 32},  # derived from the number of heads
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"eos_token_id": [2, 7], "attention_dropout": 0.1, "use_cache": False},
        {"a_field_of_a_later_version": 3},
    ],
    ids=["all its defaults", "a derived field", "a nested default", "generation and training", "an unknown field"],
)
def test_what_changes_nothing_does_not_change_the_hash(changes: dict[str, Any]) -> None:
    assert hash_config(LlamaConfig(**{**changes})) == hash_config(LlamaConfig())


def test_a_default_that_a_later_version_changes_is_another_hash() -> None:
    """Of numbers that keys and values depend on: a checkpoint that leaves them out is computed in another way then."""

    class LaterConfig(LlamaConfig):
        rms_norm_eps: float = 1e-5

    class SameConfig(LlamaConfig):
        a_new_field: float = 1.0

    assert hash_config(LaterConfig()) != hash_config(LlamaConfig())
    assert hash_config(SameConfig()) == hash_config(LlamaConfig())


def test_trying_configurations_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Without its vocabulary or its factor, a configuration makes no sense."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    config = LlamaConfig(vocab_size=200000, bos_token_id=199999, rope_parameters=rope, max_position_embeddings=512)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # it does not propagate
    try:
        caplog.clear()
        hash_config(config)
        assert caplog.records == []
    finally:
        logger.removeHandler(caplog.handler)


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
