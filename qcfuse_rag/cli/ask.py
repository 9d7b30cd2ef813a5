"""`qcfuse ask`: retrieve, fuse, answer, and say what was reused."""

from __future__ import annotations

from pathlib import Path

from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.cli.console import ERR, OUT, print_json, size
from qcfuse_rag.cli.library import (
    DEFAULT_EMBEDDER,
    index_folder,
    needing_extra,
    open_kv,
    require_library,
)
from qcfuse_rag.cli.open_engine import note_verdict, open_engine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.monitoring.explain import explain_html
from qcfuse_rag.retrieval.index import PassageIndex
from qcfuse_rag.retrieval.retrieval_log import RetrievalLog


def ask_library(
    question: str,
    library: Path,
    model: str | None,
    embedder: str | None,
    method: Method,
    top_k: int,
    max_new_tokens: int,
    explain: Path | None,
    device: str | None,
    dtype: str | None,
    tenant: str | None,
    *,
    as_json: bool,
) -> None:
    """Answer a question over a library."""
    with needing_extra():
        from qcfuse_rag.retrieval.embedder import Embedder

    require_library(library)
    if not library.is_dir():
        PassageIndex.load(index_folder(library), embedder or DEFAULT_EMBEDDER)  # says what is missing
    with open_kv(library, tenant=tenant) as store:
        place = index_folder(library, store)
        index = PassageIndex.load(place, embedder or DEFAULT_EMBEDDER)
        embed = Embedder(embedder or default_embedder())
        found = index.search(embed([question])[0], top_k)
        RetrievalLog(place).note(passage.text for passage in found)
        engine = open_engine(store, model, method, device, dtype)
        note_verdict(engine)
        prompt = engine.prompt(question, [passage.text for passage in found])
        stream = engine.stream(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        if explain is not None:
            scores = stream.prefilled.scores
            looked = None if scores is None else scores.mean
            explain.write_text(explain_html(engine.lm.tokenizer, prompt, stream.report, looked), "utf-8")
        if as_json:
            answer = stream.result()
            sources = list(dict.fromkeys(passage.source for passage in found))
            print_json({"question": question, "answer": answer.text, "sources": sources, **answer.to_dict()})
            return
        for piece in stream:
            OUT.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
        OUT.print()
        ERR.print(describe(stream.report), style="dim", highlight=False, markup=False, soft_wrap=True)


def describe(report: FusionReport) -> str:
    """Say in one line what a fused prefill did."""
    head = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{head}computed {report.rows:,} of {report.prompt_tokens:,} tokens ({report.work:.0%} over all layers), "
        f"loaded {size(report.bytes_loaded)}, first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.fallback}" if report.fallback else line
