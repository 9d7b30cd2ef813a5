"""`qcfuse tune`: train a writer on a library's passages, and keep it in the library's store if it is better."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path

from rich.bar import Bar
from rich.table import Table

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import (
    ERR,
    OUT,
    duration,
    print_json,
    print_line,
    print_note,
    progress_bar,
    status,
    terminable,
)
from qcfuse_rag.cli.library import print_model_note, with_settings
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.library.folder import existing_store_folder, index_folder, refuse_store
from qcfuse_rag.library.index import PassageIndex
from qcfuse_rag.library.jobs import JobRecord, job_lock
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.tuning.tune import LEAST_GAIN, RATIOS, Measured, TuningReport, partial_path, tune

BAR_WIDTH = 24


def run_tune(library: Path, config: EngineConfig, count: int | None, *, as_json: bool) -> bool:
    """Tune a writer for a library and print what it wins; return whether it is kept."""
    refuse_store(library)
    folder = existing_store_folder(library)
    config = with_settings(config, LibrarySettings.load(library))
    config = replace(config, weights=config.weights or "model")
    with job_lock(library), terminable():
        texts = [passage.text for passage in PassageIndex.load(index_folder(library)).passages]
        print_model_note(config)
        with status("loading the model"):
            lm = LanguageModel.load(config.model or default_model(), **config.load_options())
        prompts = PromptBuilder(lm.tokenizer, config.wording, lm.context_window.tokens)
        last = JobRecord.load(library)
        took = duration(last.updated - last.started)
        print_note("note:", f"a writer needs a new warming (the last took {took}); Ctrl-C keeps the weights so far")
        try:
            with progress_bar("tuning", "prompts") as advance:
                report = tune(lm, prompts, texts, folder, count=count, progress=advance, measured=_print_measured)
        except KeyboardInterrupt:
            if (partial := partial_path(lm.fingerprint.writer_path(folder))).exists():
                print_line(f"the weights so far are in {partial}; the same command goes on from there", ERR)
            raise
    if as_json:
        print_json({**asdict(report), "path": report.path and str(report.path)})
    else:
        _print_report(report, library)
    return report.path is not None


def _print_measured(done: int, measured: Measured) -> None:
    kl = ", ".join(f"{nearness.kl:.4f} at {ratio:.0%}" for ratio, nearness in measured.items())
    print_line(f"after {done:,} prompts: held-out divergence {kl}", ERR)


def _print_report(report: TuningReport, library: Path) -> None:
    table = Table("recomputed", "", "KL", "", "KL of the first token", "same answers")
    most = max(nearness.kl for nearness in report.before.values())
    for ratio in RATIOS:
        for name, measured in (("untuned", report.before), ("tuned", report.after)):
            found = measured[ratio]
            bar = Bar(most, 0, found.kl, width=BAR_WIDTH)
            table.add_row(f"{ratio:.0%}", name, f"{found.kl:.4f}", bar, f"{found.first_kl:.4f}", f"{found.same:.0%}")
    OUT.print(table)
    print_line(f"{report.prompts:,} prompts of {report.passages:,} passages in {duration(report.seconds)}")
    if report.path is None:
        print_line(f"the writer is not better by {LEAST_GAIN:.0%}, so nothing is written")
        return
    store = shlex.quote(str(library))
    print_line(f"saved in {report.path}; delete this file to go back")
    print_line(f"`qcfuse warm run DOCUMENTS --store {store}` now computes the library again, with the writer")
    print_line(f"`qcfuse verify --store {store}` then finds the share to recompute")
