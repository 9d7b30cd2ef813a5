"""What set-ups of users reuse, on a tiny model: the short form of `python -m benchmarks reuse`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.reuse import EACH, SET_UPS, report
from benchmarks.reuse.recording import RUN_WORDS, RecordingEngine, Setting, SetUp
from benchmarks.runner import Run
from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.bundled import corpus
from tests.support.cases import cases
from tests.support.cli import Run as Command
from tests.support.families import build_model, build_tokenizer

GUARDED = "machine under load, with the guard"
"""Of a tiny model on any machine, the guard may refuse what it likes."""
SHORT = (
    "LlamaIndex: query engine",
    "LlamaIndex: refine",
    "LlamaIndex: CitationQueryEngine",
    "LlamaIndex: structured answer",
    "LangChain: LCEL",
    "LangChain: ParentDocumentRetriever",
    "LangChain: agent with middleware",
    "LangChain: agent with a retriever tool",
    "client: Open WebUI, ftfy",
    "client: --retrieve",
    "restart",
    "update of transformers",
    "both frameworks on one store",
    "middle of a passage",
    "one word changed",
    "another header",
    "Chinese",
    "Japanese",
)
TEXTS = {name: text[:600] for name, text in [*corpus().items()][:4]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tiny model, which another process can load."""
    folder = str(tmp_path_factory.mktemp("model"))
    build_model("llama", max_position_embeddings=8192).save_pretrained(folder)
    build_tokenizer(TEXTS.values).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lm(model: str) -> LanguageModel:
    return LanguageModel.load(model, device="cpu", dtype="float32", weights="model")


@pytest.fixture
def setting(lm: LanguageModel, tmp_path: Path) -> Setting:
    return Setting(lm, TEXTS, "Who keeps the key?", tmp_path)


@contextmanager
def asked(engine: RecordingEngine, text: str) -> Iterator[RecordingEngine]:
    engine.prefill(engine.prompt_from_text([("user", text)]))
    with engine:
        yield engine


@pytest.mark.parametrize("set_up", cases({name: set_up for name, set_up in SET_UPS.items() if name != GUARDED}, *SHORT))
def test_a_set_up_reuses_what_it_has_warmed_and_changes_nothing_else(set_up: SetUp, setting: Setting) -> None:
    with set_up(setting) as engine:
        record = engine.reuse()
    assert record["prompts"] > 0
    assert (record["ids"], record["answers"]) == (True, True)
    assert record["recognised"] >= EACH * record["warmed"], record["reasons"]
    assert not engine.notes


def test_there_are_at_least_24_set_ups() -> None:
    assert len(SET_UPS) >= 24


def test_warmed_text_counts_however_it_is_cut_and_other_text_does_not(setting: Setting) -> None:
    passage = "The ferry leaves at \uff17 from the north pier; its captain\u2019s name is Orla, and she is never late."
    engine = setting.engine()
    engine.warm([passage])
    words = passage.replace("\uff17", "7").split()
    with asked(engine, f"Is it so? {' '.join(words[2:12])} Who says so, and why?"):
        [(prompt, _)] = engine.seen
        shown = sorted(engine.warmed_positions(prompt))
    text = engine.lm.tokenizer.decode([prompt.ids[position] for position in shown])
    assert text.split() == words[2:12]
    with asked(setting.engine(), passage) as unwarmed:
        assert unwarmed.reuse()["prompts"] == 0


def test_fewer_words_in_a_row_are_chance(setting: Setting) -> None:
    engine = setting.engine()
    engine.warm([TEXTS["01-vellmar-sound.md"]])
    few = " ".join(TEXTS["01-vellmar-sound.md"].split()[: RUN_WORDS - 1])
    with asked(engine, few):
        assert engine.reuse()["prompts"] == 0


def test_ids_that_are_not_full_prefills_are_told(lm: LanguageModel) -> None:
    run, right = Run("reuse"), {"prompts": 1, "warmed": 100, "recognised": 79, "reasons": []}
    run.records = {("set-up", "one"): {**right, "ids": True, "answers": False}}
    found = report(run)
    assert found.tables[0].rows == [["one", "100", "79%", "answers", "none given"]]
    assert (found.summary["least"], found.summary["reached"]) == (0.79, 0)
    with RecordingEngine(lm, MemoryStore()) as engine:
        prompt = engine.prompt("Who?", ["The ferry leaves at seven."])
        assert engine.has_right_ids(prompt)
        engine._again[prompt.ids] = lambda other: other.prompt("Why?")
        assert not engine.has_right_ids(prompt)


@pytest.mark.slow
def test_the_command_measures_some_set_ups(run: Command, model: str) -> None:
    code, out, _ = run("reuse", "--model", model, "--only", "restart", "--characters", "400", "--json", "-")
    result = json.loads(out)
    assert (code, result["set_ups"], result["least"]) == (0, 1, 1.0)
    assert [record["key"] for record in result["records"]] == [["set-up", "restart"]]
