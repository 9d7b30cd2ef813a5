"""Measure what users' set-ups reuse: frameworks' own classes, clients, restarts, changed text; each has its own store.

The method fuses whatever is recognised, without its guard, except where a set-up is about the guard.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from typer import Option

from benchmarks.options import ModelOptions
from benchmarks.reuse import circumstances, clients, with_langchain, with_llama_index
from benchmarks.reuse.recording import Setting
from benchmarks.runner import Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.bundled import corpus, questions

SET_UPS = with_llama_index.SET_UPS | with_langchain.SET_UPS | clients.SET_UPS | circumstances.SET_UPS
EACH, MIDDLE = 0.8, 0.9
"""The aim: the share of warmed tokens that each set-up recognises, and that the median does."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    only: Annotated[str, Option(help="Only set-ups with this in their name.")] = ""
    characters: Annotated[int, Option(min=400, help="Of each of the four documents that are warmed.")] = 800


def measure(options: Options, run: Run) -> None:
    """Warm some documents in each set-up, ask, and count which tokens of warmed text came from the store."""
    lm, question = options.load_model(), questions()[0].question
    run.begin(about_model(lm), {**machine_conditions(lm), "characters": options.characters})
    texts = {name: text[: options.characters] for name, text in [*corpus().items()][:4]}
    chosen = {name: set_up for name, set_up in SET_UPS.items() if options.only.lower() in name.lower()}
    for done, (name, set_up) in enumerate(chosen.items(), start=1):
        if ("set-up", name) not in run.records:
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                with set_up(Setting(lm, texts, question, Path(folder))) as engine:
                    record = {"s": time.perf_counter() - began, **engine.reuse()}
            run.add(("set-up", name), record)
        run.progress(done, len(chosen))


def report(run: Run) -> Report:
    """Return a line for each set-up, and how many reach the aim."""
    rows, shares = [], []
    for (name,), record in run.of("set-up"):
        shares.append(share := record["recognised"] / max(record["warmed"], 1))
        differ = " and ".join(what for what in ("ids", "answers") if not record[what])
        reason = "; ".join(record["reasons"]) or ("" if share > MIDDLE else "none given")
        rows.append([str(name), f"{record['warmed']:,}", f"{share:.0%}", differ or "-", reason])
    reached = sum(share >= EACH for share in shares)
    note = f"{reached} of {len(shares)} set-ups recognise {EACH:.0%}; median {median(shares):.0%}, aim {MIDDLE:.0%}"
    columns = ["set-up", "warmed tokens", "recognised", "differs from full prefill", "reason for the rest"]
    summary = {"least": min(shares), "median": median(shares), "reached": reached, "set_ups": len(shares)}
    return Report(summary, [Table("warmed tokens in prompts", columns, rows, narrow=columns[:3])], [note])
