"""Quality against bytes: caches in int8 and fp8 beside those in the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.quality.metrics import token_f1
from qcfuse_rag.evaluation.questions import first_passages, read_dataset
from qcfuse_rag.evaluation.studies.runner import FULL_PREFILL, StudyResult, StudyRun, demo_questions, load_engine
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.decode import TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.quantization import STORE_FORMATS
from qcfuse_rag.verification.divergence import divergence
from qcfuse_rag.verification.samples import Sample

METHODS = [make_method("reuse", base=FRAMED), make_method("qcfuse", ratio=0.15, base=FRAMED)]
PARAMS = SamplingParams(max_new_tokens=24)
FIGURES = ("kl", "narrow", "same", "f1")


def quantization(
    run: StudyRun, model: str | None = None, data: Path | None = None, questions: int = 24, passages: int = 4
) -> StudyResult:
    """Compare caches in int8 and fp8 with those in the model's own dtype, question by question on the same token ids.

    Without `--data`, the questions and documents are the demonstration's. A data file has JSON lines as `qcfuse profile
    --data` reads them; of a question's passages, the supporting passages and then the others are taken, in their order.
    `KL to full` is of the first answer token, from full prefill. `KL to model` is from the same method on caches in the
    model's own dtype, hence the effect of the format alone. F1 is over the words of the answer.
    """
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    token_bytes: dict[str, float] = {}
    with load_engine(model) as first:
        name = first.lm.name
        samples = demo_questions(passages, questions) if data is None else _read(data, questions, passages)
        for sample in run.track(samples):
            prompt = first.prompt(sample.question, sample.passages)
            exact = first.prefill(prompt, method=FULL_PREFILL, answer_tokens=PARAMS.max_new_tokens)
            full = {"kl": 0.0, "narrow": 0.0, "same": 1.0}
            rows.setdefault(("full", "-"), []).append({**full, "f1": _answer_f1(first, exact, sample.answers)})
            stored_tokens = len(prompt.prefix_ids) + sum(len(span) for span in prompt.chunks)
            unquantized: dict[str, Any] = {}
            for numbers in STORE_FORMATS:
                engine = FusionEngine(first.lm, MemoryStore(UNLIMITED, numbers=numbers))
                engine.warm(sample.passages, bases=(FRAMED,))
                token_bytes[numbers] = engine.store.stats()[0].size_bytes / stored_tokens
                for method in METHODS:
                    label = f"{method.name} {method.ratio:g}"
                    prefilled = engine.prefill(prompt, method=method, answer_tokens=PARAMS.max_new_tokens)
                    logits = prefilled.logits
                    row = {
                        "kl": divergence(exact.logits, logits),
                        "narrow": divergence(unquantized.setdefault(label, logits), logits),
                        "same": float(logits.argmax() == exact.logits.argmax()),
                        "f1": _answer_f1(engine, prefilled, sample.answers),
                    }
                    rows.setdefault((label, numbers), []).append(row)
    lines: list[dict[str, Any]] = []
    table = Table("method", "numbers", "bytes a token", "KL to full", "KL to model", "same first token", "F1")
    for method_name in dict.fromkeys(label for label, _ in rows):
        for numbers in ("-", *STORE_FORMATS):
            if (method_name, numbers) not in rows:
                continue
            means = {key: fmean(row[key] for row in rows[method_name, numbers]) for key in FIGURES}
            size = token_bytes.get(numbers)
            lines.append({"method": method_name, "numbers": numbers, "bytes_per_token": size, **means})
            cells = (f"{means['kl']:.4f}", f"{means['narrow']:.5f}", f"{means['same']:.0%}", f"{means['f1']:.3f}")
            table.add_row(method_name, numbers, "-" if size is None else f"{size:,.0f}", *cells)
    return StudyResult({"model": name, "questions": len(samples), "rows": lines}, [table])


def _read(path: Path, count: int, passages: int) -> list[Sample]:
    """Read questions, each with its supporting passages and then others, up to `passages`."""
    examples = read_dataset(path, size=count)
    return [
        example.with_distractors(max(0, passages - len(example.supporting)))
        if example.supporting
        else first_passages(example, passages)
        for example in examples
    ]


def _answer_f1(engine: FusionEngine, prefilled: Prefilled, answers: Sequence[str]) -> float:
    return token_f1(TextStream(engine.runner, prefilled, PARAMS).result().text, answers)
