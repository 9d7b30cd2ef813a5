"""Loading while computing: the same answers as loading first, and an answer in any case."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.fusion.selectors import Selection, TopTokens
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.loading.host_to_device import PinnedRing
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.key import FRAMED, ChunkKey
from tests.support import references
from tests.support.engines import capture, loading_first, make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

Watch = Callable[[str], None]


class WatchedBlocks(Blocks):
    """Blocks that call a function before each read."""

    def __init__(self, inner: Blocks, before: Watch) -> None:
        self._inner, self._before = inner, before

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        self._before(name)
        return self._inner.rows(name, start, stop)

    def __getitem__(self, name: str) -> Tensor:
        self._before(name)
        return self._inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class WatchedStore(MemoryStore):
    """A store of chunks with watched blocks; `seek` is called before a chunk is looked up."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.before: Watch | None = None
        self.seek: Callable[[], None] = lambda: None

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        self.seek()
        chunk = super().get(key)
        if isinstance(chunk, Miss) or self.before is None:
            return chunk
        return replace(chunk, blocks=WatchedBlocks(chunk.blocks, self.before))


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def engine(llama: LanguageModel, store: WatchedStore) -> FusionEngine:
    return make_warmed_engine(llama, store, load_limit_s=20.0)


def loading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "qcfuse-loading"]


@pytest.mark.parametrize("name", ["reuse", "qcfuse", "cacheblend", "cachecraft", "relaycaching", "auto"])
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_loading_while_computing_gives_what_loading_first_gives(llama: LanguageModel, name: str, kv_dtype: str) -> None:
    method = make_method(name, base=FRAMED) if name != "auto" else make_method("auto", guard=False)
    with MemoryStore(kv_dtype=kv_dtype) as store:
        engine = make_warmed_engine(llama, store, method=method)
        prompt = engine.prompt(QUESTION, PASSAGES)
        first = fuse_prompt(loading_first(llama, store), prompt, method)
        during = fuse_prompt(ModelRunner(llama, store), prompt, method)
    assert torch.equal(first.logits, during.logits)
    assert first.report.selected == during.report.selected
    assert first.report.lookups == during.report.lookups
    for expected, tensor in zip(
        first.buffer.keys + first.buffer.values, during.buffer.keys + during.buffer.values, strict=True
    ):
        assert torch.equal(tensor, expected)
    assert during.report.bytes_loaded > 0


def test_a_probe_that_ends_early_does_not_wait_for_later_layers(engine: FusionEngine, store: WatchedStore) -> None:
    """Tokens are chosen while the last layer is being read; here the read waits for the choice."""
    chosen, came_first = threading.Event(), []

    class SignallingSelector(TopTokens):
        def select(self, *args: Any) -> Selection:
            chosen.set()
            return super().select(*args)

    prompt = engine.prompt(QUESTION, PASSAGES)
    method = replace(make_method("auto", ratio=0.3, guard=False, layers="third_quarter"), selector=SignallingSelector())
    expected = fuse_prompt(loading_first(engine.lm, store), prompt, method)
    chosen.clear()
    last = f"key.{engine.lm.n_layers - 1}"
    store.before = lambda name: came_first.append(chosen.wait(10)) if name == last else None
    done = engine.prefill(prompt, method=method)
    assert came_first
    assert all(came_first)
    assert done.report.selected == expected.report.selected != ()
    assert torch.equal(done.logits, expected.logits)


def test_the_last_layers_are_read_while_the_first_are_computed(engine: FusionEngine, store: WatchedStore) -> None:
    computed = threading.Event()
    last = f"value.{engine.lm.n_layers - 1}"
    came_first: list[bool] = []

    def before(name: str) -> None:
        if name == last:
            came_first.append(computed.wait(10))

    prompt, method = engine.prompt(QUESTION, PASSAGES), make_method("reuse", base=FRAMED)
    expected = fuse_prompt(loading_first(engine.lm, store), prompt, method).logits
    store.before = before
    hook = engine.lm.model.get_decoder().layers[0].register_forward_hook(lambda *_: computed.set())
    try:
        done = engine.prefill(prompt, method=method)
    finally:
        hook.remove()
    assert came_first
    assert all(came_first)
    assert torch.equal(done.logits, expected)


@pytest.mark.slow
def test_waiting_counts_as_loading_wherever_it_happens(engine: FusionEngine, store: WatchedStore) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    store.before = lambda name: time.sleep(0.1 if name.startswith("value") else 0.0)
    timings = engine.prefill(prompt, method=make_method("prophetkv", base=FRAMED)).report.timings
    slept = 0.1 * engine.lm.n_layers * 4  # the system prefix and three passages
    assert timings.load_s > 0.8 * slept


