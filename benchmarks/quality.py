"""Answer quality: methods beside full prefill on the same questions and token ids, along full prefill's answer."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from typer import Option

from benchmarks.configurations import (
    FULL,
    NO_PASSAGES,
    RANDOM,
    Configuration,
    configurations,
    method_name,
    plain_base,
    split_names,
)
from benchmarks.options import Methods, ModelOptions, Ratios, shares
from benchmarks.preparation import depends_on_neighbours, preparation_of, prepare
from benchmarks.questions import BadDataset, Example, passage_texts, read_dataset, retrieved_examples
from benchmarks.runner import Key, Record, Report, Run, Table, about_model, digest_of_texts, machine_conditions
from benchmarks.scoring import format_interval, gap_recovered, mean_interval, scores
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import IN_FULL
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.methods.qcfuse import critical_layers
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.entry.encryption import environment_cipher
from qcfuse_rag.verification.cases import TASKS, ruler_cases
from qcfuse_rag.verification.divergence import (
    answer_logits,
    answer_text,
    compare_answers,
    compare_greedy_answers,
    greedy_answers,
)

POOLED, AUTO = "all", "auto"
DEMO = "demo"
"""The dataset of the demonstration's questions, each over the documents that MiniLM finds nearest."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    dataset: Annotated[
        list[str],
        Option(
            help="Dataset, or several with commas: files DATASET.jsonl in --data-dir; demo, the demonstration's "
            "questions; or ruler_mv, ruler_mq and ruler_vt, which are generated."
        ),
    ]
    data_dir: Annotated[
        Path,
        Option(
            help="Folder of the datasets; each line is an object with `question`, `passages` (texts, or objects "
            "with `title` and `text`) and `answers` (texts), and perhaps `supporting` (indices of the passages with "
            "the answer) and `id`. The layouts of LongBench and of the QCFuse release are read too."
        ),
    ] = Path(".")
    methods: Methods = "auto"
    ratios: Ratios = ""
    bases: Annotated[
        str, Option(help="Stored caches: blind, framed, primed, begun, enriched; by default each method's own.")
    ] = ""
    size: Annotated[int, Option(min=1, help="Questions of each dataset.")] = 100
    distractors: Annotated[int | None, Option(min=0, help="Passages beside those with the answer; all by default.")] = (
        None
    )
    top_k: Annotated[
        int | None, Option(min=1, help="Number of first passages to keep; all by default, of demo's documents 8.")
    ] = None
    seed: Annotated[int, Option(help="Seed of generated tasks and of intervals.")] = 0
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens of an answer; by default 32, in RULER tasks their own.")
    ] = None
    ruler_tokens: Annotated[int, Option(min=64, help="Length of generated tasks.")] = 2048
    group: Annotated[int, Option(min=1, help="Number of questions whose passages are in memory together.")] = 20
    store: Annotated[Path | None, Option(help="Folder to keep passages in; memory by default.")] = None

    def configurations(self) -> list[Configuration]:
        """Return full prefill, the question alone, and the methods."""
        full, *methods = configurations(split_names(self.methods), shares(self.ratios), split_names(self.bases))
        return [full, NO_PASSAGES, *methods]


def measure(options: Options, run: Run) -> None:
    """Answer every question with full prefill, without passages and with each method, and compare the answers."""
    datasets = split_names(",".join(options.dataset))
    chosen = options.configurations()
    if not datasets:
        raise QCFuseError("name a dataset, or several with commas")
    for name in datasets:
        if name in TASKS and options.top_k is not None and not (options.data_dir / f"{name}.jsonl").exists():
            raise QCFuseError(f"--top-k would cut away part of what {name} hides; its length is --ruler-tokens")
    store = MemoryStore(UNLIMITED) if options.store is None else DiskStore(options.store, cipher=environment_cipher())
    with store, options.load_engine(store) as engine:
        examples, sources = _read_examples(options, datasets, engine)
        if options.distractors is not None:
            unlabelled = sum(not example.supporting and example.dataset not in TASKS for example in examples)
            if unlabelled:
                run.notes.append(f"{unlabelled} questions do not say which passages hold the answer; they keep all")
        conditions = {
            **machine_conditions(engine.lm),
            "critical_layers": critical_layers(engine.lm, engine.store.folder),
            "datasets": sources,
            **{name: getattr(options, name) for name in ("distractors", "top_k", "seed", "max_new_tokens")},
            "group": options.group if options.store is None else None,
        }
        run.begin(about_model(engine.lm), conditions)
        _ask(engine, examples, chosen, options, run)
        if not run.records:
            raise QCFuseError("; ".join(["no question could be measured", *run.notes]))


