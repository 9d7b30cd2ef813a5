"""Keep the result of a passed exactness check: later starts with the same model, code and machine do not repeat it.

A passed check is in the folder `checks` of kept results, see `models.kept_result`. A failed check is never kept.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import qcfuse_rag
from qcfuse_rag.engine.exactness_check import ExactnessCheck, check_exact
from qcfuse_rag.models.kept_result import KeptResult
from qcfuse_rag.runtime.attention.dense import dense_attention_name
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel


def check_exact_once(lm: LanguageModel) -> ExactnessCheck:
    """Return the kept result of an exactness check that has passed; without one, check and keep the result.

    Raises:
        UnsupportedModel: if the engine does not reproduce the model.
    """
    result = KeptResult("checks", "exactness.json", check_identity(lm))
    if (kept := _passed_check(result.read())) is not None:
        return kept
    check = check_exact(lm)
    result.keep(check=check.to_dict())
    return check


def check_identity(lm: LanguageModel) -> dict[str, Any]:
    """Return all that the result of a check depends on, ready for JSON."""
    package = Path(qcfuse_rag.__file__).parent
    return {
        "fingerprint": lm.fingerprint.digest,
        "architecture": type(lm.model).__name__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "qcfuse-rag": qcfuse_rag.__version__,
        "changed": max(path.stat().st_mtime_ns for path in package.rglob("*.py")),  # for installations that are edited
        "device": torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else str(lm.device.type),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "kernels": unavailable_reason(lm.device, lm.dtype, lm.widest_head) or "used",
        "attention": dense_attention_name(lm.device, lm.dtype),
    }


def _passed_check(kept: dict[str, Any] | None) -> ExactnessCheck | None:
    try:
        fields = dict((kept or {})["check"])
        fields.pop("passed")
        check = ExactnessCheck(**{name: float(value) for name, value in fields.items()})
    except (ValueError, TypeError, KeyError):
        return None
    return check if check.passed else None
