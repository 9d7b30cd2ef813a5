"""What every method must be, for every model family: full prefill at ratio 1, its base at ratio 0, and repeatable."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace

import pytest
import torch

from qcfuse_rag import METHODS, FusionEngine, LanguageModel, Method, Prompt, make_method
from qcfuse_rag.fusion.selectors import SelectNone
from qcfuse_rag.methods.epic import BEGUN
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED, Base
from tests.support import references
from tests.support.engines import capture, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import error

TOLERANCE = 1e-4
WITH_RATIO = sorted(name for name, build in METHODS.items() if "ratio" in inspect.signature(build).parameters)
VARIANTS = {
    "cacheblend": [{"variant": "release"}],
    "fusionrag": [{"probe": "question_only"}],
    "relaxkv": [{"charge": "average"}, {"context": "all"}],
    "qcfuse": [{"reduce": "max"}],
    "auto": [{"exact_first": False}, {"rows": "question", "normalized": False}],
}
CASES = [(name, {}) for name in WITH_RATIO] + [(name, case) for name, cases in VARIANTS.items() for case in cases]


def fused(name: str, **options: object) -> Method:
    """Return a method that fuses whether it is worth it or not: prompts here are short."""
    return replace(make_method(name, **options), guard=None)


def warm_all_kinds(family: LanguageModel) -> FusionEngine:
    """Return an engine over caches of every kind."""
    engine = make_warmed_engine(family, bases=(BLIND, FRAMED, PRIMED, BEGUN, ENRICHED))
    capture(
        engine,
        [PASSAGES, [PASSAGES[2], PASSAGES[0], PASSAGES[1]]],
        keep=("variant", "difference", "patch"),
    )
    return engine


@pytest.fixture(scope="module")
def warmed(family: LanguageModel) -> FusionEngine:
    return warm_all_kinds(family)


def ask_in_another_order(warmed: FusionEngine) -> Prompt:
    return warmed.prompt(QUESTION, [PASSAGES[1], PASSAGES[2], PASSAGES[0]])


@pytest.fixture(scope="module")
def prompt(warmed: FusionEngine) -> Prompt:
    return ask_in_another_order(warmed)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value) if value else "")
def test_ratio_1_is_full_prefill(warmed: FusionEngine, prompt: Prompt, name: str, options: dict[str, str]) -> None:
    logits, table = references.plain_forward(warmed.lm, prompt.ids)
    done = warmed.prefill(prompt, method=fused(name, ratio=1.0, **options))
    references.assert_prefilled(done, logits[-1], table)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value) if value else "")
def test_ratio_0_is_its_base(warmed: FusionEngine, prompt: Prompt, name: str, options: dict[str, str]) -> None:
    """Not even a bit more: what is placed, and the question over it."""
    method = fused(name, ratio=0.0, **options)
    done = warmed.prefill(prompt, method=method)
    base = replace(method, probe=None, selector=SelectNone(), layer_hook=None)
    assert torch.equal(done.logits, warmed.prefill(prompt, method=base).logits)
    assert done.report.selected == ()


@pytest.mark.parametrize("base", [BEGUN, ENRICHED], ids=lambda base: base.name)
def test_nothing_recomputed_over_another_base_is_not_full_prefill(
    warmed: FusionEngine, prompt: Prompt, base: Base
) -> None:
    """Or the tests above would say nothing of these bases."""
    logits, _ = references.plain_forward(warmed.lm, prompt.ids)
    done = warmed.prefill(prompt, method=Method("reuse", base))
    assert done.report.fallback is None
    assert error(done.logits, logits[-1]) > 100 * TOLERANCE


class TestMainFamilies:
    """Repeated requests and freed memory: they hardly depend on the family."""

    @pytest.fixture(scope="class")
    def warmed(self, main_family: LanguageModel) -> FusionEngine:
        return warm_all_kinds(main_family)

    @pytest.fixture(scope="class")
    def prompt(self, warmed: FusionEngine) -> Prompt:
        return ask_in_another_order(warmed)

    @pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value) if value else "")
    def test_the_same_request_has_the_same_answer(
        self, warmed: FusionEngine, prompt: Prompt, name: str, options: dict[str, str]
    ) -> None:
        """And the one before it, on the same engine, leaves no trace."""
        method = fused(name, ratio=0.3, **options)
        first = warmed.prefill(prompt, method=method)
        warmed.prefill(warmed.prompt("Why?", PASSAGES), method=fused(name, ratio=0.8, **options))
        again = warmed.prefill(prompt, method=method)
        assert torch.equal(first.logits, again.logits)
        assert first.report.selected == again.report.selected
        assert torch.isfinite(first.logits).all()

    @pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value) if value else "")
    def test_memory_is_free_as_soon_as_a_result_is_dropped(
        self, warmed: FusionEngine, prompt: Prompt, name: str, options: dict[str, str]
    ) -> None:
        """Not when the garbage collector next runs: a buffer may be gigabytes, and the next request wants them."""
        method = fused(name, ratio=0.3, **options)
        gc.disable()
        try:
            places = [warmed.prefill(prompt, method=method).buffer.keys[0].data_ptr() for _ in range(3)]
        finally:
            gc.enable()
        assert len(set(places)) == 1