def _read_examples(
    options: Options, datasets: Sequence[str], engine: FusionEngine
) -> tuple[list[Example], dict[str, str]]:
    """Read or generate the questions of all datasets; return them and a digest of each dataset's source."""
    examples: list[Example] = []
    sources: dict[str, str] = {}
    for name in dict.fromkeys(datasets):
        path = options.data_dir / f"{name}.jsonl"
        if path.exists():
            dataset = [replace(example, dataset=name) for example in read_dataset(path, size=options.size)]
            sources[name] = digest(path.read_bytes())
            if options.distractors is not None:
                # Which passages hold the answer is not guessed: a question of two steps would lose the first.
                dataset = [
                    example.with_distractors(options.distractors) if example.supporting else example
                    for example in dataset
                ]
        elif name == DEMO:
            dataset = retrieved_examples(options.top_k or 8)[: options.size]
            sources[name] = "bundled"
        elif name in TASKS:
            haystack = list(dict.fromkeys(passage_texts(options.data_dir))) or list(corpus().values())
            cases = ruler_cases(engine, name, options.size, options.ruler_tokens, haystack, options.seed)
            dataset = [
                Example(case.question, case.passages, case.expected, (), str(number), name, True, case.max_new_tokens)
                for number, case in enumerate(cases)
            ]
            sources[name] = f"generated {options.ruler_tokens} {digest_of_texts(haystack)}"
        else:
            available = ", ".join(sorted(file.stem for file in options.data_dir.glob("*.jsonl"))) or "none"
            raise BadDataset(
                f"there is no dataset {name!r} in {options.data_dir}; there are {available}, "
                f"and {DEMO}, {', '.join(TASKS)}"
            )
        if options.top_k is not None:
            dataset = [example.keeping([*range(min(options.top_k, len(example.passages)))]) for example in dataset]
        if options.max_new_tokens is not None:
            dataset = [replace(example, max_new_tokens=options.max_new_tokens) for example in dataset]
        examples += dataset
    return examples, sources


