"""A healed cache is full prefill's: its keys, its values, and the logits over it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, make_method
from qcfuse_rag.fusion.healing import AttendedTokens, Healing
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.prompts.segments import Role, Segment
from qcfuse_rag.runtime.cost import StepCosts
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.cases import cases
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import plain_forward, whole_forward

FULL, REUSE = make_method("full"), make_method("reuse", base=FRAMED)
ANSWER = (40, 41, 42, 43, 44)
TOLERANCE = 1e-4


@pytest.fixture
def engine(main_family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(main_family)


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    """Return a prompt with text between its passages."""
    prompt = engine.prompt(QUESTION, PASSAGES)
    text = Segment(Role.TEXT, (50, 51, 52), "three tokens")
    prefix, first, second, *rest = prompt.segments
    return replace(prompt, segments=(prefix, first, text, second, text, *rest))


def distance(lm: LanguageModel, prefilled: Prefilled, ids: tuple[int, ...], start: int = 0) -> float:
    """Return the largest difference from transformers' own keys and values, from a position on."""
    _, table = plain_forward(lm, ids)
    buffer = prefilled.buffer
    return max(
        float((ours[:, :, start : len(ids)] - theirs[:, :, start:]).abs().max())
        for layer, sides in enumerate(table)
        for ours, theirs in zip((buffer.keys[layer], buffer.values[layer]), sides, strict=True)
    )


class TestEveryFamily:
    """Healing ends over an exact cache in every family; the other tests run on the main families."""

    @pytest.fixture
    def engine(self, family: LanguageModel) -> FusionEngine:
        return make_warmed_engine(family)

    @pytest.mark.parametrize("rows", cases([1, 7, 64, 1000], 7, 1000))
    def test_healing_makes_the_cache_full_prefills(self, engine: FusionEngine, prompt: Prompt, rows: int) -> None:
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
        assert distance(engine.lm, prefilled, prompt.ids) > 100 * TOLERANCE, "there is something to heal"
        healing = Healing(engine.runner, prefilled)
        assert 0 < healing.healed < len(prompt)
        while healing.prompt_left:
            before = healing.healed
            healing.advance([], rows)
            assert 0 < healing.healed - before <= rows
        logits = healing.finish(ANSWER)
        ids = prompt.ids + ANSWER
        expected, _ = plain_forward(engine.lm, ids)
        assert distance(engine.lm, prefilled, ids) < TOLERANCE
        assert float((logits - expected[len(prompt) - 1 :]).abs().max()) < TOLERANCE

    @pytest.mark.parametrize("attended", [0.0, 0.3])
    @pytest.mark.parametrize("rows", cases([3, 32, 1000], 32))
    def test_steps_that_heal_end_over_an_exact_cache(
        self, engine: FusionEngine, prompt: Prompt, rows: int, attended: float
    ) -> None:
        """The answer is fixed, so the last logits are those of the text, whatever came before they were exact."""
        answer = tuple(40 + index % 9 for index in range(220))
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(answer))
        healing = Healing(engine.runner, prefilled, attended)
        count = 0
        while count == 0 or not healing.prefix_is_exact(answer[:count]):
            count += 1
            logits = healing.step(answer[:count], rows)
        ids = prompt.ids + answer[:count]
        expected, _ = plain_forward(engine.lm, ids)
        assert healing.healed == len(ids), "the last token's row is exact as well"
        assert float((logits - expected[-1]).abs().max()) < TOLERANCE
        last = healing.step(answer[: count + 1], 0)
        ids = prompt.ids + answer[: count + 1]
        expected, _ = plain_forward(engine.lm, ids)
        assert float((last - expected[-1]).abs().max()) < TOLERANCE
        assert distance(engine.lm, prefilled, ids) < TOLERANCE


def test_a_step_that_heals_gives_the_logits_after_its_own_row(engine: FusionEngine, prompt: Prompt) -> None:
    """All layers heal before the answer's row reads them, so its logits are those over the rows healed so far."""
    prefilled, reference = (engine.prefill(prompt, method=REUSE, answer_tokens=2) for _ in range(2))
    logits = Healing(engine.runner, prefilled).step(ANSWER[:1], 11)
    Healing(engine.runner, reference).advance([], 11)
    expected = engine.runner.decodes(ANSWER[:1], [len(prompt)], [reference.buffer])[0]
    assert float((logits - expected).abs().max()) < TOLERANCE


@pytest.mark.slow
def test_a_single_row_is_enough_per_pass_of_its_own(engine: FusionEngine, prompt: Prompt) -> None:
    prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
    healing = Healing(engine.runner, prefilled)
    while not healing.prefix_is_exact(ANSWER):
        healing.advance(ANSWER, 1)
    assert distance(engine.lm, prefilled, (prompt.ids + ANSWER)[:-1]) < TOLERANCE
    assert healing.verified(ANSWER) is not None


