"""`qcfuse demo`: ingest and warm the bundled corpus with LlamaIndex, ask a question, and compare the methods."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from qcfuse_rag.bundled import corpus, default_embedder, default_model
from qcfuse_rag.cli.console import ERR, OUT, print_json, print_line, progress_bar, size, status
from qcfuse_rag.cli.open_engine import print_profile_note
from qcfuse_rag.cli.options import DemoOptions
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.prefill_base import FRAMED

QUESTION = "How many members does the Tidemoot have?"
METHODS = (
    make_method("full"),
    make_method("auto", guard=False),  # answers the question; without its guard it fuses prompts of this length
    make_method("reuse", base=FRAMED),
    make_method("qcfuse", ratio=0.05, base=FRAMED),
    make_method("qcfuse", ratio=0.15, base=FRAMED),
    make_method("qcfuse", ratio=0.5, base=FRAMED),
)
ANSWER_TOKENS = 32


def run_demo(options: DemoOptions, *, as_json: bool) -> None:
    """Run the demonstration and print its table or one JSON object."""
    try:
        from llama_index.core import Document, VectorStoreIndex
        from llama_index.core.ingestion import IngestionPipeline
        from llama_index.core.node_parser import SentenceSplitter
        from llama_index.core.schema import MetadataMode
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding

        from llama_index.llms.qcfuse import QCFuseLLM, QCFusePostprocessor, QCFuseSynthesizer, QCFuseWarmup
    except ImportError as error:
        raise QCFuseError(
            f"the demo needs LlamaIndex ({error.name}); run `pip install -e integrations/llama-index-llms-qcfuse "
            "llama-index-embeddings-huggingface` in a clone of the repository"
        ) from error

    question = options.question or QUESTION
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = options.store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qcfuse-demo-")))
        with status("loading the model and checking it against its own code"):
            engine = stack.enter_context(
                FusionEngine.load(
                    options.model or default_model(),
                    store=folder / "kv",
                    device=options.device,
                    dtype=options.dtype,
                    weights=options.weights,
                )
            )
            llm = QCFuseLLM.from_engine(engine, max_new_tokens=ANSWER_TOKENS)
        print_profile_note(engine)
        with status("reading and embedding the corpus with LlamaIndex"):
            embed = HuggingFaceEmbedding(model_name=options.embedder or default_embedder(), device="cpu")
            documents = [Document(text=text, doc_id=name) for name, text in corpus().items()]
            pipeline = IngestionPipeline(transformations=[SentenceSplitter(chunk_size=512, chunk_overlap=0), embed])
            nodes = pipeline.run(documents=documents)
            index = VectorStoreIndex(nodes, embed_model=embed)
        setup_s = time.perf_counter() - started
        with progress_bar(f"warming {len(nodes)} passages", "tokens") as advance:
            warmup = QCFuseWarmup(llm, progress=advance)
            warmup(nodes)
        assert warmup.summary is not None

        queries = index.as_query_engine(
            llm=llm,
            similarity_top_k=options.top_k,
            node_postprocessors=[QCFusePostprocessor(llm=llm)],
            response_synthesizer=QCFuseSynthesizer(llm, streaming=True),
        )
        if not as_json:
            ERR.print(f"\n{question}", style="bold", highlight=False, markup=False)
        response = queries.query(question)
        for piece in response.response_gen:
            if not as_json:
                OUT.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
        if not as_json:
            OUT.print("\n")
        passages = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in response.source_nodes]
        prompt = engine.prompt(question, passages)
        with progress_bar("measuring", "runs") as advance:
            context_tokens, measured = compare(engine, prompt, options.repeats, advance)

    summary = warmup.summary
    if as_json:
        timings = {"setup_s": setup_s, "warm_s": summary.elapsed_s}
        print_json({"model": engine.lm.name, "context_tokens": context_tokens, "methods": measured, **timings})
    else:
        OUT.print(to_table(prompt, context_tokens, measured, options.repeats))
        for method, row in zip(METHODS, measured, strict=True):
            print_line(f"  {label(method):12} {' '.join(row['answer'].split())}")
        OUT.print(
            f"Warmed {summary.warmed} caches ({size(summary.size_bytes)}) in {summary.elapsed_s:.1f} s, once; "
            f"{torch.get_num_threads()} threads, {engine.lm.device}, {engine.lm.fingerprint.number_formats}."
        )


def compare(
    engine: FusionEngine, prompt: Prompt, repeats: int, advance: Callable[[int, int], None]
) -> tuple[int, list[dict[str, Any]]]:
    """Measure `METHODS` in alternation, so that a slow phase of the machine affects all of them.

    Return the prompt's context tokens, and for each method the median time to first token, the divergence of that token
    from full prefill's, in nats, the last run's figures and the answer.
    """
    times: dict[Method, list[float]] = {method: [] for method in METHODS}
    reports: dict[Method, FusionReport] = {}
    logits: dict[Method, Tensor] = {}
    answers: dict[Method, str] = {}
    total, done = (repeats + 1) * len(METHODS), 0
    for method in METHODS:  # the first round generates the answers and is not timed
        answers[method] = engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS), method=method).text
        advance(done := done + 1, total)
    for _ in range(repeats):
        for method in METHODS:
            prefilled = engine.prefill(prompt, method=method, answer_tokens=ANSWER_TOKENS)
            times[method].append(prefilled.report.timings.ttft_s)
            reports[method], logits[method] = prefilled.report, prefilled.logits
            advance(done := done + 1, total)
    full = METHODS[0]
    rows = [
        {
            "method": method.name,
            "ratio": method.ratio,
            "ttft_s": statistics.median(times[method]),
            "ttft_full_s": statistics.median(times[full]),
            "rows": reports[method].rows,
            "bytes_loaded": reports[method].bytes_loaded,
            "kl": divergence(logits[full], logits[method]),
            "answer": answers[method].strip(),
            "fallback": reports[method].fallback,
        }
        for method in METHODS
    ]
    return reports[full].context_tokens, rows


def to_table(prompt: Prompt, context_tokens: int, measured: list[dict[str, Any]], repeats: int) -> Table:
    """Return the comparison as a table, with a bar for the time of each method."""
    slowest = max(row["ttft_s"] for row in measured)
    table = Table(
        title=f"{context_tokens:,} context tokens in {len(prompt.chunks)} passages, "
        f"time to first token, median of {repeats}"
    )
    for name in ("method", "time to first token", "", "faster", "rows", "loaded", "KL"):
        table.add_column(name, justify="right" if name in ("faster", "rows", "loaded", "KL") else "left", no_wrap=True)
    for method, row in zip(METHODS, measured, strict=True):
        bar, speedup = "█" * max(1, round(16 * row["ttft_s"] / slowest)), row["ttft_full_s"] / row["ttft_s"]
        figures = (f"{speedup:.1f}x", f"{row['rows']:,}", size(row["bytes_loaded"]), f"{row['kl']:.3f}")
        table.add_row(label(method), bar, f"{row['ttft_s']:.2f} s", *figures)
    return table


def label(method: Method) -> str:
    """Return the name of a method, with its ratio if it has a probe."""
    return f"{method.name} {method.ratio:g}" if method.probe else method.name
