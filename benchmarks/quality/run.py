"""Run questions: prefill each configuration alone on the same token ids, and compare along full prefill's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.quality.configurations import FULL, NO_PASSAGES, Configuration
from benchmarks.quality.metrics import scores
from benchmarks.quality.offline import NeighbourPool, depends_on_neighbours, prepare
from benchmarks.quality.records import Record, RecordLog, digest_of_passages
from benchmarks.samples import Example
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.verification.divergence import (
    answer_logits,
    answer_text,
    compare_answers,
    compare_greedy_answers,
    greedy_answer,
)

T = TypeVar("T")


@dataclass(slots=True)
class PendingQuestion:
    """A question to run, with the prompts and the gold answer's tokens that all its configurations share.

    `without_passages` is the prompt without passages. `beside` is the digest of the passages prepared together.
    """

    example: Example
    prompt: Prompt
    without_passages: Prompt
    gold: tuple[int, ...]
    beside: str

    @property
    def answer_tokens(self) -> int:
        """Tokens to reserve for the answer, generated or gold."""
        return max(self.example.max_new_tokens, len(self.gold))


def run_questions(
    engine: FusionEngine,
    examples: Sequence[Example],
    chosen: list[Configuration],
    log: RecordLog,
    *,
    group: int | None = None,
    pool: NeighbourPool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Add a record to the log for every question and configuration that it lacks; return why others could not run.

    Records of enriched and captured caches are made again if they were made beside other passages. Full prefill, the
    first configuration, runs along with every missing one, because divergences and paired times need it. If
    `group` is given, the passages of `group` questions are prepared together, and the store is emptied after these
    questions. Neighbours are searched in `pool`, by default among the passages prepared together.
    """
    skipped: list[str] = []
    done, warm = 0, False
    for batch in _groups(examples, group or max(1, len(examples))):
        passages = [text for example in batch for text in example.passages]
        searched = [*pool.texts, str(pool.neighbours)] if pool is not None and pool != NeighbourPool() else []
        beside = digest_of_passages([*passages, *searched])
        todo = [(example, log.missing(example, chosen, beside)) for example in batch]
        needed = list({configuration.key: configuration for _, missing in todo for configuration in missing}.values())
        # All passages of the group are prepared, because an enriched passage depends on the others.
        for cost in prepare(engine, needed, passages, pool).values() if needed else ():
            log.add_offline(cost)
        for example, missing in todo:
            if missing:
                question = _pending(engine, example, beside)
                limit = engine.lm.context_window.tokens
                if len(question.prompt) + question.answer_tokens > limit:
                    skipped.append(f"{example.dataset} {example.id}: its prompt exceeds the window of {limit:,} tokens")
                else:
                    others = [configuration for configuration in missing if configuration.label != FULL]
                    if not warm:  # the first passes of a process are slower
                        for configuration in (chosen[0], *others):
                            _prefill(engine, question, configuration)
                        warm = True
                    turn = done % max(1, len(others))
                    for record in answer(engine, question, [chosen[0], *others[turn:], *others[:turn]]):
                        log.add(record)
                    log.flush()
            done += 1
            if progress is not None:
                progress(done, len(examples))
        if group is not None:
            engine.store.clear()
    return skipped


@dataclass(frozen=True, slots=True, eq=False)
class FullAnswer:
    """Full prefill's greedy answer to a question, which all configurations are compared with.

    Attributes:
        ids: its tokens, the end token included.
        logits: `[N, vocabulary]` float32 logits before each token.
        ttft_s: time to its first token, in seconds.
    """

    ids: tuple[int, ...]
    logits: Tensor
    ttft_s: float


def answer(engine: FusionEngine, question: PendingQuestion, order: Sequence[Configuration]) -> Iterator[Record]:
    """Yield the records of a question, one for each configuration; full prefill must be the first.

    Every configuration is prefilled as for a user and answers over its own buffer, of which one exists at a time.
    """
    full: FullAnswer | None = None
    for configuration in order:
        record, full = _measure(engine, question, configuration, full)
        yield record


def gold_nll(runner: ModelRunner, prefilled: Prefilled, gold: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of a gold answer, in nats a token; 0 without tokens."""
    if not gold:
        return 0.0
    logits = answer_logits(runner, prefilled, gold)
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(gold, device=logits.device)))


def _prefill(engine: FusionEngine, question: PendingQuestion, configuration: Configuration) -> Prefilled:
    prompt = question.without_passages if configuration == NO_PASSAGES else question.prompt
    return engine.prefill(prompt, method=configuration.method, answer_tokens=question.answer_tokens)


def _measure(
    engine: FusionEngine, question: PendingQuestion, configuration: Configuration, full: FullAnswer | None
) -> tuple[Record, FullAnswer]:
    """Answer a question with one configuration; return its record and full prefill's answer, made if it is None."""
    runner, example = engine.runner, question.example
    prefilled = _prefill(engine, question, configuration)
    report, timings = prefilled.report, prefilled.report.timings
    nll = gold_nll(runner, prefilled, question.gold)
    if full is None:
        ids, logits = greedy_answer(runner, prefilled, example.max_new_tokens)
        full, compared = FullAnswer(ids, logits, timings.ttft_s), compare_answers(logits, logits)
    else:
        [other] = compare_greedy_answers(runner, [(full.ids, full.logits)], [prefilled], example.max_new_tokens)
        ids, compared = other.ids or (), other.divergence
    text = answer_text(engine.lm, ids)
    record = {
        "id": example.id,
        "dataset": example.dataset,
        "method": configuration.label,
        "base": configuration.base,
        "ratio": configuration.ratio,
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
        **({"beside": question.beside} if depends_on_neighbours(configuration) else {}),
    }
    return record, full


def _pending(engine: FusionEngine, example: Example, beside: str) -> PendingQuestion:
    prompt, without_passages = engine.prompt(example.question, example.passages), engine.prompt(example.question)
    tokenizer = engine.lm.tokenizer
    # A chat template's answer begins a turn; without one it goes on after "Answer:".
    text = example.gold.strip() if tokenizer.chat_template else f" {example.gold.strip()}"
    gold = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    return PendingQuestion(example, prompt, without_passages, gold, beside)


def _groups(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
