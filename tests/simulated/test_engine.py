"""The engine as it runs on a CUDA device: its streams, transfers, kernels and recorded passes break no rule there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import (
    METHODS,
    FusionEngine,
    LanguageModel,
    MemoryStore,
    SamplingParams,
    Scheduler,
    SchedulerSettings,
    make_method,
)
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.runtime.fused_layers.fused_decoder_layer import leanest_steps
from qcfuse_rag.runtime.fused_layers.fused_modules import leanest_first
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, PinnedRing, TransferLink
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BLIND, FRAMED
from tests.simulated.cuda import moved
from tests.simulated.device import Device
from tests.simulated.order import Stream
from tests.simulated.tensor import DeviceTensor
from tests.support import seams
from tests.support.damage import damaged
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.recorders import leanest_alone

PASSAGES = ["The ferry is green.", "Orla keeps the paint."]
QUESTION = "Who paints?"
PROPHETKV = make_method("prophetkv", ratio=0.3, base=FRAMED)
REUSE = make_method("reuse", base=FRAMED)
TIERS = {"memory": {}, "pinned": {"pinned": True}, "device": {"device": "cuda:0"}}


def engine_on(
    device: Device | None,
    tokenizer: PreTrainedTokenizerFast,
    family: str = "llama",
    store: MemoryStore | None = None,
    layers: int = 2,
) -> FusionEngine:
    """Return an engine over a tiny model, on the device or on the CPU; its weights are the same everywhere."""
    model = build_model(family, num_hidden_layers=layers)
    lm = LanguageModel.wrap(model if device is None else moved(model, device), tokenizer)
    return make_engine(lm, MemoryStore() if store is None else store)


def engines(device: Device, tokenizer: PreTrainedTokenizerFast, *about: Any, **given: Any) -> list[FusionEngine]:
    """Return an engine on the CPU and one on the device, with the same in their stores."""
    there = engine_on(device, tokenizer, *about, **given)
    given["store"] = MemoryStore(numbers=there.store.numbers)
    here = engine_on(None, tokenizer, *about, **given)
    here.warm(PASSAGES, bases=(BLIND, FRAMED))
    for entry in here.store.entries():
        opened = here.store.open(entry.address)
        assert not isinstance(opened, Miss)
        there.store.put(*opened)
    return [here, there]


def assert_same(found: Prefilled, expected: Prefilled) -> None:
    assert found.report.selected == expected.report.selected
    assert found.report.fallback == expected.report.fallback
    assert float((found.logits.cpu() - expected.logits).abs().max()) < 1e-3


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    seams.kernel_refusal(monkeypatch, lambda *about: "switched off")


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_computes_on_the_device(method: str, device: Device, tokenizer: PreTrainedTokenizerFast) -> None:
    here, there = engines(device, tokenizer)
    prompt, chosen = here.prompt(QUESTION, PASSAGES), make_method(method)
    if method == "auto":  # as far as it is not refused for being slow
        chosen = make_method(method, base=FRAMED, guard=False)
    assert_same(there.prefill(prompt, method=chosen), here.prefill(prompt, method=chosen))


@pytest.mark.usefixtures("no_kernels")
def test_every_family_computes_on_the_device(
    family_name: str, device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    here, there = engine_on(None, tokenizer, family_name), engine_on(device, tokenizer, family_name)
    for engine in (here, there):
        assert engine.warm(PASSAGES, bases=(FRAMED,)).failed == ()
    prompt = here.prompt(QUESTION, PASSAGES)
    assert_same(there.prefill(prompt, method=PROPHETKV), here.prefill(prompt, method=PROPHETKV))
    greedy = SamplingParams(max_new_tokens=3)
    assert there.generate(prompt, greedy).ids == here.generate(prompt, greedy).ids


@pytest.mark.parametrize(
    ("tier", "numbers", "layers"),
    [("memory", "model", 2), ("pinned", "model", 4), ("device", "model", 4), ("pinned", "int8", 2)],
)
def test_what_is_stored_arrives_from_every_tier(
    tier: str, numbers: str, layers: int, device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    here, there = engines(device, tokenizer, store=MemoryStore(numbers=numbers, **TIERS[tier]), layers=layers)
    prompt = here.prompt(QUESTION, PASSAGES)
    for _ in range(2):  # the second time through memory that the first has left
        assert_same(there.prefill(prompt, method=REUSE), here.prefill(prompt, method=REUSE))
        gc.collect()
    assert device.launched["place"] > 0


def test_recorded_passes_and_steps_are_those_that_were_recorded(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.prefill_views(monkeypatch, leanest_first)
    seams.decode_views(monkeypatch, leanest_steps)
    seams.decode_trial_steps(monkeypatch, 1)
    seams.decode_trial_rounds(monkeypatch, 1)
    seams.decode_trial_lengths(monkeypatch, (5, 40))
    here, there = engines(device, tokenizer, "gemma3-two-ropes", store=MemoryStore(pinned=True), layers=2)
    there.runner.prefills.compile(rows=(16, 48))
    there.runner.decodes.compile(requests=(1,))
    assert (there.runner.prefills.refusal, there.runner.decodes.refusal) == (None, None)
    assert min(device.launched[kernel] for kernel in ("normalize", "rotate", "gate")) > 0
    for prompt in (here.prompt(QUESTION, PASSAGES), here.prompt("Who?", PASSAGES[::-1])):
        before = there.runner.prefills.replayed
        assert_same(there.prefill(prompt, method=PROPHETKV), here.prefill(prompt, method=PROPHETKV))
        assert there.runner.prefills.replayed == before + 2, "the probe's, and the rows'"
    graphs, greedy = device.launched["graph"], SamplingParams(max_new_tokens=3)
    assert there.generate(prompt, greedy, method=REUSE).ids == here.generate(prompt, greedy, method=REUSE).ids
    assert device.launched["graph"] - graphs == there.lm.n_layers + 2, "a pass layer by layer, and two steps"


def test_recorded_steps_of_the_leanest_layers_are_the_models(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.decode_views(monkeypatch, leanest_alone)
    here, there = engines(device, tokenizer, "qwen3-qk-norm", store=MemoryStore(pinned=True), layers=2)
    there.runner.decodes.compile(requests=(2,))
    assert there.runner.decodes.refusal is None
    assert min(device.launched[kernel] for kernel in ("project", "project_gated", "rotate")) > 0
    graphs, greedy, prompt = device.launched["graph"], SamplingParams(max_new_tokens=3), here.prompt("Who?", PASSAGES)
    assert there.generate(prompt, greedy, method=REUSE).ids == here.generate(prompt, greedy, method=REUSE).ids
    assert device.launched["graph"] - graphs == 2


def test_requests_share_the_device(device: Device, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prefills, recorded or not, beside one another's decode steps, in the scheduler's thread."""
    here, there = engines(device, tokenizer, store=MemoryStore(pinned=True))
    there.runner.prefills.compile(rows=(48,))
    there.runner.decodes.compile(requests=(2,))
    replayed, graphs = there.runner.prefills.replayed, device.launched["graph"]
    greedy = SamplingParams(max_new_tokens=4)
    prompts = [here.prompt(QUESTION, passages) for passages in (PASSAGES, PASSAGES[::-1], PASSAGES[:1])]
    with Scheduler(there, SchedulerSettings(active=2, waiting=4)) as scheduler:
        answers = [scheduler.submit(prompt, greedy, method=PROPHETKV) for prompt in prompts]
        found = [answer.result(timeout=120).ids for answer in answers]
    assert found == [here.generate(prompt, greedy, method=PROPHETKV).ids for prompt in prompts]
    passes = there.runner.prefills.replayed - replayed
    assert passes > 0
    assert device.launched["graph"] - graphs > passes * there.lm.n_layers, "steps, too"


