"""Rounded weights beside the model's own: seconds, bytes, divergence, and how much a row depends on its pass."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.speed.ceilings import take_turns
from benchmarks.studies.runner import StudyResult, load_model
from qcfuse_rag.bundled import corpus
from qcfuse_rag.models.weights.formats import LINEARS, round_weights
from qcfuse_rag.verification.divergence import compare_answers
from qcfuse_rag.verification.exactness import stock_attention

CONTEXT = 256
"""Tokens in front of the rows that are timed, where these are fewer than a prompt."""
ALONE = 12
"""Last rows of a text that are computed apart from the rest of it."""


def weights(model: str | None = None, rows: str = "1024,108,1", texts: int = 4, rounds: int = 6) -> StudyResult:
    """Compare rounded weights with the model's own in transformers' forward, in turns; medians after a warm-up round.

    KL is that of full prefill to the model's own weights, the mean over all tokens of documents of the demonstration.
    For the last column, the last rows of a text are computed twice: with the rest of the text in one pass, and alone
    over its stored keys. It is the largest difference between their logits, in standard deviations of the logits.
    """
    lm = load_model(model)
    sides: dict[str, PreTrainedModel] = {"model": lm.model}
    for weights in LINEARS:
        sides[weights] = copy.deepcopy(lm.model, {id(weight): weight for weight in lm.model.parameters()})
        round_weights(sides[weights], weights)
    with stock_attention(lm):
        for module in sides.values():
            module.set_attn_implementation(lm.stock_attention)
        seconds = {
            count: {
                side: median(times)
                for side, times in take_turns(
                    {side: _pass(module, int(count)) for side, module in sides.items()}, rounds
                ).items()
            }
            for count in rows.split(",")
        }
        ids = [torch.tensor([lm.tokenizer(text)["input_ids"][:384]]) for text in list(corpus().values())[:texts]]
        logits = {side: [_logits(module, text) for text in ids] for side, module in sides.items()}
        apart = {side: max(_apart(module, text) for text in ids) for side, module in sides.items()}
    divergences = {
        side: torch.tensor(
            [kl for pair in zip(logits["model"], of_side, strict=True) for kl in compare_answers(*pair).kl]
        )
        for side, of_side in logits.items()
    }
    result = {
        side: {
            "bytes": sum({t.data_ptr(): t.nbytes for t in module.state_dict().values()}.values()),
            "seconds": {count: by_side[side] for count, by_side in seconds.items()},
            "kl": float(divergences[side].mean()),
            "kl_p99": float(divergences[side].quantile(0.99)),
            "apart": apart[side],
        }
        for side, module in sides.items()
    }
    counts = [f"{count} rows" for count in seconds]
    table = Table("weights", "MB", *counts, "KL", "99 %", "a row apart")
    for side, row in result.items():
        times = (f"{s * 1e3:.1f} ms ({seconds[count]['model'] / s:.2f})" for count, s in row["seconds"].items())
        table.add_row(
            side, f"{row['bytes'] / 1e6:.0f}", *times, f"{row['kl']:.1e}", f"{row['kl_p99']:.1e}", f"{row['apart']:.1e}"
        )
    return StudyResult({"model": lm.name, "sides": result}, [table, f"{torch.get_num_threads()} threads"])


def _pass(model: PreTrainedModel, rows: int) -> Callable[[], float]:
    ids = (7 + 31 * torch.arange(CONTEXT + rows)[None]) % model.get_input_embeddings().num_embeddings
    return partial(_timed_pass, model, ids, 0 if rows > CONTEXT else CONTEXT)


@torch.inference_mode()
def _timed_pass(model: PreTrainedModel, ids: Tensor, context: int) -> float:
    """Time one forward pass over `ids[:, CONTEXT:]`.

    If `context` is not 0, the first `context` tokens are prefilled first, untimed.
    """
    cache = None
    if context:
        cache = model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values
    started = time.perf_counter()
    model(input_ids=ids[:, CONTEXT:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


@torch.inference_mode()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits[0].float()  # type: ignore[no-any-return]


@torch.inference_mode()
def _apart(model: PreTrainedModel, ids: Tensor) -> float:
    together = _logits(model, ids)[-ALONE:]
    cache = model(input_ids=ids[:, :-ALONE], use_cache=True, logits_to_keep=1).past_key_values
    alone = model(input_ids=ids[:, -ALONE:], past_key_values=cache, use_cache=True).logits[0].float()
    return float((alone - together).abs().max() / together.std())
