"""The shared parts of all studies: options, engines, questions, turns, tables and JSON."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer import Option

from benchmarks.environment import about_process
from benchmarks.quality.summary import format_interval, mean_interval
from benchmarks.questions import read_dataset
from benchmarks.samples import Example, Sample
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.bundled import corpus, default_embedder, default_model, questions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.library.index import nearest
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.prefill_base import Base

T = TypeVar("T")
PROGRAM = "python -m benchmarks"
PRINT_JSON = "-"
FULL_PREFILL = make_method("full")
JsonFile = Annotated[str | None, Option(metavar="FILE", help="File to write the result to as JSON; - prints it.")]


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The result of a study: plain data for JSON, and tables and lines for the terminal."""

    data: Mapping[str, Any]
    shown: Sequence[Table | str]


class StudyRun:
    """One run of a study: its progress, and where its result goes; the JSON file `-` is standard output."""

    def __init__(self, json_file: str | None) -> None:
        self._json_file = json_file

    @property
    def prints_json(self) -> bool:
        """Whether JSON goes to standard output, so that nothing else may be printed there."""
        return self._json_file == PRINT_JSON

    def track(self, items: Sequence[T]) -> Iterable[T]:
        """Yield items with a progress bar on standard error."""
        return track(items, "measuring", console=Console(stderr=True))

    def keep(self, data: Mapping[str, Any]) -> None:
        """Write the result so far to the JSON file, if there is one."""
        if self._json_file and not self.prints_json:
            write_atomically(Path(self._json_file), _to_json(data))

    def publish(self, result: StudyResult) -> None:
        """Write and show the finished result."""
        self.keep(result.data)
        if self.prints_json:
            print(_to_json(result.data))
            return
        console = Console(width=max(120, Console().width))
        for part in result.shown:
            console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def to_command(study: Callable[..., StudyResult]) -> Callable[..., None]:
    """Make a Typer command of a study: its parameters but `run`, and the fields of `files`, become options.

    `--json` is added.
    """
    options = dict(inspect.signature(study, eval_str=True).parameters)
    takes_run, takes_files = (options.pop(name, None) is not None for name in ("run", "files"))
    fields = dict(inspect.signature(DataFiles, eval_str=True).parameters) if takes_files else {}
    options = {**fields, **options}
    options["json"] = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonFile)

    @functools.wraps(study)
    def command(json: str | None = None, **settings: Any) -> None:
        run = StudyRun(json)
        if takes_files:
            settings["files"] = DataFiles(**{name: settings.pop(name) for name in fields})
        run.publish(study(run, **settings) if takes_run else study(**settings))

    command.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {name: option.annotation for name, option in options.items()}
    return command


def load_model(model: str | None) -> LanguageModel:
    """Load a model, SmolLM2-135M by default, on the CPU."""
    return LanguageModel.load(model or default_model(), device="cpu")


def load_engine(model: str | None, store: Path | None = None) -> FusionEngine:
    """Load a model, SmolLM2-135M by default, over a store in memory or in a folder."""
    opened = MemoryStore(UNLIMITED) if store is None else open_store(store)
    return FusionEngine.load(model or default_model(), store=opened, verdict="ignore", prefix_bytes=0)


def _to_json(data: Mapping[str, Any]) -> str:
    return json.dumps({"about": about_process(PROGRAM), **data}, indent=1, default=str)


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Options of a study over questions in files of JSON lines; `skip` leaves out the first of each file."""

    data: list[Path]
    model: str | None = None
    size: int = 20
    skip: int = 0
    distractors: int = 2

    def examples(self) -> list[Example]:
        """Read the questions of all files."""
        files = (read_dataset(path, size=self.skip + self.size)[self.skip :] for path in self.data)
        examples = [example for file in files for example in file]
        return [example.with_distractors(self.distractors) if example.supporting else example for example in examples]

    def measure(
        self,
        run: StudyRun,
        bases: Iterable[Base],
        measure: Callable[[FusionEngine, Prompt], T],
        store: Path | None = None,
    ) -> Iterator[T]:
        """Yield a measurement of each question; its passages are warmed first, into a store in memory or a folder."""
        bases = tuple(bases)
        with load_engine(self.model, store) as engine:
            for example in run.track(self.examples()):
                engine.warm(example.passages, bases=bases)
                yield measure(engine, engine.prompt(example.question, example.passages))


def demo_questions(top_k: int, count: int | None = None) -> list[Sample]:
    """Return the demonstration's questions, each over the `top_k` documents that MiniLM finds nearest."""
    from qcfuse_rag.library.embedder import Embedder

    texts = list(corpus().values())
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    samples = []
    for question in questions()[:count]:
        passages = tuple(texts[i] for i in nearest(vectors, embed([question.question])[0], top_k))
        samples.append(Sample(question.question, passages, question.answers))
    return samples


def difference_cell(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the paired mean difference and its interval, for a table."""
    return format_interval(mean_interval([value - other for value, other in zip(values, reference, strict=True)]))