@pytest.mark.parametrize("method", ["reuse", "prophetkv", "qcfuse"])
def test_a_chunk_found_damaged_late_is_computed_reported_and_discarded(
    engine: FusionEngine, store: WatchedStore, method: str
) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    last, count = f"value.{engine.lm.n_layers - 1}", []

    def before(name: str) -> None:
        if name == last:
            count.append(name)
            if len(count) == 3:
                raise CorruptEntry("checksum differs")

    store.before = before
    done = engine.prefill(prompt, method=make_method(method, base=FRAMED))
    assert [lookup.hit for lookup in done.report.lookups] == [True, True, False, True]
    assert done.report.fallback == "1 of 3 passages computed in full: checksum differs"
    assert FRAMED.key(engine.lm.fingerprint, prompt.prefix_ids, prompt.chunks[1].segment.ids) not in store
    store.before = None
    assert torch.equal(
        done.logits, fuse_prompt(loading_first(engine.lm, store), prompt, make_method(method, base=FRAMED)).logits
    )


def test_several_chunks_that_break_one_after_the_other_all_end_in_full_prefill(
    engine: FusionEngine, store: WatchedStore
) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)

    def before(name: str) -> None:
        if name == "key.2":
            raise OSError(5, "Input/output error")

    store.before = before
    done = engine.prefill(prompt, method=make_method("qcfuse", base=FRAMED))
    assert torch.allclose(done.logits, references.plain_forward(engine.lm, prompt.ids)[0][-1], atol=1e-4)
    assert done.report.reused_tokens == 0
    assert done.report.fallback == "3 of 3 passages computed in full: cannot be read: [Errno 5] Input/output error"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["lookup", "ranking", "first layer", "last layer"])
def test_a_store_that_hangs_costs_its_limit_and_nothing_else(
    llama: LanguageModel, store: WatchedStore, where: str
) -> None:
    engine, released, returned = make_engine(llama, store, load_limit_s=0.5), threading.Event(), list[bool]()
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    stuck = {"ranking": "ranking", "first layer": "key.0", "last layer": f"key.{llama.n_layers - 1}"}.get(where)

    def hang() -> None:
        returned.append(released.wait(30))

    if stuck is None:
        store.seek = hang
    else:
        store.before = lambda name: hang() if name == stuck else None
    try:
        done = engine.prefill(prompt, method=make_method("qcfuse", base=FRAMED))
        assert not returned, "nobody waited for the store to go on"
    finally:
        released.set()
    assert torch.allclose(done.logits, references.plain_forward(llama, prompt.ids)[0][-1], atol=1e-4)
    assert done.report.fallback is not None
    assert done.report.fallback.startswith("3 of 3 passages computed in full: ")
    assert done.report.fallback.endswith("within 0.5 s")


