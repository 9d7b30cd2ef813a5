"""Names in the package that several tests replace, each once under a name that says what it is.

Call a seam with a `MonkeyPatch` and the replacement: `seams.ring_bytes(monkeypatch, 1 << 13)`.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import Any

import pytest
import torch


class Seam:
    """A function, class or constant of the package, by the dotted name of every module that uses it."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, patch: pytest.MonkeyPatch, replacement: Any) -> None:
        for name in self.names:
            patch.setattr(name, replacement)

    @property
    def original(self) -> Any:
        """What stands there until it is replaced; imported only now, as there may be no Triton."""
        module, _, attribute = self.names[0].rpartition(".")
        return resolve_name(f"{module}:{attribute}")


mapped_file = Seam("qcfuse_rag.store.backends.disk.MappedFile")
disk_index = Seam("qcfuse_rag.store.backends.index.Index")

ring_bytes = Seam("qcfuse_rag.runtime.loading.host_to_device.RING_BYTES")
transfer = Seam("qcfuse_rag.runtime.language_model.LanguageModel.transfer")

steps_have_kernels = Seam("qcfuse_rag.runtime.forward.kernels_available")
engine_has_kernels = Seam(
    "qcfuse_rag.runtime.kernels.support.kernels_available",
    "qcfuse_rag.runtime.runner.kernels_available",
    *steps_have_kernels.names,
)
KERNELS = {
    "attention": Seam("qcfuse_rag.runtime.kernels.sparse_attention.sparse_attention"),
    "by table": Seam("qcfuse_rag.runtime.kernels.table_attention.table_attention"),
    "append": Seam("qcfuse_rag.runtime.kernels.table_attention.append_rows"),
    "score": Seam("qcfuse_rag.runtime.kernels.context_score.context_scores"),
    "place": Seam("qcfuse_rag.runtime.kernels.placement.launch_table"),
}
"""Functions that launch kernels, by what tests call them."""

recorder_has_kernels = Seam("qcfuse_rag.runtime.graphs.recorder.kernels_available")


verified_answers = Seam(
    "qcfuse_rag.verification.sweep.greedy_answers", "qcfuse_rag.verification.divergence.greedy_answers"
)


def torch_refuses(patch: pytest.MonkeyPatch, name: str) -> None:
    """Have torch refuse to pack weights of a format of CPUs, as where instructions are missing; it is tried anew."""
    from qcfuse_rag.models import cpu_weights

    operations, packer = (
        ("quantized", "linear_prepack_fp16") if name == "float16" else ("mkldnn", "_reorder_linear_weight")
    )
    pack = getattr(getattr(torch.ops, operations), packer)

    def refusing(weight: torch.Tensor, *more: Any) -> Any:
        if name == "float16" or weight.dtype == getattr(torch, name):
            raise RuntimeError("the processor lacks the instructions")
        return pack(weight, *more)

    patch.setattr(getattr(torch.ops, operations), packer, refusing)
    patch.setattr(cpu_weights, "multiplies", cache(cpu_weights.multiplies.__wrapped__))


def large_blocks(patch: pytest.MonkeyPatch) -> None:
    """Have programs take as many rows, keys and tokens as tests have: the interpreter is slow by programs."""
    from qcfuse_rag.runtime.kernels.launch import Tile

    for module in ("sparse_attention", "context_score"):
        patch.setattr(f"qcfuse_rag.runtime.kernels.{module}.default_tile", lambda *_: Tile(64, 64))
    patch.setattr("qcfuse_rag.runtime.kernels.table_attention.ROWS_PER_PROGRAM", 64)
    patch.setattr("qcfuse_rag.runtime.kernels.placement.TOKENS_PER_PROGRAM", 64)