def _ask(
    engine: FusionEngine, examples: Sequence[Example], chosen: list[Configuration], options: Options, run: Run
) -> None:
    """Add a record for every question and configuration that the run lacks.

    The passages of a group of questions are prepared together; without a folder the store is emptied after them. An
    enriched or captured passage depends on those beside it, so its records have a digest of them in their keys. Full
    prefill runs along with every missing configuration, because divergences and paired times need it.
    """
    group = options.group if options.store is None else len(examples)
    warm = False
    for start in range(0, len(examples), group):
        batch = examples[start : start + group]
        passages = [text for example in batch for text in example.passages]
        beside = digest_of_texts(passages)

        def key(example: Example, side: Configuration, beside: str = beside) -> Key:
            return ("answer", example.dataset, example.id, *side.key, beside if depends_on_neighbours(side) else None)

        todo = [(e, [side for side in chosen if key(e, side) not in run.records]) for e in batch]
        needed = list({side.key: side for _, missing in todo for side in missing}.values())
        for cost in prepare(engine, needed, passages).values() if needed else ():
            run.add(("offline", cost.preparation, beside), asdict(cost))
        limit = engine.lm.context_window.tokens
        for done, (example, missing) in enumerate(todo, start + 1):
            question = PendingQuestion.of(engine, example) if missing else None
            if question is not None and len(question.prompt) + question.answer_tokens > limit:
                run.notes.append(f"{example.dataset} {example.id}: its prompt exceeds {limit:,} tokens")
            elif question is not None:
                others = [side for side in missing if side.label != FULL]
                if not warm:  # the first passes of a process are slower
                    for side in (chosen[0], *others):
                        question.prefill(engine, side)
                    warm = True
                turn = (done - 1) % max(1, len(others))
                full: FullAnswer | None = None
                for side in (chosen[0], *others[turn:], *others[:turn]):
                    record, full = answer(engine, question, side, full)
                    if key(example, side) not in run.records:
                        run.add(key(example, side), record)
            run.progress(done, len(examples))
        if options.store is None:
            engine.store.clear()


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question to run, with the prompts and the gold answer's tokens that all its configurations share."""

    example: Example
    prompt: Prompt
    without_passages: Prompt
    gold: tuple[int, ...]

    @classmethod
    def of(cls, engine: FusionEngine, example: Example) -> PendingQuestion:
        """Make the prompts."""
        prompt, without_passages = engine.prompt(example.question, example.passages), engine.prompt(example.question)
        tokenizer = engine.lm.tokenizer
        # A chat template's answer begins a turn; without one it goes on after "Answer:".
        text = example.gold.strip() if tokenizer.chat_template else f" {example.gold.strip()}"
        gold = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return cls(example, prompt, without_passages, gold)

    @property
    def answer_tokens(self) -> int:
        """Tokens to reserve for the answer, generated or gold."""
        return max(self.example.max_new_tokens, len(self.gold))

    def prefill(self, engine: FusionEngine, side: Configuration) -> Prefilled:
        """Prefill as for a user."""
        prompt = self.without_passages if side == NO_PASSAGES else self.prompt
        return engine.prefill(prompt, method=side.method, answer_tokens=self.answer_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class FullAnswer:
    """Full prefill's greedy answer: its tokens, `[N, vocabulary]` logits before each, and the time to its first."""

    ids: tuple[int, ...]
    logits: Tensor
    ttft_s: float


def answer(
    engine: FusionEngine, question: PendingQuestion, side: Configuration, full: FullAnswer | None
) -> tuple[Record, FullAnswer]:
    """Answer with one configuration; return its record and full prefill's answer, made if it is None."""
    runner, example = engine.runner, question.example
    prefilled = question.prefill(engine, side)
    report, timings = prefilled.report, prefilled.report.timings
    nll = gold_nll(runner, prefilled, question.gold)
    if full is None:
        [(ids, logits)] = greedy_answers(runner, [prefilled], example.max_new_tokens)
        full, compared = FullAnswer(ids, logits, timings.ttft_s), compare_answers(logits, logits)
    else:
        [other] = compare_greedy_answers(runner, [(full.ids, full.logits)], [prefilled], example.max_new_tokens)
        ids, compared = other.ids or (), other.divergence
    text = answer_text(engine.lm, ids)
    needed = preparation_of(side)
    record = {
        "rows": report.rows,
        "context_tokens": report.context_tokens,
        **scores(text, example.answers, needs_all=example.needs_all),
        "nll": nll,
        "kl": compared.first_kl,
        "answer_kl": compared.mean_kl,
        "top1": compared.top1,
        "identical": ids == full.ids,
        "length_ratio": len(ids) / len(full.ids),
        "position_kl": [float(f"{kl:.4g}") for kl in compared.kl],
        "ttft_s": timings.ttft_s,
        "full_ttft_s": full.ttft_s,
        **{name: getattr(timings, name) for name in ("load_s", "probe_s", "select_s", "recompute_s")},
        "bytes_loaded": report.bytes_loaded,
        "row_layers": report.row_layers,
        "fallback": report.fallback,
        "answer": text,
        "preparation": None if needed is None else needed.name,
    }
    return record, full


def gold_nll(runner: ModelRunner, prefilled: Prefilled, gold: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of a gold answer, in nats a token; 0 without tokens."""
    if not gold:
        return 0.0
    logits = answer_logits(runner, prefilled, gold)
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(gold, device=logits.device)))


SCORES = ("f1", "match", "nll")
NEARNESS = ("identical", "answer_kl", "top1", "kl", "length_ratio")  # to full prefill's answer, not the gold answer
MEANS = (*SCORES, *NEARNESS, "rows", "row_layers", "context_tokens", "bytes_loaded")

Group = dict[str, Record]  # records of a configuration by question
Groups = dict[Key, Group]  # by `(dataset, method, base, ratio)`

NARROW = ("method", "base", "ratio", "identical", "KL", "F1", "match", "of full")
LEGEND = (
    "Means over questions; in brackets paired 95 % bootstrap intervals. identical: share of greedy answers that are "
    "full prefill's; KL: nats a token from full prefill along its greedy answer; top-1: share of that answer's tokens "
    "that are predicted; recovered: share of full prefill's gain in F1 (in RULER's tasks: match) over `no passages`, "
    "the question alone; NLL: nats a token of the gold answer; TTFT: median, and median of the paired ratios to full "
    "prefill; selecting: probe and selection as a share of TTFT; random: the control over the same base at the same "
    "ratio."
)


def grouped(run: Run) -> Groups:
    """Return the newest record of each question by configuration; full prefill's come first in each dataset.

    Behind several datasets stand all their questions together, as the dataset `all`.
    """
    groups: Groups = {}
    for (dataset, name, *side, _), record in run.of("answer"):
        groups.setdefault((dataset, *side), {})[str(name)] = record
    datasets = list(dict.fromkeys(key[0] for key in groups))
    if len(datasets) > 1:
        datasets.append(POOLED)
        for (dataset, *side), group in list(groups.items()):
            questions = {f"{dataset} {name}": record for name, record in group.items()}
            groups.setdefault((POOLED, *side), {}).update(questions)
    return {key: groups[key] for key in sorted(groups, key=lambda key: (datasets.index(key[0]), key[1] != FULL))}


def report(run: Run) -> Report:
    """Return a line for each dataset and configuration; see `summarize`."""
    groups = grouped(run)
    seed = int(run.conditions.get("seed", 0))
    lines = []
    for key, group in groups.items():
        needed = {record["preparation"] for record in group.values()}
        lines.append(summarize(key, groups, [cost for (name, _), cost in run.of("offline") if name in needed], seed))
    tables = []
    for dataset in dict.fromkeys(line["dataset"] for line in lines):
        here = [line for line in lines if line["dataset"] == dataset]
        rows = list(map(cells, here))
        zero = here[0]["zero_share"]
        title = f"{dataset}: {here[0]['n']} questions, full prefill scores F1 0 on {zero:.0%} of them"
        tables.append(Table(title, list(rows[0]), [list(row.values()) for row in rows], NARROW))
    return Report({"summary": lines}, tables, [LEGEND, *_on_methods(groups)])


def summarize(key: Key, groups: Groups, offline: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """Return means, median times and paired differences of a configuration, and its cost before questions come.

    Differences are taken question by question. The control of a method is `random` over the same base at the same
    ratio, without other parameters if there is one, else the first with some.
    """
    dataset, method, base, ratio = key
    group, records = groups[key], list(groups[key].values())
    full = groups.get((dataset, FULL, None, 1.0), {})
    quality = quality_score(str(dataset))
    without = groups.get((dataset, *NO_PASSAGES.key), {})
    wanted = (dataset, RANDOM, plain_base(base if base is None else str(base)), ratio)
    controls = [other for other in groups if (other[0], method_name(str(other[1])), *other[2:]) == wanted]
    control = groups.get(wanted) or (groups[controls[0]] if controls else {})
    if method_name(str(method)) in (RANDOM, FULL, NO_PASSAGES.label):
        control = {}
    auto = next((other for at, other in groups.items() if at[:2] == (dataset, AUTO) and at[3] == ratio), {})
    chunks = sum(cost["chunks"] for cost in offline)
    shared = [name for name in group if name in full and name in without]
    sides = [[side[name][quality] for name in shared] for side in (group, without, full)]
    pgr = gap_recovered(sides[0], sides[1], sides[2], seed) if shared else {}
    return {
        **{"dataset": dataset, "method": method, "base": base, "ratio": ratio, "n": len(records)},
        **{name: statistics.fmean(record[name] for record in records) for name in MEANS},
        "intervals": {
            name: mean_interval([r[name] for r in records], seed) for name in ("identical", "answer_kl", "kl")
        },
        "ttft_s": statistics.median(record["ttft_s"] for record in records),
        "ttft_to_full": statistics.median(record["ttft_s"] / record["full_ttft_s"] for record in records),
        "selection_share": statistics.median((r["probe_s"] + r["select_s"]) / r["ttft_s"] for r in records),
        "zero_share": statistics.fmean(record["f1"] == 0 for record in records),
        "minus_full": {name: difference(group, full, name, seed) for name in SCORES},
        "auto_minus_it": difference(auto, group, "answer_kl", seed),
        "minus_random": {name: difference(group, control, name, seed) for name in ("f1", "answer_kl")},
        "recovered": {"mean": pgr.get("pgr"), "low": pgr.get("pgr_low"), "high": pgr.get("pgr_high")},
        "offline_chunks": chunks,
        "offline_s_per_chunk": sum(cost["seconds"] for cost in offline) / chunks if chunks else None,
        "offline_bytes_per_chunk": sum(cost["size_bytes"] for cost in offline) / chunks if chunks else None,
    }


def difference(group: Group, other: Group, name: str, seed: int = 0) -> dict[str, float] | None:
    """Return the mean difference over the questions that both have, with its interval; None without any."""
    shared = [question for question in group if question in other]
    return mean_interval([group[i][name] - other[i][name] for i in shared], seed) if shared else None


def quality_score(dataset: str) -> str:
    """Return the score that says whether a dataset's answers are right: string match for RULER's tasks, else F1."""
    return "match" if dataset.startswith("ruler_") else "f1"


def cells(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a line by column."""
    full, fixed = line["method"] == FULL, line["method"] in (FULL, NO_PASSAGES.label)
    quality = quality_score(line["dataset"])
    name = {"f1": "F1", "match": "match"}[quality]
    recovered, chunk_s, auto = line["recovered"], line["offline_s_per_chunk"], line["auto_minus_it"]
    share = "-" if fixed or recovered["mean"] is None else f"{recovered['mean']:.0%}"
    if share != "-" and recovered["low"] is not None:
        share += f" [{recovered['low']:.0%}, {recovered['high']:.0%}]"

    def minus(differences: Mapping[str, Any], of: str) -> str:
        return "-" if full or differences[of] is None else format_interval(differences[of])

    return {
        "method": line["method"],
        "base": line["base"] or "-",
        "ratio": "-" if line["ratio"] is None else f"{line['ratio']:g}",
        "n": str(line["n"]),
        "identical": "-" if full else f"{line['identical']:.0%}",
        "KL": "-" if full else f"{line['answer_kl']:.3f}",
        "top-1": "-" if full else f"{line['top1']:.0%}",
        name: f"{line[quality]:.3f}",
        f"{name} - full": minus(line["minus_full"], quality),
        "recovered": share,
        "NLL - full": minus(line["minus_full"], "nll"),
        "F1 - random": minus(line["minus_random"], "f1"),
        "KL - random": minus(line["minus_random"], "answer_kl"),
        "KL, auto less it": "-" if auto is None or line["method"] == AUTO else format_interval(auto),
        "TTFT": f"{line['ttft_s']:.3g} s",
        "of full": f"{line['ttft_to_full']:.2f}",
        "selecting": f"{line['selection_share']:.0%}",
        "offline / chunk": "-"
        if chunk_s is None
        else f"{1000 * chunk_s:.3g} ms, {line['offline_bytes_per_chunk'] / 1e6:.3g} MB",
    }


def _on_methods(groups: Groups) -> list[str]:
    """Return notes on answers that a method computed in full, and on inputs that a method lacked."""
    answers, in_full = Counter[str](), Counter[str]()
    for key, group in groups.items():
        answers[str(key[1])] += len(group)
        in_full[str(key[1])] += sum((record["fallback"] or "").startswith(IN_FULL) for record in group.values())
    notes = [
        f"{method}: {count} of {answers[method]} answers were computed in full, because the guard predicted no gain; "
        f"{method_name(method)}[guard=false] measures fused answers"
        for method, count in in_full.items()
        if count
    ]
    if any(method_name(method) == "relaycaching" for method in answers):
        notes.append(
            "relaycaching: it is made for passages that a model generated, and these are not; the result shows only "
            "how it repairs the stored caches of its base"
        )
    return notes
