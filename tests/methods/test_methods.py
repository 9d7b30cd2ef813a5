"""Methods: their published parameters, what they select, and probes against a slow independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from qcfuse_rag import (
    METHODS,
    FusionEngine,
    FusionReport,
    LanguageModel,
    Prompt,
    choose_method,
    make_method,
)
from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import Budget, FixedRatio
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import Selection, TopTokens
from qcfuse_rag.fusion.state import PlacedChunk
from qcfuse_rag.methods.epic import ChunkHeads
from qcfuse_rag.methods.qcfuse import CriticalProbe, layers_by_depth
from qcfuse_rag.methods.random import RandomTokens
from qcfuse_rag.prompts.segments import Role, Segment, Span
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.language_model import LanguageModel as Model
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED
from tests.support import references
from tests.support.engines import capture, make_warmed_engine, stored_chunk
from tests.support.passages import PASSAGES, QUESTION


@pytest.fixture
def warmed(llama: LanguageModel) -> FusionEngine:
    engine = make_warmed_engine(llama, bases=(BLIND, FRAMED, PRIMED))
    capture(engine, [PASSAGES], keep=("difference",))
    return engine


@pytest.fixture
def prompt(warmed: FusionEngine) -> Prompt:
    return warmed.prompt(QUESTION, PASSAGES)


@dataclass(frozen=True)
class Chosen:
    """A selector of fixed positions."""

    positions: Sequence[int]

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        return Selection(torch.tensor(self.positions))


@pytest.mark.parametrize("wrong", ["twice", "the question's"])
def test_a_selector_that_leaves_its_candidates_is_refused(wrong: str, warmed: FusionEngine, prompt: Prompt) -> None:
    last = prompt.chunks[-1].stop - 1
    method = replace(
        make_method("random", base=FRAMED), selector=Chosen([last, last if wrong == "twice" else last + 1])
    )
    with pytest.raises(ValueError, match="selects a token twice, or a token that is not stored"):
        warmed.prefill(prompt, method=method)
    before = prompt.chunks[0].start - 1
    for chosen, message in (
        ([before], "outside the inexact passages"),
        (range(prompt.chunks[-1].start, last), "tokens, of which"),
    ):
        method = replace(make_method("random", ratio=0.05, base=FRAMED), selector=Chosen(chosen))
        with pytest.raises(ValueError, match=message):
            warmed.prefill(prompt, method=method)
    fine = replace(method, selector=Chosen([last, last - 2]))
    assert set(warmed.prefill(prompt, method=fine).report.selected) == {last, last - 2}


def question_rows(prompt: Prompt) -> list[int]:
    """Return the rows from the end of the last chunk to the end of the question."""
    return list(range(prompt.chunks[-1].stop, prompt.spans[-2].stop))


@torch.inference_mode()
def attention_of_question(lm: Model, prompt: Prompt, seen: Sequence[Sequence[int]], layers: Sequence[int]) -> Tensor:
    """Run the question one layer's cache at a time with eager attention and score it against all keys.

    Returns:
        `[T]`, mean over layers, heads and question rows of the softmax over everything before a row.
    """
    table, rows = references.stored_table(lm, prompt, BLIND), question_rows(prompt)
    captured: dict[int, tuple[Tensor, Tensor]] = {}

    def capture(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        captured[int(module.layer_idx)] = (query, key[:, :, -len(rows) :])  # type: ignore[arg-type]
        additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        return eager_attention_forward(module, query, key, value, additive, **kwargs)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", sdpa_mask)
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    for layer, (keys, values) in enumerate(table):
        cache.update(keys[:, :, list(seen[layer])], values[:, :, list(seen[layer])], layer)
    count = len(seen[0])
    mask = torch.ones(1, 1, len(rows), count + len(rows), dtype=torch.bool).tril(count)
    lm.model.set_attn_implementation("capture")
    try:
        lm.model.model(
            input_ids=torch.tensor([[prompt.ids[p] for p in rows]]),
            position_ids=torch.tensor([rows]),
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
        )
    finally:
        lm.model.set_attn_implementation("qcfuse")
    total = torch.zeros(len(prompt))
    for layer in layers:
        query, row_keys = captured[layer]
        keys = torch.cat([table[layer][0][:, :, : rows[0]], row_keys], 2).repeat_interleave(2, 1)
        for i, row in enumerate(rows):
            scores = query[0, :, i].unsqueeze(1) @ keys[0, :, : row + 1].transpose(-1, -2) * 16**-0.5
            total[: row + 1] += scores.softmax(-1)[:, 0].mean(0) / len(rows) / len(layers)
    return total


def best(scores: Tensor, prompt: Prompt, count: int) -> list[int]:
    candidates = [p for span in prompt.chunks for p in range(span.start, span.stop)]
    ranked = sorted(candidates, key=lambda p: -float(scores[p]))
    return sorted(ranked[:count])


def test_prophetkv_selects_what_the_question_attends_to_over_the_whole_cache(
    warmed: FusionEngine, prompt: Prompt
) -> None:
    report = warmed.prefill(prompt, method=make_method("prophetkv")).report
    everything = [list(range(prompt.chunks[-1].stop))] * warmed.lm.n_layers
    scores = attention_of_question(warmed.lm, prompt, everything, layers=range(warmed.lm.n_layers))
    count = int(0.2 * report.context_tokens)
    assert list(report.selected) == best(scores, prompt, count)


def test_qcfuse_selects_what_the_question_attends_to_after_seeing_anchors_only(
    warmed: FusionEngine, prompt: Prompt
) -> None:
    report = warmed.prefill(prompt, method=make_method("qcfuse", ratio=0.25)).report
    seen = []
    for layer in range(warmed.lm.n_layers):
        positions = list(range(prompt.spans[0].stop))
        for span in prompt.chunks:
            order = stored_chunk(warmed, span.segment.text.strip(), BLIND).blocks["ranking"][layer].tolist()
            positions += sorted(span.start + token for token in order[: -(-len(span) * 15 // 100)])
        seen.append(positions)
    scores = attention_of_question(warmed.lm, prompt, seen, layers=layers_by_depth(4))
    assert list(report.selected) == best(scores, prompt, int(0.25 * report.context_tokens))
    whole = attention_of_question(warmed.lm, prompt, [list(range(prompt.chunks[-1].stop))] * 4, layers=range(4))
    assert list(report.selected) != best(whole, prompt, len(report.selected)), "anchors and layers must matter here"


def test_published_defaults() -> None:
    qcfuse, prophetkv = make_method("qcfuse"), make_method("prophetkv")
    assert (qcfuse.base, qcfuse.ratio, qcfuse.probe) == (BLIND, 0.5, CriticalProbe(0.15))
    assert (prophetkv.base, prophetkv.ratio, prophetkv.probe) == (BLIND, 0.2, QuestionProbe("all", anchor_ratio=1.0))
    assert make_method("epic").selector == ChunkHeads(16)
    assert make_method("full").ratio == 1
    assert make_method("reuse").ratio == 0


@pytest.mark.parametrize(
    ("layers", "expected"), [(36, (18, 19, 20)), (32, (16, 17, 18)), (30, (15, 16, 17)), (2, (0, 1)), (1, (0,))]
)
def test_critical_layers_default_to_the_middle(layers: int, expected: tuple[int, ...]) -> None:
    assert layers_by_depth(layers) == expected


def test_epic_takes_the_head_of_every_chunk(warmed: FusionEngine, prompt: Prompt) -> None:
    report = warmed.prefill(prompt, method=make_method("epic", n_tokens=3)).report
    assert report.selected == tuple(span.start + i for span in prompt.chunks for i in range(3))
    assert report.ratio == len(report.selected) / report.context_tokens
    at_ratio = warmed.prefill(prompt, method=make_method("epic", ratio=0.5)).report
    heads = [p for span in prompt.chunks for p in range(span.start, span.start + round(len(span) / 2))]
    assert abs(len(at_ratio.selected) - len(heads)) <= len(prompt.chunks)
    assert at_ratio.selected[0] == prompt.chunks[0].start


def test_random_is_repeatable_and_changes_with_its_seed(warmed: FusionEngine, prompt: Prompt) -> None:
    chosen = [warmed.prefill(prompt, method=make_method("random", seed=seed)).report.selected for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def assert_in_budget(report: FusionReport, budget: Budget | None, recomputable: Sequence[Span]) -> None:
    tokens = sum(len(span) for span in recomputable)
    if budget is None:  # the selector decides the number
        assert 0 < len(report.selected) < tokens
        assert report.ratio == len(report.selected) / tokens
    elif report.method == "cacheblend":  # drops rows from layer to layer; these are left
        assert 0 < len(report.selected) < budget.tokens(tokens)
    elif report.method == "relaxkv":  # its budget is per layer; these are all layers' tokens
        assert budget.tokens(tokens) <= len(report.selected) <= report.n_layers * budget.tokens(tokens)
    else:
        assert len(report.selected) == budget.tokens(tokens)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_keeps_its_budget_and_reports_the_truth(warmed: FusionEngine, prompt: Prompt, name: str) -> None:
    report = warmed.prefill(prompt, method=replace(make_method(name), guard=None)).report
    assert report.rows + report.reused_tokens == len(prompt)
    assert report.context_tokens == sum(len(span) for span in prompt.chunks)
    assert set(report.selected) <= {p for span in prompt.chunks for p in range(span.start, span.stop)}
    assert list(report.selected) == sorted(set(report.selected))
    assert report.fallback is None
    if name != "full":
        first_is_exact = report.base == "framed" or name in ("auto", "fusionrag")  # they read its framed cache
        assert_in_budget(report, make_method(name).budget, prompt.chunks[1 if first_is_exact else 0 :])
    if name != "full":
        per_token = warmed.lm.kv_bytes_per_token
        assert report.bytes_loaded == per_token * (report.context_tokens + len(prompt.prefix_ids))


def test_choosing_by_name() -> None:
    default = choose_method()
    assert default == make_method("auto")
    assert (default.name, default.ratio, default.base) == ("auto", 0.15, PRIMED)
    assert choose_method(base="framed").base is FRAMED
    assert choose_method(ratio=0.3).ratio == 0.3
    qcfuse = choose_method("qcfuse")
    assert (qcfuse.ratio, qcfuse.base) == (0.5, FRAMED), "as published, but over framed caches"
    assert choose_method("reuse", base="blind").base is BLIND
    with pytest.raises(UnknownMethod, match="no method 'qcfuze'; there are auto, full"):
        choose_method("qcfuze")
    with pytest.raises(UnknownMethod, match="'full' does not take ratio; it takes no parameters"):
        choose_method("full", ratio=0.5)
    with pytest.raises(UnknownMethod, match="no base 'framd'"):
        choose_method(base="framd")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("qcfuse", {"ratio": "abc"}, "ratio of method 'qcfuse' must be a finite number, got 'abc'"),
        ("qcfuse", {"anchors": "kvzap"}, "anchors of method 'qcfuse' must be instruction or kvzip or knorm or sinks"),
        ("qcfuse", {"layers": "midle"}, "layers of method 'qcfuse' must be critical or whole numbers such as 7[+]8"),
        ("qcfuse", {"base": "blind"}, "base of method 'qcfuse' must be a Base, got 'blind'"),
        ("relaxkv", {"context": "seleted"}, "context of method 'relaxkv' must be selected or all"),
        ("agentkvshift", {"keys": "no"}, "keys of method 'agentkvshift' must be true or false"),
        ("cachecraft", {"alpha": float("nan")}, "alpha of method 'cachecraft' must be a finite number, got nan"),
        ("epic", {"n_tokens": 1.5}, "n_tokens of method 'epic' must be a whole number, got 1.5"),
        ("relaycaching", {"layers": (1, 2, 3)}, "layers of method 'relaycaching' must be a RelayLayers"),
        ("kamera", {"threshold": 1.5}, r"threshold must be a fraction and slots above 0, got 1\.5 and 5"),
        ("kvcomm", {"temperature": 0.0}, "temperature and anchors above 0"),
        ("cachecraft", {"alpha": 0.0}, "must be above 0"),
        ("relaycaching", {"influence": 0.0}, "thresholds must be above 0"),
        ("qcfuse", {"ratio": -0.1}, r"ratio must be a fraction in \[0, 1\], got -0\.1"),
        ("qcfuse", {"ratio": 1.3}, r"ratio must be a fraction in \[0, 1\], got 1\.3"),
        ("cacheblend", {"variant": "paper", "layer": -1}, "layer must not be negative, got -1"),
        ("cacheblend", {"variant": "release", "layer": -1}, "layer must not be negative, got -1"),
    ],
)
def test_a_parameter_of_the_wrong_type_or_out_of_range_is_one_clear_error(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnknownMethod, ValueError), match=message):
        make_method(name, **parameters)


def test_a_layer_alone_is_a_choice_of_layers() -> None:
    assert make_method("qcfuse", layers=7) == make_method("qcfuse", layers=(7,))


@pytest.mark.parametrize(("lengths", "budget"), [([10] * 4, 6), ([50] * 10, 25), ([30] * 20, 90), ([100] * 3, 1)])
def test_epic_at_a_ratio_computes_as_many_tokens_as_the_others(lengths: list[int], budget: int) -> None:
    stops = list(accumulate(lengths))
    chunk = Segment(Role.CHUNK, (), "")  # only its position counts
    spans = [Span(stop - length, stop, chunk) for length, stop in zip(lengths, stops, strict=True)]
    candidates = [PlacedChunk(span, cast(ChunkKV, None), exact=False) for span in spans]
    positions = ChunkHeads(None).select(candidates, None, budget).positions
    assert len(positions) == budget
    assert len(set(positions.tolist())) == budget


def test_budgets_round_down_but_not_to_nothing() -> None:
    assert [FixedRatio(0.15).tokens(n) for n in (0, 1, 10, 100)] == [0, 1, 1, 15]
    assert FixedRatio(0.0).tokens(100) == 0


def test_selectors_choose_nothing_from_nothing() -> None:
    for selector in (TopTokens(), RandomTokens(), ChunkHeads()):
        assert selector.select([], Scores(torch.zeros(1, 4), (0,)), 3).positions.tolist() == []


def test_probes_ask_only_for_layers_there_are(warmed: FusionEngine, prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="the model has 4 layers, the probe asks for layer 9"):
        warmed.prefill(prompt, method=make_method("qcfuse", layers=(1, 9)))


def test_rankings_are_permutations_led_by_the_chunks_first_tokens(warmed: FusionEngine, prompt: Prompt) -> None:
    span, stored = prompt.chunks[0], stored_chunk(warmed, PASSAGES[0])
    for order in stored.blocks["ranking"].tolist():
        assert order[:4] == [0, 1, 2, 3]
        assert sorted(order) == list(range(len(span)))
    assert stored.blocks["ranking"][1].tolist() != stored.blocks["ranking"][2].tolist()
    assert stored.anchors(0.15)[0].tolist() == sorted(stored.blocks["ranking"][0, : -(-len(span) * 15 // 100)].tolist())
