"""An engine behind a scheduler, as frameworks' objects hold it."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import EngineConfig, FusionEngine, LanguageModel, MemoryStore, SamplingParams, open_store
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.errors import MisplacedSetting
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

FEW = SamplingParams(max_new_tokens=3)


def answer(served: EngineHandle) -> str:
    return served.submit(lambda engine: (engine.prompt(QUESTION, PASSAGES), FEW)).result(60).text


def test_closing_frees_the_model_and_asking_loads_it_again(tokenizer: PreTrainedTokenizerFast) -> None:
    def load() -> FusionEngine:
        return make_engine(LanguageModel.wrap(build_model("llama"), tokenizer), MemoryStore())

    served = EngineHandle(load)
    first = answer(served)
    model = weakref.ref(served.engine.lm)
    served.close()
    gc.collect()
    assert model() is None, "though whoever holds it still does"
    assert answer(served) == first


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_answers_too(llama: LanguageModel, tmp_path: Path, on_disk: bool) -> None:
    """Threads are not there after a fork, and SQLite's connections must not be used."""
    with open_store(tmp_path / "kv" if on_disk else None) as store:
        engine = make_engine(llama, store)
        engine.warm(PASSAGES, sources=["a", "b", "c"])
        served = EngineHandle.wrap(engine)
        expected = answer(served)
        child = os.fork()
        if not child:
            try:
                here = engine.corpus.open_sources()
                same = answer(served) == expected and here.names() == ["a", "b", "c"]
                os._exit(0 if same and here is engine.corpus.open_sources() else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answer(served) == expected
        assert engine.forget("a") > 0
        served.scheduler.close()


def test_what_another_process_forgets_is_gone_from_memory_too(llama: LanguageModel, tmp_path: Path) -> None:
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        serving, elsewhere = make_engine(llama, store), make_engine(llama, other)
        serving.warm(PASSAGES, sources=["a", "b", "c"])
        prompt = serving.prompt(QUESTION, PASSAGES)
        near = store.tiers[0]
        assert all(lookup.hit for lookup in serving.generate(prompt, FEW).report.lookups)
        kept = near.stats()[0].entries
        assert elsewhere.forget("b") > 0
        found = serving.generate(prompt, FEW).report.lookups
        assert [lookup.hit for lookup in found if lookup.role == "chunk"] == [True, False, True]
        assert near.stats()[0].entries < kept
        elsewhere.close()


def test_settings_that_change_too_late_are_an_error(engine: FusionEngine) -> None:
    config = EngineConfig(ratio=0.1)
    served = EngineHandle(lambda: engine, config=config)
    assert served.for_config(replace(config)) is served
    other = EngineConfig(method="full", ratio=0.1)
    assert served.for_config(other).config == other, "another one"
    assert served.engine is engine
    assert served.for_config(config) is served
    with pytest.raises(MisplacedSetting, match="method, ratio changed after the engine was loaded"):
        served.for_config(EngineConfig(method="full", ratio=0.2))


@pytest.mark.parametrize("warmed", [False, True])
def test_a_text_without_passages_is_no_fallback(engine: FusionEngine, warmed: bool) -> None:
    if warmed:
        engine.warm(PASSAGES)
    report = engine.generate(engine.prompt_from_text([("user", "Who are you?")]), FEW).report
    assert (report.fallback, report.context_tokens, report.missing) == (None, 0, ())
