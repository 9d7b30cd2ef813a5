"""Read and split files, embed texts and prefill batches with a pool of workers on Ray Data.

The driver plans prefilling as for a job in one process, so the batches and the stored bytes are the same. A batch
carries token ids, never text. Ray gives the batch of a lost worker to another worker. Entries are written atomically
under names made from their content, so the second worker writes the same entries again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.bundled import default_model
from qcfuse_rag.engine.config import ModelConfig
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.ingestion.batches import BatchResult, store_batch, system_prefix
from qcfuse_rag.ingestion.prefill import Batch, Ids, PrefillTarget
from qcfuse_rag.library.conversion import Converter
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.files import Unread, find_files, real_path
from qcfuse_rag.library.readers import PassagesBySource, TextSplitting, collect_passages, try_file
from qcfuse_rag.methods import find_base
from qcfuse_rag.models.load import load_tokenizer
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.entry.encryption import environment_secret
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.verification.exactness import check_exact_once

Columns = dict[str, Any]
"""Input and output of a worker: columns by name, with one value for each row."""


def map_with_workers(
    rows: Sequence[Columns],
    worker: type[Any],
    arguments: tuple[Any, ...],
    *,
    doing: str,
    count: int,
    batch_size: int,
    resources: dict[str, Any],
) -> Iterator[Columns]:
    """Yield the workers' results for rows, in any order. The process must be connected to a cluster.

    A worker is made with `arguments`, then called with columns of `batch_size` rows. An error names the activity
    `doing`. Ray gives the rows of a lost worker to another one.
    """
    import ray

    batches = -(-len(rows) // batch_size)
    pool = ray.data.from_items(rows, override_num_blocks=batches).map_batches(
        worker,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=min(count, batches), max_tasks_in_flight_per_actor=2),
        **resources,
    )
    try:
        yield from pool.iter_rows()
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        raise QCFuseError(
            f"{doing} on Ray stopped: {worker_error(error)}; run it again, what is stored stays"
        ) from error


def worker_error(error: BaseException | None) -> str:
    """Return the message of the worker's `QCFuseError` without the stack traces around it, else the whole message."""
    texts, inner = list[str](), error
    while inner is not None:
        texts.append(str(inner))
        inner = getattr(inner, "cause", None) or inner.__cause__
    messages = re.findall(r"qcfuse_rag\.errors\.\w+: (.+)", "\n".join(texts))
    return messages[-1] if messages else str(error)


def connect(address: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect this process to a cluster, if it is not connected yet."""
    try:
        import ray
    except ImportError as error:
        raise QCFuseError("a cluster needs Ray: run `pip install 'qcfuse-rag[ray]'`") from error
    if ray.is_initialized():
        return
    dashboard = False if address == "local" else None
    try:
        ray.init(address=address, runtime_env=dict(runtime_env or {}), log_to_driver=False, include_dashboard=dashboard)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise QCFuseError(
            f"there is no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or name `local`"
        ) from error


@dataclass(frozen=True, kw_only=True)
class RayWorkers(ModelConfig):
    """The settings of a pool of workers, each with a model that it can load by this name.

    Set the dtype if the workers have GPUs and this machine has none.

    Attributes:
        store: options of `open_store` for the store that all workers share: `remote`, or a `folder` on a shared file
            system. If this process has a secret (QCFUSE_SECRET), the workers need it too: it does not travel.
        address: address of the cluster; `auto` for the one of this machine, `local` to start one here.
        count: number of workers.
        cpus: CPU cores of each worker.
        gpus: GPUs of each worker.
        runtime_env: Ray's `runtime_env` for the workers.
    """

    store: Mapping[str, Any]
    address: str = "auto"
    count: int = 2
    cpus: float = 1
    gpus: float = 0
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if environment_secret() is not None and "encrypt" not in self.store:
            object.__setattr__(self, "store", {**self.store, "encrypt": True})

    def requiring_encryption(self) -> RayWorkers:
        """Return the same workers with an encrypted store, for which every worker needs the secret."""
        return replace(self, store={**self.store, "encrypt": True})

    def open(self) -> tuple[LanguageModel, KVStore]:
        """Load the model and open the store, in a worker."""
        return LanguageModel.load(self.model or default_model(), **self.load_options()), open_store(**self.store)

    def resources(self) -> dict[str, Any]:
        """Return the resources that Ray reserves for one worker."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    def prefill(
        self, lm: LanguageModel, prefix_ids: Ids, primer: Ids, batches: Iterable[Batch], *, encrypted: bool
    ) -> Iterator[BatchResult]:
        """Compute and store batches on the cluster; yield the result of each batch when it is done, in any order."""
        connect(self.address, self.runtime_env)
        workers = self.requiring_encryption() if encrypted else self
        remaining, arguments = iter(batches), (workers, lm.fingerprint.digest, prefix_ids, primer)
        while inputs := [{"batch": batch_to_json(batch)} for batch in islice(remaining, BATCHES_AT_ONCE)]:
            rows = map_with_workers(
                inputs,
                PrefillWorker,
                arguments,
                doing="warming",
                count=self.count,
                batch_size=1,
                resources=self.resources(),
            )
            for row in rows:
                yield BatchResult(**{name: int(value) for name, value in row.items()})


