"""Questions for studies: from files, and from the demonstration corpus with retrieval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from qcfuse_rag.bundled import corpus, default_embedder, questions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.evaluation.quality.bootstrap import format_interval, mean_interval
from qcfuse_rag.evaluation.questions import read_dataset
from qcfuse_rag.evaluation.studies.runner import StudyRun, load_engine
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.prefill_base import Base
from qcfuse_rag.verification.samples import Example, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The questions of a study over files of JSON lines, and the model that answers them."""

    data: Sequence[Path]
    model: str | None
    size: int
    distractors: int
    store: Path | None
    skip: int = 0

    def examples(self) -> list[Example]:
        """Read the questions of all files."""
        files = (read_dataset(path, size=self.skip + self.size)[self.skip :] for path in self.data)
        examples = [example for file in files for example in file]
        return [example.with_distractors(self.distractors) if example.supporting else example for example in examples]

    def measure(
        self, run: StudyRun, bases: Iterable[Base], measure: Callable[[FusionEngine, Prompt], T]
    ) -> Iterator[T]:
        """Yield a measurement of each question; its passages are warmed first."""
        bases = tuple(bases)
        with load_engine(self.model, self.store) as engine:
            for example in run.track(self.examples()):
                engine.warm(example.passages, bases=bases)
                yield measure(engine, engine.prompt(example.question, example.passages))


def demo_questions(top_k: int, count: int | None = None) -> list[Sample]:
    """Return the demonstration's questions, each over the `top_k` documents that MiniLM finds nearest."""
    from qcfuse_rag.retrieval.embedder import Embedder

    texts = list(corpus().values())
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    samples = []
    for question in questions()[:count]:
        nearest = np.argsort(-(vectors @ embed([question.question])[0]), kind="stable")[:top_k]
        samples.append(Sample(question.question, tuple(texts[i] for i in nearest), question.answers))
    return samples


def difference_cell(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the paired mean difference and its interval, for a table."""
    return format_interval(mean_interval([value - other for value, other in zip(values, reference, strict=True)]))
