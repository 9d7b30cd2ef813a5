"""Read and split files, and embed texts, with workers on Ray Data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cluster.pool import Columns, connect, map_with_workers
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.readers import PassagesBySource, find_files, read_passages
from qcfuse_rag.models.load import load_tokenizer

FILES_AT_ONCE, TEXTS_AT_ONCE = 8, 64


class ReadWorker:
    """Read files and split them into passages, measured by a model's tokenizer."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = load_tokenizer(model), max_tokens

    def __call__(self, rows: Columns) -> Columns:
        """Return the passages of each file, or the reason why it cannot be read, as JSON."""
        return {"number": rows["number"], "result": np.array([self._read(Path(file)) for file in rows["file"]])}

    def _read(self, file: Path) -> str:
        try:
            return json.dumps({"passages": read_passages([file], self._tokenizer, max_tokens=self._max_tokens)})
        except QCFuseError as error:
            return json.dumps({"unread": str(error)})


class EmbedWorker:
    """Embed texts with a sentence-transformers model."""

    def __init__(self, name: str) -> None:
        self._embed = Embedder(name)

    def __call__(self, rows: Columns) -> Columns:
        """Return the vector of each text."""
        return {"number": rows["number"], "result": self._embed(list(rows["text"]))}


def read_on_ray(
    workers: RayWorkers,
    paths: Iterable[Path],
    *,
    max_tokens: int,
    skip: Sequence[Path] = (),
    progress: Callable[[int, int], None] | None = None,
    unread: list[str] | None = None,
) -> PassagesBySource:
    """Read passages like `library.readers.read_passages`; workers read the files at the same paths."""
    all_paths = list(paths)
    files = [str(file.resolve()) for file in find_files(all_paths, skip)]
    named = {str(path.resolve()) for path in all_paths}
    results = _ordered(
        workers,
        "file",
        files,
        ReadWorker,
        (workers.model or default_model(), max_tokens),
        batch_size=FILES_AT_ONCE,
        progress=progress,
    )
    passages: PassagesBySource = {}
    for file, text in zip(files, results, strict=True):
        read = json.loads(text)
        if "unread" in read:
            if unread is None or file in named:
                raise QCFuseError(read["unread"])
            unread.append(read["unread"])
        for source, texts in read.get("passages", {}).items():
            passages.setdefault(source, []).extend(texts)
    return passages


def embed_on_ray(workers: RayWorkers, name: str, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return `[N, D]` float32 vectors of texts, rows of length 1."""
    if not texts:
        return np.zeros((0, 0), np.float32)
    vectors = _ordered(workers, "text", texts, EmbedWorker, (name,), batch_size=TEXTS_AT_ONCE)
    return np.stack(vectors).astype(np.float32)


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
