"""Weights in int8: near to the float32 layer, the same row in every pass, and another model to a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.engine.exactness_check import INT8_TOLERANCE, measure_exactness
from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models.int8_checkpoint import load_int8, save_int8
from qcfuse_rag.models.int8_linear import (
    BLOCK_ROWS,
    Int8Linear,
    choose_weight_format,
    quantize_linears,
    weight_format,
)
from qcfuse_rag.models.load import load_pretrained
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BLIND
from tests.support import references
from tests.support.engines import make_engine
from tests.support.families import FAMILIES, build_model
from tests.support.passages import PASSAGES, QUESTION

WITH_EXPERTS = {"afmoe", "gpt-oss-sinks", "qwen2-moe-silent-window"}
"""Families whose experts are no linear layers."""


def rounded(family: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    model = build_model(family)
    quantize_linears(model)
    return LanguageModel.wrap(model, tokenizer, name=family)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 40).requires_grad_(False)


def test_rows_are_near_to_those_of_the_layer(linear: nn.Linear) -> None:
    x = torch.randn(2, 3, 96)
    x[0, 0] *= 1000  # must not spoil the other rows
    x[1, 1] = 0
    expected, result = linear(x), Int8Linear(linear)(x)
    assert result.shape == expected.shape
    error = (result - expected).std(-1) / expected.std(-1)
    assert error.max() < 0.01
    weight = Int8Linear(linear).weight.float() * Int8Linear(linear).scale[:, None]
    assert (result - nn.functional.linear(x, weight, linear.bias)).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("n_rows", [1, 2, BLOCK_ROWS, 2 * BLOCK_ROWS + 5])
def test_a_row_has_the_same_result_in_every_pass(linear: nn.Linear, n_rows: int) -> None:
    layer, x = Int8Linear(linear), torch.randn(n_rows, 96) * torch.logspace(-3, 3, n_rows)[:, None]
    together = layer(x)
    assert all(torch.equal(layer(row[None])[0], result) for row, result in zip(x, together, strict=True))


def test_results_have_the_dtype_of_the_activations(linear: nn.Linear) -> None:
    x = torch.randn(4, 96)
    assert Int8Linear(linear.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - WITH_EXPERTS))
def test_the_engine_reproduces_the_rounded_model(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = rounded(name, tokenizer)
    check = measure_exactness(lm)
    assert check.tolerance == INT8_TOLERANCE
    assert check.passed


@pytest.mark.parametrize("name", ["gemma3-two-ropes", "llama", "qwen2-bias"])
def test_full_recomputation_is_the_rounded_models_own_forward(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = rounded(name, tokenizer)
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    logits, _ = references.plain_forward(lm, prompt.ids)
    unrounded, _ = references.plain_forward(LanguageModel.wrap(build_model(name), lm.tokenizer), prompt.ids)
    distance = float((unrounded[-1] - logits[-1]).abs().max())
    for method in (make_method("full"), make_method("random", ratio=1.0, base=BLIND)):
        assert float((engine.prefill(prompt, method=method).logits - logits[-1]).abs().max()) < 0.2 * distance


@pytest.mark.parametrize("name", sorted(WITH_EXPERTS))
def test_experts_are_refused_before_anything_is_changed(name: str) -> None:
    model = build_model(name)
    with pytest.raises(UnsupportedModel, match=r"layers\.\d\.mlp\..*weights=.model."):
        quantize_linears(model)
    assert weight_format(model) == "model"


def test_caches_of_the_rounded_model_are_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = LanguageModel.wrap(build_model("llama"), tokenizer).fingerprint
    fingerprint = rounded("llama", tokenizer).fingerprint
    assert fingerprint.number_formats == "float32, int8 weights"
    expected = ["weights", "weight_format"]
    assert plain.differences(fingerprint.fields()) == expected == fingerprint.differences(plain.fields())
    assert set(plain.fields()) == {"weights", "config", "tokenizer", "rope", "dtype"}
    key = BLIND.key(fingerprint, (1, 2), (3, 4))
    assert ChunkKey.from_fields(key.fields()) == key
    assert key.address != BLIND.key(plain, (1, 2), (3, 4)).address


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_near_and_share_the_output_layers_weights_if_they_did(tied: bool) -> None:
    model = build_model("llama")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.arange(12).view(3, 4)
    expected = model.model.embed_tokens(ids)
    quantize_linears(model)
    embeddings = model.get_input_embeddings()
    assert (embeddings(ids) - expected).abs().max() <= 0.51 * float(embeddings.scale.max())
    assert (embeddings.weight.data_ptr() == model.lm_head.weight.data_ptr()) is tied


def test_embeddings_that_do_more_than_look_up_stay_as_they_are() -> None:
    model = build_model("gemma3-two-ropes")
    embeddings = model.get_input_embeddings()
    quantize_linears(model)
    assert model.get_input_embeddings() is embeddings
    assert type(model.get_output_embeddings()) is Int8Linear


def test_a_single_changed_weight_is_another_rounded_model(tokenizer: PreTrainedTokenizerFast) -> None:
    changed = rounded("llama", tokenizer)
    changed.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    again = LanguageModel.wrap(changed.model, tokenizer).fingerprint
    assert rounded("llama", tokenizer).fingerprint.differences(again.fields()) == ["weights"]


@torch.inference_mode()
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - WITH_EXPERTS))
def test_each_family_in_int8_is_loaded_as_it_was_saved(name: str, tmp_path: Path) -> None:
    model = build_model(name)
    model.set_attn_implementation("eager")
    quantize_linears(model)
    save_int8(model, tmp_path)
    loaded, ids = load_int8(tmp_path), torch.arange(40)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    sharing = [len({tensor.data_ptr() for tensor in m.state_dict().values()}) for m in (model, loaded)]
    assert sharing[0] == sharing[1]
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_a_model_is_rounded_when_it_is_loaded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("llama", "gpt-oss-sinks"):
        build_model(name).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with FusionEngine.load(str(tmp_path / "llama"), device="cpu", weights="int8") as engine:
        assert engine.lm.fingerprint.weight_format == "int8"
        assert type(engine.lm.model.lm_head) is Int8Linear
    model, _ = load_pretrained(str(tmp_path / "gpt-oss-sinks"), device="cpu", weights="auto")
    assert weight_format(model) == "model"
    with pytest.raises(UnsupportedModel, match="linear layers"):
        load_pretrained(str(tmp_path / "gpt-oss-sinks"), device="cpu", weights="int8")


def test_devices_choose_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    assert (choose_weight_format("auto", "cpu"), choose_weight_format("auto", "cuda:0")) == ("int8", "model")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert (choose_weight_format("auto", "cpu"), choose_weight_format("int8", "cpu")) == ("model", "int8")
    with pytest.raises(QCFuseError, match=r"load the model with weights=.model."):
        choose_weight_format("int8", "cuda:0")
    with pytest.raises(ValueError, match="model, int8, auto"):
        choose_weight_format("int4", "cpu")