class TestAttendedTokens:
    """The tokens that the answer attends to most are computed first."""

    @torch.inference_mode()
    def test_they_are_those_that_transformers_attention_names(self, llama: LanguageModel) -> None:
        """The reused cache is overwritten by full prefill's, so that transformers attends to the same keys."""
        engine = make_warmed_engine(llama)
        prompt = engine.prompt(QUESTION, PASSAGES)
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
        _, table = plain_forward(llama, prompt.ids)
        for layer, (keys, values) in enumerate(table):
            prefilled.buffer.keys[layer][:, :, : len(prompt)] = keys
            prefilled.buffer.values[layer][:, :, : len(prompt)] = values
        attended = AttendedTokens(llama, prefilled, 0.25)
        assert attended.take(5) == [], "nothing is known before the first token"
        expected = torch.zeros(len(prompt))
        for count in (1, 2):
            _step(engine, prefilled, attended, ANSWER[:count])
            ids = prompt.ids + ANSWER[:count]
            _, table = plain_forward(llama, ids)
            attention = whole_forward(llama, ids, table, [[]] * llama.n_layers).attention
            for weights in attention[llama.n_layers // 2 :]:
                answers = weights[:, -1, : len(prompt)].mean(0)
                answers[: prefilled.exact_tokens] = 0
                answers[prompt.chunks[-1].stop :] = 0
                expected += answers / answers.sum()
        reused = prompt.chunks[-1].stop - prefilled.exact_tokens
        assert attended.left == reused // 4
        assert attended.take(7) == sorted(expected.topk(7).indices.tolist())
        assert not set(attended.take(1000)) & set(expected.topk(7).indices.tolist()), "no token twice"
        assert attended.left == 0

    def test_the_probe_names_the_first(self, engine: FusionEngine) -> None:
        prompt = engine.prompt(QUESTION, PASSAGES)
        method = make_method("qcfuse", ratio=0.2, base=FRAMED)
        prefilled = engine.prefill(prompt, method=method, answer_tokens=4)
        assert prefilled.scores is not None
        scores = prefilled.scores.mean.clone()
        scores[: prefilled.exact_tokens] = 0
        scores[prompt.chunks[-1].stop :] = 0
        scores[list(prefilled.report.selected)] = 0
        taken = AttendedTokens(engine.lm, prefilled, 0.5).take(4)
        assert taken == sorted(scores.topk(4).indices.tolist())

    def test_a_pass_of_their_own_computes_them_too(self, engine: FusionEngine, prompt: Prompt) -> None:
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
        healing, before = Healing(engine.runner, prefilled, 0.25), prefilled.exact_tokens
        healing.advance(ANSWER, 8)
        stale = [values.clone() for values in prefilled.buffer.values]
        healing.advance(ANSWER, 8)
        changed = [bool((old != new).any()) for old, new in zip(stale, prefilled.buffer.values, strict=True)]
        assert any(changed)
        assert healing.healed == before, "none of them is exact"
        while not healing.prefix_is_exact(ANSWER):
            healing.advance(ANSWER, 8)
        assert distance(engine.lm, prefilled, (prompt.ids + ANSWER)[:-1]) < TOLERANCE


def _step(engine: FusionEngine, prefilled: Prefilled, attended: AttendedTokens, answer: tuple[int, ...]) -> None:
    """Compute the row of the answer's last token, observed, beside a row of the prompt."""
    rows = torch.tensor([0, len(prefilled.prompt) + len(answer) - 1])
    plan = RowsPlan.of(rows, engine.lm.sliding, observe=attended.observe)
    ids = torch.tensor([prefilled.prompt.ids[0], answer[-1]])
    engine.runner.prefills.logits(ids, plan, prefilled.buffer)


class TestVerified:
    def test_it_counts_the_leading_tokens_that_full_prefill_gives(self, engine: FusionEngine, prompt: Prompt) -> None:
        logits, _ = plain_forward(engine.lm, prompt.ids)
        first = int(logits[-1].argmax())
        logits, _ = plain_forward(engine.lm, (*prompt.ids, first))
        other = (int(logits[-1].argmax()) + 1) % logits.shape[-1]
        healing = Healing(engine.runner, engine.prefill(prompt, method=REUSE, answer_tokens=4))
        assert healing.verified([]) is None
        healing.advance([], len(prompt))
        assert healing.verified([first]) is None, "the last row's logits choose the first token"
        healing.finish([first, other, 40])
        assert [healing.verified(ids) for ids in ([], [other], [first], [first, other, 40])] == [0, 0, 1, 1]
        healing.shorten([first])
        assert healing.healed == len(prompt) + 1
        right = (other or logits.shape[-1]) - 1
        assert healing.verified([first, right, 40]) == 2, "and nothing is known of what was behind"

    def test_decode_steps_count_once_the_cache_is_exact(self, engine: FusionEngine, prompt: Prompt) -> None:
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=8)
        healing, answer = Healing(engine.runner, prefilled), [40]
        stale = engine.runner.decodes([40], [len(prompt)], [prefilled.buffer])[0]
        healing.note_step(answer, stale)
        assert healing.verified(answer) is None, "a step over a stale cache verifies nothing"
        logits = healing.finish([])[-1]
        answer = [int(logits.argmax())]
        for position in range(len(prompt), len(prompt) + 3):
            logits = engine.runner.decodes([answer[-1]], [position], [prefilled.buffer])[0]
            healing.note_step(answer, logits)
            answer.append(int(logits.argmax()))
        assert healing.verified(answer) == len(answer) == 4


