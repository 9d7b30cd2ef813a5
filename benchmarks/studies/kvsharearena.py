"""Frozen questions of KVShareArena: the share of full prefill's gain that each method recovers, and its cost.

Source of questions, prompts and measures: github.com/xishi404/KVShareArena, `docs/benchmark.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.quality.arena_score import gap_recovered, paired_difference
from benchmarks.quality.configurations import (
    FULL,
    NO_PASSAGES,
    Configuration,
    Key,
    configurations,
    split_names,
)
from benchmarks.quality.metrics import token_f1
from benchmarks.quality.offline import prepare
from benchmarks.quality.summary import format_interval
from benchmarks.quality.tables import markdown_table
from benchmarks.samples import Example
from benchmarks.studies.arena_files import Wording, read_questions, read_wording
from benchmarks.studies.runner import StudyResult, StudyRun
from qcfuse_rag.bundled import default_model
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import PromptTooLong, QCFuseError
from qcfuse_rag.fusion.method import IN_FULL
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.prompts.chat_template import ChatTemplate
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.verification.exactness import check_exact

METHODS = "reuse[base=blind],auto"
"""Position-only reuse, the arena's reference, and the default method."""

NO_THINKING = {"enable_thinking": False}
COLUMNS = (
    "method", "base", "ratio", "F1", "PGR", "95 %", "F1 - reference", "recomputed", "work", "time of full", "in full",
)  # fmt: skip

Record = dict[str, Any]


def kvsharearena(
    run: StudyRun,
    questions: Path,
    model: str | None = None,
    size: int = 100,
    methods: str = METHODS,
    most_tokens: int | None = None,
    assets: Path | None = None,
) -> StudyResult:
    """Answer the frozen questions of KVShareArena and report the performance gap recovered (PGR).

    QUESTIONS is a file of its data/queryset, such as hotpotqa_n100.jsonl or agent_reports/hotpotqa_notes.jsonl. The
    wording comes from --assets, by default kvsharearena/assets of the same checkout. The first --size questions of at
    most --most-tokens prompt tokens are answered greedily without passages (the arena's floor), with full prefill, and
    with each of --methods. The first of them is the reference of differences. PGR = (method - floor) / (full - floor),
    of mean word F1; intervals are the arena's paired bootstrap over questions. The table also has the share of passage
    tokens that are computed (recomputed), the computed rows of all layers over full prefill's (work), the median of the
    paired ratios of times to first token with ready caches (time of full), and the number of questions that a method
    computed in full.
    """
    arena = read_questions(questions)
    checkout = questions.resolve().parents[2 if arena.track == "re" else 3]
    wording = read_wording(assets or checkout / "kvsharearena" / "assets", arena.subset)
    chosen = configurations(split_names(methods))
    records: list[Record] = []
    with load_arena_engine(model, wording) as engine:
        asked = [*islice(_fitting(engine, arena.examples, wording.max_new_tokens, most_tokens), size)]
        if not asked:
            raise QCFuseError("no question is short enough; raise --most-tokens or take a model with a longer window")
        about = {
            "subset": arena.subset, "track": arena.track, "sha256": arena.sha256, "checksum_checked": arena.checked,
            "model": Path(engine.lm.name).name, "device": str(engine.lm.device), "in_file": len(arena.examples),
            "questions": len(asked), "most_tokens": most_tokens, "left_out": asked[-1].position + 1 - len(asked),
        }  # fmt: skip
        for turn, question in enumerate(run.track(asked)):
            prepare(engine, chosen, question.example.passages)
            if turn == 0:  # the first passes of a process are slower
                answer(engine, question, chosen, wording.max_new_tokens)
            shift = turn % len(chosen)
            records += answer(engine, question, chosen[shift:] + chosen[:shift], wording.max_new_tokens)
            engine.store.clear()
            run.keep({"arena": about, "records": records})
    summary = summarize(records, [configuration.key for configuration in chosen])
    counts = f"{len(asked)} of {len(arena.examples)} questions, {about['left_out']} left out as too long"
    checksum = "right" if arena.checked else "not checked"
    title = f"{arena.subset} ({arena.track}): {counts}, checksum {checksum}, {about['model']}\n"
    return StudyResult(
        {"arena": about, "summary": summary, "records": records}, [title, markdown_table(COLUMNS, map(_cells, summary))]
    )


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question to be answered, with its prompt and its position in the file, from 0."""

    position: int
    example: Example
    prompt: Prompt


def load_arena_engine(model: str | None, wording: Wording) -> FusionEngine:
    """Load a model, SmolLM2-135M by default, with the arena's wording and over a store in memory.

    Where the chat template can switch thinking off it is switched off, as the arena does for Qwen3.
    """
    lm = LanguageModel.load(model or default_model())
    check_exact(lm)
    switches = NO_THINKING if NO_THINKING.keys() <= ChatTemplate(lm.tokenizer).variables else {}
    template = replace(wording.template, chat_template_kwargs=switches)
    return FusionEngine(lm, MemoryStore(UNLIMITED), template=template)


def _fitting(
    engine: FusionEngine, examples: Sequence[Example], answer_tokens: int, most_tokens: int | None
) -> Iterator[AskedQuestion]:
    """Yield the questions whose prompts are short enough for the limit and, with an answer, for the model's window."""
    limit = engine.lm.context_window.tokens - answer_tokens
    if most_tokens is not None:
        limit = min(limit, most_tokens)
    for position, example in enumerate(examples):
        with suppress(PromptTooLong):
            prompt = engine.prompt(example.question, example.passages)
            if len(prompt) <= limit:
                yield AskedQuestion(position, example, prompt)


