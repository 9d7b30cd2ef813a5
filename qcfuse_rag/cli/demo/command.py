"""`qcfuse demo`: answer questions by full prefill and over warmed caches, side by side."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.live import Live

from qcfuse_rag.bundled import Question, corpus, default_embedder, demonstration_questions
from qcfuse_rag.cli.console import ERR, OUT, duration, print_json, progress_bar, size, status
from qcfuse_rag.cli.demo.page import demo_page
from qcfuse_rag.cli.demo.pair import AnsweredPair, PairView, ask_both
from qcfuse_rag.cli.demo.table import summarise, summary_table
from qcfuse_rag.cli.options import DemoOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.warm_job import WarmSummary
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import nearest

SHOWN = 6
"""Number of questions without `--all`."""
ANSWER_TOKENS = 32
FUSED_SHARE = 0.5
"""Share of full prefill's time to expect of a fused answer, decoding of both included, for the estimate."""


def run_demo(config: EngineConfig, options: DemoOptions, *, as_json: bool) -> None:
    """Run the demonstration: print each question's two answers and a table, or one JSON object."""
    asked, texts = chosen_questions(options), list(corpus().values())
    if not as_json:
        _say(
            f"{len(texts)} short documents are warmed once; then {len(asked)} of the questions about them are answered "
            "twice: by full prefill, which reads the retrieved documents anew, and by qcfuse, which reuses their "
            f"caches. On two cores this takes about {'four minutes' if len(asked) > SHOWN else 'a minute and a half'}."
        )
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = options.store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qcfuse-demo-")))
        with status("loading the model and checking it against its own code"):
            # prefix_bytes=0, or the second side would reuse what the first one computed
            weights = config.weights or "model"
            own = replace(config, weights=weights, store=str(folder / "kv"), compiled=False, prefix_bytes=0)
            engine = stack.enter_context(FusionEngine.load(own))
            embed = Embedder(options.embedder or default_embedder())
            vectors = embed(texts)
        plan = engine.corpus.warm_job([engine.prompts.chunk_ids(text) for text in texts]).plan(measure=not as_json)
        if not as_json and plan.seconds:
            token_s = plan.seconds / max(1, plan.tokens)
            question_tokens = options.top_k * plan.tokens / max(1, plan.to_warm)
            asking_s = len(asked) * question_tokens * token_s * (1 + FUSED_SHARE)
            _say(f"On this machine: about {duration(plan.seconds)} to warm, and {duration(asking_s)} to answer.")
        setup_s = time.perf_counter() - started
        with progress_bar(f"warming {len(texts)} documents", "tokens") as advance:
            summary = engine.warm(texts, sources=list(corpus()), progress=advance)
        with status("making the first passes, which are slower"):
            engine.compile()
        pairs = []
        for number, question in enumerate(asked, start=1):
            passages = [texts[i] for i in nearest(vectors, embed([question.question])[0], options.top_k)]
            view = PairView(question, f"Question {number} of {len(asked)}: {question.question}")
            if as_json:
                pairs.append(ask_both(engine, passages, view, ANSWER_TOKENS))
                continue
            with Live(get_renderable=view.render, console=OUT, refresh_per_second=8):
                pairs.append(ask_both(engine, passages, view, ANSWER_TOKENS, replay=OUT.is_terminal))
    report(engine, options, pairs, summary, setup_s, as_json=as_json)


def chosen_questions(options: DemoOptions) -> list[Question]:
    """Return the given question, all questions, or six spread evenly over them."""
    if options.question is not None:
        return [Question("given", options.question, (), ())]
    known = demonstration_questions()
    return known if options.all else known[:: max(1, -(-len(known) // SHOWN))]


def report(
    engine: FusionEngine,
    options: DemoOptions,
    pairs: list[AnsweredPair],
    summary: WarmSummary,
    setup_s: float,
    *,
    as_json: bool,
) -> None:
    """Print the table or the JSON object, and write the page if one was asked for."""
    totals = summarise(pairs)
    about = (
        f"{Path(engine.lm.name).name}, {engine.lm.number_formats}, {engine.lm.device}, threads: "
        f"{torch.get_num_threads()}; {options.top_k} documents for each question"
    )
    if options.html is not None:
        options.html.write_text(demo_page(pairs, totals, about), "utf-8")
        ERR.print(f"wrote {options.html}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print_json(
            {
                "model": engine.lm.name,
                "top_k": options.top_k,
                "setup_s": setup_s,
                "warm": summary.to_dict(),
                "questions": [pair.to_dict() for pair in pairs],
                "summary": totals,
            }
        )
        return
    OUT.print(summary_table(totals))
    _say(f"{about}.")
    _say(
        f"Warmed {summary.warmed} caches ({size(summary.size_bytes)}) in {duration(summary.elapsed_s)}, once. Reused "
        "caches change some answers: `qcfuse verify` finds the share to recompute for your model and documents, and "
        "`qcfuse ask --fidelity exact` keeps full prefill's answers."
    )


def _say(text: str) -> None:
    """Print a sentence, broken between words where the terminal ends."""
    OUT.print(text, highlight=False, markup=False)
