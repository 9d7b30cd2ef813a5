"""Weights in eight and four bits: near the model's, one fingerprint each, and the engine exact over them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models.load import load_model
from qcfuse_rag.models.quantized_weights import FORMATS, quantize_weights
from qcfuse_rag.models.source import QUANTIZED_FORMATS
from qcfuse_rag.verification.exactness import measure_exactness
from tests.support.families import build_model

CPU = torch.device("cpu")
ERRORS = {"int8_weight_only": 0.08, "nf4": 0.8}
"""The largest relative error of a tiny model's logits."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip without the libraries; a processor's own products of nf4, which need wide layers, are not what is tested."""
    pytest.importorskip("torchao")
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)


@pytest.mark.parametrize("weights", ERRORS)
def test_the_decoders_linear_layers_are_quantized_and_the_engine_is_exact(
    weights: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = torch.arange(5, 45)[None]
    model, other = (build_model("llama").to(torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        expected = model(ids).logits.float()
        embeddings = model.get_input_embeddings().weight.clone()
        weight_format = quantize_weights(model, weights, CPU)
        found = model(ids).logits.float()
    assert 0 < float((found - expected).norm() / expected.norm()) < ERRORS[weights]
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    lm, plain = (
        LanguageModel.wrap(each, tokenizer, weights_hash="same", weight_format=name)
        for each, name in ((model, weight_format), (other, "model"))
    )
    assert lm.fingerprint.differences(plain.fingerprint.fields()) == ["weight_format"]
    assert lm.number_formats == f"bfloat16, {weight_format} weights"
    assert measure_exactness(lm).passed


def test_what_cannot_be_quantized_is_one_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(FORMATS) == QUANTIZED_FORMATS
    with pytest.raises(QCFuseError, match=r"weights must be one of auto, .*, got 'int4'"):
        load_model(str(tmp_path), device="cpu", weights="int4")
    with pytest.raises(QCFuseError, match="nf4 weights are for NVIDIA GPUs; cpu has none"):
        load_model(str(tmp_path), device="cpu", weights="nf4")
    with pytest.raises(UnsupportedModel, match="is no plain linear layer"):
        quantize_weights(build_model("qwen2-moe-silent-window"), "nf4", CPU)
    with pytest.raises(QCFuseError, match=r"torchao does not quantise .*q_proj to int8_weight_only on nowhere"):
        quantize_weights(build_model("llama"), "int8_weight_only", "nowhere")  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.nn", None)
    with pytest.raises(QCFuseError, match=r"need bitsandbytes: run `pip install 'qcfuse-rag\[quantization\]'"):
        quantize_weights(build_model("llama"), "nf4", CPU)


def test_biases_stay() -> None:
    model = build_model("qwen2-bias").to(torch.bfloat16)
    before = model.model.layers[0].self_attn.q_proj.bias.clone()
    quantize_weights(model, "nf4", CPU)
    linear = model.model.layers[0].self_attn.q_proj
    assert isinstance(linear, nn.Linear)
    assert torch.equal(linear.bias, before)
