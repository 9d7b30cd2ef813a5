"""What every result says of itself: the command, the date, the machine."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from qcfuse_rag.runtime.language_model import LanguageModel


def about_run(lm: LanguageModel, model: str) -> dict[str, Any]:
    """Return how and where this process measures, as plain data.

    Args:
        lm: the model.
        model: how the user called it.
    """
    gpu = lm.device.type == "cuda"
    name = torch.cuda.get_device_name(lm.device) if gpu else platform.processor() or platform.machine()
    return {
        "command": shlex.join(["qcfuse", *sys.argv[1:]]),
        "model": model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{lm.device} ({name})",
        "dtype": lm.fingerprint.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
