"""What cannot be right is refused with the reason; what can is taken whatever its name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LongcatFlashConfig,
    Mamba2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import ModelNotFound, UnsupportedModel
from qcfuse_rag.models.compatibility import refuse_unsupported
from qcfuse_rag.runtime.attention.dispatch import rows_attention
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.verification.exactness import check_exact
from tests.runtime.test_attention import Layer
from tests.support.families import LATENT, SIZES, YARN, build_model, build_nested_model


def changed(**fields: object) -> PreTrainedModel:
    """Return a model with other fields of its configuration, or with another configuration."""
    model = build_model("llama")
    for name, value in fields.items():
        setattr(model if name == "config" or name.startswith("_") else model.config, name, value)
    return model


RECURRENT = Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8)
ENCODER_DECODER = T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=2, num_heads=2, d_kv=16)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: changed(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
            "dynamic RoPE changes its frequencies",
        ),
        (lambda: AutoModelForCausalLM.from_config(RECURRENT), None),
        (
            lambda: changed(layer_types=["full_attention", "hybrid"] * 2),
            "layers of type hybrid keep a state",
        ),
        (lambda: T5ForConditionalGeneration(ENCODER_DECODER), "encoder-decoder"),
    ],
    ids=["dynamic RoPE", "recurrent", "hybrid layers", "encoder-decoder"],
)
def test_a_model_that_cannot_be_right_is_refused(build: Callable[[], PreTrainedModel], message: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        refuse_unsupported(build())


@pytest.mark.parametrize("by", ["its device_map", "FSDP", "DeepSpeed", "tensor parallelism"])
def test_a_model_over_several_devices_is_refused(by: str, tmp_path: Path) -> None:
    """Whoever spread it: its weights are not whole anywhere, and stored caches would be parts."""
    model = build_model("llama")
    layer = model.model.layers[0]
    if by == "its device_map":
        model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    elif by == "FSDP":  # `fully_shard` gives modules such a class
        from torch.distributed.fsdp import FSDPModule

        layer.__class__ = type("FSDPLayer", (FSDPModule, type(layer)), {})
    elif by == "DeepSpeed":  # ZeRO 3 numbers the weights it has taken
        layer.mlp.up_proj.weight.ds_id = 7
    else:
        from torch.distributed.tensor import distribute_tensor, init_device_mesh

        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            whole = layer.mlp.up_proj.weight.data
            sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)))
            layer.mlp.up_proj.weight = torch.nn.Parameter(sharded, requires_grad=False)
        finally:
            torch.distributed.destroy_process_group()
    with pytest.raises(UnsupportedModel, match=f"over several devices by {by}.* load it whole on one device"):
        refuse_unsupported(model)


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("`.to` is not supported for `8-bit` bitsandbytes models\nand more"),
        NotImplementedError("Int8Tensor dispatch: attempting to run unimplemented operator"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
)
def test_packed_weights_that_cannot_be_moved_are_refused_by_name(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    def moved(*_: object) -> None:
        raise raised

    monkeypatch.setattr(torch.nn.Module, "to", moved)
    with pytest.raises(type(raised)):  # of a model that is not quantised it is another error
        LanguageModel.load(model_folder, device="cpu")
    monkeypatch.setattr(PreTrainedModel, "hf_quantizer", object(), raising=False)
    line = re.escape(str(raised).splitlines()[0])
    with pytest.raises(UnsupportedModel, match=f"packed weights that cannot be moved to cpu: {line}; name the device"):
        LanguageModel.load(model_folder, device="cpu")


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("rope", "tokens", "reason"),
    [
        ({**LONGROPE, "original_max_position_embeddings": 128}, 128, "longrope"),
        ({**YARN, "llama_4_scaling_beta": 0.5}, YARN["original_max_position_embeddings"], "queries are scaled"),
    ],
)
def test_a_model_is_held_to_the_length_below_which_its_rope_stays(
    rope: dict[str, Any], tokens: int, reason: str
) -> None:
    window = refuse_unsupported(build_model("llama", rope_parameters=rope))
    assert (window.tokens, reason in window.reason) == (tokens, True)


@pytest.mark.parametrize(
    ("sizes", "tokens", "reason"),
    [
        ({"attention_chunk_size": 64, "floor_scale": 65}, 64, "layers see only the last chunk"),
        ({"attention_chunk_size": 64, "floor_scale": 64}, 63, "queries are scaled"),
        ({"attention_chunk_size": 64, "floor_scale": 32, "attn_temperature_tuning": False}, 64, "the last chunk"),
        ({"attention_chunk_size": 8192, "floor_scale": 8192}, 512, "the model's own limit"),
    ],
)
@torch.inference_mode()
def test_a_model_of_chunks_is_held_to_one_in_which_it_scales_no_query(
    sizes: dict[str, Any], tokens: int, reason: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build_model("llama4-chunked", **sizes)
    window = refuse_unsupported(model)
    assert (window.tokens, reason in window.reason) == (tokens, True)
    if tokens == 512:
        return
    ids = torch.arange(5, 5 + tokens + 2)[None]
    whole = build_model("llama4-chunked", attention_chunk_size=512, floor_scale=512)
    expected = whole(ids).logits
    differences = (model(ids).logits - expected).abs().amax(-1)[0]
    assert float(differences[:tokens].max()) <= 1e-4
    assert float(differences[tokens]) > 1e-2, "what the reason says is what the model does"
    lm = LanguageModel.wrap(model, tokenizer)
    plan = RowsPlan.between(0, tokens, lm.device, lm.sliding)
    logits = forward_rows(lm, ids[0, :tokens], plan, lm.empty_buffer(tokens))
    assert torch.allclose(logits, expected[0, tokens - 1], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "obeyed"),
    [
        ("llama-idle-window", False),
        ("llama", False),
        ("mistral-sliding", True),
        ("gemma3-two-ropes", True),
        ("gpt-oss-sinks", True),
        ("qwen2-moe-silent-window", True),
    ],
)
def test_a_window_counts_where_the_model_obeys_it(
    family: str, obeyed: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = build_model(family)
    window = model.config.sliding_window if obeyed else None
    lm = LanguageModel.wrap(model, tokenizer)
    assert set(lm.sliding) - {None} == ({window} if obeyed else set())
    assert getattr(model.config, "sliding_window", None) == getattr(build_model(family).config, "sliding_window", None)


def test_a_window_that_cannot_be_told_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model("llama-idle-window")
    model.get_decoder().layers[1].self_attn.sliding_window = 24
    with pytest.raises(UnsupportedModel, match="in a window of 24 tokens cannot be told"):
        LanguageModel.wrap(model, tokenizer)


def test_a_model_that_can_see_shares_keys_too(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_nested_model("gemma4-shared-keys"), tokenizer)
    assert lm.n_sharing == 3
    assert check_exact(lm).passed


def test_layers_that_attend_twice_are_refused() -> None:
    experts = {"expert_ffn_hidden_size": 16, "n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1}
    model = AutoModelForCausalLM.from_config(LongcatFlashConfig(**{**SIZES, **LATENT, **experts, "num_layers": 2}))
    with pytest.raises(UnsupportedModel, match="LongcatFlashForCausalLM has 2 layers with 4 attentions"):
        refuse_unsupported(model)


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (AttributeError("no such thing"), UnsupportedModel),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
    ids=["any error", "out of memory"],
)
def test_an_error_of_the_models_own_code_is_a_refusal(
    raised: Exception, becomes: type[Exception], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("llama")

    def forward(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(model.model.layers[2], "forward", forward)
    message = "LlamaForCausalLM fails as it is measured: AttributeError: no such thing|^no memory$"
    with pytest.raises(becomes, match=message):
        LanguageModel.wrap(model, tokenizer)


def test_layers_that_lose_what_they_are_called_with_are_refused(llama: LanguageModel) -> None:
    """A pass's own mask says nothing: read as one, it would show every key to every row."""
    key = torch.zeros(1, 2, 9, 4)
    with pytest.raises(UnsupportedModel, match="do not pass their keyword arguments to Layer"):
        rows_attention(Layer(), key[:, :, :3], key, key, torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_the_self_check_catches_attention_that_is_not_what_it_seems(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LanguageModel.wrap(build_model("llama"), tokenizer)
    monkeypatch.setattr(
        "qcfuse_rag.models.rope.angles",
        lambda table, p: (torch.ones(len(p), len(table)), torch.zeros(len(p), len(table))),
    )
    with pytest.raises(UnsupportedModel, match="does not reproduce LlamaForCausalLM"):
        check_exact(lm)


def test_a_wrapped_model_still_works_on_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    padded = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9], [0, 5, 6, 7, 8], [0, 0, 0, 0, 9]])
    seen = padded != 0
    for family in ("llama", "gemma2-softcap"):
        stock, lm = build_model(family), LanguageModel.wrap(build_model(family), tokenizer)
        expected = stock.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(lm.model.generate(ids, max_new_tokens=8, do_sample=False), expected)
        batch = [m(padded, attention_mask=seen).logits[:, -1] for m in (stock, lm.model)]
        assert torch.allclose(*batch, atol=1e-4)


