"""Passages and a question for kernel tests, and a transfer for a host that is its own device."""

from __future__ import annotations

from torch import Tensor

from qcfuse_rag.runtime.loading.host_to_device import TransferHandle
from tests.support.recorders import DEVICE

PASSAGES = ["The ferry is green, its captain is Orla.", "The paint is kept in the mill.", "Nobody has a key."]
QUESTION = "Who paints?"
"""Short, because the interpreter is slow."""


class Nearby:
    """Replaces a transfer if host and device are the same; data arrives `at_once`, or when it is received."""

    device = DEVICE

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once

    def send(self, tensors: list[Tensor]) -> TransferHandle:
        class There(TransferHandle):
            is_complete = self.at_once

            def receive(self) -> None:
                pass

        return There(self.device, tensors, 0, None, None)  # type: ignore[arg-type]
