"""Options of the measurements: those that several share, how lists are written, and commands made of dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from benchmarks.configurations import split_names
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.options import expand_options
from qcfuse_rag.engine.config import ModelConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore

JSON = Annotated[
    str | None,
    Option(
        metavar="FILE",
        help="File of the result as JSON; a Markdown table and the records go beside it, and the same command goes on "
        "where it was stopped. - prints JSON.",
    ),
]
Methods = Annotated[str, Option(help="Methods, with commas; parameters as epic\\[n_tokens=16].")]
Ratios = Annotated[str, Option(help="Shares to recompute, with commas; by default each method's own.")]
Repeats = Annotated[int, Option(min=1, help="Rounds of each measurement.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ModelConfig):
    """The model to measure."""

    weights: str | None = "model"

    def load_model(self) -> LanguageModel:
        """Load the model."""
        return LanguageModel.load(self.model or default_model(), **self.load_options())

    def load_engine(self, store: KVStore) -> FusionEngine:
        """Load the model with an engine over a store, which keeps no finished prompts."""
        return FusionEngine.load(
            self.model or default_model(), store=store, verdict="ignore", prefix_bytes=0, **self.load_options()
        )


def counts(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in split_names(text))
    except ValueError:
        raise QCFuseError(f"{text!r} is no list of whole numbers such as 1,4") from None


def shares(text: str) -> tuple[float, ...]:
    """Read ratios with commas between them."""
    try:
        return tuple(float(part) for part in split_names(text))
    except ValueError:
        raise QCFuseError(f"{text!r} is no list of numbers such as 0.05,0.2") from None


def to_command(options_type: type, run: Callable[[Any, str | None], None]) -> Callable[..., None]:
    """Return a function whose parameters are the fields of a dataclass and `--json`, for Typer to read."""

    def command(options: Any, json: str | None = None) -> None:
        run(options, json)

    command.__doc__, command.__name__ = run.__doc__, run.__name__
    command.__annotations__ = {"options": options_type, "json": JSON}
    return expand_options(command)
