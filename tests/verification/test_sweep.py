"""Verifying a method: from the smallest ratio up to the first whose answers are near full prefill's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Method, make_method
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import BreakEven, VerifiedRatio
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.key import BLIND, FRAMED
from qcfuse_rag.verification.cases import NOISE, TASKS, Case, generate, passage_cases
from qcfuse_rag.verification.divergence import Divergence
from qcfuse_rag.verification.exactness import naive_concatenation, stock_attention
from qcfuse_rag.verification.sweep import (
    Comparison,
    Reference,
    References,
    VerifySettings,
    answer_checks,
    candidates,
    verify,
)
from qcfuse_rag.verification.verdict import Trial
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

REUSE = make_method("reuse", base=FRAMED)
OPEN = replace(make_method("random", base=FRAMED), budget=VerifiedRatio(0.05))
LOOSE = {"kl": 100.0, "agreement": 0.0, "loss": 1.0}
STRICT = {"kl": 1e-6, "agreement": 1.0, "loss": 0.0}


@pytest.fixture(scope="module")
def long_llama(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Return a tiny Llama whose window holds the prompts that methods are verified on."""
    return LanguageModel.wrap(
        build_model("llama", num_hidden_layers=2, max_position_embeddings=2048), tokenizer, name="long"
    )


@pytest.fixture
def engine(long_llama: LanguageModel) -> FusionEngine:
    return make_engine(long_llama, MemoryStore())


def settings(limits: dict[str, float], ratios: Sequence[float] = (0.05, 0.5)) -> VerifySettings:
    """Return the smallest verification that the test tokenizer's template leaves room for."""
    return VerifySettings(ratios, size=1, tokens=1200, **limits)


def values(trial: Trial) -> dict[str, float]:
    return {check.name: check.value for check in trial.checks}


# --- candidates


