"""A LoRA of peft is part of the model: it computes what peft computes, and its caches are nobody else's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.models.load import load_tokenizer
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "on queries": {"target_modules": ["q_proj"]},
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "modules to save": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


def with_lora(model: Any, **settings: Any) -> Any:
    """Add an adapter for a causal language model; importing peft takes seconds, which no other test should wait for."""
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(model, LoraConfig(init_lora_weights=False, task_type=TaskType.CAUSAL_LM, **settings))


def adapt(base: str, seed: int = 0, **settings: Any) -> Any:
    """Return a model with a random adapter, as a training run leaves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = with_lora(model, **{"target_modules": EVERYWHERE, **settings}).eval()
    for name, weight in adapted.named_parameters():
        if "modules_to_save" in name:
            weight.data += 0.05 * torch.randn_like(weight)
    return adapted


@pytest.fixture
def save(model_folder: str, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    """Return a function that saves an adapter of the tiny Llama and returns the adapted model and the folder."""

    def saved(base: str = model_folder, **settings: Any) -> tuple[Any, str]:
        adapted, folder = adapt(base, **settings), tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        adapted.save_pretrained(folder)
        return adapted, str(folder)

    return saved


@torch.inference_mode()
def logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_an_adapter_is_the_adapted_model(
    kind: str, save: Callable[..., tuple[Any, str]], model_folder: str
) -> None:
    adapted, folder = save(**KINDS[kind])
    engine = make_engine(LanguageModel.load(folder, device="cpu", dtype="float32"), MemoryStore())
    prompt = engine.prompt(QUESTION, PASSAGES)
    expected = logits(adapted, prompt.ids)
    engine.warm(PASSAGES)
    for method in (make_method("full"), make_method("random", ratio=1.0)):
        torch.testing.assert_close(engine.prefill(prompt, method=method).logits, expected[-1], atol=2e-4, rtol=0)
    base, other = (LanguageModel.load(name, device="cpu") for name in (model_folder, save(seed=7, **KINDS[kind])[1]))
    fingerprints = {lm.fingerprint.digest for lm in (engine.lm, base, other)}
    assert len(fingerprints) == 3
    assert (logits(base.model, prompt.ids)[-1] - expected[-1]).abs().max() > 0.1


def second_adapter(adapted: Any) -> Any:
    from peft import LoraConfig

    adapted.add_adapter("second", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    return adapted


def attached(folder: str) -> Any:
    """Let transformers attach the adapter."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "hand_over",
    [
        lambda adapted, _: adapted,
        lambda adapted, _: adapted.get_base_model(),
        lambda adapted, _: adapted.merge_adapter() or adapted,
        lambda adapted, _: adapted.merge_and_unload(),
        lambda adapted, _: second_adapter(adapted),
        lambda _, folder: attached(folder),
    ],
    ids=["unmerged", "inner model", "merged", "unloaded", "beside another", "attached by transformers"],
)
def test_an_adapted_model_is_taken_however_it_comes(
    hand_over: Callable[[Any, str], Any], save: Callable[..., tuple[Any, str]], tokenizer: PreTrainedTokenizerFast
) -> None:
    adapted, folder = save()
    expected = logits(adapted, tuple(range(3, 40)))
    lm = LanguageModel.wrap(hand_over(adapted, folder), tokenizer)
    assert lm.fingerprint == LanguageModel.load(folder, device="cpu", dtype="float32").fingerprint
    torch.testing.assert_close(logits(lm.model, tuple(range(3, 40))), expected, atol=2e-4, rtol=0)


def test_the_active_adapter_of_several_counts(model_folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    adapted = second_adapter(adapt(model_folder))
    adapted.set_adapter("second")
    expected = logits(adapted, (5, 6, 7))
    torch.testing.assert_close(logits(LanguageModel.wrap(adapted, tokenizer).model, (5, 6, 7)), expected)


def test_an_adapter_brings_its_vocabulary_and_tokenizer(
    save: Callable[..., tuple[Any, str]], model_folder: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.resize_token_embeddings(328)
    adapted = with_lora(model, target_modules=["q_proj"]).eval()
    adapted.save_pretrained(tmp_path)
    own = PreTrainedTokenizerFast.from_pretrained(model_folder)
    own.add_tokens(["<|turn|>"])
    own.save_pretrained(tmp_path)
    lm = LanguageModel.load(str(tmp_path), device="cpu", dtype="float32")
    (token,) = lm.tokenizer.encode("<|turn|>", add_special_tokens=False)
    torch.testing.assert_close(logits(lm.model, (5, token)), logits(adapted, (5, token)), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hidden_layers": 2}, r"belongs to another model: 24 of its weights .*layers\.2"),
        ({"num_hidden_layers": 6}, r"belongs to another model: 24 of its weights .*layers\.4"),
        ({"hidden_size": 32}, r"cannot load .*: .*size mismatch"),
        ({"name": "gpt-neox"}, "cannot load .*: Target modules .* not found"),
    ],
    ids=["fewer layers", "more layers", "narrower", "another family"],
)
def test_an_adapter_of_another_base_is_one_clear_error(
    other: dict[str, Any],
    message: str,
    save: Callable[..., tuple[Any, str]],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    _, folder = save()
    build_model(**{"name": "llama", **other}).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    named(folder, tmp_path / "other")
    with pytest.raises((ModelNotFound, UnsupportedModel), match=message):
        LanguageModel.load(folder, device="cpu")


def named(folder: str, base: object) -> None:
    """Change the base model that an adapter names."""
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base and str(base)}))


def test_an_adapter_whose_base_is_not_there_names_the_file_to_change(
    save: Callable[..., tuple[Any, str]], model_folder: str, tmp_path: Path
) -> None:
    (_, folder), (_, other) = save(), save()
    for base, message in (
        (None, "names no base model: set its base_model_name_or_path"),
        (tmp_path / "gone", "names the base model .*gone, which is not there: set base_model_name_or_path"),
        (other, "is an adapter too: merge"),
    ):
        named(folder, base)
        with pytest.raises((ModelNotFound, UnsupportedModel), match=message):
            LanguageModel.load(folder, device="cpu")
    named(folder, model_folder)
    (Path(folder) / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelNotFound, match=r"cannot load .*adapter-\d"):
        LanguageModel.load(folder, device="cpu")
    (Path(folder) / "model.safetensors").touch()
    with pytest.raises(UnsupportedModel, match="has a model and an adapter"):
        LanguageModel.load(folder, device="cpu")


def disabled(base: str) -> Any:
    adapted = adapt(base)
    adapted.base_model.disable_adapter_layers()
    return adapted


def quantized(base: str) -> Any:
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits, device_map="cpu")
    return with_lora(model, target_modules=["q_proj"])


def prompt_tuned(base: str) -> Any:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    tokens = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (disabled, "adapters are disabled: enable them"),
        (quantized, "exactly into quantised weights: name the base model that is not quantised"),
        (prompt_tuned, "PROMPT_TUNING adds to the prompt"),
    ],
)
def test_what_cannot_be_merged_exactly_is_refused(
    make: Callable[[str], Any], message: str, model_folder: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        LanguageModel.wrap(make(model_folder), tokenizer)


def test_models_check_says_which_model_an_adapter_is_merged_into(
    run: Run, save: Callable[..., tuple[Any, str]], model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = save()
    code, out, _ = run("models", "check", folder, "--device", "cpu")
    assert (code, f"adapter: merged into the weights of {model_folder}" in out.replace("\n", "")) == (0, True), out
    assert "--base blind" not in out
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(QCFuseError, match=r"run `pip install 'qcfuse-rag\[adapters\]'`"):
        LanguageModel.load(folder, device="cpu")


def in_hub_cache(folder: str, cache: Path) -> Path:
    """Put an adapter where huggingface_hub keeps `some/adapter`, and return its snapshot."""
    snapshot = cache / "models--some--adapter" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (cache / "models--some--adapter" / "refs").mkdir()
    (cache / "models--some--adapter" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")  # as some repositories of adapters have it
    return snapshot


def test_an_adapter_is_found_by_its_id_in_the_hubs_cache(
    run: Run, save: Callable[..., tuple[Any, str]], model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = save()
    snapshot, read = in_hub_cache(folder, tmp_path / "hub"), list[str]()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **b: read.append(path.name) or read_text(path, *a, **b))
    lm = LanguageModel.load("some/adapter", device="cpu", dtype="float32")
    assert read.count("adapter_config.json") == 1
    assert (lm.name, lm.fingerprint) == (
        "some/adapter",
        LanguageModel.load(folder, device="cpu", dtype="float32").fingerprint,
    )
    assert load_tokenizer("some/adapter").get_vocab() == load_tokenizer(model_folder).get_vocab()
    code, out, _ = run("models", "check", "some/adapter", "--device", "cpu")
    assert (code, f"adapter: merged into the weights of {model_folder}" in out.replace("\n", "")) == (0, True), out
    (snapshot / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ModelNotFound, match=r"the adapter in .*some--adapter.* has no adapter_model.safetensors: fetch"
    ):
        LanguageModel.load("some/adapter", device="cpu")


def test_an_id_that_is_not_in_the_cache_is_one_clear_error_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (LanguageModel.load, load_tokenizer):
        with pytest.raises(ModelNotFound, match="cannot load 'some/adapter': ") as raised:
            load("some/adapter")
        assert "\n" not in str(raised.value)
