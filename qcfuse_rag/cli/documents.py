"""What documents a warming job is given: reading them, and keeping the library's index of their passages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.cli.console import progress_bar
from qcfuse_rag.cli.job import WarmOptions
from qcfuse_rag.cli.library import needing_extra
from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.retrieval.index import PassageIndex

EMBEDDED_AT_ONCE = 256
INDEX_SAVED_EVERY_S = 30.0


def check_paths(options: WarmOptions, library: Path) -> None:
    """Complain of paths before a model is loaded.

    A folder that is empty may be one that is not mounted: each is looked at by itself, since what is gone from one is
    forgotten whatever the others hold.

    Raises:
        QCFuseError: if there is nothing to read in one of them, or no such reader.
    """
    with needing_extra():
        from qcfuse_rag.ingestion.readers import FILES, find_files, load_reader

    if options.reader != FILES:
        load_reader(options.reader)
        return
    for path in options.paths:
        if not any(True for _ in find_files([Path(path)])) and not options.allow_empty:
            hint = "; if all were deleted, `warm run --allow-empty` forgets them" if library.is_dir() else ""
            raise QCFuseError(f"no text files in {path}{hint}")


def read_documents(
    engine: FusionEngine, options: WarmOptions, unread: list[str], workers: RayWorkers | None = None
) -> dict[str, list[str]]:
    """Return the passages of each document, in order; here or, where there are workers, there.

    Args:
        engine: whose tokenizer measures passages.
        options: of the job.
        unread: gets what in folders is not read, and why.
        workers: that read files, and find them at the same paths.

    Raises:
        QCFuseError: if something that was named outright cannot be read.
    """
    with needing_extra():
        from qcfuse_rag.ingestion.readers import FILES, read_passages, skipped_files

    paths = [Path(path) for path in options.paths]
    if options.reader == FILES:
        unread.extend(skipped_files(paths))
    with progress_bar("reading documents", "files") as advance:
        if workers is not None and options.reader == FILES:
            from qcfuse_rag.cluster.read import read_on_ray

            passages = read_on_ray(workers, paths, max_tokens=options.max_tokens, progress=advance, unread=unread)
        else:
            passages = read_passages(
                paths,
                engine.lm.tokenizer,
                reader=options.reader,
                max_tokens=options.max_tokens,
                progress=advance,
                unread=unread,
            )
    unread.extend(f"{source} has no text" for source, texts in passages.items() if not texts)
    return passages


def require_passages(passages: dict[str, list[str]], options: WarmOptions) -> None:
    """Complain of documents without any text.

    Raises:
        QCFuseError: if there is no passage at all.
    """
    if not any(passages.values()):
        raise QCFuseError(f"no passages in {', '.join(options.paths)}")


def vanished_files(index: PassageIndex, options: WarmOptions, passages: Mapping[str, Sequence[str]]) -> set[str]:
    """Return indexed files that no longer exist in the folders named, and documents in which there is no text now.

    Args:
        index: of the library.
        options: of the job.
        passages: of each document just read. A record of JSON lines may be called as a file that is elsewhere.
    """
    folders = [Path(path).resolve() for path in options.paths if Path(path).is_dir()]
    sources = {passage.source for passage in index.passages}
    gone = {s for s in sources if not Path(s).is_file() and any(Path(s).is_relative_to(folder) for folder in folders)}
    return (gone | passages.keys()) - {source for source, texts in passages.items() if texts}


def index_passages(
    index: PassageIndex,
    place: Path,
    passages: dict[str, list[str]],
    options: WarmOptions,
    workers: RayWorkers | None = None,
) -> None:
    """Embed the passages of new and changed documents, saving the index now and then."""
    with needing_extra():
        from qcfuse_rag.retrieval.embedder import Embedder

    at_once, name = EMBEDDED_AT_ONCE, options.embedder or default_embedder()
    embed: Callable[[Sequence[str]], NDArray[np.float32]]
    if workers is None:
        embed = Embedder(name)
    else:
        from qcfuse_rag.cluster.read import embed_on_ray

        at_once, embed = EMBEDDED_AT_ONCE * 16 * workers.count, partial(embed_on_ray, workers, name)
    had = index.by_source()
    changed = {source: texts for source, texts in passages.items() if had.get(source) != texts}
    saved = time.monotonic()
    with progress_bar("indexing passages", "passages") as advance:
        done, total = 0, sum(len(texts) for texts in changed.values())
        while changed:
            group: dict[str, list[str]] = {}
            while changed and sum(map(len, group.values())) < at_once:
                source = next(iter(changed))
                group[source] = changed.pop(source)
            index.replace(group, embed([text for texts in group.values() for text in texts]))
            done += sum(map(len, group.values()))
            advance(done, total)
            if time.monotonic() - saved > INDEX_SAVED_EVERY_S:
                index.save(place)
                saved = time.monotonic()
    index.save(place)
