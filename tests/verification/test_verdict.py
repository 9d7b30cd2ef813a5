"""Verdicts on methods before use: kept beside the store, found again, and followed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, make_method
from qcfuse_rag.engine.engine import require_verdict
from qcfuse_rag.errors import Unverified, UnverifiedMethod
from qcfuse_rag.fusion.method import FixedRatio, Method, VerifiedRatio
from qcfuse_rag.methods.auto import DEFAULT_RATIO
from qcfuse_rag.methods.qcfuse import FORMAT, PROFILE_FILE
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.verification import verdict as verdict_module
from qcfuse_rag.verification.verdict import Check, Trial, Verdict, find_verdict, method_digest, verdict_problem
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

QCFUSE = make_method("qcfuse", ratio=0.1, base=FRAMED)
AUTO = make_method("auto")


def trial(ratio: float | None, value: float = 0.5) -> Trial:
    """Return a made-up trial, which passes with a value of at most 1."""
    checks = (Check("kl", value, 1.0, False, "made up"), Check("identical", 0.0, None, True, "made up"))
    return Trial(ratio, checks)


def verdict(engine: FusionEngine, method: Method, *tried: Trial) -> Verdict:
    """Return a made-up verdict; without trials, the method passed as it is."""
    digest = method_digest(engine.lm, engine.store, method)
    return Verdict(engine.lm.fingerprint.digest, digest, method.name, "2026-01-01", tried or (trial(method.ratio),))


@pytest.fixture
def kept(llama: LanguageModel, tmp_path: Path) -> Iterator[FusionEngine]:
    """Return an engine over a store in a folder."""
    with make_engine(llama, DiskStore(tmp_path)) as engine:
        yield engine


def write_profile(engine: FusionEngine, folder: Path) -> None:
    """Write a profile whose critical layer is the first."""
    profile = {
        "format": FORMAT,
        "model": "tiny",
        "fingerprint": engine.lm.fingerprint.fields(),
        "layers": [0],
        "recall": [0.1] * engine.lm.n_layers,
    }
    (folder / PROFILE_FILE).write_text(json.dumps(profile))


def test_a_verdict_is_found_again_by_model_method_and_kv_dtype(kept: FusionEngine, tmp_path: Path) -> None:
    saved = verdict(kept, QCFUSE)
    path = saved.save(str(tmp_path))
    assert json.loads(path.read_text())["passed"] is True
    assert path.stat().st_mode & 0o077 == 0
    assert find_verdict(kept.lm, kept.store, QCFUSE) == saved
    assert find_verdict(kept.lm, kept.store, make_method("qcfuse", ratio=0.2, base=FRAMED)) is None
    other = replace(kept.lm, fingerprint=replace(kept.lm.fingerprint, dtype="bfloat16"))
    assert find_verdict(other, kept.store, QCFUSE) is None
    write_profile(kept, tmp_path)
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None
    (tmp_path / PROFILE_FILE).unlink()
    kept.store.kv_dtype = "int8"
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None


def test_a_verdict_of_the_package_counts_where_the_store_has_none(
    kept: FusionEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same weights, method and number format as any other, also for a store without a folder."""
    monkeypatch.setattr(verdict_module, "PACKAGED", tmp_path / "package")
    packaged = verdict(kept, AUTO, trial(0.3))
    packaged.save(tmp_path / "package")
    assert find_verdict(kept.lm, kept.store, AUTO) == packaged
    assert find_verdict(kept.lm, MemoryStore(kv_dtype=kept.store.kv_dtype), AUTO) == packaged
    assert require_verdict(kept.lm, kept.store, make_method("auto", ratio=0.3), "require") == packaged
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None
    own = verdict(kept, AUTO, trial(0.2, 2.0))
    own.save(tmp_path)
    assert find_verdict(kept.lm, kept.store, AUTO) == own, "though it did not pass"


def test_a_check_passes_at_its_limit_whatever_is_rounded() -> None:
    lost = 0.55 - 0.45
    assert lost > 0.1
    assert Check("multi-hop", lost, 0.1, False, "made up").passed
    assert not Check("multi-hop", 0.55 - 0.425, 0.1, False, "made up").passed


@pytest.mark.parametrize("change", ["{", {"version": 1}, {"tried": []}, {"tried": 3}, {"tried": [{"label": 1}]}])
def test_a_damaged_verdict_one_of_another_version_or_on_nothing_is_none(
    kept: FusionEngine, tmp_path: Path, change: str | dict[str, object]
) -> None:
    path = verdict(kept, QCFUSE).save(tmp_path)
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    assert find_verdict(kept.lm, kept.store, QCFUSE) is None