BATCHES_AT_ONCE = 4096
"""Batches that the driver hands to Ray at a time; it keeps their token ids only."""


class PrefillWorker:
    """A Ray actor with the shared store and the model, which must have the digest `fingerprint` of the driver's."""

    def __init__(self, workers: RayWorkers, fingerprint: str, prefix_ids: Ids, primer: Ids) -> None:
        lm, self._store = workers.open()
        if lm.fingerprint.digest != fingerprint:
            raise QCFuseError(
                "a worker's model is not this machine's: give both the same weights, and the same dtype "
                f"(a worker has {lm.number_formats})"
            )
        check_exact_once(lm)
        self._target = PrefillTarget(lm, self._store, prefix_ids, primer)
        self._system_prefix = system_prefix(self._target)

    def __call__(self, rows: Columns) -> Columns:
        """Compute and store batches; return the fields of each `BatchResult`."""
        results = [store_batch(self._target, batch_from_json(text), self._system_prefix) for text in rows["batch"]]
        self._store.flush()
        names = ("chunks", "tokens", "computed_tokens", "size_bytes")
        return {name: np.array([getattr(result, name) for result in results]) for name in names}


def batch_to_json(batch: Batch) -> str:
    """Return a batch as JSON."""
    return json.dumps([batch.base.name, batch.chunks, batch.origins, batch.tokens_in_front])


def batch_from_json(text: str) -> Batch:
    """Return the batch of `batch_to_json`."""
    base, chunks, origins, tokens = json.loads(text)
    passages = tuple(tuple(map(tuple, ids)) for ids in origins)
    return Batch(find_base(base), tuple(map(tuple, chunks)), passages, tokens)


FILES_AT_ONCE, TEXTS_AT_ONCE = 8, 64


class ReadWorker:
    """Read files and split them into passages, measured by a model's tokenizer; those named are read at any size."""

    def __init__(self, model: str, max_tokens: int, named: frozenset[str]) -> None:
        self._splitting, self._named = TextSplitting(load_tokenizer(model), max_tokens), named

    def __call__(self, rows: Columns) -> Columns:
        """Return the passages of each file, or the reason why it is not read, as JSON."""
        with Converter() as convert:
            results = [try_file(Path(f), self._splitting, convert, named=f in self._named) for f in rows["file"]]
        return {"number": rows["number"], "result": np.array([json.dumps(result) for result in results])}


class EmbedWorker:
    """Embed texts with a sentence-transformers model."""

    def __init__(self, name: str) -> None:
        self._embed = Embedder(name)

    def __call__(self, rows: Columns) -> Columns:
        """Return the vectors of each text's windows, as JSON."""
        results = [json.dumps(vectors.tolist()) for vectors in self._embed.windows(list(rows["text"]))]
        return {"number": rows["number"], "result": np.array(results)}


def read_on_ray(
    workers: RayWorkers,
    paths: Iterable[Path],
    *,
    max_tokens: int,
    skip: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
    unread: Unread | None = None,
) -> PassagesBySource:
    """Read passages like `library.readers.read_passages`; workers read the files at the same paths."""
    named = list(paths)
    files = [real_path(file) for file in find_files(named, skip, unread)]
    named = [real_path(path) if path.is_file() else path for path in named]
    arguments = (workers.model or default_model(), max_tokens, frozenset(map(str, named)))
    results = _ordered(
        workers, "file", list(map(str, files)), ReadWorker, arguments, batch_size=FILES_AT_ONCE, progress=progress
    )
    return collect_passages(zip(files, map(json.loads, results), strict=True), named, unread)


def embed_on_ray(workers: RayWorkers, name: str, texts: Sequence[str]) -> list[NDArray[np.float32]]:
    """Return vectors of texts like `Embedder.windows`."""
    results = _ordered(workers, "text", texts, EmbedWorker, (name,), batch_size=TEXTS_AT_ONCE)
    return [np.array(json.loads(result), np.float32) for result in results]


def _ordered(
    workers: RayWorkers,
    column: str,
    items: Sequence[str],
    worker: type[ReadWorker] | type[EmbedWorker],
    arguments: tuple[Any, ...],
    *,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    connect(workers.address, workers.runtime_env)
    if not items:
        return []
    rows = [{"number": number, column: item} for number, item in enumerate(items)]
    results = map_with_workers(
        rows,
        worker,
        arguments,
        doing="reading" if worker is ReadWorker else "embedding",
        count=workers.count,
        batch_size=batch_size,
        resources={"num_cpus": workers.cpus},
    )
    by_number: dict[int, Any] = {}
    for row in results:
        by_number[int(row["number"])] = row["result"]
        if progress is not None:
            progress(len(by_number), len(rows))
    return [by_number[number] for number in range(len(rows))]
