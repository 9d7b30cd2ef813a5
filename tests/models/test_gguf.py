"""A GGUF file's header is read once, and later starts load its conversion; nothing else about loading changes."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from qcfuse_rag.errors import ModelNotFound
from qcfuse_rag.models import load
from qcfuse_rag.models import load as conversions
from qcfuse_rag.models.load import SOURCE_FILE, SWITCH, cached_gguf_header, load_model
from qcfuse_rag.runtime.language_model import LanguageModel
from tests.support.passages import QUESTION

OWN = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}


@pytest.fixture(autouse=True)
def cache(assets: Path) -> Path:
    return assets / "gguf"


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


def test_one_reading_gives_what_transformers_loads_alone(file: Path, model: Qwen2ForCausalLM, read: list[str]) -> None:
    found = load_model(str(file), device="cpu")
    loaded, tokenizer = found.model, found.tokenizer
    assert read == [str(file)]
    ids = torch.tensor([tokenizer(QUESTION).input_ids]) % model.config.vocab_size
    with torch.inference_mode():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)
    source, options = str(file.parent), {"gguf_file": file.name}
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    assert len(read) > 2, "transformers reads it once by itself: `cached_gguf_header` may go"
    assert AutoTokenizer.from_pretrained(source, **options)(QUESTION).input_ids == tokenizer(QUESTION).input_ids
    assert [name for name, weight in expected.state_dict().items() if not loaded.state_dict()[name].equal(weight)] == []
    assert loaded.config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named_as_such(file: Path, share: float) -> None:
    left = int(file.stat().st_size * share)
    os.truncate(file, left)
    with pytest.raises(ModelNotFound, match=rf"tiny\.gguf is cut off or damaged: it ends at {left:,} bytes; fetch it"):
        load_model(str(file), device="cpu")


def test_capitals_in_the_name_change_nothing(file: Path) -> None:
    named = load_model(str(file), device="cpu")
    assert load_model(str(file.rename(file.with_name("T.GGUF"))), device="cpu").weights_hash == named.weights_hash


def test_nothing_is_remembered_afterwards(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but no more than that")
    with pytest.raises(ModelNotFound, match=r"broken\.gguf"):
        load_model(str(tmp_path / "broken.gguf"), device="cpu")
    assert {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")} == OWN
    with cached_gguf_header():
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    assert {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")} == OWN


def test_a_later_start_reads_the_conversion_alone(file: Path, read: list[str]) -> None:
    first = LanguageModel.load(str(file), device="cpu")
    read.clear()
    second = LanguageModel.load(str(file), device="cpu")
    assert read == []
    assert second.fingerprint == first.fingerprint
    assert second.name == first.name
    assert second.model.config.to_dict() == first.model.config.to_dict()
    assert second.model.generation_config.to_dict() == first.model.generation_config.to_dict()
    assert second.tokenizer(QUESTION).input_ids == first.tokenizer(QUESTION).input_ids
    assert second.tokenizer.all_special_tokens == first.tokenizer.all_special_tokens
    assert second.tokenizer.chat_template == first.tokenizer.chat_template


@pytest.mark.slow
def test_from_the_third_start_on_neither_the_file_nor_the_weights_are_hashed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = LanguageModel.load(str(file), device="cpu")
    assert LanguageModel.load(str(file), device="cpu").fingerprint == first.fingerprint
    monkeypatch.setattr(conversions, "_hash_file", None)
    monkeypatch.setattr(load, "hash_weights", None)
    assert LanguageModel.load(str(file), device="cpu").fingerprint == first.fingerprint


def test_each_dtype_has_its_own_conversion(file: Path, cache: Path, read: list[str]) -> None:
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        loaded = load_model(str(file), device="cpu", dtype=dtype).model
        assert loaded.dtype == getattr(torch, dtype)
    assert len(read) == len(list(cache.iterdir())) == 2


def test_a_changed_file_is_another_model_even_with_the_old_times(file: Path, read: list[str]) -> None:
    before = load_model(str(file), device="cpu").model
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load_model(str(file), device="cpu").model
    assert len(read) == 2
    assert any(not weight.equal(after.state_dict()[name]) for name, weight in before.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "source.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_conversion_is_made_again(file: Path, cache: Path, read: list[str], name: str, damage: str) -> None:
    first = LanguageModel.load(str(file), device="cpu")
    damaged = next(cache.iterdir()) / name
    if damage == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    assert LanguageModel.load(str(file), device="cpu").fingerprint == first.fingerprint
    assert len(read) == 2
    assert LanguageModel.load(str(file), device="cpu").fingerprint == first.fingerprint
    assert len(read) == 2, "the conversion was not made again"


def test_a_full_disk_keeps_no_conversion(
    file: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversions.shutil, "disk_usage", lambda _: SimpleNamespace(free=conversions.FREE_BYTES))
    for _ in range(2):
        load_model(str(file), device="cpu")
    assert len(read) == 2
    assert [list(folder.iterdir()) for folder in cache.iterdir()] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error"), RuntimeError("any")])
def test_a_conversion_that_cannot_be_written_leaves_the_model_loaded(
    file: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(conversions, "_write", fail)
    for _ in range(2):
        load_model(str(file), device="cpu")
    assert len(read) == 2
    assert [list(folder.iterdir()) for folder in cache.iterdir()] == [[]]


def test_the_switch_turns_conversions_off(
    file: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    for _ in range(2):
        load_model(str(file), device="cpu")
    assert len(read) == 2
    assert not cache.exists()


@pytest.mark.slow
def test_loads_at_the_same_time_leave_one_conversion(file: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_model(str(file), device="cpu").model, range(8)))
    (folder,) = cache.iterdir()
    assert (folder / "source.json").is_file()
    for model in loaded:
        assert all(weight.equal(loaded[0].state_dict()[name]) for name, weight in model.state_dict().items())


def test_what_a_killed_process_left_is_removed_by_a_later_start(file: Path, cache: Path) -> None:
    load_model(str(file), device="cpu", dtype="float32")
    [folder] = [path for path in cache.rglob("*") if (path / SOURCE_FILE).is_file()]
    old, young = (folder.with_name(f"{folder.name}.{name}.part") for name in ("old", "young"))
    for part in (old, young):
        part.mkdir()
    os.utime(old, (0, 0))
    (folder / SOURCE_FILE).unlink()
    load_model(str(file), device="cpu", dtype="float32")
    assert (old.exists(), young.exists()) == (False, True)
