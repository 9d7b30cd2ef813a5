"""The tests that every store must pass: subclass `KVStoreTests`, give it a store, and run pytest.

class TestMyStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path):
        with MyStore(tmp_path) as store:
            yield store
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.backends.base import EntryInfo, KVStore, Miss, lasting
from qcfuse_rag.store.chunk import Blocks, ChunkKV, to_format
from qcfuse_rag.store.key import ChunkKey, hash_ids

FINGERPRINT = Fingerprint("weights", "config", "tokenizer", "rope", "float32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def example_key(number: int = 0) -> ChunkKey:
    """Return a key that differs for each number."""
    return ChunkKey(FINGERPRINT, "framed", hash_ids([1, 2, 3]), hash_ids([number]))


def example_chunk(number: int = 0, *, n_tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Return a chunk of three layers whose numbers depend on `number`."""
    generator = torch.Generator().manual_seed(number)
    keys = [torch.randn(2, n_tokens, 8, generator=generator).to(dtype) for _ in range(3)]
    values = [torch.randn(2, n_tokens, 4, generator=generator).to(dtype) for _ in range(3)]
    ranking = torch.stack([torch.randperm(n_tokens, generator=generator) for _ in range(3)])
    return ChunkKV.of(keys, values, ranking)


def example_patch(number: int = 0, *, n_tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Return a chunk in low rank with notes and an additional block of a method."""
    plain = example_chunk(number, n_tokens=n_tokens, dtype=dtype)
    tensors = {name: plain.blocks[name] for name in plain.names()}
    tensors["inter"] = torch.linspace(0.0, 1.0, n_tokens)[:, None]
    notes = {"context": [hash_ids([8]), hash_ids([number])], "facts": {"cci": [0.625], "inter": [1.5, 0.1]}}
    chunk = replace(plain, notes=notes, extras=("inter",), blocks=Blocks(tensors))
    return to_format(chunk, "rank4")


def assert_same(chunk: ChunkKV | Miss, expected: ChunkKV) -> None:
    """Assert that a store returned exactly the chunk it was given, bit for bit."""
    assert isinstance(chunk, ChunkKV), f"expected a chunk, got {chunk}"
    assert (chunk.n_tokens, chunk.n_layers) == (expected.n_tokens, expected.n_layers)
    assert (chunk.dtype, chunk.kv_dtype) == (expected.dtype, expected.kv_dtype)
    assert (dict(chunk.notes), chunk.extras) == (expected.notes, expected.extras)
    assert chunk.names() == expected.names()
    for name in expected.names():
        block, other = chunk.blocks[name].cpu(), expected.blocks[name]
        assert (block.dtype, block.shape) == (other.dtype, other.shape), f"block {name} is another kind of tensor"
        assert torch.equal(block.view(torch.uint8), other.view(torch.uint8)), f"block {name} differs"


class KVStoreTests:
    """Conformance of a `KVStore`.

    Needs a fixture `store` that returns an empty store of at least 1 MB whose entries do not expire by themselves. A
    store may be closed twice. What it does not know is None, see `EntryInfo`.
    """

    def test_an_empty_store_has_nothing(self, store: KVStore) -> None:
        assert store.get(example_key()) == Miss("absent")
        assert store.open(store.address(example_key())) == Miss("absent")
        assert example_key() not in store
        assert "no address" not in store
        assert list(store.entries()) == []
        assert store.clear() == 0

    def test_what_is_put_comes_back_bit_for_bit(self, store: KVStore) -> None:
        for number, dtype in enumerate(DTYPES):
            chunk, limits = example_chunk(number, dtype=dtype), torch.finfo(dtype)
            extremes = torch.tensor([-0.0, limits.smallest_normal, limits.max, limits.min], dtype=dtype)
            chunk.blocks["value.1"][2, 1] = extremes
            expected = to_format(chunk.copied(), store.kv_dtype)
            store.put(example_key(number), chunk)
            chunk.blocks["key.0"].zero_()
            assert_same(store.get(example_key(number)), expected)
            assert example_key(number) in store
            assert {block.dtype for block in self._chunk(store, number).layer(1)} == {dtype}

    def test_a_quantized_chunk_stays_as_it_is(self, store: KVStore) -> None:
        quantized = to_format(example_chunk(), "int8")
        store.put(example_key(), quantized)
        assert_same(store.get(example_key()), quantized)

    def test_the_notes_of_a_chunk_come_back(self, store: KVStore) -> None:
        for number, dtype in enumerate(DTYPES):
            patch = example_patch(number, n_tokens=150, dtype=dtype).with_expiry(4e9)
            store.put(example_key(number), patch)
            store.flush()
            assert_same(store.get(example_key(number)), patch)
            opened = store.open(store.address(example_key(number)))
            assert not isinstance(opened, Miss)
            assert_same(opened[1], patch)

    def test_a_range_of_tokens_is_that_slice_of_the_whole(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk(n_tokens=300))
        expected = self._expected(store, n_tokens=300)
        for start, stop in ((0, 300), (0, 128), (127, 129), (130, 140), (299, 300), (0, 0), (128, 128)):
            chunk = self._chunk(store)
            for layer in range(expected.n_layers):
                for part, whole in zip(chunk.layer(layer, start, stop), expected.layer(layer), strict=True):
                    assert torch.equal(part.cpu(), whole[:, start:stop]), f"tokens {start} to {stop} differ"
        assert_same(chunk, expected)
        assert torch.equal(chunk.anchors(0.1)[0].cpu(), expected.anchors(0.1)[0])

    def test_a_key_that_differs_anywhere_is_another_key(self, store: KVStore) -> None:
        key = example_key()
        store.put(key, example_chunk())
        others = [replace(key, base="blind"), replace(key, prefix=hash_ids([])), replace(key, ids=hash_ids([9]))]
        others += [replace(key, fingerprint=replace(FINGERPRINT, dtype="bfloat16"))]
        assert [isinstance(store.get(other), Miss) for other in others] == [True] * 4

    def test_put_replaces(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk(1))
        store.put(example_key(), example_chunk(2, n_tokens=7))
        assert_same(store.get(example_key()), self._expected(store, 2, n_tokens=7))
        assert len(list(store.entries())) == 1
        store.flush()
        assert store.stats()[-1].entries == 1

    def test_an_entry_opens_by_its_address_alone(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        store.flush()
        entry = store.open(store.address(example_key()))
        assert not isinstance(entry, Miss)
        key, chunk = entry
        assert replace(key, namespace="") == example_key()
        assert key.address == store.address(example_key())
        assert_same(chunk, self._expected(store))
        assert sum(s.hits + s.misses for s in store.stats()) == 0

    def test_entries_yields_every_entry(self, store: KVStore) -> None:
        for number in range(3):
            store.put(example_key(number), example_chunk(number), saved_ms=12.5)
        entries = list(store.entries())
        assert sorted(e.address for e in entries) == sorted(store.address(example_key(number)) for number in range(3))
        for entry in entries:
            assert entry.size_bytes >= 5 * 2 * (8 + 4) * 3  # a byte a number at least
            assert entry.kv_dtype in (None, store.kv_dtype)
            assert entry.saved_ms in (None, 12.5)
            assert entry.uses is None or entry.uses > 0
            assert entry.used is None or abs(entry.used - time.time()) < 3600
            assert entry.expires is None
            assert not entry.pinned

    def test_pin_says_whether_there_is_such_an_entry(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        assert store.pin(example_key())
        assert store.pin(store.address(example_key()), pinned=False)
        assert not store.pin(example_key(1))
        assert not any(entry.pinned for entry in store.entries())
        assert_same(store.get(example_key()), self._expected(store))

    def test_discard_removes_one_entry_by_its_key_or_address(self, store: KVStore) -> None:
        address = store.address(example_key())
        for entry in (example_key(), address):
            for number in range(2):
                store.put(example_key(number), example_chunk(number))
            assert address in store
            assert store.discard(entry)
            assert not store.discard(entry)
            assert address not in store
            assert isinstance(store.get(example_key()), Miss)
            assert_same(store.get(example_key(1)), self._expected(store, 1))

    def test_a_damaged_entry_is_counted_and_can_be_put_again(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        store.flush()
        assert store.discard(example_key(), "a block differs")
        assert example_key() not in store
        assert store.stats()[-1].discarded == 1
        store.put(example_key(), example_chunk())
        assert_same(store.get(example_key()), self._expected(store))

    def test_an_expired_entry_is_a_miss(self, store: KVStore) -> None:
        for number in range(2):
            store.put(example_key(number), example_chunk().with_expiry(time.time() - 1.0))
        assert isinstance(store.get(example_key(0)), Miss)
        assert isinstance(store.open(store.address(example_key(1))), Miss)

    def test_an_entry_keeps_its_expiry(self, store: KVStore) -> None:
        soon = time.time() + 3600.0
        store.put(example_key(), example_chunk().with_expiry(soon))
        assert self._chunk(store).expires == soon
        [entry] = store.entries()
        assert entry.expires is None or abs(entry.expires - soon) < 1.0

    def test_a_chunk_in_use_survives_its_removal(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        chunk = store.get(example_key())
        store.clear()
        assert_same(chunk, self._expected(store))

    def test_clear_leaves_nothing(self, store: KVStore) -> None:
        for number in range(3):
            store.put(example_key(number), example_chunk(number))
        store.pin(example_key(0))
        assert store.clear() == 3
        assert [stats.entries for stats in store.stats()] == [0] * len(store.stats())
        assert isinstance(store.get(example_key(0)), Miss)
        assert list(store.entries()) == []

    def test_stats_count_uses(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        store.flush()
        store.get(example_key())
        store.get(example_key(1))
        stats = store.stats()
        assert store.address(example_key()) in store.tiers[-1]
        assert lasting(store, [example_key(), example_key(1)]) == {store.address(example_key())}
        assert sum(s.hits for s in stats) == 1
        assert stats[-1].misses == 1
        assert 0 < stats[-1].size_bytes <= (stats[-1].limit_bytes or 1 << 40)

    def test_every_tier_is_reported(self, store: KVStore) -> None:
        health = store.health()
        assert [h.kind for h in health] == [s.kind for s in store.stats()] == [tier.kind for tier in store.tiers]
        assert all(isinstance(tier, KVStore) for tier in store.tiers)
        assert store.limit_bytes == store.stats()[-1].limit_bytes
        assert [(h.ok, h.problems) for h in health] == [(True, ())] * len(health)

    def test_threads_may_share_it(self, store: KVStore) -> None:
        expected = [self._expected(store, number).blocks["value.2"] for number in range(5)]
        wrong: list[object] = []

        def work(offset: int) -> None:
            for step in range(15):
                number = (step + offset) % 5
                store.put(example_key(number), example_chunk(number))
                chunk = store.get(example_key(number))
                if not isinstance(chunk, ChunkKV) or not torch.equal(chunk.blocks["value.2"].cpu(), expected[number]):
                    wrong.append(chunk)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert wrong == []
        assert len(list(store.entries())) == 5

    def test_threads_may_remove_what_others_use(self, store: KVStore) -> None:
        expected = self._expected(store).blocks["key.1"]
        wrong: list[object] = []

        def use() -> None:
            for _ in range(15):
                store.put(example_key(), example_chunk())
                chunk = store.get(example_key())
                if isinstance(chunk, ChunkKV) and not torch.equal(chunk.blocks["key.1"].cpu(), expected):
                    wrong.append(chunk)

        def remove() -> None:
            for _ in range(15):
                store.discard(example_key())
                wrong.extend(entry for entry in store.entries() if not isinstance(entry, EntryInfo))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda work: work(), (use, use, remove)))
        assert wrong == []

    def test_prefetch_changes_nothing_but_speed(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        store.prefetch([example_key(), example_key(1)])
        assert_same(store.get(example_key()), self._expected(store))

    def test_it_is_a_context_manager(self, store: KVStore) -> None:
        with store as entered:
            assert entered is store
            entered.put(example_key(), example_chunk())
            assert_same(entered.get(example_key()), self._expected(store))

    @staticmethod
    def _chunk(store: KVStore, number: int = 0) -> ChunkKV:
        chunk = store.get(example_key(number))
        assert isinstance(chunk, ChunkKV), f"expected a chunk, got {chunk}"
        return chunk

    @staticmethod
    def _expected(store: KVStore, number: int = 0, *, n_tokens: int = 5, dtype: torch.dtype = torch.float32) -> ChunkKV:
        """Return an example in the store's format."""
        return to_format(example_chunk(number, n_tokens=n_tokens, dtype=dtype), store.kv_dtype)
