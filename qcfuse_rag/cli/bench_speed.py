"""`qcfuse bench speed`: load or make a model, measure, write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import progress_bar
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.environment import about_run
from qcfuse_rag.evaluation.speed.measure import SpeedOptions, measure_speed
from qcfuse_rag.evaluation.speed.shapes import random_model
from qcfuse_rag.evaluation.speed.tables import draw, markdown
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.atomic_write import write_whole


def run_speed(
    model: str | None, shape: str | None, options: SpeedOptions, device: str | None, dtype: str | None, out: Path | None
) -> dict[str, Any]:
    """Measure, write `out` with Markdown and a picture beside it if given, and return plain data.

    Raises:
        QCFuseError: if both a model and a shape are given, or something cannot be measured here.
    """
    if model is not None and shape is not None:
        raise QCFuseError("give a --model or a --shape, not both")
    if shape is not None:
        lm = random_model(shape, device=device, dtype=dtype)
    else:
        lm = LanguageModel.load(model or default_model(), device=device, dtype=dtype)
    gpu = lm.device.type == "cuda"
    if not options.tiers:
        options = replace(options, tiers=("pinned", "device", "disk") if gpu else ("memory", "disk"))
    refusal = unavailable_reason(lm.device, lm.dtype, lm.widest_head)
    about = {**about_run(lm, lm.name), "kernels": refusal or "used"}

    def keep(measured: dict[str, Any]) -> None:
        if out is not None:
            result = {"about": about, **measured}
            write_whole(out, json.dumps(result, indent=1))
            write_whole(out.with_suffix(".md"), markdown(result))

    with progress_bar("measuring", "contexts") as advance:
        result = {"about": about, **measure_speed(lm, options, advance, keep)}
    if out is not None:
        try:
            draw(result, out.with_suffix(".png"))
        except QCFuseError as error:  # what took minutes to measure is written, with a picture or without
            result["about"]["no_picture"] = str(error)
    return result
