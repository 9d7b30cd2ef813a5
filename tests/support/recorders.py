"""Recorders for tests.

Where there is no CUDA device a recording is the call itself, made again over the same tensors: it shows whether what is
recorded depends on anything else, and Triton's interpreter runs its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from qcfuse_rag.runtime.graphs.recorder import GraphRecorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CountingRecorder:
    """Records, and counts how often what it recorded was computed."""

    broken = None

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0
        self._inner = GraphRecorder(DEVICE) if DEVICE.type == "cuda" else AgainAndAgain()

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, again = self._inner.record(compute)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            again()

        return result, replay

    def exclusive(self) -> AbstractContextManager[object]:
        return self._inner.exclusive()


class AgainAndAgain:
    """Stands for a CUDA graph where there is no device for one."""

    broken: str | None = None

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result = compute().clone()

        def again() -> None:
            result.copy_(compute())

        return result, again

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()


class Failing(AgainAndAgain):
    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise RuntimeError("called a synchronizing CUDA operation")


class Breaking(AgainAndAgain):
    """Ends half way, and leaves the device in doubt."""

    def __init__(self) -> None:
        self.asked = 0

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.asked += 1
        self.broken = "it ended half way"
        raise RuntimeError(self.broken)


class Remembering(AgainAndAgain):
    """Records a step that depends on something that is not in its tensors: it never changes."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        return compute().clone(), lambda: None


class Spoiling(AgainAndAgain):
    """Records something that computes nonsense."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result = compute()
        return result, lambda: result.fill_(torch.nan)


class Forgetful(AgainAndAgain):
    """Records a model's layers; the replay of the second one does nothing."""

    def __init__(self) -> None:
        self.seen = 0

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, again = super().record(compute)
        self.seen += 1
        return (result, lambda: None) if self.seen == 2 else (result, again)


class FullAt(AgainAndAgain):
    """Has no memory for passes of this number of rows or more."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, again = super().record(compute)
        if result.shape[1] >= self.rows:
            raise torch.OutOfMemoryError("no room")
        return result, again