class TestExactTokens:
    def test_system_prefix_and_exact_first_passage_count(self, engine: FusionEngine, prompt: Prompt) -> None:
        first, second = prompt.chunks[:2]
        exact = {base: engine.prefill(prompt, method=make_method("reuse", base=base)) for base in (BLIND, FRAMED)}
        assert exact[BLIND].exact_tokens == first.start
        assert exact[FRAMED].exact_tokens == second.start > first.stop, "the text between them as well"

    def test_of_recomputed_rows_those_before_the_first_stale_one_count(
        self, engine: FusionEngine, prompt: Prompt
    ) -> None:
        second = prompt.chunks[1]
        heads = engine.prefill(prompt, method=make_method("epic", ratio=0.2, base=FRAMED))
        in_second = [position for position in heads.report.selected if position < second.stop]
        assert 1 < len(in_second) < len(heads.report.selected)
        assert heads.exact_tokens == second.start + len(in_second)

    def test_full_prefill_and_a_prompt_without_stored_passages_are_exact(
        self, engine: FusionEngine, prompt: Prompt, main_family: LanguageModel
    ) -> None:
        empty = make_engine(main_family, MemoryStore())
        results = (
            engine.prefill(prompt, method=FULL),
            empty.prefill(prompt, method=REUSE),
            engine.prefill(prompt, method=make_method("qcfuse", ratio=1.0, base=FRAMED)),
        )
        for prefilled in results:
            assert prefilled.exact_tokens == len(prompt)
            assert distance(engine.lm, prefilled, prompt.ids) < TOLERANCE

    @pytest.mark.parametrize("ratio", cases([0.1, 0.5], 0.1))
    @pytest.mark.parametrize("name", ["qcfuse", "relaxkv", "prophetkv", "cacheblend", "fusionrag", "agentkvshift"])
    def test_they_are_exact_whatever_the_method(
        self, engine: FusionEngine, prompt: Prompt, name: str, ratio: float
    ) -> None:
        prefilled = engine.prefill(prompt, method=make_method(name, ratio=ratio, base=FRAMED))
        assert prefilled.exact_tokens >= prompt.chunks[0].stop
        assert distance(engine.lm, prefilled, prompt.ids[: prefilled.exact_tokens]) < TOLERANCE


def test_a_quantized_passage_is_not_exact(llama: LanguageModel, tmp_path: object) -> None:
    with make_engine(llama, open_store(str(tmp_path), kv_dtype="int8")) as engine:
        engine.warm(PASSAGES, bases=(FRAMED,))
        prompt = engine.prompt(QUESTION, PASSAGES)
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=1)
        assert prefilled.exact_tokens <= prompt.chunks[0].start
        healing = Healing(engine.runner, prefilled)
        healing.finish(())
        assert distance(llama, prefilled, prompt.ids) < TOLERANCE


def test_a_prompt_computed_anew_is_exact(engine: FusionEngine, prompt: Prompt) -> None:
    prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=1)
    with torch.inference_mode():
        for tensor in (*prefilled.buffer.keys, *prefilled.buffer.values):
            tensor.fill_(torch.nan)
    healing = Healing(engine.runner, prefilled)
    logits = healing.restart()
    expected, _ = plain_forward(engine.lm, prompt.ids)
    assert float((logits - expected[-1]).abs().max()) < TOLERANCE
    assert healing.prefix_is_exact([])
    assert healing.verified([int(expected[-1].argmax())]) == 1


def test_rows_beside_a_step_are_as_many_as_fit_its_slowdown() -> None:
    gpu, cpu = StepCosts(0.010, 0.0, 10e-6), StepCosts(0.065, 0.025, 0.0034)
    assert [gpu.rows_beside(slowdown) for slowdown in (0.0, 0.1, 0.7)] == [0, 64, 512]
    assert [cpu.rows_beside(slowdown) for slowdown in (0.1, 0.38, 0.5, 1.0)] == [0, 0, 2, 8]
    for slowdown in (0.1, 0.7):
        assert gpu.pass_s(gpu.rows_beside(slowdown)) <= (1 + slowdown) * gpu.step_s


@pytest.mark.parametrize("slowdown", [0.02, 0.1, 0.7])
@pytest.mark.parametrize("costs", [StepCosts(0.010, 0.0, 10e-6), StepCosts(0.065, 0.025, 0.0034)])
def test_healing_keeps_to_its_slowdown_on_average(costs: StepCosts, slowdown: float) -> None:
    pace = costs.pace(slowdown)
    assert pace is not None
    taken = costs.pass_s(pace.rows) + (pace.interval - 1) * costs.step_s
    assert taken <= (1 + slowdown) * pace.interval * costs.step_s
    assert pace.interval == 1 or costs.rows_beside(slowdown) == 0
    assert costs.pace(0.0) is None