def test_a_guard_and_a_profile_that_is_not_read_leave_the_verdict(kept: FusionEngine, tmp_path: Path) -> None:
    saved = verdict(kept, AUTO)
    saved.save(tmp_path)
    assert find_verdict(kept.lm, kept.store, make_method("auto", guard=False)) == saved
    write_profile(kept, tmp_path)
    assert find_verdict(kept.lm, kept.store, AUTO) == saved


# --- the ratio


def test_the_first_ratio_that_passed_is_recommended(kept: FusionEngine) -> None:
    result = verdict(kept, AUTO, trial(0.05, 2.0), trial(0.15), trial(0.3))
    assert (result.passed, result.ratio) == (True, 0.15)
    assert result.recommendation == "auto passes at ratio 0.15 (the smallest of those tried that passes)"
    plain = result.to_dict()
    assert (plain["version"], plain["passed"], plain["ratio"]) == (4, True, 0.15)
    assert [(each["ratio"], each["passed"]) for each in plain["tried"]] == [(0.05, False), (0.15, True), (0.3, True)]
    figures = {"value": 2.0, "limit": 1.0, "at_least": False, "passed": False}
    assert plain["tried"][0]["checks"][0] == {"name": "kl", "detail": "made up", **figures}


def test_where_no_ratio_passes_the_verdict_says_what_to_do(kept: FusionEngine) -> None:
    result = verdict(kept, AUTO, trial(0.05, 2.0), trial(0.5, 2.0))
    assert (result.passed, result.ratio, result.to_dict()["ratio"]) == (False, None, None)
    assert result.recommendation == (
        "auto passes at none of the ratios tried; at ratio 0.5 it fails: kl; "
        "verify a ratio above 0.5 (`qcfuse verify --ratio`), or use method `full`"
    )
    alone = verdict(kept, make_method("reuse"), trial(0.0, 2.0))
    assert alone.recommendation == "reuse does not pass at ratio 0: kl; use method `full`"


def test_a_method_that_leaves_its_ratio_to_the_verdict_takes_it(kept: FusionEngine) -> None:
    result = verdict(kept, AUTO, trial(0.05, 2.0), trial(0.1))
    assert AUTO.budget == VerifiedRatio(DEFAULT_RATIO)
    assert result.applied(AUTO) == make_method("auto", ratio=0.1)
    fixed = make_method("auto", ratio=0.4)
    assert result.applied(fixed) is fixed
    failed = verdict(kept, AUTO, trial(0.5, 2.0))
    assert failed.applied(AUTO) is AUTO


def test_an_open_ratio_does_not_count_in_the_digest_and_a_fixed_one_does(kept: FusionEngine) -> None:
    def digest(method: Method) -> str:
        return method_digest(kept.lm, kept.store, method)

    assert digest(AUTO) == digest(replace(AUTO, budget=VerifiedRatio(0.3)))
    fixed = [digest(replace(AUTO, budget=FixedRatio(ratio))) for ratio in (0.0, 0.05, 0.3)]
    assert len({digest(AUTO), *fixed}) == 4


@pytest.mark.parametrize(
    ("ratio", "problem"),
    [
        (None, None),
        (0.15, None),
        (0.4, "auto has not been verified on this model at ratio 0.4; use ratio 0.15, which passed"),
        (0.1, "auto was verified on this model and did not pass at ratio 0.1: kl; use ratio 0.15, which passed"),
        (0.12, "auto has not been verified on this model at ratio 0.12; use ratio 0.15, which passed"),
    ],
)
def test_a_fixed_ratio_passes_if_it_is_one_that_was_tried_and_passed(
    kept: FusionEngine, tmp_path: Path, ratio: float | None, problem: str | None
) -> None:
    verdict(kept, AUTO, trial(0.1, 2.0), trial(0.15)).save(tmp_path)
    method = make_method("auto", ratio=ratio)
    said = verdict_problem(find_verdict(kept.lm, kept.store, method), method)
    assert said is None if problem is None else said is not None and problem in said


@pytest.mark.parametrize("open_ratio", [(), (trial(0.15, 2.0), trial(0.3)), (trial(0.2),)])
def test_the_verdict_on_the_fixed_ratio_itself_counts_before_that_on_the_open_ratio(
    kept: FusionEngine, tmp_path: Path, open_ratio: tuple[Trial, ...]
) -> None:
    if open_ratio:
        verdict(kept, AUTO, *open_ratio).save(tmp_path)
    method = make_method("auto", ratio=0.2)
    for value, problem in ((0.5, "None"), (2.0, "at ratio 0.2: kl; verify a ratio above 0.2")):
        verdict(kept, method, trial(0.2, value)).save(tmp_path)
        assert problem in str(verdict_problem(find_verdict(kept.lm, kept.store, method), method))
    assert (find_verdict(kept.lm, kept.store, AUTO) is None) == (not open_ratio), "it chooses none for the method"


