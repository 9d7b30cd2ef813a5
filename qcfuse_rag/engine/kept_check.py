"""Keep that an exactness check has passed, so that later starts with the same model, code and machine do not repeat it.

A passed check is a small file among the assets of huggingface_hub (`HF_ASSETS_CACHE`, by default
`~/.cache/huggingface/assets/qcfuse-rag/checks`), which may be deleted at any time. A failed check is never kept.
"""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path

import qcfuse_rag
from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.engine.exactness_check import ExactnessCheck, check_exact
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.dense import dense_attention_name
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel

LOG = logging.getLogger(__name__)


def check_exact_once(lm: LanguageModel) -> ExactnessCheck:
    """Return the kept result of an exactness check that has passed; without one, check and keep the result.

    Raises:
        UnsupportedModel: if the engine does not reproduce the model.
    """
    identity = check_identity(lm)
    if (kept := _read(identity)) is not None:
        return kept
    check = check_exact(lm)
    try:
        write_atomically(_file(identity), json.dumps({"identity": identity, "check": check.to_dict()}), sync=False)
    except (OSError, ValueError) as error:  # huggingface_hub raises ValueError for a file in the folder's place
        LOG.info("the passed check is not kept: %s", error)
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


def _read(identity: dict[str, Any]) -> ExactnessCheck | None:
    try:
        kept = json.loads(_file(identity).read_text("utf-8"))
        fields = dict(kept["check"])
        fields.pop("passed")
        check = ExactnessCheck(**{name: float(value) for name, value in fields.items()})
        return check if kept["identity"] == identity and check.passed else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _file(identity: dict[str, Any]) -> Path:
    name = digest(json.dumps(identity, sort_keys=True).encode())
    return cached_assets_path("qcfuse-rag", "checks", name) / "exactness.json"
