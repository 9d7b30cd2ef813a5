"""Compare a view of a model with the model layer by layer.

Two sound ways of computing a real model in half precision differ in their logits by any amount: each layer multiplies
the rounding errors of the layers before. So each layer of the model gets the hidden states that the same layer of the
view got, and errors do not add up. Measured on CPU in bfloat16, over prompts of random tokens: 0.01 for SmolLM2-135M
and Qwen2.5-0.5B, of 0.02 that are allowed; their logits differ by up to 0.9 over random keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.recorder import ErrorBound
from qcfuse_rag.runtime.kernels.limits import relative_error
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan

ALLOWED = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Allowed error of a layer, as a share of what the layer adds to the hidden states. Keys that are split differently are
summed in another order, and fused modules round less often."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePrompt:
    """A prompt of random tokens that the model has prefilled.

    Keys and values of noise are no substitute: over noise, real models multiply rounding errors.

    Attributes:
        ids: `[n]` int64 token ids.
        buffer: their keys and values.
    """

    ids: Tensor
    buffer: KVBuffer

    @classmethod
    @torch.inference_mode()
    def of(cls, lm: LanguageModel, length: int, seed: int = 0) -> SamplePrompt:
        """Prefill a prompt of some length."""
        vocabulary = lm.model.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).to(lm.device)
        buffer = lm.empty_buffer(length)
        forward_rows(lm, ids, RowsPlan.between(0, length, lm.device, lm.sliding), buffer)
        return cls(ids, buffer)

    def without(self, rows: Tensor, length: int) -> KVBuffer:
        """Return a copy of the keys and values of the first tokens, with NaN at rows, which are to be computed."""

        def copied(side: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(tensor[:, :, :length].contiguous().index_fill(2, rows, torch.nan) for tensor in side)

        return KVBuffer(copied(self.buffer.keys), copied(self.buffer.values))


@dataclass(slots=True, eq=False)
class LayerTrace:
    """Runs the layers of a view, and keeps the input and the result of each.

    Attributes:
        layers: each layer's hidden states, before and after.
    """

    layers: list[tuple[Tensor, Any]] = field(default_factory=list)

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer."""
        result = inner(hidden, *args, **kwargs)
        self.layers.append((hidden, result))
        return result

    def hidden(self, layer: int, requests: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states of some requests' last rows, before and after a layer."""
        before, result = self.layers[layer]
        after: Tensor = result if isinstance(result, Tensor) else result[0]
        return before[:requests, -rows:], after[:requests, -rows:]


@dataclass(slots=True, eq=False)
class LayerComparison:
    """Runs each of the model's own layers on the hidden states that the view's layer received.

    Returns the view's result, so errors do not accumulate. Logits that are computed from the last layer's result are
    the logits of the model's own head over the view's hidden states. The trace may be of further requests, and of rows
    before these.

    Attributes:
        errors: of the embeddings and of each layer so far; see `ALLOWED`.
    """

    trace: LayerTrace
    errors: list[float] = field(default_factory=list)

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer."""
        before, after = self.trace.hidden(layer, *hidden.shape[:2])
        if layer == 0:
            self.errors.append(relative_error(before, hidden))
        own = inner(before, *args, **kwargs)
        is_tensor = isinstance(own, Tensor)
        self.errors.append(_layer_error(after, own if is_tensor else own[0], before))
        return after if is_tensor else (after, *own[1:])

    def bounds(self, logits: Tensor, expected: Tensor) -> list[ErrorBound]:
        """Return the errors of the layers and of the view's logits against those computed behind these layers."""
        allowed = ALLOWED[self.trace.layers[0][0].dtype]
        return [*(ErrorBound(error, allowed) for error in self.errors), ErrorBound.of(logits, expected, allowed)]


def _layer_error(result: Tensor, expected: Tensor, before: Tensor) -> float:
    """Return the error of a layer: the root mean square over rows, as a share of what the layer adds to a row.

    A row may be many times larger than what the layer adds to it, so the rounding error of the row is allowed too.
    """
    rounding = torch.finfo(expected.dtype).eps / ALLOWED[expected.dtype]
    result, expected, before = (tensor.double() for tensor in (result, expected, before))
    off, added, size = (rows.norm(dim=-1) for rows in (result - expected, expected - before, expected))
    return float((off / (added + rounding * size)).square().mean().sqrt())
