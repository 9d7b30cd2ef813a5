"""Lower bounds on a prefill's and a decode step's time, from rates measured on this machine.

Williams et al., Roofline (CACM 2009): work is bound by arithmetic or by bytes, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from qcfuse_rag.cli.capacity import Ceilings
from qcfuse_rag.models.fingerprint import plain_parts
from qcfuse_rag.models.weights.packed_linear import PackedLinear
from qcfuse_rag.runtime.device import finish, timed
from qcfuse_rag.runtime.language_model import LanguageModel

T = TypeVar("T")


def seconds(lm: LanguageModel, run: Callable[[], object]) -> float:
    """Time one call, with the work that it leaves to the device."""
    finish(lm.device)
    return timed(lm.device, run)


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every side once a round, and return the results of all rounds but a first one, which warms up."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, call in sides.items():
            result = call()
            if turn:
                results[name].append(result)
    return results


def row_operations(lm: LanguageModel, rows: float, tokens: int) -> float:
    """Count the floating-point operations of rows evenly spread over a prompt, and of one row of logits."""
    heads = int(lm.model.config.get_text_config().num_attention_heads)
    attention = sum(2 * (shape.key_dim + shape.value_dim) for shape in lm.shapes) * heads * tokens / 2
    matrices = sum(map(_matrix_numbers, _layer_modules(lm)))
    return rows * (2 * matrices + attention) + 2 * _matrix_numbers(lm.model.get_output_embeddings())


def step_bytes(lm: LanguageModel, tokens: int, requests: int = 1) -> float:
    """Count the bytes that a decode step reads: the weights once, and each request's keys and values."""
    weights = sum(map(_held_bytes, [*_layer_modules(lm), lm.model.get_output_embeddings()]))
    return weights + requests * tokens * lm.kv_bytes_per_token


def add_floors(result: dict[str, Any], ceilings: Ceilings, throttle: float) -> None:
    """Add the ceilings to a result, and to each row its lower bound and its share of the time measured.

    Each prefill also gets its ratio to full prefill's operations alone at the measured rate. No engine computes them in
    less time, so the ratio is a lower bound on `speedup` over any full prefill. The tier `throttled` delivers
    `throttle` bytes a second.
    """
    result["ceilings"] = {
        "flops": ceilings.flops,
        "memory_bytes_s": ceilings.memory,
        "loading_bytes_s": ceilings.loading,
    }
    rates = {"throttled": throttle, "device": ceilings.memory / 2}
    for row in result["prefill"]:
        row["arithmetic_s"] = row["operations"] / ceilings.flops
        row["loading_s"] = row["bytes_loaded"] / rates.get(row["tier"], ceilings.loading)
        row["of_floor"] = max(row["arithmetic_s"], row["loading_s"]) / row["ttft_s"]
        row["calculated_full_s"] = row["full_operations"] / ceilings.flops
        row["speedup_calculated"] = row["calculated_full_s"] / row["ttft_s"]
    for row in result["decode"]:
        row["bytes_s"] = row["bytes"] / ceilings.memory
        row["of_floor"] = row["bytes_s"] / row["step_s"]


def _layer_modules(lm: LanguageModel) -> list[nn.Module]:
    """Return all modules but embeddings and output layer."""
    outside = (lm.model.get_input_embeddings(), lm.model.get_output_embeddings())
    return [module for module in lm.model.modules() if all(module is not other for other in outside)]


def _matrix_numbers(module: nn.Module) -> int:
    """Count the numbers of a module's own matrices; a packed matrix counts as the matrix that it stands for."""
    rows, columns = (getattr(module, name, None) for name in ("out_features", "in_features"))
    if isinstance(rows, int) and isinstance(columns, int) and not any(module.children()):
        return rows * columns
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)


def _held_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's own weights as they are held: packed numbers, their scales, and the rest."""
    if isinstance(module, PackedLinear):
        return module.nbytes
    temporary = module._non_persistent_buffers_set
    saved = [x for name, x in module.named_buffers(recurse=False) if name not in temporary]
    own = [*module.parameters(recurse=False), *saved]
    scales = [scale for tensor in own for scale in _scales(module, tensor)]
    return sum(part.nbytes for tensor in (*own, *scales) for _, part in plain_parts("", tensor))


def _scales(module: nn.Module, weight: Tensor) -> list[Tensor]:
    """Return the scales that bitsandbytes keeps beside packed weights, which are no buffers."""
    state = getattr(weight, "quant_state", None)  # of 4 bits
    values = () if state is None else state.as_dict().values()
    owners = (weight, getattr(module, "state", None)) if hasattr(weight, "SCB") else ()  # of 8 bits; weight or layer
    return [x for x in (*values, *(getattr(owner, "SCB", None) for owner in owners)) if isinstance(x, Tensor)]
