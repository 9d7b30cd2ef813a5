"""Run questions: prefill each configuration by itself on the same token ids, then answer all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.quality.batched_decode import BatchedDecoder
from qcfuse_rag.evaluation.quality.configurations import FULL, Configuration
from qcfuse_rag.evaluation.quality.metrics import scores
from qcfuse_rag.evaluation.quality.offline import NeighbourPool, neighbour_preparation, prepare
from qcfuse_rag.evaluation.quality.records import Record, RecordLog, digest_of_passages
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.verification.samples import Example

T = TypeVar("T")

STACK_BYTES = 3 << 30
"""Most bytes of keys and values to hold for one batch of configurations."""


@dataclass(slots=True)
class PendingQuestion:
    """A question with what every configuration of it shares.

    Attributes:
        example: as it was read.
        prompt: what every configuration sees.
        gold: token ids of the gold answer.
        beside: digest of the passages that were prepared together with its own.
    """

    example: Example
    prompt: Prompt
    gold: tuple[int, ...]
    beside: str

    @property
    def room(self) -> int:
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
    """Add a record to the log for every question and configuration that it does not have.

    Records of enriched and captured caches that were made beside other passages are made anew.

    Full prefill is run along with whatever is missing, since divergences and paired times need it.

    Args:
        engine: with a store that may be filled and, if `group` is given, emptied.
        examples: questions, in order.
        chosen: configurations; the first one is full prefill.
        log: where records go.
        group: prepare so many questions at once and empty the store after them; None prepares all at once.
        pool: where enriched passages' neighbours are searched; among those prepared together if None.
        progress: called with questions `(done, total)`.

    Returns:
        What could not be run and why, one sentence each.
    """
    skipped: list[str] = []
    done, warm = 0, False
    for some in _groups(examples, group or max(1, len(examples))):
        wanted = [text for example in some for text in example.passages]
        searched = [*pool.texts, str(pool.neighbours)] if pool is not None and pool != NeighbourPool() else []
        beside = digest_of_passages([*wanted, *searched])
        todo = [(example, log.missing(example, chosen, beside)) for example in some]
        needed = list({one.key: one for _, missing in todo for one in missing}.values())
        # All of the group's, done or not: what an enriched passage is stored as depends on the others.
        for cost in prepare(engine, needed, wanted, pool).values() if needed else ():
            log.add_offline(cost)
        for example, missing in todo:
            if missing:
                question = _pending(engine, example, beside)
                limit = engine.lm.window.tokens
                if len(question.prompt) + question.room > limit:
                    skipped.append(f"{example.dataset} {example.id}: its prompt exceeds the window of {limit:,} tokens")
                else:
                    order = [chosen[0], *(one for one in missing if one.label != FULL)]
                    if not warm:  # the first passes of a process are slower
                        for one in order:
                            engine.prefill(question.prompt, method=one.method, answer_tokens=question.room)
                        warm = True
                    turn = done % len(order)
                    for record in answer(engine, question, order[turn:] + order[:turn]):
                        log.add(record)
                    log.flush()
            done += 1
            if progress is not None:
                progress(done, len(examples))
        if group is not None:
            engine.store.clear()
    return skipped


def answer(engine: FusionEngine, question: PendingQuestion, order: Sequence[Configuration]) -> Iterator[Record]:
    """Yield one question's records, one for each configuration; full prefill must be among them."""
    length, room = len(question.prompt), question.room
    batch = max(1, STACK_BYTES // (engine.lm.kv_bytes_per_token * (length + room)))
    found: list[tuple[Configuration, FusionReport, Tensor, float, str]] = []
    for some in _groups(order, batch):
        reports: list[FusionReport] = []

        def prefilled(
            some: Sequence[Configuration] = some, reports: list[FusionReport] = reports
        ) -> Iterator[Prefilled]:
            for one in some:
                result = engine.prefill(question.prompt, method=one.method, answer_tokens=room)
                reports.append(result.report)
                yield result

        stack = BatchedDecoder.stack(engine.lm, prefilled(), len(some), length, room)
        nll = stack.gold_nll(question.gold)
        texts = [stack.text(ids) for ids in stack.greedy(question.example.max_new_tokens)]
        found += zip(some, reports, stack.logits.clone(), nll, texts, strict=True)
    oracle, full_s = next((logits, report.timings.ttft_s) for one, report, logits, *_ in found if one.label == FULL)
    for one, report, logits, likelihood, text in found:
        yield _record(question, one, report, text, likelihood, divergence(oracle, logits), full_s)


def _record(
    question: PendingQuestion,
    one: Configuration,
    report: FusionReport,
    text: str,
    nll: float,
    kl: float,
    full_s: float,
) -> Record:
    example, timings = question.example, report.timings
    return {
        "id": example.id,
        "dataset": example.dataset,
        "method": one.label,
        "base": one.base,
        "ratio": one.ratio,
        "rows": report.rows,
        "context_tokens": report.context_tokens,
        **scores(text, example.answers, needs_all=example.needs_all),
        "nll": nll,
        "kl": kl,
        "ttft_s": timings.ttft_s,
        "full_ttft_s": full_s,
        "load_s": timings.load_s,
        "probe_s": timings.probe_s,
        "select_s": timings.select_s,
        "recompute_s": timings.recompute_s,
        "bytes_loaded": report.bytes_loaded,
        "row_layers": report.row_layers,
        "fallback": report.fallback,
        "answer": text,
        **({"beside": question.beside} if neighbour_preparation(one) else {}),
    }


def _pending(engine: FusionEngine, example: Example, beside: str) -> PendingQuestion:
    prompt = engine.prompt(example.question, example.passages)
    tokenizer = engine.lm.tokenizer
    # A chat template's answer begins a turn; without one it goes on after "Answer:".
    text = example.gold.strip() if tokenizer.chat_template else f" {example.gold.strip()}"
    gold = tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    return PendingQuestion(example, prompt, gold, beside)


def _groups(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