@pytest.mark.parametrize(("plain", "ratio"), [(0.1, 0.15), (2.0, None)], ids=["passed without", "failed without"])
def test_of_an_old_verdict_the_trials_that_can_be_run_count(
    kept: FusionEngine, tmp_path: Path, plain: float, ratio: float | None
) -> None:
    """Earlier versions added biases to scores, and recommended them where they diverged less."""
    path = verdict(kept, AUTO, trial(0.15, plain)).save(tmp_path)
    saved = json.loads(path.read_text())
    biased = trial(0.15, 0.01).to_dict() | {"calibration": {"biases": [[0.5]], "prefix": "p"}}
    saved["tried"] = [saved["tried"][0] | {"calibration": None}, biased]
    path.write_text(json.dumps(saved))
    found = find_verdict(kept.lm, kept.store, AUTO)
    assert found is not None
    assert found.ratio == ratio
    assert (verdict_problem(found, AUTO) is None) == (ratio is not None)


def test_residuals_that_passed_are_used_at_their_ratio(kept: FusionEngine) -> None:
    moved = replace(trial(0.15, 0.1), residuals=True)
    result = verdict(kept, AUTO, trial(0.15, 2.0), moved)
    assert result.applied(AUTO) == make_method("auto", ratio=0.15, residuals=True)
    assert result.applied(make_method("auto", ratio=0.15)).residuals is not None
    assert result.applied(make_method("auto", ratio=0.2)).residuals is None
    assert result.covers(AUTO)
    assert Trial.from_dict(json.loads(json.dumps(moved.to_dict()))) == moved
    failed = verdict(kept, AUTO, trial(0.15, 0.1), replace(trial(0.15, 2.0), residuals=True))
    assert not failed.covers(make_method("auto", ratio=0.15, residuals=True)), "they were tried and failed"


def test_a_gpu_takes_from_a_verdict_only_what_it_can_run(
    kept: FusionEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict(kept, AUTO, trial(0.1, 2.0), replace(trial(0.1, 0.1), residuals=True), trial(0.15, 0.2)).save(tmp_path)
    on_a_cpu = find_verdict(kept.lm, kept.store, AUTO)
    assert on_a_cpu is not None
    assert on_a_cpu.ratio == 0.1
    monkeypatch.setattr(LanguageModel, "device", torch.device("cuda"))
    on_a_gpu = find_verdict(kept.lm, kept.store, AUTO)
    assert on_a_gpu is not None
    assert on_a_gpu.applied(AUTO) == make_method("auto", ratio=0.15)


# --- use


def test_without_a_passing_verdict_there_is_a_warning_or_a_refusal(kept: FusionEngine, tmp_path: Path) -> None:
    subject = (kept.lm, kept.store)
    with pytest.warns(UnverifiedMethod, match="qcfuse has not been verified on this model; `qcfuse verify --quick"):
        require_verdict(*subject, QCFUSE, "warn")
    with pytest.raises(Unverified, match="has not been verified"):
        require_verdict(*subject, QCFUSE, "require")
    verdict(kept, QCFUSE, trial(0.1, 2.0)).save(tmp_path)
    with pytest.raises(Unverified, match=r"did not pass at ratio 0\.1: kl; verify a ratio above 0\.1"):
        require_verdict(*subject, QCFUSE, "require")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require_verdict(*subject, QCFUSE, "ignore") is not None
        verdict(kept, QCFUSE).save(tmp_path)
        assert require_verdict(*subject, QCFUSE, "require") is not None
        require_verdict(*subject, make_method("full"), "require")


def test_loading_an_engine_looks_for_the_verdict(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(Unverified, match="`qcfuse verify --quick"):
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


def test_a_loaded_engine_computes_at_the_recommended_ratio(model_folder: str, tmp_path: Path) -> None:
    with FusionEngine.load(model_folder, store=tmp_path, verdict="ignore") as engine:
        verdict(engine, AUTO, trial(0.05, 2.0)).save(tmp_path)
    with pytest.warns(UnverifiedMethod, match=r"did not pass at ratio 0\.05: kl; verify a ratio above 0\.05"):
        engine = FusionEngine.load(model_folder, store=tmp_path)
    with engine:
        assert engine.method == AUTO
        verdict(engine, AUTO, trial(0.05, 2.0), trial(0.3)).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = FusionEngine.load(model_folder, store=tmp_path, verdict="require")
    with engine:
        engine.warm(PASSAGES)
        report = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=engine.method.unguarded).report
    assert engine.method == make_method("auto", ratio=0.3)
    assert report.ratio == 0.3
    assert report.selected
