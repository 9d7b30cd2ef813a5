"""The options of the command line: each is declared once, and commands take them as dataclasses.

Annotations are evaluated here, so that dataclasses in other modules can add options to these.
"""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.source import model_source
from qcfuse_rag.prompts.template import PromptTemplate

if TYPE_CHECKING:
    from qcfuse_rag.fusion.method import Method


class WeightsChoice(StrEnum):
    """Formats of a model's weights."""

    MODEL = "model"
    FLOAT16 = "float16"
    INT8 = "int8"
    AUTO = "auto"


Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Library = Annotated[Path, Option("--store", help="Folder of the library; its folder kv is the store.")]
Question = Annotated[str, Argument(help="The question.")]
Device = Annotated[str | None, Option(help="Device, such as cpu or cuda:0; by default a GPU if there is one.")]
Dtype = Annotated[
    str | None,
    Option(help="Data type, such as bfloat16; on a CPU by default float32, or bfloat16 if measured to be faster."),
]
Weights = Annotated[
    WeightsChoice | None,
    Option(
        help="Format of weights: model (default), float16 or int8 (on CPUs), or auto: on a CPU the faster of bfloat16 "
        "and float16."
    ),
]
Tenant = Annotated[
    str | None,
    Option(help="Tenant whose entries are used; the secret is read from QCFUSE_SECRET or QCFUSE_TENANT_SECRET."),
]
EmbedderName = Annotated[
    str | None,
    Option(help="sentence-transformers id or folder; by default the one of the library's passages, else MiniLM."),
]
Remote = Annotated[str | None, Option(help="URL of a bucket or server behind the folder, shared between machines.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model to load and how to compute with it."""

    model: Annotated[
        str | None,
        Option(
            help="Hugging Face id, folder or GGUF file of the model; "
            "by default that of the library, if there is one, else SmolLM2-135M."
        ),
    ] = None
    device: Device = None
    dtype: Dtype = None
    weights: Weights = None

    @property
    def weight_format(self) -> str:
        """The format of weights to load the model with."""
        return (self.weights or WeightsChoice.MODEL).value


@dataclass(frozen=True, slots=True, kw_only=True)
class WordingOptions(ModelOptions):
    """A model and how its chat template words prompts."""

    chat_template_kwargs: Annotated[
        str | None,
        Option(
            help="Variables of the model's chat template as a JSON object, such as '{\"enable_thinking\": false}'; "
            "by default those that the library was warmed with."
        ),
    ] = None

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """The variables; None if the option is not given.

        Raises:
            QCFuseError: if they are not a JSON object.
        """
        if self.chat_template_kwargs is None:
            return None
        try:
            kwargs = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise QCFuseError(f"--chat-template-kwargs is not JSON: {error}") from error
        if not isinstance(kwargs, dict):
            raise QCFuseError("--chat-template-kwargs has to be a JSON object")
        return kwargs

    def worded(self, template: PromptTemplate | None) -> PromptTemplate | None:
        """Return a library's wording, if it has one, with the given variables instead of its own."""
        kwargs = self.template_kwargs
        return template if kwargs is None else replace(template or PromptTemplate(), chat_template_kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions(WordingOptions):
    """The system message and the tools that conversations begin with."""

    system: Annotated[str | None, Option(help="The system message of the conversations.")] = None
    tools: Annotated[
        Path | None, Option(help="JSON file with the list of the agent's tools, as requests to the server give them.")
    ] = None
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions(WordingOptions):
    """A model and the fusion method that reuses caches."""

    method: Annotated[str | None, Option(help="Fusion method, see `qcfuse methods`; auto by default.")] = None
    ratio: Annotated[
        float | None,
        Option(help="Share of reused tokens to recompute, 0 to 1; for auto by default what `qcfuse verify` found."),
    ] = None
    base: Annotated[
        str | None,
        Option(help="Stored caches to read: framed, primed, blind, begun or enriched; by default those of the method."),
    ] = None

    def chosen_method(self) -> "Method":
        """Return the fusion method; refuse unknown names and bad ratios."""
        from qcfuse_rag.methods import choose_method

        return choose_method(self.method, ratio=self.ratio, base=self.base)


class FidelityChoice(StrEnum):
    """How closely an answer follows full prefill's; see `generation.sampling_params.Fidelity`."""

    FAST = "fast"
    HEAL = "heal"
    EXACT = "exact"


FidelityOption = Annotated[
    FidelityChoice,
    Option(
        help="fast: answer over the reused caches; heal: also recompute the rest while the answer is written, "
        "which slows it by at most 10 %; exact: show nothing before it is full prefill's greedy answer."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions(MethodOptions):
    """Options of commands that answer a question over a library."""

    embedder: EmbedderName = None
    top_k: Annotated[int, Option(min=0, help="Number of passages to retrieve.")] = 6
    fidelity: FidelityOption = FidelityChoice.FAST
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions(WordingOptions):
    """The documents of a warming job, and the caches to make of them."""

    paths: Annotated[
        list[Path], Argument(help="Text files, JSON lines files, or folders of them; or paths that --reader reads.")
    ]
    reader: Annotated[
        str, Option(help="Reader: files, llama-index (a persisted index) or langchain (a dumped store).")
    ] = "files"
    base: Annotated[
        str | None,
        Option(help="Caches to store: primed (default), blind, begun or enriched, each with framed; or framed alone."),
    ] = None
    max_tokens: Annotated[int, Option(min=16, help="Maximum tokens in a passage.")] = 384
    batch_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens in one pass; by default 2048 on a CPU, 16384 on a GPU.")
    ] = None
    numbers: Annotated[
        str | None, Option(help="Number format of stored keys and values: int8 (default of a new store), model or fp8.")
    ] = None
    limit_gb: Annotated[
        float | None, Option(min=0.0, max=1e9, help="Maximum size of the store in GB; 68.7 if never set.")
    ] = None
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions(CorpusOptions):
    """Options of `qcfuse warm run`; the job's record keeps them for `qcfuse warm resume`."""

    embedder: EmbedderName = None
    encrypt: Annotated[
        bool, Option("--encrypt", help="Require encryption; a new store is encrypted if QCFUSE_SECRET is set.")
    ] = False
    access: Annotated[
        str | None, Option(help="Access tag: readers who may see these documents; '' means everybody.")
    ] = None
    remote: Remote = None
    ray: Annotated[str | None, Option(help="Ray cluster to warm on: auto, local, or an address.")] = None
    workers: Annotated[int, Option(min=1, help="Number of Ray workers.")] = 2
    cpus_per_worker: Annotated[float, Option(min=0.0, help="CPU cores of each worker.")] = 1.0
    gpus_per_worker: Annotated[float, Option(min=0.0, help="GPUs of each worker.")] = 0.0
    allow_empty: Annotated[
        bool, Option("--allow-empty", help="Forget all documents of a folder that is empty now.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(MethodOptions):
    """Options of `qcfuse serve`."""

    name: Annotated[
        str | None,
        Option(
            help="Name of the model for clients; by default its Hugging Face id, or the name of its folder or file."
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; an address beyond loopback requires QCFUSE_TOKEN.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000
    waiting: Annotated[int, Option(min=1, help="Maximum waiting requests; the server refuses more with 429.")] = 64
    most_tokens: Annotated[
        int, Option(min=1, help="Maximum tokens of an answer; chat requests that set no limit get 1,024.")
    ] = 4096
    fidelity: FidelityOption = FidelityChoice.FAST
    top_k: Annotated[int, Option(min=0, help="Number of passages to retrieve from the library.")] = 6
    retrieve: Annotated[
        bool, Option("--retrieve", help="Retrieve from the library also for requests that have no documents.")
    ] = False
    editable: Annotated[bool, Option("--editable", help="Let clients add and remove documents of the library.")] = False
    keep: Annotated[
        bool,
        Option("--keep", help="Warm passages of clients that the store lacked, while no request waits."),
    ] = False
    no_playground: Annotated[bool, Option("--no-playground", help="Serve no page for browsers at /.")] = False
    prefix_mb: Annotated[
        int, Option(min=0, help="Megabytes of finished requests to keep in memory for conversations that go on.")
    ] = 1000
    memory_gb: Annotated[float, Option(min=0.0, help="Gigabytes of passages' caches to keep in memory.")] = 2.0
    remote: Remote = None
    ray: Annotated[str | None, Option(help="Ray cluster to serve on: auto, local, or an address.")] = None
    replicas: Annotated[int, Option(min=1, help="Replicas on Ray; the minimum if --most-replicas is given.")] = 2
    most_replicas: Annotated[int | None, Option(min=1, help="Maximum replicas that Ray starts under load.")] = None
    cpus_per_replica: Annotated[float, Option(min=0.0, help="CPU cores of each replica.")] = 1.0
    gpus_per_replica: Annotated[float, Option(min=0.0, help="GPUs of each replica.")] = 0.0

    @property
    def memory_bytes(self) -> int:
        """Most bytes of the tier in memory."""
        return int(self.memory_gb * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions(ModelOptions):
    """Options of `qcfuse demo`."""

    embedder: EmbedderName = None
    store: Annotated[Path | None, Option(help="Folder to keep the store in; a temporary folder by default.")] = None
    question: Annotated[str | None, Option(help="Question to ask instead of the built-in questions.")] = None
    all: Annotated[bool, Option("--all", help="Ask all questions of the demonstration instead of six.")] = False
    top_k: Annotated[int, Option(min=1, help="Number of documents to retrieve.")] = 4
    html: Annotated[Path | None, Option(help="HTML page to write, with the answers and a picture.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(MethodOptions):
    """Options of `qcfuse verify`."""

    ratio: Annotated[
        float | None,
        Option(help="Only share of reused tokens to try, 0 to 1; by default from 0.05 to the first that passes."),
    ] = None
    store: Annotated[
        Path | None,
        Option(help="Folder of a library, whose passages are used, or of a store; the verdict is saved in it."),
    ] = None
    size: Annotated[int, Option(min=1, help="Number of prompts of each of the three kinds.")] = 8
    tokens: Annotated[int, Option(min=512, help="Length in tokens of the prompts with a hidden answer.")] = 1024
    kl: Annotated[float, Option(min=0.0, help="Maximum mean divergence along answers, in nats.")] = 0.25
    agreement: Annotated[float, Option(min=0.0, max=1.0, help="Minimum share of equal answer tokens.")] = 0.75
    loss: Annotated[float, Option(min=0.0, max=1.0, help="Maximum share of hidden answers lost.")] = 0.1
    tenant: Tenant = None


class Numbers(StrEnum):
    """Number formats of stored keys and values."""

    MODEL = "model"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `qcfuse plan`."""

    nodes: Annotated[int, Option(min=1, help="Number of passages in the corpus.")]
    model: Annotated[str, Option(help="Shape such as qwen3-8b, or a model folder or id.")]
    tokens: Annotated[int, Option(min=1, help="Tokens per passage.")] = 384
    gpu: Annotated[str, Option(help="GPU: a100, l40s, h100, h200, b200, or here to measure this machine.")] = "h200"
    retrieved: Annotated[int, Option(min=1, help="Passages per request.")] = 10
    ratio: Annotated[float, Option(min=0.0, max=1.0, help="Share of their tokens to recompute.")] = 0.15
    numbers: Annotated[Numbers, Option(help="Number format of stored keys and values.")] = Numbers.INT8
    reached: Annotated[
        float, Option(min=0.01, max=1.0, help="Share of a data sheet's rates to assume; ignored with --gpu here.")
    ] = 0.5
    caches: Annotated[int, Option(min=1, help="Caches per passage; the default method keeps two.")] = 2


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one parameter per field of its `options` dataclass, for Typer to read.

    The command refuses a model's folder or file that does not exist before it does anything else.
    """
    signature = inspect.signature(command, eval_str=True)
    options_type = signature.parameters["options"].annotation
    fields = inspect.signature(options_type, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += fields.values() if name == "options" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        options = options_type(**{name: values.pop(name) for name in fields})
        if isinstance(options, ModelOptions) and options.model is not None:
            model_source(options.model)  # before the command imports torch and transformers, which takes seconds
        command(options=options, **values)

    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
