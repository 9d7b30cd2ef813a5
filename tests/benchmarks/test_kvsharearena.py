"""The study over KVShareArena's questions: files, wording, scores, and a run on a tiny model."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.quality.arena_score import gap_recovered, paired_difference
from benchmarks.quality.configurations import Key
from benchmarks.quality.metrics import token_f1
from benchmarks.questions import BadDataset
from benchmarks.studies.arena_files import Wording, read_questions, read_wording
from benchmarks.studies.kvsharearena import kvsharearena, load_arena_engine, summarize
from benchmarks.studies.runner import to_command
from qcfuse_rag import FusionEngine, MemoryStore, PromptTemplate
from tests.support.passages import PASSAGES, QUESTION

ANSWERS = ["the harbour school", "the old mill"]
PASSAGE_ROWS = [
    {"_id": f"q{i}", "input": QUESTION, "answers": ANSWERS, "context": "".join(PASSAGES), "chunks": PASSAGES[: 3 - i]}
    for i in range(3)
]
REPORT_ROWS = [
    {"_id": "q1", "input": QUESTION, "notes": [{"note_text": text, "note_token_ids": [1]} for text in PASSAGES]}
]
USER = 'Read {"these"}.\n\n{context}\n\nQuestion: {input}\nAnswer:'


class Checkout:
    """A folder laid out like the arena's repository, with questions about the harbour."""

    def __init__(self, folder: Path) -> None:
        self.data, self.assets = folder / "data" / "queryset", folder / "kvsharearena" / "assets"
        self.passages = self.data / "harbour_n100.jsonl"
        self.reports = self.data / "agent_reports" / "harbour_notes.jsonl"
        self.reports.parent.mkdir(parents=True)
        self.assets.mkdir(parents=True)
        self.write(self.passages, PASSAGE_ROWS)
        self.write(self.reports, REPORT_ROWS)
        (self.assets / "prompts.json").write_text(json.dumps({"P_c": "Answer {briefly}.", "P_p": "not this one"}))
        config = {"dataset2prompt": {"harbour": USER.replace('{"these"}', "these")}, "dataset2maxlen": {"harbour": 4}}
        (self.assets / "longbench_config.json").write_text(json.dumps(config))

    def write(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def note_checksums(self) -> None:
        files = {path.relative_to(self.data).as_posix(): path for path in (self.passages, self.reports)}
        sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
        (self.data / "sha256.json").write_text(json.dumps(sums))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_passages_are_the_arenas_chunks_and_reports_get_their_answers_from_the_file_above(checkout: Checkout) -> None:
    arena = read_questions(checkout.passages)
    assert (arena.subset, arena.track, arena.checked) == ("harbour", "re", False)
    assert [example.id for example in arena.examples] == ["q0", "q1", "q2"]
    assert [len(example.passages) for example in arena.examples] == [3, 2, 1]
    assert (arena.examples[0].passages, arena.examples[0].answers) == (tuple(PASSAGES), tuple(ANSWERS))
    reports = read_questions(checkout.reports)
    assert (reports.subset, reports.track) == ("harbour", "ar")
    assert [(e.id, e.passages, e.answers) for e in reports.examples] == [("q1", tuple(PASSAGES), tuple(ANSWERS))]


def test_a_list_of_checksums_confirms_a_file_or_refuses_it(checkout: Checkout) -> None:
    checkout.note_checksums()
    for path in (checkout.passages, checkout.reports):
        arena = read_questions(path)
        assert (arena.checked, arena.sha256) == (True, hashlib.sha256(path.read_bytes()).hexdigest())
    checkout.write(checkout.passages, PASSAGE_ROWS[:2])
    for path in (checkout.passages, checkout.reports):  # the reports' answers come from the changed file
        with pytest.raises(BadDataset, match=r"harbour_n100\.jsonl is not the frozen file"):
            read_questions(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, "line 1: no passages, no answers"),
        ({"chunks": []}, "line 1: no passages, no answers"),
        ({"_id": "q1"}, "line 2: .* an id that is there twice"),
        ({"input": None, "chunks": None}, "line 1: .* is missing or has another type"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(checkout: Checkout, change: dict[str, Any], message: str) -> None:
    checkout.write(checkout.passages, [{**PASSAGE_ROWS[0], **change}, *PASSAGE_ROWS[1:]])
    with pytest.raises(BadDataset, match=message):
        read_questions(checkout.passages)
    renamed = checkout.data / "harbour.jsonl"
    shutil.copy(checkout.passages, renamed)
    with pytest.raises(BadDataset, match="not named like a file of the arena"):
        read_questions(renamed)


def test_the_prompt_is_the_arenas_with_nothing_between_passages(checkout: Checkout, engine: FusionEngine) -> None:
    wording = read_wording(checkout.assets, "harbour")
    assert wording.max_new_tokens == 4
    template = wording.template
    asked = FusionEngine(engine.lm, MemoryStore(), template=template).prompt(QUESTION, PASSAGES)
    text = "".join(segment.text for segment in asked.segments)
    body = USER.replace('{"these"}', "these").format(context="".join(PASSAGES), input=QUESTION)
    assert text.endswith(f"Answer {{briefly}}.</s>\n<user>\n{body}</s>\n<assistant>\n")
    with pytest.raises(BadDataset, match="the arena's wording for lighthouse is not in"):
        read_wording(checkout.assets, "lighthouse")


def test_word_f1_is_the_arenas() -> None:
    assert token_f1("The band is Orla.", ["Orla"]) == 0.5  # 1 of 3 words, without the article, and 1 of 1
    assert token_f1("2000 Summer Games", ["x", "2000 Summer Olympic Games"]) == pytest.approx(6 / 7)
    assert token_f1("", ["Orla"]) == 0


def test_the_gap_recovered_is_of_means() -> None:
    without_passages, full = [0.0, 0.25, 0.0, 0.25], [1.0, 0.75, 1.0, 0.75]  # means 0.125 and 0.875
    result = gap_recovered([0.5, 0.0, 1.0, 0.5], without_passages, full)
    assert result["pgr"] == pytest.approx((0.5 - 0.125) / 0.75)
    assert result["pgr_undefined"] == 0
    same_everywhere = gap_recovered([0.5] * 4, [0.25] * 4, [1.25] * 4)
    assert [same_everywhere[name] for name in ("pgr", "pgr_low", "pgr_high")] == [0.25] * 3


def test_no_gap_is_no_share_and_an_uncertain_gap_has_no_interval() -> None:
    assert gap_recovered([1.0, 0.0], [0.5, 0.5], [0.5, 0.5])["pgr"] is None
    assert gap_recovered([1.0, 0.0], [0.5, 0.5], [0.0, 0.5])["pgr"] is None
    uncertain = gap_recovered([1.0, 0.0, 0.0], [0.0] * 3, [1.0, 0.0, 0.0])
    assert (uncertain["pgr"], uncertain["pgr_low"], uncertain["pgr_high"]) == (1.0, None, None)
    # Resamples without the first question: (2/3)^3.
    assert uncertain["pgr_undefined"] == pytest.approx(8 / 27, abs=0.02)


def test_the_resamples_are_the_arenas() -> None:
    scores, others = [0.91, 0.2, 0.03, 0.7, 0.4, 0.55, 0.18, 0.83], [0.5, 0.31, 0.0, 0.17, 0.9, 0.21, 0.6, 0.37]
    differences = [score - other for score, other in zip(scores, others, strict=True)]
    generator = random.Random(20260730)
    means = sorted(sum(differences[generator.randrange(8)] for _ in range(8)) / 8 for _ in range(10_000))
    result = paired_difference(scores, others)
    assert [result["low"], result["high"]] == pytest.approx([means[249], means[9749]])
    assert result["mean"] == pytest.approx(sum(differences) / 8)


def test_the_summary_compares_with_the_first_method_and_divides_sums_by_sums() -> None:
    keys: list[Key] = [("full", None, 1.0), ("reuse", "blind", 0.0), ("auto", "primed", 0.05)]
    f1 = {"no passages": (0.0, 0.0), "full": (1.0, 0.5), "reuse": (0.5, 0.0), "auto": (0.5, 0.4)}
    records = [
        {
            **{"id": str(i), "method": label, "base": base, "ratio": ratio, "f1": f1[label][i], "answer_tokens": 3},
            **{"recomputed_tokens": 10 * i, "context_tokens": 50 + 100 * i, "row_layers": 10, "full_row_layers": 40},
            **{"ttft_s": 4.0 if label == "full" else 1.0 + i, "fallback": "computed in full, x" if i else "2 missing"},
        }
        for label, base, ratio in [("no passages", None, None), *keys]
        for i in range(2)
    ]
    without_passages, full, reuse, auto = summarize(records, keys)
    assert [line["pgr"] for line in (without_passages, full, reuse, auto)] == pytest.approx(
        [0, 1, 0.25 / 0.75, 0.45 / 0.75]
    )
    assert (reuse["minus_reference"]["mean"], auto["minus_reference"]["mean"]) == pytest.approx((0, 0.2))
    assert (auto["recomputed"], auto["work"]) == pytest.approx((10 / 200, 0.25))
    assert (auto["time_of_full"], auto["in_full"], auto["n"], auto["answer_tokens"]) == (0.375, 1, 2, 3)


def test_every_side_answers_every_question_that_is_short_enough(checkout: Checkout, model_folder: str) -> None:
    checkout.note_checksums()
    out = checkout.data / "result.json"
    app = typer.Typer()
    app.command()(to_command(kvsharearena))
    arguments = [checkout.passages, "--model", model_folder, "--methods", "reuse[base=blind],qcfuse[ratio=0.5]"]
    limit = _prompt_lengths(checkout, model_folder)
    assert limit[0] > limit[1] > limit[2]
    arguments += ["--json", out, "--most-tokens", limit[1]]
    shown = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert shown.exit_code == 0, shown.output
    assert "harbour (re): 2 of 3 questions, 1 left out as too long, checksum right" in shown.output
    result = json.loads(out.read_text())
    sides = ["no passages", "full", "reuse[base=blind]", "qcfuse[ratio=0.5]"]
    assert sorted((r["id"], r["method"]) for r in result["records"]) == sorted(
        (name, side) for name in ("q1", "q2") for side in sides
    )
    assert [line["method"] for line in result["summary"]] == sides
    without_passages, full, reuse, fused = result["summary"]
    assert (without_passages["recomputed"], full["recomputed"], reuse["recomputed"]) == (None, 1.0, 0.0)
    # Half of the passages' tokens, of the exact first one none: q1 has two passages, q2 one.
    assert 0 < fused["recomputed"] < 0.5
    assert reuse["work"] < fused["work"] < full["work"] == 1
    assert reuse["minus_reference"] == {"mean": 0, "low": 0, "high": 0}
    assert all(record["f1"] == token_f1(record["answer"], ANSWERS) for record in result["records"])
    assert all(1 <= record["answer_tokens"] <= 4 for record in result["records"])
    lengths = {(record["id"], record["method"]): record["prompt_tokens"] for record in result["records"]}
    assert lengths["q1", "full"] == lengths["q1", "reuse[base=blind]"] == limit[1]
    assert lengths["q1", "no passages"] == lengths["q2", "no passages"] < lengths["q2", "full"] == limit[2]


def test_nothing_short_enough_is_an_error(checkout: Checkout, model_folder: str) -> None:
    app = typer.Typer()
    app.command()(to_command(kvsharearena))
    stopped = CliRunner().invoke(app, [str(checkout.passages), "--model", model_folder, "--most-tokens", "5"])
    assert "no question is short enough" in str(stopped.exception)


def test_thinking_is_switched_off_where_the_chat_template_can(tmp_path: Path, model_folder: str) -> None:
    folder = tmp_path / "thinking"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template_file = folder / "chat_template.jinja"
    switch = "{%- if enable_thinking is defined and enable_thinking is false %}[no thoughts]{%- endif %}"
    if template_file.exists():
        template_file.write_text(template_file.read_text() + switch)
    else:
        config["chat_template"] += switch
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    wording = Wording(PromptTemplate(), 4)
    texts = []
    for model in (str(folder), model_folder):
        with load_arena_engine(model, wording) as engine:
            texts.append("".join(segment.text for segment in engine.prompt(QUESTION, PASSAGES).segments))
    assert texts[0] == texts[1] + "[no thoughts]"


def _prompt_lengths(checkout: Checkout, model: str) -> list[int]:
    wording = read_wording(checkout.assets, "harbour")
    with load_arena_engine(model, wording) as engine:
        return [len(engine.prompt(QUESTION, row["chunks"])) for row in PASSAGE_ROWS]