class DamagedLate(MemoryStore):
    """Of each chunk, the last layer turns out damaged when it is read."""

    harmed = False

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        found = super().get(key)
        return damaged(found, "value.1") if self.harmed and isinstance(found, ChunkKV) else found


def test_damage_in_the_midst_of_a_recorded_pass_costs_nothing_but_time(
    device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    store = DamagedLate(pinned=True)
    here, there = engines(device, tokenizer, store=store)
    there.runner.prefills.compile(rows=(48,))
    store.harmed = True
    prompt, graphs = here.prompt(QUESTION, PASSAGES), device.launched["graph"]
    found = there.prefill(prompt, method=PROPHETKV)
    assert device.launched["graph"] > graphs
    expected = here.prefill(prompt, method=make_method("full"))
    assert found.report.fallback is not None
    assert "does not match its checksum" in found.report.fallback
    assert float((found.logits.cpu() - expected.logits).abs().max()) < 1e-3


def test_the_ring_goes_round_no_faster_than_the_link(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, blocks = (
        HostToDevice(TransferLink(torch.device("cuda", 0))),
        [torch.full((500,), float(n)) for n in range(12)],
    )
    sent = transfer.send(blocks)
    sent.receive()
    assert [one.mean().item() for one in sent.tensors] == list(range(12))
    assert not device.broken
    monkeypatch.setattr(PinnedRing, "hold_until", lambda *given: None)
    transfer.send(blocks)
    assert "copy_ by the host overwrites what stream 2 is perhaps still reading" in device.broken[0]
    device.broken.clear()


@pytest.mark.parametrize(
    ("who", "what", "said"),
    [
        (Stream, "wait_event", "place on stream 1 reads what stream 2 is perhaps still writing"),
        (DeviceTensor, "record_stream", "is freed while stream 1 is perhaps at it"),
    ],
    ids=["arrival", "allocator"],
)
def test_a_rule_the_engine_forgets_is_found(
    who: type, what: str, said: str, device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be wrong now and then on a device, each time here."""
    _, engine = engines(device, tokenizer)
    monkeypatch.setattr(who, what, lambda *given: None)
    for _ in range(2):
        engine.prefill(engine.prompt(QUESTION, PASSAGES), method=REUSE)
        gc.collect()
    assert any(said in one for one in device.broken)
    device.broken.clear()