def test_a_tokenizer_of_another_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    words = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    with pytest.raises(UnsupportedModel, match="they belong to different models"):
        LanguageModel.wrap(build_model("llama", vocab_size=words - 1), tokenizer)


def test_tokens_added_beyond_the_embeddings_are_no_reason_to_refuse(tokenizer: PreTrainedTokenizerFast) -> None:
    padded = copy.deepcopy(tokenizer)
    model = build_model("llama", vocab_size=len(tokenizer))
    padded.add_tokens(["[to pad with]"], special_tokens=True)
    lm = LanguageModel.wrap(model, padded)
    assert len(lm.tokenizer) == model.get_input_embeddings().num_embeddings + 1
    assert check_exact(lm).passed


def test_attention_that_asks_for_more_is_refused_rather_than_ignored(llama: LanguageModel) -> None:
    plan = RowsPlan(torch.arange(2), 2)
    with pytest.raises(UnsupportedModel, match="attends by position_bias, which is not supported"):
        rows_attention(Layer(), *torch.zeros(3, 1, 2, 2, 4), None, fusion=plan, position_bias=torch.zeros(1))


def test_the_self_check_crosses_a_short_sliding_window(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LanguageModel.wrap(build_model("qwen2-moe-silent-window"), tokenizer)
    assert check_exact(lm).passed
    without = replace(lm, sliding=(None,) * lm.n_layers)
    monkeypatch.setattr("qcfuse_rag.verification.exactness._segment_tokens", lambda _: 24)
    with pytest.raises(UnsupportedModel, match="does not reproduce"):
        check_exact(without)


def test_a_model_saved_to_a_folder_is_loaded_and_answers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, family_name: str
) -> None:
    build_model(family_name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = FusionEngine.load(str(tmp_path), store=MemoryStore(), device="cpu")
    assert engine.generate(engine.prompt("Who?"), method=make_method("full")).report.rows > 0


@pytest.mark.parametrize(
    ("name", "message"), [("/no/such/folder", "no model folder at"), ("./nothing.gguf", "no GGUF file at")]
)
def test_a_model_that_is_not_there_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        LanguageModel.load(name)


def test_weights_that_are_missing_are_not_drawn_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if ".3." not in k}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"9 weights are missing, such as model\.layers\.3\.input_layernorm"):
        LanguageModel.load(str(folder), device="cpu")


def test_weights_of_other_shapes_are_one_clear_error(folder: Path) -> None:
    build_model("llama", intermediate_size=32).config.save_pretrained(folder)
    with pytest.raises(ModelNotFound, match="have other shapes than its configuration asks for"):
        LanguageModel.load(str(folder), device="cpu")


def test_code_that_a_model_brings_is_not_run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    remote = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": remote}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()")
    with pytest.raises(UnsupportedModel, match="brings its own code, which is never run"):
        LanguageModel.load(str(tmp_path), device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_encoder_decoder_in_a_folder_is_no_text_decoder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no text decoder"):
        LanguageModel.load(str(tmp_path), device="cpu")


def test_an_id_that_cannot_be_fetched_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="cannot load 'nobody/nothing'"):
        LanguageModel.load("nobody/nothing")


def test_sizes_are_measured_from_the_cache(llama: LanguageModel) -> None:
    assert isinstance(llama.model.config, LlamaConfig)
    shape = llama.shapes[0]
    assert (shape.kv_heads, shape.key_dim, shape.value_dim) == (SIZES["num_key_value_heads"], 16, 16)
    assert llama.kv_bytes_per_token == 4 * 2 * (16 + 16) * 4