def test_the_default_methods_guard_has_the_same_limit(
    llama: LanguageModel, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, released = make_engine(llama, store, method=make_method("auto"), load_limit_s=0.5), threading.Event()
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    monkeypatch.setattr(WatchedStore, "__contains__", lambda store, key: released.wait(30))
    try:
        done = engine.prefill(prompt)
    finally:
        released.set()
    assert done.report.fallback == "everything is computed: the store gave no answer within 0.5 s"


@pytest.mark.slow
def test_a_slow_store_after_damage_has_only_the_rest_of_the_limit(engine: FusionEngine, store: WatchedStore) -> None:
    limited, damaged = make_engine(engine.lm, store, load_limit_s=3.0), []

    def before(name: str) -> None:
        if damaged or name == "key.0":  # of the system prefix and three passages
            time.sleep(0.4 if not damaged else 2.0)
        if name == "value.2" and not damaged:
            damaged.append(name)
            raise CorruptEntry("checksum differs")

    store.before = before
    prompt = limited.prompt(QUESTION, PASSAGES)
    done = limited.prefill(prompt, method=make_method("qcfuse", base=FRAMED))
    assert done.report.timings.load_s < 4.0  # 1.6 before the damage, and what is left of 3
    assert min(done.report.timings.stages.values()) >= 0, "waits before probing are not part of the probe"
    assert torch.allclose(done.logits, references.plain_forward(engine.lm, prompt.ids)[0][-1], atol=1e-4)
    assert "checksum differs" in str([lookup.reason for lookup in done.report.lookups])
    assert "not there within 3 s" in str(done.report.fallback)


def test_facts_that_a_probe_needs_are_read_once_with_the_lookup(engine: FusionEngine, store: WatchedStore) -> None:
    read: list[tuple[str, str]] = []
    store.before = lambda name: read.append((name, threading.current_thread().name))
    text = "\n\n".join([*PASSAGES, QUESTION])
    for prompt in (
        engine.prompt(QUESTION, PASSAGES),
        engine.prompt_from_text(text),
    ):  # separate passages, and passages found in a text
        read.clear()
        done = engine.prefill(prompt, method=make_method("qcfuse", base=FRAMED))
        hits = sum(lookup.hit for lookup in done.report.lookups)
        assert hits >= 3
        assert [by for name, by in read if name == "ranking"] == ["qcfuse-lookup"] * hits
        assert {by for name, by in read if name.startswith(("key", "value"))} == {"qcfuse-loading"}


def test_facts_that_cachecraft_needs_are_read_with_the_lookup(engine: FusionEngine, store: WatchedStore) -> None:
    """The scores of captured passages are stored with their keys and values."""
    another = "Mondays are quiet in the harbour, and the captain of the ferry paints her own door green then."
    engine.warm([another])
    capture(engine, [PASSAGES])
    prompt = engine.prompt(QUESTION, [PASSAGES[0], another, PASSAGES[2]])
    readers: list[str] = []
    store.before = lambda name: readers.append(threading.current_thread().name) if name == "inter" else None
    done = engine.prefill(prompt, method=make_method("cachecraft", ratio=0.3))
    assert done.scores is not None
    assert set(readers) == {"qcfuse-lookup"}


@pytest.mark.parametrize("where", ["lookup", "second layer"])
def test_a_thread_that_hangs_keeps_no_buffer(llama: LanguageModel, store: WatchedStore, where: str) -> None:
    engine, released = make_engine(llama, store, load_limit_s=0.2), threading.Event()
    engine.warm(PASSAGES)
    if where == "lookup":
        store.seek = lambda: released.wait(30)  # type: ignore[assignment]
    else:
        store.before = lambda name: released.wait(30) if name == "key.1" else None  # type: ignore[func-returns-value]
    gc.collect()
    prompt, before = engine.prompt(QUESTION, PASSAGES), buffers()  # threads of other tests may hold some
    try:
        engine.prefill(prompt, method=make_method("reuse", base=FRAMED))
        gc.collect()
        assert [buffer for buffer in buffers() if all(buffer is not other for other in before)] == []
    finally:
        released.set()


def buffers() -> list[KVBuffer]:
    return [item for item in gc.get_objects() if isinstance(item, KVBuffer)]


def test_an_error_while_computing_leaves_no_thread_behind(engine: FusionEngine, store: WatchedStore) -> None:
    hook = engine.lm.model.get_decoder().layers[1].register_forward_hook(lambda *_: 1 / 0)
    store.before = lambda name: time.sleep(0.01)
    try:
        with pytest.raises(ZeroDivisionError):
            engine.prefill(engine.prompt(QUESTION, PASSAGES), method=make_method("reuse", base=FRAMED))
    finally:
        hook.remove()
    deadline = time.monotonic() + 20
    while loading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loading_threads() == []


def test_a_limit_that_leaves_no_time_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="must be positive or None"):
        make_engine(llama, MemoryStore(), load_limit_s=0)


def test_a_call_of_a_store_passes_on_results_and_errors() -> None:
    assert WaitBudget(5.0).call(lambda: 7) == WaitBudget(None).call(lambda: 7) == 7
    with pytest.raises(KeyError):
        WaitBudget(5.0).call(lambda: {}["nothing"])
    for budget in (WaitBudget(0.05), WaitBudget(None), WaitBudget(5.0)):
        budget.lower(0.05)
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            budget.call(lambda: time.sleep(1))
        budget.lower(5.0)
        assert budget.left_s == 0, "a budget is never raised"


class LateCopy:
    """A copy out of the ring that is made when it is waited for, as late as a device may make it."""

    def __init__(self, staged: Tensor) -> None:
        self._staged = staged
        self.result: Tensor | None = None

    def synchronize(self) -> None:
        if self.result is None:
            self.result = self._staged.clone()


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=60))
def test_a_ring_reuses_no_memory_before_it_was_read(sizes: list[int]) -> None:
    ring, sent = PinnedRing(torch.zeros(2048, dtype=torch.uint8)), []
    for number, size in enumerate(sizes):
        tensor = torch.full((size,), number, dtype=torch.float32) if size <= 512 else torch.zeros(size)
        staged = ring.copy(tensor)
        if tensor.nbytes > 2048:
            assert staged is None
            continue
        assert staged is not None
        copied = LateCopy(staged)
        ring.hold_until(staged, copied)
        sent.append((tensor, copied))
    for tensor, copied in sent:
        copied.synchronize()
        assert copied.result is not None
        assert torch.equal(copied.result, tensor)
