"""`qcfuse ask` and `qcfuse explain`: answer a question over a library."""

from __future__ import annotations

from pathlib import Path

from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.cli.console import ERR, OUT, print_json, size
from qcfuse_rag.cli.library import DEFAULT_EMBEDDER, index_folder, open_library_store, require_extra, require_library
from qcfuse_rag.cli.open_engine import open_engine, print_verdict_note
from qcfuse_rag.cli.options import AskOptions
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.monitoring.explain import explain_html
from qcfuse_rag.retrieval.index import PassageIndex
from qcfuse_rag.retrieval.retrieval_log import RetrievalLog


def ask_library(
    question: str, library: Path, options: AskOptions, *, max_new_tokens: int = 128, explain: Path | None, as_json: bool
) -> None:
    """Retrieve passages, answer a question over them, and print the answer and what was reused."""
    method = options.chosen_method()
    with require_extra():
        from qcfuse_rag.retrieval.embedder import Embedder

    require_library(library)
    index_name = options.embedder or DEFAULT_EMBEDDER
    if not library.is_dir():
        PassageIndex.load(index_folder(library), index_name)  # raises; opening the store would create the folder
    with open_library_store(library, tenant=options.tenant) as store:
        folder = index_folder(library, store)
        index = PassageIndex.load(folder, index_name)
        embed = Embedder(options.embedder or default_embedder())
        passages = index.search(embed([question])[0], options.top_k)
        RetrievalLog(folder).note(passage.text for passage in passages)
        engine = open_engine(store, method, options)
        print_verdict_note(engine)
        prompt = engine.prompt(question, [passage.text for passage in passages])
        params = SamplingParams(max_new_tokens=max_new_tokens, fidelity=options.fidelity.value)
        stream = engine.stream(prompt, params)
        if explain is not None:
            scores = stream.prefilled.scores
            mean_scores = None if scores is None else scores.mean
            explain.write_text(explain_html(engine.lm.tokenizer, prompt, stream.report, mean_scores), "utf-8")
        if as_json:
            answer = stream.result()
            sources = list(dict.fromkeys(passage.source for passage in passages))
            print_json({"question": question, "answer": answer.text, "sources": sources, **answer.to_dict()})
            return
        for piece in stream:
            OUT.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
        OUT.print()
        answer = stream.result()
        for line in (summary_line(stream.report), *healing_line(answer)):
            ERR.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def healing_line(answer: Generation) -> list[str]:
    """Return one line on how far an answer was healed and verified; none if that was not asked for."""
    healing = answer.healing
    if healing is None:
        return []
    line = f"{healing.fidelity}: {healing.exact_tokens:,} of {healing.prompt_tokens:,} prompt tokens are exact"
    if healing.verified_upto is not None:
        line += f", {healing.verified_upto:,} of {len(answer.ids):,} answer tokens verified"
    return [f"{line}; {healing.reason}" if healing.reason else line]


def summary_line(report: FusionReport) -> str:
    """Return one line on a fused prefill: method, tokens computed, bytes loaded, and time to the first token."""
    label = f"{report.method}, ratio {report.ratio:g}: " if report.base else f"{report.method}: "
    line = (
        f"{label}computed {report.rows:,} of {report.prompt_tokens:,} tokens ({report.work:.0%} over all layers), "
        f"loaded {size(report.bytes_loaded)}, first token after {report.timings.ttft_s:.2f} s"
    )
    return f"{line}; {report.fallback}" if report.fallback else line
