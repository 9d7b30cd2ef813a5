"""`qcfuse demo`: ingest and warm the bundled corpus with LlamaIndex, ask a question, and compare the methods."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time, divergence and answer of one method on one prompt.

    `ttft_s` is the median, the report that of the last run, and `kl` the divergence of the first token from full
    prefill's, in nats.
    """

    method: Method
    ttft_s: float
    report: FusionReport
    kl: float
    answer: str


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
                    options.model or default_model(), store=folder / "kv", device=options.device, dtype=options.dtype
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
            measured = compare(engine, prompt, METHODS, options.repeats, advance)

    data = to_json(engine, measured, setup_s, warmup.summary.elapsed_s)
    if as_json:
        print_json(data)
    else:
        OUT.print(to_table(prompt, measured, options.repeats))
        for measurement in measured:
            print_line(f"  {label(measurement.method):12} {' '.join(measurement.answer.split())}")
        summary = warmup.summary
        OUT.print(
            f"Warmed {summary.warmed} caches ({size(summary.size_bytes)}) in {summary.elapsed_s:.1f} s, once; "
            f"{torch.get_num_threads()} threads, {engine.lm.device}, {engine.lm.fingerprint.dtype}."
        )


def compare(
    engine: FusionEngine, prompt: Prompt, methods: tuple[Method, ...], repeats: int, advance: Callable[[int, int], None]
) -> list[Measurement]:
    """Measure the methods in alternation, so that a slow phase of the machine affects all of them.

    The first method is full prefill, the reference of the divergences.
    """
    times: dict[Method, list[float]] = {method: [] for method in methods}
    reports: dict[Method, FusionReport] = {}
    logits: dict[Method, Tensor] = {}
    answers: dict[Method, str] = {}
    total, done = (repeats + 1) * len(methods), 0
    for method in methods:  # the first round generates the answers and is not timed
        answers[method] = engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS), method=method).text
        advance(done := done + 1, total)
    for _ in range(repeats):
        for method in methods:
            prefilled = engine.prefill(prompt, method=method, answer_tokens=ANSWER_TOKENS)
            times[method].append(prefilled.report.timings.ttft_s)
            reports[method], logits[method] = prefilled.report, prefilled.logits
            advance(done := done + 1, total)
    reference = logits[methods[0]]
    return [
        Measurement(m, statistics.median(times[m]), reports[m], divergence(reference, logits[m]), answers[m].strip())
        for m in methods
    ]


def to_json(engine: FusionEngine, measured: list[Measurement], setup_s: float, warm_s: float) -> dict[str, Any]:
    """Return the result of the demonstration as JSON-compatible data, with times in seconds."""
    full = measured[0]
    return {
        "model": engine.lm.name,
        "context_tokens": full.report.context_tokens,
        "methods": [
            {
                "method": m.method.name,
                "ratio": m.method.ratio,
                "ttft_s": m.ttft_s,
                "ttft_full_s": full.ttft_s,
                "rows": m.report.rows,
                "bytes_loaded": m.report.bytes_loaded,
                "kl": m.kl,
                "answer": m.answer,
                "fallback": m.report.fallback,
            }
            for m in measured
        ],
        "setup_s": setup_s,
        "warm_s": warm_s,
    }


def to_table(prompt: Prompt, measured: list[Measurement], repeats: int) -> Table:
    """Return the comparison as a table, with a bar for the time of each method."""
    slowest = max(m.ttft_s for m in measured)
    full = measured[0]
    table = Table(
        title=f"{full.report.context_tokens:,} context tokens in {len(prompt.chunks)} passages, "
        f"time to first token, median of {repeats}"
    )
    for name in ("method", "time to first token", "", "faster", "rows", "loaded", "KL"):
        table.add_column(name, justify="right" if name in ("faster", "rows", "loaded", "KL") else "left", no_wrap=True)
    for m in measured:
        table.add_row(
            label(m.method),
            "█" * max(1, round(16 * m.ttft_s / slowest)),
            f"{m.ttft_s:.2f} s",
            f"{full.ttft_s / m.ttft_s:.1f}x",
            f"{m.report.rows:,}",
            size(m.report.bytes_loaded),
            f"{m.kl:.3f}",
        )
    return table


def label(method: Method) -> str:
    """Return the name of a method, with its ratio if it has a probe."""
    return f"{method.name} {method.ratio:g}" if method.probe else method.name
