"""Verdicts on methods before use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.engine.verdict import Check, Verdict, find_verdict, method_digest, require_verdict
from qcfuse_rag.errors import Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.verification.checks import VerifyLimits, passage_cases, verify
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES

QCFUSE = make_method("qcfuse", ratio=0.1, base=FRAMED)
REUSE = make_method("reuse", base=FRAMED)
LOOSE = VerifyLimits(kl=100.0, agreement=0.0, loss=1.0)


@pytest.fixture(scope="module")
def long_llama(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Return a tiny Llama whose window holds the prompts that methods are verified on."""
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), tokenizer, name="long")


@pytest.fixture
def engine(long_llama: LanguageModel) -> FusionEngine:
    return make_engine(long_llama, MemoryStore())


def verdict(engine: FusionEngine, method: Method, *, limit: float = 1.0) -> Verdict:
    checks = (Check("kl", 0.5, limit, False, "made up"),)
    return Verdict(
        engine.lm.fingerprint.digest, method_digest(engine.lm, engine.store, method), method.name, "2026-01-01", checks
    )


# --- verdict


def test_full_prefill_is_always_like_itself(engine: FusionEngine) -> None:
    result = verify(
        engine, make_method("full"), size=1, tokens=1200, limits=VerifyLimits(kl=1e-6, agreement=1.0, loss=0.0)
    )
    assert result.passed, result
    assert {check.name for check in result.checks} == {"exactness", "kl", "top-1", "needle", "multi-hop"}


def test_a_method_that_drifts_does_not_pass(engine: FusionEngine) -> None:
    strict = verify(
        engine, REUSE, texts=PASSAGES, size=1, tokens=1200, limits=VerifyLimits(kl=0.0, agreement=1.0, loss=0.0)
    )
    assert not strict.passed
    assert next(check.name for check in strict.checks if not check.passed) == "kl"
    assert verify(engine, REUSE, texts=PASSAGES, size=1, tokens=1200, limits=LOOSE).passed


def test_a_guard_does_not_hide_what_it_would_refuse(engine: FusionEngine) -> None:
    """Verified is what fusing gives, not what is computed in full because the prompts of the test are short."""
    from qcfuse_rag.fusion.guard import BreakEven

    guarded = replace(REUSE, guard=BreakEven(margin=1e-9))
    result = verify(engine, guarded, texts=PASSAGES, size=1, tokens=1200, limits=LOOSE)
    assert next(check.value for check in result.checks if check.name == "kl") > 0


def test_verifying_leaves_the_store_as_it_is(engine: FusionEngine) -> None:
    verify(engine, REUSE, texts=PASSAGES, size=1, tokens=1200)
    assert not list(engine.store.entries())


def test_own_passages_are_asked_about_beside_those_they_are_related_to(engine: FusionEngine) -> None:
    cases = passage_cases(engine, [*PASSAGES, *PASSAGES], 2)
    assert len(cases) == 2
    for case in cases:
        assert case.passages[-1].startswith(case.question.removeprefix("What do the passages say about this: ")[:-1])
        assert len(set(case.passages)) == len(case.passages) == 3


@pytest.fixture
def kept(long_llama: LanguageModel, tmp_path: Path) -> Iterator[FusionEngine]:
    """Return an engine over a store in a folder."""
    with make_engine(long_llama, DiskStore(tmp_path)) as engine:
        yield engine


def test_a_verdict_is_found_again_by_model_method_and_numbers(kept: FusionEngine, tmp_path: Path) -> None:
    saved = verdict(kept, QCFUSE)
    path = saved.save(tmp_path)
    assert json.loads(path.read_text())["passed"] is True
    assert path.stat().st_mode & 0o077 == 0
    assert find_verdict(kept.lm, kept.store, QCFUSE) == saved
    assert find_verdict(kept.lm, kept.store, make_method("qcfuse", ratio=0.2, base=FRAMED)) is None
    other = replace(kept.lm, fingerprint=replace(kept.lm.fingerprint, dtype="bfloat16"))
    assert find_verdict(other, kept.store, QCFUSE) is None
    assert find_verdict(replace(kept.lm, critical_layers=(0,)), kept.store, QCFUSE) is None
    kept.store.numbers = "int8"
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None


@pytest.mark.parametrize("method", [make_method("auto"), make_method("epic")], ids=lambda method: method.name)
def test_a_profile_leaves_the_verdict_on_a_method_that_does_not_read_it(
    kept: FusionEngine, tmp_path: Path, method: Method
) -> None:
    saved = verdict(kept, method)
    saved.save(tmp_path)
    assert find_verdict(replace(kept.lm, critical_layers=(0,)), kept.store, method) == saved


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 99}', '{"version": 1, "checks": 3, "passed": true}'])
def test_a_damaged_verdict_is_none(kept: FusionEngine, tmp_path: Path, damage: str) -> None:
    path = verdict(kept, QCFUSE).save(tmp_path)
    path.write_text(damage)
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None


def test_without_a_passing_verdict_there_is_a_warning_or_a_refusal(kept: FusionEngine, tmp_path: Path) -> None:
    subject = (kept.lm, kept.store)
    with pytest.warns(UnverifiedMethod, match="qcfuse has not been verified on this model; run `qcfuse verify`"):
        require_verdict(*subject, QCFUSE, require=False)
    with pytest.raises(Unverified, match="has not been verified"):
        require_verdict(*subject, QCFUSE, require=True)
    verdict(kept, QCFUSE, limit=0.1).save(tmp_path)
    with pytest.raises(Unverified, match="did not pass: kl"):
        require_verdict(*subject, QCFUSE, require=True)
    verdict(kept, QCFUSE).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require_verdict(*subject, QCFUSE, require=True) is not None
        require_verdict(*subject, make_method("full"), require=True)


def test_loading_an_engine_looks_for_the_verdict(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(Unverified, match="run `qcfuse verify`"):
        FusionEngine.load(model_folder, store=tmp_path, method=QCFUSE, verdict="require")
    with pytest.warns(UnverifiedMethod):
        engine = FusionEngine.load(model_folder, store=tmp_path, method=QCFUSE)
    with engine:
        assert engine.verdict is None
        saved = verdict(engine, QCFUSE)
        saved.save(tmp_path)
    with FusionEngine.load(model_folder, store=tmp_path, method=QCFUSE, verdict="require") as engine:
        assert engine.verdict == saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusionEngine.load(model_folder, method=QCFUSE).close()
    with pytest.raises(Unverified, match="has not been verified"):
        FusionEngine.load(model_folder, method=QCFUSE, verdict="require")
