"""Read the documents of a warming job, and keep the passage index of the library up to date."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.cli.console import progress_bar
from qcfuse_rag.cli.options import CorpusOptions, WarmOptions
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.folder import own_folders, require_extra
from qcfuse_rag.library.index import PassageIndex, embedder_source

EMBEDDING_BATCH = 256  # minimum number of passages to embed together on this machine
INDEX_SAVE_INTERVAL_S = 30.0


def check_paths(options: CorpusOptions, library: Path, *, allow_empty: bool = False) -> None:
    """Check the paths and the reader of a job before a model is loaded.

    Each folder is checked by itself: an empty folder may be a missing mount, and warming would forget its documents.
    """
    with require_extra():
        from qcfuse_rag.library.readers import FILES, find_files, load_reader

    if options.reader != FILES:
        load_reader(options.reader)
        return
    own = own_folders(library)
    for path in options.paths:
        if not any(True for _ in find_files([path], own)) and not allow_empty:
            hint = "; if all were deleted, `warm run --allow-empty` forgets them" if library.is_dir() else ""
            raise QCFuseError(f"there are no text files in {path}{hint}")


def read_documents(
    engine: FusionEngine,
    library: Path,
    options: CorpusOptions,
    unread: list[str],
    workers: RayWorkers | None = None,
) -> dict[str, list[str]]:
    """Read and split the documents of a job: source -> its passages, in order.

    The library's own folders are left out: it may be inside the folder of its documents.

    Ray workers, if given, must see the files at the same paths. Files in folders that are not read are listed with the
    reason in `unread`.
    """
    with require_extra():
        from qcfuse_rag.library.readers import FILES, read_passages, skipped_files

    own = own_folders(library)
    if options.reader == FILES:
        unread.extend(skipped_files(options.paths, own))
    with progress_bar("reading documents", "files") as advance:
        if workers is not None and options.reader == FILES:
            from qcfuse_rag.cluster.read import read_on_ray

            passages = read_on_ray(
                workers, options.paths, max_tokens=options.max_tokens, skip=own, progress=advance, unread=unread
            )
        else:
            passages = read_passages(
                options.paths,
                engine.lm.tokenizer,
                reader=options.reader,
                max_tokens=options.max_tokens,
                skip=own,
                progress=advance,
                unread=unread,
            )
    unread.extend(f"{source} has no text" for source, texts in passages.items() if not texts)
    return passages


def require_passages(passages: Mapping[str, Sequence[str]], options: CorpusOptions) -> None:
    """Require at least one passage."""
    if not any(passages.values()):
        raise QCFuseError(f"there are no passages in {', '.join(map(str, options.paths))}")


def vanished_files(index: PassageIndex, options: WarmOptions, passages: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the sources to forget: indexed files that no longer exist in the folders, and documents without text.

    A source just read is kept: a JSON lines record may have the name of a file elsewhere.
    """
    folders = [path.resolve() for path in options.paths if path.is_dir()]
    sources = {passage.source for passage in index.passages}
    deleted = {
        source
        for source in sources
        if any(Path(source).is_relative_to(folder) for folder in folders) and not os.path.isfile(source)
    }
    return (deleted | passages.keys()) - {source for source, texts in passages.items() if texts}


def index_passages(
    index: PassageIndex,
    folder: Path,
    passages: Mapping[str, list[str]],
    workers: RayWorkers | None = None,
) -> None:
    """Embed the passages of new and changed documents, and save the index at intervals and at the end."""
    with require_extra():
        from qcfuse_rag.library.embedder import Embedder

    batch_size, model = EMBEDDING_BATCH, embedder_source(index.embedder)
    embed: Callable[[Sequence[str]], NDArray[np.float32]]
    if workers is None:
        embed = Embedder(model)
    else:
        from qcfuse_rag.cluster.read import embed_on_ray

        batch_size, embed = EMBEDDING_BATCH * 16 * workers.count, partial(embed_on_ray, workers, model)
    indexed = index.by_source()
    changed = {source: texts for source, texts in passages.items() if indexed.get(source) != texts}
    saved_at = time.monotonic()
    with progress_bar("indexing passages", "passages") as advance:
        done, total = 0, sum(map(len, changed.values()))
        while changed:
            batch: dict[str, list[str]] = {}
            while changed and sum(map(len, batch.values())) < batch_size:
                source = next(iter(changed))
                batch[source] = changed.pop(source)
            index.replace(batch, embed([text for texts in batch.values() for text in texts]))
            done += sum(map(len, batch.values()))
            advance(done, total)
            if time.monotonic() - saved_at > INDEX_SAVE_INTERVAL_S:
                index.save(folder)
                saved_at = time.monotonic()
    index.save(folder)