def answer(
    engine: FusionEngine, question: AskedQuestion, chosen: Sequence[Configuration], max_new_tokens: int
) -> list[Record]:
    """Answer a question without passages and with each configuration; one record for each.

    The prompt without passages has the same wording around an empty context.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    records: list[Record] = []
    bare = engine.prompt(question.example.question)
    for side in (NO_PASSAGES, *chosen):
        generation = engine.generate(bare if side == NO_PASSAGES else question.prompt, params, method=side.method)
        report = generation.report
        record = {
            "id": question.example.id,
            "method": side.label,
            "base": side.base,
            "ratio": side.ratio,
            "answer": generation.text,
            "f1": token_f1(generation.text, question.example.answers),
            "answer_tokens": len(generation.ids),
            "prompt_tokens": report.prompt_tokens,
            "context_tokens": report.context_tokens,
            "recomputed_tokens": recomputed_tokens(report),
            "row_layers": report.row_layers,
            "full_row_layers": report.prompt_tokens * report.n_layers,
            "bytes_loaded": report.bytes_loaded,
            "ttft_s": report.timings.ttft_s,
            "fallback": report.fallback,
        }
        records.append(record)
    return records


def recomputed_tokens(report: FusionReport) -> int:
    """Return the passage tokens that a prefill computed, because they were chosen or not reused."""
    chunks = [lookup for lookup in report.lookups if lookup.role == "chunk" and lookup.hit]
    kept = sum(lookup.tokens for lookup in chunks)
    chosen = sum(any(c.start <= position < c.start + c.tokens for c in chunks) for position in report.selected)
    return report.context_tokens - kept + chosen


def summarize(records: Sequence[Record], keys: Sequence[Key]) -> list[Record]:
    """Return one line without passages and one for each configuration; full prefill must be the first of them.

    Differences of F1 are to the first configuration behind full prefill.
    """
    groups: dict[Key, dict[str, Record]] = {key: {} for key in (NO_PASSAGES.key, *keys)}
    for record in records:
        groups[record["method"], record["base"], record["ratio"]][record["id"]] = record
    names = [*groups[NO_PASSAGES.key]]
    f1 = {key: [group[name]["f1"] for name in names] for key, group in groups.items()}
    reference = keys[min(1, len(keys) - 1)]
    lines = []
    for (label, base, ratio), group in groups.items():
        key, rows = (label, base, ratio), [*group.values()]
        full_s = [groups[keys[0]][row["id"]]["ttft_s"] for row in rows]
        line = {
            "method": label,
            "base": base,
            "ratio": ratio,
            "n": len(rows),
            "f1": fmean(f1[key]),
            **gap_recovered(f1[key], f1[NO_PASSAGES.key], f1[keys[0]]),
            "minus_reference": paired_difference(f1[key], f1[reference]),
            "recomputed": _share(rows, "recomputed_tokens", "context_tokens") if label != NO_PASSAGES.label else None,
            "work": _share(rows, "row_layers", "full_row_layers") if label != NO_PASSAGES.label else None,
            "time_of_full": median(row["ttft_s"] / full for row, full in zip(rows, full_s, strict=True)),
            "answer_tokens": fmean(row["answer_tokens"] for row in rows),
            "in_full": sum((row["fallback"] or "").startswith(IN_FULL) for row in rows),
        }
        lines.append(line)
    return lines


def _share(rows: Sequence[Record], part: str, whole: str) -> float:
    return float(sum(row[part] for row in rows) / sum(row[whole] for row in rows))


def _cells(line: Record) -> list[str]:
    fixed = line["method"] in (NO_PASSAGES.label, FULL)
    interval = "undefined" if line["pgr_low"] is None else f"{line['pgr_low']:.2f} to {line['pgr_high']:.2f}"
    return [
        line["method"] if line["method"] == NO_PASSAGES.label else f"`{line['method']}`",
        line["base"] or "-",
        "-" if line["ratio"] is None else f"{line['ratio']:g}",
        f"{line['f1']:.3f}",
        "-" if line["pgr"] is None else f"{line['pgr']:.2f}",
        "-" if fixed else interval,
        format_interval(line["minus_reference"]),
        *("-" if line[name] is None else f"{line[name]:.3f}" for name in ("recomputed", "work")),
        f"{line['time_of_full']:.2f}",
        str(line["in_full"]),
    ]
