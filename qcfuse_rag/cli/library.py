"""`qcfuse warm` and `qcfuse ask`: a folder that holds passages, their embeddings and their caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qcfuse_rag.cli.console import ERR, OUT, print_json, progress_bar, size, status
from qcfuse_rag.demo.assets import default_embedder, default_model
from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fuse.method import Method
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.methods import choose_method
from qcfuse_rag.report.explain import explain_html
from qcfuse_rag.report.fusion import FusionReport
from qcfuse_rag.retrieve.index import PassageIndex

KV_FOLDER, INDEX_FOLDER = "kv", "passages"
DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"


def warm_library(
    paths: Sequence[Path],
    store: Path,
    model: str | None,
    embedder: str | None,
    base: str | None,
    max_tokens: int,
    device: str | None,
    dtype: str | None,
    *,
    as_json: bool,
) -> None:
    """Split, embed and prefill documents into a library folder, and print what was done."""
    with _needing_extra():
        from qcfuse_rag.ingest.split import find_documents, split_document
        from qcfuse_rag.retrieve.embed import Embedder

    files = list(find_documents(paths))
    if not files:
        raise QCFuseError(f"no text files in {', '.join(str(path) for path in paths)}")
    embed = Embedder(embedder or default_embedder())
    with _open(store, model, choose_method(base=base), device, dtype) as engine:
        place, name = store / INDEX_FOLDER, embedder or DEFAULT_EMBEDDER
        index = PassageIndex.load(place, name) if place.exists() else PassageIndex(name)
        index.remove(_vanished(index, paths))
        texts: list[str] = []
        with progress_bar("indexing documents") as advance:
            for done, file in enumerate(files, start=1):
                passages = split_document(file, engine.lm.tokenizer, max_tokens=max_tokens)
                index.replace(str(file.resolve()), passages, embed(passages))
                texts += passages
                advance(done, len(files))
        index.save(place)
        with progress_bar("prefilling passages") as advance:
            summary = engine.warm(texts, progress=advance)
    if as_json:
        print_json({"documents": len(files), "passages": len(texts), **summary.to_dict()})
        return
    OUT.print(
        f"{len(files)} documents, {len(texts)} passages: {summary.warmed} prefilled ({summary.tokens:,} tokens, "
        f"{size(summary.size_bytes)}) in {summary.elapsed_s:.1f} s, {summary.present} were there already",
        soft_wrap=True,
    )
    for index_of_passage, reason in summary.failed:
        ERR.print(f"[yellow]not stored[/yellow] passage {index_of_passage}: {reason}", highlight=False, soft_wrap=True)


def ask_library(
    question: str,
    store: Path,
    model: str | None,
    embedder: str | None,
    method: Method,
    top_k: int,
    max_new_tokens: int,
    explain: Path | None,
    device: str | None,
    dtype: str | None,
    *,
    as_json: bool,
) -> None:
    """Retrieve, fuse, answer, and say what was reused."""
    with _needing_extra():
        from qcfuse_rag.retrieve.embed import Embedder

    index = PassageIndex.load(store / INDEX_FOLDER, embedder or DEFAULT_EMBEDDER)
    embed = Embedder(embedder or default_embedder())
    found = index.search(embed([question])[0], top_k)
    with _open(store, model, method, device, dtype) as engine:
        prompt = engine.prompt(question, [passage.text for passage in found])
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        if explain is not None:
            explain.write_text(explain_html(engine.lm.tokenizer, prompt, stream.report), "utf-8")
        if as_json:
            answer = stream.result()
            sources = list(dict.fromkeys(passage.source for passage in found))
            print_json({"question": question, "answer": answer.text, "sources": sources, **answer.to_dict()})
            return
        for piece in stream:
            OUT.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
        OUT.print()
        ERR.print(describe(stream.report), style="dim", highlight=False, soft_wrap=True)


def describe(report: FusionReport) -> str:
    """Say in one line what a fused prefill did."""
    head = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{head}computed {report.rows:,} of {report.prompt_tokens:,} tokens, loaded {size(report.bytes_loaded)}, "
        f"first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.fallback}" if report.fallback else line


def _vanished(index: PassageIndex, paths: Sequence[Path]) -> set[str]:
    """Return indexed files that no longer exist in the folders named."""
    folders = [path.resolve() for path in paths if path.is_dir()]
    sources = {passage.source for passage in index.passages}
    return {s for s in sources if not Path(s).exists() and any(Path(s).is_relative_to(folder) for folder in folders)}


@contextmanager
def _needing_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli]'`") from error


def _open(store: Path, model: str | None, method: Method, device: str | None, dtype: str | None) -> FusionEngine:
    with status("loading the model"):
        return FusionEngine.load(
            model or default_model(), store=store / KV_FOLDER, method=method, device=device, dtype=dtype
        )
