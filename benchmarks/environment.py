"""The command, the date and the machine behind a result."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.runtime.language_model import LanguageModel


def require_json_name(out: Path) -> None:
    """Refuse a file for results whose name does not end in `.json`: the table beside it would overwrite it."""
    if out.suffix != ".json":
        raise QCFuseError(f"the result is JSON, its table goes beside it: call it something.json, not {out}")


def about_process(program: str) -> dict[str, Any]:
    """Describe this process, started by the command `program`, as plain data."""
    return {
        "command": " ".join([program, *map(shlex.quote, sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def about_run(lm: LanguageModel, model: str) -> dict[str, Any]:
    """Describe this process and its model, with the name that the user gave, as plain data."""
    gpu = lm.device.type == "cuda"
    name = torch.cuda.get_device_name(lm.device) if gpu else platform.processor() or platform.machine()
    return {
        **about_process("python -m benchmarks"),
        "model": model,
        "device": f"{lm.device} ({name})",
        "dtype": lm.fingerprint.number_formats,
    }
