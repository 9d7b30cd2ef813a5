"""`python -m qcfuse_rag.evaluation.studies`: list the studies, or run one."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib import import_module

import typer

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.studies.runner import PROGRAM, to_command

STUDIES = {
    "compare": "Pool results of `qcfuse bench quality` and compare one method with the others.",
    "concurrency": "Ask many questions at once: equal answers, and a responsive event loop.",
    "conversations": "Measure conversations with and without the reuse of earlier turns.",
    "demo-quality": "Compare the answers of methods on the demonstration corpus.",
    "guard": "Time `auto` beside full prefill where it should be faster and where it should not be slower.",
    "healing": "Compare answers over a cache that heals while they are decoded with full prefill's.",
    "joined-text": "Compare passages kept apart with passages found in a joined text.",
    "kernel-floors": "Time the kernels on this GPU beside torch and their lower bounds.",
    "kvsharearena": "Answer frozen questions of KVShareArena; the performance gap that each method recovers.",
    "ladder": "Compare `auto` at several ratios with full prefill's answers.",
    "loading": "Compare loading during the computation with loading before it.",
    "overhead": "Measure the share of CPU time outside matrix products and attention.",
    "primers": "Compare primers of one to eight passages by whole answers of `auto`.",
    "probe-layers": "Compare the layers that the probe of `auto` may look at.",
    "prompt-lookup": "Compare prompt lookup decoding with plain steps: passes, seconds, answers.",
    "quantization": "Compare caches in int8 and fp8 with those in the model's own dtype.",
    "trace": "Count what recorded chat requests would reuse.",
    "weights": "Compare int8 weights with the model's own: seconds, bytes, divergence.",
}


def main() -> None:
    """Run a study by its name, or list all studies."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in STUDIES:
        print(f"usage: {PROGRAM} NAME [options] [--json FILE]\n")
        print("\n".join(f"  {study:14} {summary}" for study, summary in STUDIES.items()))
        sys.exit(0 if name in ("", "--help") else 2)
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    function = name.replace("-", "_")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    try:
        app.command()(to_command(getattr(import_module(f"qcfuse_rag.evaluation.studies.{function}"), function)))
        app(args=arguments, prog_name=f"{PROGRAM} {name}")
    except (QCFuseError, ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
