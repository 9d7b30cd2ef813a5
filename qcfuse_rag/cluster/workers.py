"""Prefill on Ray Data: a pool of workers, each with the model, computes the batches that the driver plans.

The driver plans as for a job in one process, so the batches and the stored bytes are the same. A batch carries token
ids, never text. Ray gives the batch of a lost worker to another worker. Entries are written atomically under names made
from their content, so the second worker writes the same entries again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cluster.pool import Columns, connect, map_with_workers
from qcfuse_rag.engine.config import ModelConfig
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.ingestion.batches import BatchResult, store_batch, system_prefix
from qcfuse_rag.ingestion.prefill import Ids
from qcfuse_rag.ingestion.target import Batch, PrefillTarget
from qcfuse_rag.methods import find_base
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.entry.encryption import environment_secret
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.verification.exactness import check_exact_once


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
        lm = LanguageModel.load(self.model or default_model(), **self.load_options())
        return lm, open_store(**self.store)

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
    """A Ray actor with the model and the shared store; its model must be the driver's.

    The driver could not find the entries of another model, so `fingerprint` is the digest of its own.
    """

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
