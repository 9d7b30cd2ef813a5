"""Prefill on Ray Data: a pool of workers, each with the model, over batches that the driver planned.

The driver plans as it does for a job in one process, so the batches are the same, and with them the stored bytes. A
batch carries token ids, never text. Ray gives a batch whose worker is lost to another one; entries are written whole
and under names made of their content, so what the lost one had written is written again, the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from qcfuse_rag.cluster.pool import Column, through_pool
from qcfuse_rag.cluster.workers import RayWorkers, connect
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fuse.self_check import check_exact
from qcfuse_rag.ingest.base import BASES
from qcfuse_rag.ingest.prefiller import Batch, Done, Ids, Prefiller
from qcfuse_rag.model.language_model import LanguageModel

AT_ONCE = 4096
"""Batches that the driver hands to Ray at a time; their token ids are all it keeps of them."""


class PrefillWorker:
    """One worker: a model and the shared store.

    Args:
        workers: what it is made of.
        fingerprint: address of the driver's model; another would write what the driver does not find.
        frame, primer: see `Prefiller`.

    Raises:
        QCFuseError: if its model is not the driver's.
    """

    def __init__(self, workers: RayWorkers, fingerprint: str, frame: Ids, primer: Ids) -> None:
        lm, self._store = workers.open()
        if lm.fingerprint.digest != fingerprint:
            raise QCFuseError(
                "a worker's model is not this machine's: give both the same weights, and the same dtype "
                f"(a worker has {str(lm.dtype).removeprefix('torch.')})"
            )
        check_exact(lm)
        self._prefiller = Prefiller(lm, self._store, frame, primer)
        self._head = self._prefiller.head()

    def __call__(self, rows: Column) -> Column:
        """Compute and store batches; return what each took."""
        done = [self._prefiller.run(from_json(text), self._head) for text in rows["batch"]]
        self._store.flush()
        names = ("chunks", "tokens", "computed_tokens", "size_bytes")
        return {name: np.array([getattr(one, name) for one in done]) for name in names}


def prefill_on_ray(
    workers: RayWorkers, lm: LanguageModel, frame: Ids, primer: Ids, batches: Iterable[Batch]
) -> Iterator[Done]:
    """Compute and store batches on a cluster; yield what each took as it is done, in any order.

    Raises:
        QCFuseError: if Ray is not installed, there is no cluster, or a worker fails for a reason of its own.
    """
    connect(workers.address, workers.runtime_env)
    rest, arguments = iter(batches), (workers, lm.fingerprint.digest, frame, primer)
    while window := [{"batch": to_json(batch)} for batch in islice(rest, AT_ONCE)]:
        done = through_pool(
            window,
            PrefillWorker,
            arguments,
            doing="warming",
            count=workers.count,
            batch_size=1,
            resources=workers.resources(),
        )
        for row in done:
            yield Done(**{name: int(value) for name, value in row.items()})


def to_json(batch: Batch) -> str:
    """Return a batch as text."""
    return json.dumps([batch.base.name, batch.chunks, batch.met, batch.before])


def from_json(text: str) -> Batch:
    """Return the batch that was written."""
    base, chunks, met, before = json.loads(text)
    all_met = tuple(tuple(tuple(ids) for ids in own) for own in met)
    return Batch(BASES[base], tuple(tuple(ids) for ids in chunks), all_met, before)
