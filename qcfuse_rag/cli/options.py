"""The options of the command line, made from dataclasses: `EngineConfig`, and those of the commands below.

Annotations are evaluated here, so that dataclasses in other modules can add options to these.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Le
from rich.markup import escape
from typer import Argument, Option

from qcfuse_rag.declared_options import DeclaredOption, declared_options
from qcfuse_rag.engine.config import EngineConfig, ModelConfig
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.models.source import adapter_base, model_source
from qcfuse_rag.server.settings import ServerSettings

MODEL = tuple(declared_options(ModelConfig))
WORDING = (*MODEL, "chat_template_kwargs")
METHOD = (*WORDING, "method", "ratio", "base")

LoadedModel = Annotated[EngineConfig, MODEL]
WordedModel = Annotated[EngineConfig, WORDING]
ModelAndMethod = Annotated[EngineConfig, METHOD]
"""An `EngineConfig` of which a command has these options."""

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Library = Annotated[Path, Option("--store", help="Folder of the library; its folder kv is the store.")]
LIBRARY = Path("library")
Question = Annotated[str, Argument(help="The question.")]
Tenant = Annotated[
    str | None,
    Option(help="Tenant whose entries are used; the secret is read from QCFUSE_SECRET or QCFUSE_TENANT_SECRET."),
]
EmbedderName = Annotated[
    str | None,
    Option(help="sentence-transformers id or folder that the passages are embedded with; all-MiniLM-L6-v2 by default."),
]
Remote = Annotated[str | None, Option(help="URL of a bucket or server behind the folder, shared between machines.")]
FidelityOption = Annotated[Fidelity, Option(help=declared_options(SamplingParams)["fidelity"].text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """The system message and the tools that conversations begin with.

    Attributes:
        system: The system message of the conversations.
        tools: JSON file with the list of the agent's tools, as requests to the server give them.
    """

    system: str | None = None
    tools: Path | None = None
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How a question is answered over a library.

    Attributes:
        top_k: Number of passages to retrieve.
    """

    embedder: EmbedderName = None
    top_k: Annotated[int, Ge(0)] = 6
    fidelity: FidelityOption = "fast"
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """The documents of a warming job, and the store that their caches go to.

    Attributes:
        reader: Reader: files, llama-index (a persisted index) or langchain (a dumped store).
        max_tokens: Maximum tokens in a passage.
        batch_tokens: Maximum tokens in one pass; by default 2048 on a CPU, 16384 on a GPU.
        kv_dtype: Number format of stored keys and values: int8 (default of a new store) or model.
        limit_gb: Maximum size of the store in GB; 68.7 if never set.
    """

    paths: Annotated[
        list[Path], Argument(help="Text files, JSON lines files, or folders of them; or paths that --reader reads.")
    ]
    reader: str = "files"
    max_tokens: Annotated[int, Ge(16)] = 384
    batch_tokens: Annotated[int | None, Ge(1)] = None
    kv_dtype: str | None = None
    limit_gb: Annotated[float | None, Ge(0), Le(1e9)] = None
    tenant: Tenant = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of `qcfuse warm run` for the whole job.

    Attributes:
        encrypt: Require encryption; a new store is encrypted if QCFUSE_SECRET is set.
        access: Access tag: readers who may see these documents; '' means everybody.
        allow_empty: Forget all documents of a folder that is empty now.
        ray: Ray cluster to warm on: auto, local, or an address.
        workers: Number of Ray workers.
        cpus_per_worker: CPU cores of each worker.
        gpus_per_worker: GPUs of each worker.
    """

    embedder: EmbedderName = None
    encrypt: bool = False
    access: str | None = None
    remote: Remote = None
    allow_empty: bool = False
    ray: str | None = None
    workers: Annotated[int, Ge(1)] = 2
    cpus_per_worker: Annotated[float, Ge(0)] = 1.0
    gpus_per_worker: Annotated[float, Ge(0)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(ServerSettings):
    """Options of `qcfuse serve`: the server's settings, and the store and the machines that it uses.

    Attributes:
        prefix_mb: Megabytes of finished requests to keep in memory for conversations that go on.
        memory_gb: Gigabytes of passages' caches to keep in memory.
        ray: Ray cluster to serve on: auto, local, or an address.
        replicas: Replicas on Ray; the minimum if --most-replicas is given.
        most_replicas: Maximum replicas that Ray starts under load.
        cpus_per_replica: CPU cores of each replica.
        gpus_per_replica: GPUs of each replica.
    """

    fidelity: FidelityOption = "fast"
    prefix_mb: Annotated[int, Ge(0)] = 1000
    memory_gb: Annotated[float, Ge(0)] = 2.0
    remote: Remote = None
    ray: str | None = None
    replicas: Annotated[int, Ge(1)] = 2
    most_replicas: Annotated[int | None, Ge(1)] = None
    cpus_per_replica: Annotated[float, Ge(0)] = 1.0
    gpus_per_replica: Annotated[float, Ge(0)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `qcfuse demo`.

    Attributes:
        store: Folder to keep the store in; a temporary folder by default.
        question: Question to ask instead of the built-in questions.
        all: Ask all questions of the demonstration instead of six.
        top_k: Number of documents to retrieve.
        html: HTML page to write, with the answers and a picture.
    """

    embedder: EmbedderName = None
    store: Path | None = None
    question: str | None = None
    all: bool = False
    top_k: Annotated[int, Ge(1)] = 4
    html: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `qcfuse verify`: the prompts and the limits.

    Attributes:
        ratio: Only share of reused tokens to try, 0 to 1; by default from 0.05 to the first that passes.
        store: Folder of a library, whose passages are used, or of a store; the verdict is saved in it.
        quick: Ask fewer prompts and try fewer ratios.
        size: Number of prompts of each of the three kinds; by default 8, with --quick 3.
        tokens: Length in tokens of the prompts with a hidden answer.
        kl: Maximum mean divergence along answers, in nats.
        agreement: Minimum share of equal answer tokens.
        loss: Maximum share of hidden answers lost.
    """

    ratio: float | None = None
    store: Path | None = None
    quick: bool = False
    size: Annotated[int | None, Ge(1)] = None
    tokens: Annotated[int, Ge(512)] = 1024
    kl: Annotated[float, Ge(0)] = 0.25
    agreement: Annotated[float, Ge(0), Le(1)] = 0.75
    loss: Annotated[float, Ge(0), Le(1)] = 0.1
    tenant: Tenant = None


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one parameter for each field of its dataclasses, for Typer to read.

    `Annotated[EngineConfig, names]` stands for these fields. The command refuses a model's folder or file that does
    not exist before it does anything else.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        settings, *names = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
        if isinstance(settings, type) and dataclasses.is_dataclass(settings):
            made = _parameters(settings, *names)
            groups[name] = settings, [field.name for field in made]
            parameters += made
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, (settings, fields) in groups.items():
            values[name] = settings(**{field: values.pop(field) for field in fields})
            if isinstance(values[name], ModelConfig) and values[name].model is not None:
                model_source(model := values[name].model)  # before the command imports torch, which takes seconds
                adapter_base(model)
        command(**values)

    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parameters(settings: type, names: tuple[str, ...] | None = None) -> list[inspect.Parameter]:
    """Return the parameters for a dataclass's fields, or for some; a field with an `Option` of its own keeps it."""
    declared, fields = declared_options(settings), inspect.signature(settings, eval_str=True).parameters
    parameters = []
    for name in names or declared:
        option, field = declared[name], fields[name]
        own = [part for part in get_args(field.annotation) if type(part).__module__.startswith("typer")]
        annotation = field.annotation if own else Annotated[option.type, _typer_option(name, option)]
        parameters.append(field.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


def _typer_option(name: str, option: DeclaredOption) -> Any:
    flags = [f"--{name.replace('_', '-')}"] if option.default is False else []  # no flag that switches it off
    settings: dict[str, Any] = {"min": option.limits.get("ge"), "max": option.limits.get("le")}
    if "dict" in str(option.type):
        settings |= {"parser": json_object, "metavar": "JSON"}
    return Option(*flags, help=escape(option.text), **settings)  # brackets would be styles


def json_object(text: str) -> dict[str, Any]:
    """Read the JSON object of an option."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QCFuseError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise QCFuseError("--chat-template-kwargs has to be a JSON object")
    return found
