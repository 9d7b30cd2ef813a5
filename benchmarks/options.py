"""Options of the measurements: those that several share, how lists are written, and commands made of dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from benchmarks.configurations import split_names
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.options import expand_options
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
class ModelOptions:
    """The model to measure."""

    model: Annotated[
        str | None, Option(help="Hugging Face id, folder or GGUF file of the model; by default SmolLM2-135M.")
    ] = None
    device: Annotated[str | None, Option(help="Device, such as cpu or cuda:0; by default a GPU if there is one.")] = (
        None
    )
    dtype: Annotated[str | None, Option(help="Data type, such as bfloat16.")] = None
    weights: Annotated[str, Option(help="Format of weights, see `qcfuse ask --help`.")] = "model"

    def load_model(self) -> LanguageModel:
        """Load the model."""
        name = self.model or default_model()
        return LanguageModel.load(name, device=self.device, dtype=self.dtype, weights=self.weights)

    def load_engine(self, store: KVStore) -> FusionEngine:
        """Load the model with an engine over a store, which keeps no finished prompts."""
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "weights": self.weights}
        return FusionEngine.load(self.model or default_model(), store=store, verdict="ignore", prefix_bytes=0, **where)


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
