"""Weights in float16 and int8: near to the float32 layer, the same rows in every pass, another model to a store."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import QCFuseError, UnsupportedModel
from qcfuse_rag.models import load
from qcfuse_rag.models.load import load_model
from qcfuse_rag.models.weights import int8_linear, packed_linear
from qcfuse_rag.models.weights.float16_linear import Float16Linear
from qcfuse_rag.models.weights.formats import LINEARS, HeldFormat, choose_weight_format, round_weights, weight_format
from qcfuse_rag.models.weights.int8_linear import BLOCK_ROWS, Int8Linear
from qcfuse_rag.models.weights.int8_products import FbgemmWeights, OnednnWeights, has_vnni, packed_class
from qcfuse_rag.models.weights.packed_checkpoint import load_packed, save_packed
from qcfuse_rag.models.weights.packed_linear import PackedLinear
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BLIND
from qcfuse_rag.verification.exactness import INT8_TOLERANCE, measure_exactness
from tests.support import references
from tests.support.cases import cases
from tests.support.engines import make_engine
from tests.support.families import FAMILIES, build_model
from tests.support.passages import PASSAGES, QUESTION

WITH_EXPERTS = {"afmoe", "gpt-oss-sinks", "qwen2-moe-silent-window"}
FAMILY_CASES = cases(sorted(set(FAMILIES) - WITH_EXPERTS), "llama")
"""Families whose experts are no linear layers."""


both_formats = pytest.mark.parametrize("weights", list(LINEARS))


def rounded(family: str, tokenizer: PreTrainedTokenizerFast, weights: HeldFormat = "int8") -> LanguageModel:
    model = build_model(family)
    round_weights(model, weights)
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


@pytest.mark.skipif(not has_vnni(), reason="a processor without VNNI has one product")
@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 2, 31, BLOCK_ROWS, BLOCK_ROWS + 5])
def test_both_libraries_give_the_same_numbers(linear: nn.Linear, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "packed_class", lambda: FbgemmWeights)
    by_fbgemm = Int8Linear(linear)
    monkeypatch.setattr(int8_linear, "packed_class", lambda: OnednnWeights)
    by_onednn = Int8Linear(linear)
    x = torch.randn(n_rows, 96) * torch.logspace(-3, 3, n_rows)[:, None]
    assert torch.equal(by_onednn(x), by_fbgemm(x))
    assert torch.equal(by_onednn.weight, by_fbgemm.weight)
    assert torch.equal(copy.deepcopy(by_onednn)(x), by_fbgemm(x))


def test_the_product_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, OnednnWeights), (False, FbgemmWeights)):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda supported=supported: supported, raising=False)
        assert packed_class() is expected
    monkeypatch.delattr(torch.cpu, "_is_vnni_supported")
    assert packed_class() is FbgemmWeights


@pytest.mark.parametrize("n_rows", [1, 2, BLOCK_ROWS, 2 * BLOCK_ROWS + 5])
def test_a_row_has_the_same_result_in_every_pass(linear: nn.Linear, n_rows: int) -> None:
    layer, x = Int8Linear(linear), torch.randn(n_rows, 96) * torch.logspace(-3, 3, n_rows)[:, None]
    together = layer(x)
    assert all(torch.equal(layer(row[None])[0], result) for row, result in zip(x, together, strict=True))


def test_float16_weights_are_multiplied_in_float32(linear: nn.Linear) -> None:
    x = torch.randn(2, 3, 96)
    x[0, 0] *= 1000
    expected = nn.functional.linear(x, linear.weight.half().float(), linear.bias)
    assert torch.allclose(Float16Linear(linear)(x), expected, rtol=1e-6, atol=1e-5 * float(expected.abs().max()))
    exact = Float16Linear(linear.bfloat16().float()).weight.float()
    assert torch.equal(exact, linear.bfloat16().float().weight)


@pytest.mark.parametrize("layer", LINEARS.values())
def test_results_have_the_dtype_of_the_activations(linear: nn.Linear, layer: type[PackedLinear]) -> None:
    x = torch.randn(4, 96)
    assert layer(linear.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@torch.inference_mode()
@both_formats
@pytest.mark.parametrize("part_rows", [1, 7, 16, 39])
def test_large_layers_are_packed_in_parts_and_multiply_alike(
    linear: nn.Linear, weights: HeldFormat, part_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, layer = torch.randn(5, 96), LINEARS[weights]
    whole = layer(linear)
    monkeypatch.setattr(packed_linear, "PART_NUMBERS", part_rows * 96)
    parts = layer(linear)
    assert len(parts._packed) == -(-linear.out_features // part_rows)
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(torch.cat(list(parts.parts())), whole.weight)
    assert torch.equal(parts(x), whole(x))


@both_formats
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_the_engine_reproduces_the_rounded_model(
    name: str, weights: HeldFormat, tokenizer: PreTrainedTokenizerFast
) -> None:
    check = measure_exactness(rounded(name, tokenizer, weights))
    if weights == "int8":
        assert check.tolerance == INT8_TOLERANCE
    else:
        assert check.tolerance == measure_exactness(LanguageModel.wrap(build_model(name), tokenizer)).tolerance
    assert check.passed


@both_formats
@pytest.mark.parametrize("name", cases(["gemma3-two-ropes", "llama", "qwen2-bias"], "llama"))
def test_full_recomputation_is_the_rounded_models_own_forward(
    name: str, weights: HeldFormat, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = rounded(name, tokenizer, weights)
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    logits, _ = references.plain_forward(lm, prompt.ids)
    unrounded, _ = references.plain_forward(LanguageModel.wrap(build_model(name), lm.tokenizer), prompt.ids)
    distance = float((unrounded[-1] - logits[-1]).abs().max())
    for method in (make_method("full"), make_method("random", ratio=1.0, base=BLIND)):
        assert float((engine.prefill(prompt, method=method).logits - logits[-1]).abs().max()) < 0.2 * distance


@both_formats
@pytest.mark.parametrize("name", sorted(WITH_EXPERTS))
def test_experts_are_refused_before_anything_is_changed(name: str, weights: HeldFormat) -> None:
    model = build_model(name)
    with pytest.raises(UnsupportedModel, match=r"layers\.\d\.mlp\..*weights=.model."):
        round_weights(model, weights)
    assert weight_format(model) == "model"


@both_formats
def test_caches_of_the_rounded_model_are_its_own(weights: HeldFormat, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = LanguageModel.wrap(build_model("llama"), tokenizer).fingerprint
    fingerprint = rounded("llama", tokenizer, weights).fingerprint
    assert fingerprint.number_formats == f"float32, {weights} weights"
    expected = ["weights", "weight_format"]
    assert plain.differences(fingerprint.fields()) == expected == fingerprint.differences(plain.fields())
    assert set(plain.fields()) == {"weights", "config", "tokenizer", "rope", "dtype"}
    key = BLIND.key(fingerprint, (1, 2), (3, 4))
    assert ChunkKey.from_fields(key.fields()) == key
    assert key.address != BLIND.key(plain, (1, 2), (3, 4)).address


def test_weights_too_large_for_float16_are_refused_before_anything_is_changed() -> None:
    model = build_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj\.weight has weights above 65,504; .*weights="):
        round_weights(model, "float16")
    assert weight_format(model) == "model"


@both_formats
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_near_and_have_the_output_layers_numbers_if_they_shared_its_weights(
    tied: bool, weights: HeldFormat
) -> None:
    model = build_model("llama")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.arange(12).view(3, 4)
    expected = model.model.embed_tokens(ids).detach()
    round_weights(model, weights)
    embeddings = model.get_input_embeddings()
    step = 1e-3 * float(expected.abs().max()) if embeddings.scale is None else float(embeddings.scale.max())
    assert (embeddings(ids) - expected).abs().max() <= 0.51 * step
    assert torch.equal(embeddings.weight, model.lm_head.weight) is tied


@both_formats
def test_embeddings_that_do_more_than_look_up_stay_as_they_are(weights: HeldFormat) -> None:
    model = build_model("gemma3-two-ropes")
    embeddings = model.get_input_embeddings()
    round_weights(model, weights)
    assert model.get_input_embeddings() is embeddings
    assert type(model.get_output_embeddings()) is LINEARS[weights]


def test_a_single_changed_weight_is_another_rounded_model(tokenizer: PreTrainedTokenizerFast) -> None:
    changed = rounded("llama", tokenizer)
    layer = changed.model.model.layers[1].mlp.up_proj
    weight = layer.weight
    weight[0, 0] += 1
    layer.pack(weight)
    again = LanguageModel.wrap(changed.model, tokenizer).fingerprint
    assert rounded("llama", tokenizer).fingerprint.differences(again.fields()) == ["weights"]


@torch.inference_mode()
@both_formats
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_each_family_is_loaded_as_it_was_saved(name: str, weights: HeldFormat, tmp_path: Path) -> None:
    model = build_model(name)
    model.set_attn_implementation("eager")
    round_weights(model, weights)
    save_packed(model, tmp_path, weights)
    loaded, ids = load_packed(tmp_path, weights), torch.arange(40)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


@pytest.mark.slow
@torch.inference_mode()
@both_formats
def test_a_model_in_parts_is_loaded_as_it_was_saved(
    weights: HeldFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, ids = [build_model("qwen2-bias"), build_model("qwen2-bias")], torch.arange(40)[None]
    for model, part_rows in zip(models, (1000, 50), strict=True):
        monkeypatch.setattr(packed_linear, "PART_NUMBERS", part_rows * model.config.hidden_size)
        model.set_attn_implementation("eager")
        round_weights(model, weights)
    whole, model = models
    assert len(model.lm_head._packed) > len(whole.lm_head._packed) == 1
    save_packed(model, tmp_path, weights)
    assert torch.equal(load_packed(tmp_path, weights)(input_ids=ids).logits, whole(input_ids=ids).logits)
    last = max(tmp_path.glob("linear-*.safetensors"), key=lambda file: file.stem.split("-")[2])
    (name,) = load_file(last)
    save_file({name: torch.zeros(1, model.config.hidden_size, dtype=model.lm_head.stored_dtype)}, last)
    with pytest.raises(ValueError, match=f"{last.name} has other weights than"):
        load_packed(tmp_path, weights)


def test_a_model_is_rounded_when_it_is_loaded(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("llama", "gpt-oss-sinks"):
        build_model(name).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    for weights, held in (("int8", "int8"), ("float16", "float16"), ("auto", "float16")):
        with FusionEngine.load(str(tmp_path / "llama"), device="cpu", weights=weights) as engine:
            assert engine.lm.fingerprint.weight_format == held
            assert type(engine.lm.model.lm_head) is LINEARS[held]
    model = load_model(str(tmp_path / "gpt-oss-sinks"), device="cpu", weights="auto").model
    assert weight_format(model) == "model"
    with pytest.raises(UnsupportedModel, match="linear layers"):
        load_model(str(tmp_path / "gpt-oss-sinks"), device="cpu", weights="int8")


def test_weights_are_kept_as_they_were_rounded(linear: nn.Linear) -> None:
    layer = Int8Linear(linear)
    assert (layer.weight * layer.scale[:, None] - linear.weight).abs().max() <= 0.51 * float(layer.scale.max())
    assert torch.equal(layer.state_dict()["weight"], layer.weight)
    again = copy.deepcopy(layer)
    assert torch.equal(again(torch.ones(3, 96)), layer(torch.ones(3, 96)))


def test_sums_of_the_largest_numbers_do_not_overflow() -> None:
    linear = nn.Linear(512, 8, bias=False).requires_grad_(False)
    linear.weight[:] = 127.0 * torch.tensor([1, 1, -1, -1, 1, 1, -1, -1])[:, None]
    x = torch.full((2, 512), 63.0) * torch.tensor([[1.0], [-1.0]])
    assert torch.allclose(Int8Linear(linear)(x), linear(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "supported", "expected"),
    [
        (None, True, "model"),
        ("bfloat16", True, "model"),
        ("float32", True, "float16"),
        (None, False, "float16"),
    ],
)
def test_auto_is_bfloat16_where_that_is_faster(
    dtype: str | None,
    supported: bool,
    expected: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_model("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(load, "multiplies_bfloat16", lambda: supported)
    monkeypatch.setattr(load, "chosen_cpu_dtype", lambda: torch.bfloat16 if supported else torch.float32)
    model = load_model(str(tmp_path), device="cpu", dtype=dtype, weights="auto").model
    assert weight_format(model) == expected
    assert (model.dtype == torch.bfloat16) is (expected == "model")


def test_devices_choose_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (choose_weight_format("auto", "cpu"), choose_weight_format("auto", "cuda:0")) == ("float16", "model")
    for weights in LINEARS:
        assert choose_weight_format(weights, "cpu") == weights
        with pytest.raises(QCFuseError, match=r"load the model with weights=.model."):
            choose_weight_format(weights, "cuda:0")
    with pytest.raises(ValueError, match="model, float16, int8, auto"):
        choose_weight_format("int4", "cpu")
    assert choose_weight_format("auto", "cpu", bfloat16=True) == "model"
    assert choose_weight_format("int8", "cpu", bfloat16=True) == "int8"
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    assert (choose_weight_format("auto", "cpu"), choose_weight_format("model", "cpu")) == ("model", "model")
    with pytest.raises(QCFuseError, match=r"FBGEMM.*load the model with weights=.model."):
        choose_weight_format("int8", "cpu")
