"""Weights that are rounded while a model is loaded are those of the model loaded as a whole, bit for bit."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import gguf
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models import load
from qcfuse_rag.models.fingerprint import _state
from qcfuse_rag.models.gguf_cache import SWITCH
from qcfuse_rag.models.load import load_model
from qcfuse_rag.models.weights import gguf_tensors
from qcfuse_rag.models.weights.float16_linear import Float16Linear
from qcfuse_rag.models.weights.formats import LINEARS, HeldFormat, round_weights, weight_format
from qcfuse_rag.models.weights.packed_checkpoint import packed_bytes
from qcfuse_rag.models.weights.rounded_load import ONE_AT_A_TIME, rounding_while_loading
from tests.models.weights.test_formats import FAMILY_CASES, WITH_EXPERTS
from tests.support.cases import cases
from tests.support.families import build_model

both_formats = pytest.mark.parametrize("weights", list(LINEARS))


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many layers were rounded while each model was loaded, as they are."""
    counts: list[int] = []
    rounding = load.round_weights

    def count(model: PreTrainedModel, weights: HeldFormat, rounded: dict[nn.Module, nn.Module] | None = None) -> None:
        counts.append(len(rounded or {}))
        rounding(model, weights, rounded)

    monkeypatch.setattr(load, "round_weights", count)
    return counts


def save(family: str, tokenizer: PreTrainedTokenizerFast, folder: Path, *, tied: bool | None = None) -> Path:
    model = build_model(family)
    if tied is not None:
        model.config.tie_word_embeddings = tied
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def as_a_whole(name: str, weights: HeldFormat, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model, _ = load._load_source(name, dtype)
    round_weights(model, weights)
    return model


def require_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    ids = torch.arange(3, 40)[None]
    state, numbers = model.state_dict(), expected.state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == {name: x.dtype for name, x in numbers.items()}
    assert [name for name, tensor in numbers.items() if not torch.equal(state[name], tensor)] == []
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert model.config.to_dict() == expected.config.to_dict()
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))


@both_formats
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_every_family(
    family: str, weights: HeldFormat, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, early: list[int]
) -> None:
    name = str(save(family, tokenizer, tmp_path / "model"))
    model = load_model(name, device="cpu", weights=weights).model
    assert early[0] > 0, "nothing was rounded while the model was loaded"
    require_same(model, as_a_whole(name, weights))


@pytest.mark.slow
@both_formats
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_share_their_weights_with_the_output(
    tied: bool, weights: HeldFormat, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, early: list[int]
) -> None:
    name = str(save("llama", tokenizer, tmp_path / "model", tied=tied))
    model = load_model(name, device="cpu", weights=weights).model
    linears = sum(isinstance(module, LINEARS[weights]) for module in model.modules())
    assert early == [linears if tied else linears + 1], "all linear layers and the embeddings, the shared weights once"
    require_same(model, as_a_whole(name, weights))


@both_formats
def test_a_model_in_bfloat16(weights: HeldFormat, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    name = str(save("qwen2-bias", tokenizer, tmp_path / "model"))
    model = load_model(name, device="cpu", dtype="bfloat16", weights=weights).model
    require_same(model, as_a_whole(name, weights, torch.bfloat16))


def write_llama(path: Path) -> LlamaForCausalLM:
    """Write a tiny Llama as GGUF in 4 and 6 bits; its query and key channels are in another order there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(256)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<t{at}>" for at in range(3, 512))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem == "lm_head":
            continue
        numbers, kept = weight.numpy(), gguf.GGMLQuantizationType.F32
        if weight.dim() == 2:
            kept = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_0
            numbers = gguf.quants.quantize(numbers, kept)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", numbers, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SWITCH, "0")
    write_llama(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


@pytest.mark.slow
@both_formats
def test_a_gguf_file_is_read_one_tensor_at_a_time(
    llama: str, weights: HeldFormat, early: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_tensors.np, "copy", lambda *_: pytest.fail("transformers dequantised the file"))
    caplog.set_level(logging.INFO, logger="qcfuse_rag.models.load")
    model = load_model(llama, device="cpu", weights=weights).model
    assert early == [2 * 7 + 1], "each linear layer, and the embeddings that the output shares"
    assert caplog.messages == []
    monkeypatch.undo()
    monkeypatch.setenv(SWITCH, "0")
    require_same(model, as_a_whole(llama, weights))


@pytest.mark.slow
@both_formats
def test_a_file_that_cannot_be_read_so_is_loaded_as_a_whole(
    llama: str, weights: HeldFormat, early: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_tensors, "_tensors", lambda *_: {}["moved in another version"])
    caplog.set_level(logging.INFO, logger="qcfuse_rag.models.load")
    model = load_model(llama, device="cpu", weights=weights).model
    assert "loaded as a whole" in caplog.text
    require_same(model, as_a_whole(llama, weights))


def test_models_of_other_threads_and_the_environment_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ONE_AT_A_TIME, raising=False)
    layers: list[nn.Linear] = []

    def build() -> None:
        layer = nn.Linear(8, 8, bias=False, device="meta")
        layer.weight = nn.Parameter(torch.ones(8, 8))
        layers.append(layer)

    with rounding_while_loading("int8") as rounded:
        other = threading.Thread(target=build)
        other.start()
        other.join()
        build()
    assert [layer.weight.is_meta for layer in layers] == [False, True]
    assert list(rounded) == layers[1:]
    build()
    assert not layers[2].weight.is_meta
    assert ONE_AT_A_TIME not in os.environ


@pytest.mark.parametrize("family", cases(sorted(WITH_EXPERTS), "gpt-oss-sinks"))
def test_a_model_that_cannot_be_rounded_is_refused_before_its_weights_are_read(
    family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, early: list[int]
) -> None:
    name = str(save(family, tokenizer, tmp_path / "model"))
    with pytest.raises(UnsupportedModel, match=r"layers\.\d\.mlp\..*weights=.model."):
        load_model(name, device="cpu", weights="int8")
    model = load_model(name, device="cpu", weights="auto").model
    assert weight_format(model) == "model"
    assert early == []


def test_weights_too_large_for_float16(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = build_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = -1e5
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="weights above 65,504"):
        load_model(str(tmp_path / "model"), device="cpu", weights="float16")
    kept = load_model(str(tmp_path / "model"), device="cpu", weights="auto").model
    assert weight_format(kept) == "model"
    assert torch.equal(kept.state_dict()["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)


@both_formats
def test_a_fingerprint_hashes_the_state_without_holding_all_of_it(weights: HeldFormat) -> None:
    model = build_model("qwen2-bias")
    round_weights(model, weights)
    state = dict(_state(model))
    expected = model.state_dict()
    assert list(state) == sorted(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert packed_bytes(model) >= sum(tensor.nbytes for tensor in expected.values())


def test_float16_is_rounded_alike_by_torch_and_by_fbgemm() -> None:
    """So an output layer may be packed from embeddings that torch has rounded."""
    powers = torch.logspace(-12, 4.8, 64 * 97, dtype=torch.float64).float().view(64, 97)
    weight = torch.cat([powers, -powers, torch.randn(64, 97) * 1e-7])
    linear = nn.Linear(97, len(weight), bias=False)
    linear.weight = nn.Parameter(weight)
    assert torch.equal(Float16Linear(linear).weight, weight.half())