def test_a_method_without_a_ratio_of_its_own_is_tried_at_each_in_ascending_order() -> None:
    expected = [make_method("auto", ratio=ratio) for ratio in (0.05, 0.3)]
    assert candidates(make_method("auto"), (0.3, 0.05, 0.3)) == expected


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (make_method("auto", ratio=0.2), "ratio 0.2"),
        (make_method("qcfuse"), "ratio 0.5"),
        (make_method("relaycaching"), "its own ratio"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_any_other_method_is_tried_once_as_it_is(method: Method, label: str) -> None:
    assert candidates(method, (0.05, 0.3)) == [method]
    assert Trial(method.ratio, ()).label == label


# --- sweep


def test_full_prefill_is_always_like_itself(engine: FusionEngine) -> None:
    result = verify(engine, make_method("full"), settings=settings(STRICT))
    assert result.passed, result
    (trial,) = result.tried
    assert {check.name for check in trial.checks} == {"exactness", "kl", "top-1", "identical", "needle", "multi-hop"}
    assert values(trial)["identical"] == 1.0


@pytest.mark.slow
def test_ratios_that_do_not_pass_keep_their_checks(engine: FusionEngine) -> None:
    """At ratio 1 everything is computed, so nothing but the first ratio can fail."""
    result = verify(engine, OPEN, texts=PASSAGES, settings=settings(STRICT, (1.0, 0.05)))
    outcomes = [(trial.ratio, trial.residuals, trial.passed) for trial in result.tried]
    assert outcomes == [(0.05, False, False), (0.05, True, False), (1.0, False, True)]
    assert result.ratio == 1.0
    assert values(result.tried[0])["kl"] > 1e-6 >= values(result.tried[-1])["kl"]
    assert result.recommendation.startswith("random over framed passes at ratio 1")


@pytest.mark.slow
def test_a_ratio_that_fails_is_tried_with_residuals(engine: FusionEngine) -> None:
    """The limit lies between the divergence with residuals and the one without, whichever is larger."""
    open_ratio = replace(make_method("auto"), guard=None)
    tried = verify(engine, open_ratio, texts=PASSAGES, settings=settings({"kl": -1.0}, (0.3,))).tried
    assert [(trial.label, trial.residuals) for trial in tried] == [
        ("ratio 0.3", False),
        ("ratio 0.3 with residuals", True),
    ]
    plain, moved = (trial.divergence for trial in tried)
    assert plain != moved
    limits = {**LOOSE, "kl": (plain + moved) / 2}
    result = verify(engine, open_ratio, texts=PASSAGES, settings=settings(limits, (0.3,)))
    assert result.tried[0].passed == (plain < moved)
    assert result.recommended is not None
    assert result.recommended.residuals == (moved < plain)
    assert (result.applied(open_ratio).residuals is not None) == (moved < plain)


@pytest.mark.slow
def test_a_method_that_drifts_does_not_pass(engine: FusionEngine) -> None:
    result = verify(engine, REUSE, texts=PASSAGES, settings=settings(STRICT))
    assert (result.passed, result.ratio) == (False, None)
    assert "kl" in result.tried[-1].failed
    assert verify(engine, REUSE, texts=PASSAGES, settings=settings(LOOSE)).passed


@pytest.mark.slow
def test_a_model_trained_to_read_blocks_passes_over_blind_caches_without_recomputed_tokens(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, run: Run
) -> None:
    """Its layout is Llama 3.2's; attention in the last layer alone makes it read passages apart as it reads them whole.

    An ordinary model does not pass, see above.
    """
    model = build_model(
        "llama-llama3-rope", num_hidden_layers=2, max_position_embeddings=2048, tie_word_embeddings=True
    )
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "Llama-3.2-1B-Block-FT")
    tokenizer.save_pretrained(tmp_path / "Llama-3.2-1B-Block-FT")
    code, out, _ = run("models", "check", tmp_path / "Llama-3.2-1B-Block-FT", "--device", "cpu")
    assert (code, "by its name: --method reuse --base blind" in " ".join(out.split())) == (0, True)
    engine = make_engine(LanguageModel.load(str(tmp_path / "Llama-3.2-1B-Block-FT"), device="cpu"), MemoryStore())
    method = make_method("reuse", base=BLIND)
    result = verify(engine, method, texts=PASSAGES, settings=settings(STRICT))
    assert (result.passed, result.ratio, result.label) == (True, 0.0, "reuse over blind"), result
    engine.warm(PASSAGES, bases=(BLIND,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt, method=method)
    blocks = [torch.tensor(span.segment.ids) for span in prompt.spans]
    with stock_attention(engine.lm), torch.inference_mode():
        expected = naive_concatenation(engine.lm, blocks)[-1]
    assert (done.report.selected, done.report.missing) == ((), ())
    torch.testing.assert_close(done.logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kept_bytes", [0, 1 << 40])
def test_passages_that_are_not_kept_are_prefilled_again(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    warmed: list[int] = []
    warm = FusionEngine.warm
    monkeypatch.setattr("qcfuse_rag.verification.sweep.CACHED_BYTES", kept_bytes)

    def counted(self: FusionEngine, texts: Sequence[str], **options: object) -> object:
        summary = warm(self, texts, **options)  # type: ignore[arg-type]
        warmed.append(summary.warmed)
        return summary

    monkeypatch.setattr(FusionEngine, "warm", counted)
    result = verify(engine, OPEN, texts=PASSAGES, settings=settings({"kl": -1.0}))
    assert len(result.tried) == 4
    first_time = 3 * 2  # the first passage of a prompt, then the others
    assert sum(map(bool, warmed)) == (first_time if kept_bytes else first_time + 4 * first_time)


def test_a_sweep_ends_at_the_first_ratio_that_passes_and_its_progress_full(engine: FusionEngine) -> None:
    steps: list[tuple[int, int]] = []
    result = verify(
        engine, OPEN, texts=PASSAGES, settings=settings(LOOSE), progress=lambda done, total: steps.append((done, total))
    )
    assert (result.passed, result.ratio) == (True, 0.05)
    assert [trial.label for trial in result.tried] == ["ratio 0.05"]
    # in full, two ratios without and with residuals; and when the first passes
    most, first_ratio = 3 + 2 * 2 * 3, 3 + 3
    assert steps == [*((done, most) for done in range(1, first_ratio + 1)), (first_ratio, first_ratio)]


@pytest.mark.slow
def test_a_guard_does_not_hide_what_it_would_refuse_and_the_store_stays_as_it_is(engine: FusionEngine) -> None:
    """Verified is what fusing gives, not what is computed in full because the prompts of the test are short."""
    guarded = replace(REUSE, guard=BreakEven(margin=1e-9))
    result = verify(engine, guarded, texts=PASSAGES, settings=settings(LOOSE))
    assert values(result.tried[0])["kl"] > 0
    assert not list(engine.store.entries())


def test_a_sweep_without_ratios_is_refused(engine: FusionEngine) -> None:
    with pytest.raises(ValueError, match="at least one ratio"):
        verify(engine, OPEN, settings=settings(LOOSE, ()))


# --- cases and checks


@pytest.mark.parametrize("task", TASKS)
def test_generated_tasks_hide_every_part_of_the_answer_whole(task: str) -> None:
    sentences = [" ".join(PASSAGES)] * 20
    made = generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made == generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=3)
    assert made != generate(task, 4, tokens=1200, count=words, haystack=sentences, seed=4)
    for example in made:
        assert len(example.expected) == len(set(example.expected)) == (5 if task == "ruler_vt" else 4)
        hiding = example.passages[1:] if task == "ruler_vt" else example.passages
        assert all(any(answer in passage for passage in hiding) for answer in example.expected)
        total = words(example.question) + sum(map(words, example.passages)) + example.max_new_tokens
        assert 1200 - words(NOISE) - 25 < total <= 1200
        assert max(map(words, hiding)) <= 150
    assert len({example.expected for example in made}) == 4


def test_a_chain_is_in_order_and_no_line_is_cut() -> None:
    (example,) = generate("ruler_vt", 1, tokens=1200, count=words, haystack=[], seed=0)
    lines = [line for passage in example.passages[1:] for line in passage.split("\n")]
    assigned = [line for line in lines if line.startswith("VAR")]
    names = example.expected
    value = assigned[0].split(" = ")[1]
    assert assigned == [f"VAR {names[0]} = {value}", *(f"VAR {names[i]} = VAR {names[i - 1]}" for i in range(1, 5))]
    assert value in example.question
    assert {line for line in lines if line not in assigned} == {NOISE}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_does_not_fit_says_what_was_asked_for_and_what_would_do(task: str) -> None:
    def made(tokens: int) -> int:
        return len(generate(task, 3, tokens=tokens, overhead_tokens=30, count=words, haystack=PASSAGES, seed=0))

    with pytest.raises(QCFuseError, match=rf"{task} does not fit 64 tokens.*give at least that length") as error:
        made(64)
    least = int(re.search(r"need (\d+)", str(error.value))[1])  # type: ignore[index]
    assert least > 64
    assert made(least) == 3
    with pytest.raises(QCFuseError, match=f"need {least}"):
        made(least - 1)


def words(text: str) -> int:
    return len(text.split())


def test_own_passages_are_asked_about_beside_those_they_are_related_to(engine: FusionEngine) -> None:
    cases = passage_cases(engine, [*PASSAGES, *PASSAGES], 2)
    assert len(cases) == 2
    for case in cases:
        assert case.passages[-1].startswith(case.question.removeprefix("What do the passages say about this: ")[:-1])
        assert len(set(case.passages)) == len(case.passages) == 3


def test_every_prompt_counts_the_same_however_long_its_answer() -> None:
    exact = Comparison(Divergence((0.0,) * 9, (True,) * 9), 1.0, 1.0)
    wrong = Comparison(Divergence((0.4,), (False,)), 0.5, 1.0)
    hopeless = replace(exact, score=0.0, full_score=0.0)
    groups = {"needle": [exact, wrong], "multi-hop": [hopeless], "passages": [exact]}
    checks = {check.name: check for check in answer_checks(groups, VerifySettings(kl=0.05, agreement=0.8, loss=0.25))}
    found = {name: check.value for name, check in checks.items()}
    assert found == {"kl": pytest.approx(0.1), "top-1": 0.75, "identical": 0.75, "needle": 0.25, "multi-hop": 0.0}
    assert {name for name, check in checks.items() if not check.passed} == {"kl", "top-1"}
    assert "hidden answers found in 2 prompts: full prefill 100%, fused 75%" in checks["needle"].detail
    assert "says nothing about the method" in checks["multi-hop"].detail


def test_methods_over_enriched_caches_are_verified_with_all_passages_as_neighbours(llama: LanguageModel) -> None:
    method, case = make_method("fusionrag"), Case("Who keeps the paint?", tuple(PASSAGES), 4)
    engine = make_engine(llama, MemoryStore(), method=method)
    reference = Reference(case, MemoryStore())
    References(engine, method, lambda: None)._prefill(reference, method)
    first = engine.prompts.chunk_ids(PASSAGES[0])
    enriched, framed = (reference.store.get(key) for key in engine.corpus.keys(first, [ENRICHED, FRAMED]))
    assert not torch.equal(enriched.layer(3)[0], framed.layer(3)[0]), "the first passage has neighbours too"
