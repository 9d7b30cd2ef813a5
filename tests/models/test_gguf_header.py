"""A GGUF file's header is read once, and nothing else about loading changes."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from qcfuse_rag.errors import ModelNotFound
from qcfuse_rag.models.load import CACHED_GGUF_FUNCTIONS, cached_gguf_header, load_pretrained
from tests.support.passages import QUESTION

OWN = {name: getattr(gguf, name) for name in CACHED_GGUF_FUNCTIONS}


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=512, num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()


@pytest.fixture
def file(tmp_path: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return the model as a GGUF file, written by the format's own library."""
    path, config = tmp_path / "tiny.gguf", model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    known = {at: token for token, at in tokenizer.get_vocab().items()}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([known.get(at, f"<unused{at}>") for at in range(config.vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files of which the header is read, as they are."""
    files: list[str] = []

    class Counted(gguf.GGUFReader):  # type: ignore[misc]
        def __init__(self, path: str, mode: str = "r") -> None:
            files.append(str(path))
            super().__init__(path, mode)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    return files


def test_a_model_and_its_tokenizer_come_out_of_one_reading(
    file: Path, model: Qwen2ForCausalLM, read: list[str]
) -> None:
    loaded, tokenizer = load_pretrained(str(file), device="cpu")
    assert read == [str(file)]
    ids = torch.tensor([tokenizer(QUESTION).input_ids]) % model.config.vocab_size
    with torch.inference_mode():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)


def test_it_is_what_transformers_loads_alone(file: Path, read: list[str]) -> None:
    loaded, tokenizer = load_pretrained(str(file), device="cpu")
    source, options = str(file.parent), {"gguf_file": file.name}
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    assert len(read) > 2, "transformers reads it once by itself: this module may go"
    assert AutoTokenizer.from_pretrained(source, **options)(QUESTION).input_ids == tokenizer(QUESTION).input_ids
    assert {
        name: loaded.state_dict()[name].equal(weight) for name, weight in expected.state_dict().items()
    } == dict.fromkeys(expected.state_dict(), True)
    assert loaded.config.to_dict() == expected.config.to_dict()


def test_nothing_is_remembered_afterwards(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but no more than that")
    with pytest.raises(ModelNotFound, match=r"broken\.gguf"):
        load_pretrained(str(tmp_path / "broken.gguf"), device="cpu")
    assert {name: getattr(gguf, name) for name in CACHED_GGUF_FUNCTIONS} == OWN
    with cached_gguf_header():
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    assert {name: getattr(gguf, name) for name in CACHED_GGUF_FUNCTIONS} == OWN
