"""The tests every store must pass; subclass `KVStoreTests`, give it a store, and run pytest.

class TestMyStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with MyStore(tmp_path) as store:
            yield store
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from qcfuse_rag.model.fingerprint import Fingerprint
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.numbers import compress

FINGERPRINT = Fingerprint("weights", "config", "tokenizer", "rope", "float32")


def example_key(number: int = 0) -> ChunkKey:
    """Return one of many different keys."""
    return ChunkKey(FINGERPRINT, "framed", hash_ids([1, 2, 3]), hash_ids([number]))


def example_chunk(number: int = 0, *, n_tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Return a chunk of three layers whose numbers depend on `number`."""
    generator = torch.Generator().manual_seed(number)
    keys = [torch.randn(2, n_tokens, 8, generator=generator).to(dtype) for _ in range(3)]
    values = [torch.randn(2, n_tokens, 4, generator=generator).to(dtype) for _ in range(3)]
    ranking = torch.stack([torch.randperm(n_tokens, generator=generator) for _ in range(3)])
    return ChunkKV.of(keys, values, ranking, probe_layers=(1,))


def assert_same(found: ChunkKV | Miss, expected: ChunkKV) -> None:
    """Assert that a store gave back exactly what it was given."""
    assert isinstance(found, ChunkKV), f"expected a chunk, got {found}"
    assert (found.n_tokens, found.n_layers) == (expected.n_tokens, expected.n_layers)
    for name in expected.names():
        assert found.blocks[name].dtype == expected.blocks[name].dtype
        assert torch.equal(found.blocks[name], expected.blocks[name]), f"block {name} differs"


class KVStoreTests:
    """Conformance of a `KVStore`; needs a fixture `store` that gives an empty one of at least 1 MB."""

    def test_an_empty_store_has_nothing(self, store: KVStore) -> None:
        """A key never put is absent."""
        assert store.get(example_key()) == Miss("absent")
        assert example_key() not in store

    def test_what_is_put_comes_back_bit_for_bit(self, store: KVStore) -> None:
        """In every dtype, and whatever becomes of the tensors that were put."""
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            chunk = example_chunk(number, dtype=dtype)
            store.put(example_key(number), chunk)
            chunk.blocks["key.0"].zero_()
            assert_same(store.get(example_key(number)), compress(example_chunk(number, dtype=dtype), store.numbers))
            assert example_key(number) in store

    def test_a_key_that_differs_anywhere_is_another_key(self, store: KVStore) -> None:
        """Model, base, prefix and ids all count."""
        key = example_key()
        store.put(key, example_chunk())
        others = [replace(key, base="blind"), replace(key, prefix=hash_ids([])), replace(key, ids=hash_ids([9]))]
        others += [replace(key, fingerprint=replace(FINGERPRINT, dtype="bfloat16"))]
        assert [isinstance(store.get(other), Miss) for other in others] == [True] * 4

    def test_put_replaces(self, store: KVStore) -> None:
        """The newest chunk under a key is the one that counts."""
        store.put(example_key(), example_chunk(1))
        store.put(example_key(), example_chunk(2, n_tokens=7))
        assert_same(store.get(example_key()), example_chunk(2, n_tokens=7))
        assert store.stats()[-1].entries == 1

    def test_discard_removes_one_entry(self, store: KVStore) -> None:
        """And says whether there was one."""
        store.put(example_key(1), example_chunk(1))
        store.put(example_key(2), example_chunk(2))
        assert store.discard(example_key(1))
        assert not store.discard(example_key(1))
        assert isinstance(store.get(example_key(1)), Miss)
        assert_same(store.get(example_key(2)), example_chunk(2))

    def test_a_chunk_in_use_survives_its_removal(self, store: KVStore) -> None:
        """Eviction must not pull memory away from a running request."""
        store.put(example_key(), example_chunk())
        found = store.get(example_key())
        store.clear()
        assert_same(found, example_chunk())

    def test_clear_leaves_nothing(self, store: KVStore) -> None:
        """And counts what was there."""
        for number in range(3):
            store.put(example_key(number), example_chunk(number))
        assert store.clear() == 3
        assert [stats.entries for stats in store.stats()] == [0] * len(store.stats())
        assert isinstance(store.get(example_key(0)), Miss)

    def test_stats_count_uses(self, store: KVStore) -> None:
        """Hits and misses, over all tiers."""
        store.put(example_key(), example_chunk())
        store.get(example_key())
        store.get(example_key(1))
        stats = store.stats()
        assert sum(s.hits for s in stats) == 1
        assert stats[-1].misses == 1
        assert 0 < stats[-1].size_bytes <= (stats[-1].limit_bytes or 1 << 40)

    def test_threads_may_share_it(self, store: KVStore) -> None:
        """Readers see a whole chunk or none."""
        wrong: list[object] = []

        def work(offset: int) -> None:
            for step in range(25):
                number = (step + offset) % 5
                store.put(example_key(number), example_chunk(number))
                found = store.get(example_key(number))
                if not isinstance(found, ChunkKV) or not torch.equal(
                    found.blocks["value.2"], example_chunk(number).blocks["value.2"]
                ):
                    wrong.append(found)

        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_prefetch_changes_nothing_but_speed(self, store: KVStore) -> None:
        """Absent keys are harmless, present ones stay as they were."""
        store.put(example_key(), example_chunk())
        store.prefetch([example_key(), example_key(1)])
        assert_same(store.get(example_key()), example_chunk())
