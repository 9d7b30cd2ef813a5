"""A healed cache is full prefill's: its keys, its values, and the logits over it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, make_method
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.prompts.segments import Role, Segment
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.cases import cases
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import plain_forward

FULL, REUSE = make_method("full"), make_method("reuse", base=FRAMED)
ANSWER = (40, 41, 42, 43, 44)
TOLERANCE = 1e-4


@pytest.fixture
def engine(main_family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(main_family, bases=(BLIND, FRAMED))


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    """Return a prompt with text between its passages."""
    prompt = engine.prompt(QUESTION, PASSAGES)
    text = Segment(Role.TEXT, (50, 51, 52), "three tokens")
    prefix, first, second, *rest = prompt.segments
    return replace(prompt, segments=(prefix, first, text, second, text, *rest))


def tolerance(lm: LanguageModel) -> float:
    """Return the difference that rounding makes: transformers' own recurrences differ by parts of the text, too."""
    return 20 * TOLERANCE if lm.recurrent else TOLERANCE


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
        return make_warmed_engine(family, bases=(BLIND, FRAMED))

    @pytest.mark.parametrize("beside_steps", [False, True])
    @pytest.mark.parametrize("rows", cases([1, 7, 64, 1000], 7, 1000))
    def test_healing_makes_the_cache_full_prefills(
        self, engine: FusionEngine, prompt: Prompt, rows: int, beside_steps: bool
    ) -> None:
        prefilled = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
        assert distance(engine.lm, prefilled, prompt.ids) > 100 * TOLERANCE, "there is something to heal"
        healing = Healing(engine.runner, prefilled)
        assert 0 < healing.healed < len(prompt)
        while healing.prompt_left:
            before = healing.healed
            if beside_steps:
                healing.step(ANSWER[:1], rows)
            else:
                healing.advance(rows)
            assert 0 < healing.healed - before <= rows
        logits = healing.finish(ANSWER)
        ids = prompt.ids + ANSWER
        expected, _ = plain_forward(engine.lm, ids)
        assert distance(engine.lm, prefilled, ids) < tolerance(engine.lm)
        assert float((logits - expected[len(prompt) - 1 :]).abs().max()) < tolerance(engine.lm)


def test_a_step_that_heals_gives_the_logits_after_its_own_row(engine: FusionEngine, prompt: Prompt) -> None:
    """All layers heal before the answer's row reads them, so its logits are those over the rows healed so far."""
    prefilled, reference = (engine.prefill(prompt, method=REUSE, answer_tokens=2) for _ in range(2))
    logits = Healing(engine.runner, prefilled).step(ANSWER[:1], 11)
    Healing(engine.runner, reference).advance(11)
    expected = engine.runner.decodes(ANSWER[:1], [len(prompt)], [reference.buffer])[0]
    assert float((logits - expected).abs().max()) < TOLERANCE


class TestVerified:
    def test_it_counts_the_leading_tokens_that_full_prefill_gives(self, engine: FusionEngine, prompt: Prompt) -> None:
        logits, _ = plain_forward(engine.lm, prompt.ids)
        first = int(logits[-1].argmax())
        logits, _ = plain_forward(engine.lm, (*prompt.ids, first))
        other = (int(logits[-1].argmax()) + 1) % logits.shape[-1]
        healing = Healing(engine.runner, engine.prefill(prompt, method=REUSE, answer_tokens=4))
        assert healing.verified([]) is None
        healing.advance(len(prompt))
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
    assert healing.healed == len(prompt)
    assert healing.verified([int(expected[-1].argmax())]) == 1
