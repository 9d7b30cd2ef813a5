"""Methods whose rows change from layer to layer, against a Llama written out layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from qcfuse_rag import FusionEngine, LanguageModel, Prompt, make_method
from qcfuse_rag.methods.cacheblend import GradualFilter
from qcfuse_rag.store.key import BLIND
from tests.methods.test_methods import attention_of_question
from tests.support import references
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import Observed, Table

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def warmed(llama: LanguageModel) -> FusionEngine:
    return make_warmed_engine(llama, bases=(BLIND,))


@pytest.fixture(scope="module")
def prompt(warmed: FusionEngine) -> Prompt:
    return warmed.prompt(QUESTION, PASSAGES)


def passage_tokens(prompt: Prompt) -> list[int]:
    return [p for span in prompt.chunks for p in range(span.start, span.stop)]


def rest(prompt: Prompt) -> list[int]:
    return list(range(prompt.chunks[-1].stop, len(prompt)))


def top(scores: Tensor, among: list[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda p: -float(scores[p]))[:count])


def squared(fresh: Tensor, stored: Tensor) -> Tensor:
    """Return `[R]` squared distances of `[1, H, R, D]`."""
    return torch.tensor(
        [float(((a - b) ** 2).sum()) for a, b in zip(fresh[0].unbind(1), stored[0].unbind(1), strict=True)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("context", ["selected", "all"])
def test_relaxkv_recomputes_the_choices_of_all_later_layers(warmed: FusionEngine, prompt: Prompt, context: str) -> None:
    lm, tokens = warmed.lm, passage_tokens(prompt)
    done = warmed.prefill(prompt, method=make_method("relaxkv", ratio=0.2, context=context))
    everything = [list(range(prompt.chunks[-1].stop))] * lm.n_layers
    until: dict[int, int] = {}
    for layer in range(lm.n_layers):
        scores = attention_of_question(lm, prompt, everything, layers=[layer])
        until |= dict.fromkeys(top(scores, tokens, int(0.2 * len(tokens))), layer)
    assert list(done.report.selected) == sorted(until)
    assert len(set(until.values())) > 1, "sets must differ between layers here"

    seen_by_selected = set(range(len(prompt))) - set(tokens) | set(until) if context == "selected" else None
    _, table = references.layerwise_fusion(
        lm,
        prompt.ids,
        sorted(until),
        references.stored_table(lm, prompt, BLIND),
        rows_of=lambda layer, rows, _: [row for row in rows if until[row] >= layer],
        visible=seen_by_selected,
    )
    logits, table = references.layerwise_fusion(lm, prompt.ids, rest(prompt), table)
    references.assert_prefilled(done, logits, table)
    probe = prompt.spans[-2].stop - prompt.chunks[-1].stop
    paid = sum(last + 1 for last in until.values()) + (len(rest(prompt)) + probe) * lm.n_layers
    assert done.report.row_layers == paid


def test_relaxkv_can_charge_the_average(warmed: FusionEngine, prompt: Prompt) -> None:
    """Then it costs as much as other methods at the same ratio; as published it costs more."""
    tokens, always = len(passage_tokens(prompt)), len(rest(prompt))

    def share(charge: str) -> float:
        report = warmed.prefill(prompt, method=make_method("relaxkv", ratio=0.2, charge=charge)).report
        probe = prompt.spans[-2].stop - prompt.chunks[-1].stop
        return (report.row_layers / warmed.lm.n_layers - always - probe) / tokens

    assert 0.1 < share("average") <= 0.2 < share("layer")


def test_cacheblend_filters_by_deviation_from_layer_to_layer(warmed: FusionEngine, prompt: Prompt) -> None:
    lm, tokens = warmed.lm, passage_tokens(prompt)
    done = warmed.prefill(prompt, method=make_method("cacheblend", ratio=0.2))
    budget = int(0.2 * len(tokens))
    counts = {2: round(1.5 * budget), 3: round(0.5 * budget)}

    def rows_of(layer: int, rows: list[int], seen: Observed | None) -> list[int]:
        if layer not in counts:
            return rows
        assert seen is not None
        far = sum(squared(new, old) for new, old in zip(seen.fresh, seen.stored, strict=True))
        candidates = [i for i, row in enumerate(rows) if row in set(tokens)]
        kept = sorted(candidates, key=lambda i: -float(far[i]))[: counts[layer]]
        return sorted([rows[i] for i in kept] + [row for row in rows if row not in set(tokens)])

    left: list[int] = []

    def note(layer: int, seen: Observed, table: Table) -> None:
        left[:] = seen.rows

    logits, table = references.layerwise_fusion(
        lm,
        prompt.ids,
        tokens + rest(prompt),
        references.stored_table(lm, prompt, BLIND),
        rows_of=rows_of,
        correct=note,
    )
    assert [*done.report.selected, *rest(prompt)] == left
    assert len(done.report.selected) == counts[3]
    references.assert_prefilled(done, logits, table)
    assert done.report.row_layers == 2 * len(tokens) + sum(counts.values()) + 4 * len(rest(prompt))


@pytest.mark.parametrize(("ratio", "layers"), [(0.15, 22), (0.9, 22), (1.0, 5), (0.3, 1), (0.01, 2)])
def test_gradual_shares_fall_and_average_to_the_ratio(ratio: float, layers: int) -> None:
    shares = GradualFilter().shares(ratio, layers)
    assert len(shares) == layers
    assert sum(shares) / layers == pytest.approx(ratio)
    assert shares == sorted(shares, reverse=True)
    assert 0 < min(shares) <= max(shares) <= 1


def test_cacheblends_release_compares_values_of_layer_1_once(warmed: FusionEngine, prompt: Prompt) -> None:
    lm, tokens = warmed.lm, passage_tokens(prompt)
    done = warmed.prefill(prompt, method=make_method("cacheblend", ratio=0.2, variant="release"))
    _, exact = references.plain_forward(lm, prompt.ids)
    table = references.stored_table(lm, prompt, BLIND)
    selected = top(squared(exact[1][1], table[1][1]), tokens, int(0.2 * len(tokens)))
    assert list(done.report.selected) == selected
    assert selected != top(squared(exact[1][0], table[1][0]), tokens, len(selected)), "keys would choose others here"
    logits, completed = references.sequential_fusion(lm, prompt.ids, selected + rest(prompt), table)
    references.assert_prefilled(done, logits, completed)  # the stored rows were restored after the probe


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "values"), [(True, True), (True, False), (False, True)])
def test_agentkvshift_moves_the_others_by_their_chunks_mean_residual(
    warmed: FusionEngine, prompt: Prompt, keys: bool, values: bool
) -> None:
    lm = warmed.lm
    done = warmed.prefill(prompt, method=make_method("agentkvshift", ratio=0.2, keys=keys, values=values))
    _, exact = references.plain_forward(lm, prompt.ids)
    table = references.stored_table(lm, prompt, BLIND)
    distance = squared(exact[1][0], table[1][0]).sqrt()
    recomputed: list[list[int]] = []
    selected = set(done.report.selected)
    for span in prompt.chunks:
        tokens = list(range(span.start, span.stop))
        recomputed.append(sorted(selected & set(tokens)))
        assert recomputed[-1] == top(distance, tokens, len(recomputed[-1]))
        assert abs(len(recomputed[-1]) - 0.2 * len(tokens)) <= 1
    assert len(selected) == int(0.2 * len(passage_tokens(prompt)))
    cos, sin = lm.model.model.rotary_emb(torch.zeros(1), torch.arange(len(prompt))[None])

    def correct(layer: int, seen: Observed, table: Table) -> None:
        if layer == 0:
            return
        for span, tokens in zip(prompt.chunks, recomputed, strict=True):
            at = [seen.rows.index(row) for row in tokens]
            turned = [
                part[:, :, at] * cos[:, tokens] - rotate_half(part[:, :, at]) * sin[:, tokens]
                for part in (seen.fresh[0], seen.stored[0])
            ]
            key_shift = (turned[0] - turned[1]).mean(2)
            value_shift = (seen.fresh[1][:, :, at] - seen.stored[1][:, :, at]).mean(2)
            mean_distance = float(distance[tokens].mean())
            for other in set(range(span.start, span.stop)) - set(tokens):
                weight = min(float(distance[other]) / mean_distance, 1.0)
                if keys:
                    moved = key_shift * cos[:, other] + rotate_half(key_shift) * sin[:, other]
                    table[layer][0][:, :, other] += weight * moved
                if values:
                    table[layer][1][:, :, other] += weight * value_shift

    rows = sorted(selected) + rest(prompt)
    logits, completed = references.layerwise_fusion(lm, prompt.ids, rows, table, correct=correct)
    unshifted, _ = references.layerwise_fusion(lm, prompt.ids, rows, table)
    references.assert_prefilled(done, logits, completed)
    assert references.error(done.logits, unshifted) > 1e-3, "the shift must matter here"


def test_the_report_counts_all_computed_rows(warmed: FusionEngine, prompt: Prompt) -> None:
    layers = warmed.lm.n_layers
    full = warmed.prefill(prompt, method=make_method("full")).report
    reuse = warmed.prefill(prompt, method=make_method("reuse", base=BLIND)).report
    assert full.row_layers == len(prompt) * layers
    assert reuse.row_layers == len(rest(prompt)) * layers
    prophet = warmed.prefill(prompt, method=make_method("prophetkv", ratio=0.2)).report
    probe = prompt.spans[-2].stop - prompt.chunks[-1].stop
    assert prophet.row_layers == (len(rest(prompt)) + probe + len(prophet.selected)) * layers
