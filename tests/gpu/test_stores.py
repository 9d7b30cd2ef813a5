"""On a CUDA device: the memory tiers that need one, and answers out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import DiskStore, KVStore, LanguageModel, MemoryStore, TieredStore, make_method
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.store.testing import KVStoreTests, example_chunk, example_key
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestDeviceMemory(KVStoreTests):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryStore(1 << 20, device="cuda:0")


class TestPinnedMemory(KVStoreTests):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryStore(1 << 20, pinned=True)

    def test_its_memory_is_page_locked(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        found = store.get(example_key())
        assert found.blocks["key.0"].is_pinned()  # type: ignore[union-attr]


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_answers_do_not_depend_on_the_tier(kv_dtype: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("llama").to("cuda"), tokenizer)
    with DiskStore(tmp_path, kv_dtype=kv_dtype) as disk:
        host = TieredStore(MemoryStore(pinned=True, kv_dtype=kv_dtype), disk)
        device = TieredStore(MemoryStore(device="cuda:0", kv_dtype=kv_dtype), host)
        engines = [make_engine(lm, store) for store in (disk, host, device)]
        engines[2].warm(PASSAGES)
        prompt = engines[0].prompt(QUESTION, PASSAGES)
        logits = [engine.prefill(prompt, method=make_method("reuse", base=FRAMED)).logits for engine in engines]
        assert all(torch.equal(row, logits[0]) for row in logits)
