"""The scores of a probe against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.kernels.context_score import context_scores
from qcfuse_rag.runtime.rows import AttentionParams
from tests.runtime.kernels.operands import DTYPES, TOLERANCE, operands, relative_error
from tests.support.recorders import DEVICE


@pytest.mark.parametrize("splits", [None, 2, 5], ids="splits {}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("reduce", "window", "softcap"), [("mean", None, None), ("max", None, None), ("mean", 50, 5.0), ("max", 50, None)]
)
def test_context_scores_are_those_of_the_reference(
    dtype: torch.dtype, reduce: str, window: int | None, softcap: float | None, splits: int | None
) -> None:
    """For any number of parts, including parts of which a row sees no key."""
    query, key, _, rows = operands(6, 2, [*range(150, 181), 190], 191, 64, 64, dtype)
    known = torch.rand(191, device=DEVICE) < 0.7
    known[rows] = True
    poisoned = key.masked_fill(~known[None, None, :, None], float("nan"))
    params = AttentionParams(0.2, softcap, window)
    result = context_scores(query, poisoned, rows, known, params, reduce=reduce, splits=splits)
    clean = key.masked_fill(~known[None, None, :, None], 0.0)
    expected = attention_weights(query.float(), clean.float(), rows, known, params, reduce=reduce)
    assert relative_error(result, expected) < TOLERANCE[dtype]
    assert float(result[~known].abs().max()) == 0
    if reduce == "mean":
        assert float(result.sum()) == pytest.approx(1, abs=1e-3)


def test_context_scores_of_many_rows_and_a_few_channels() -> None:
    query, key, _, rows = operands(9, 3, list(range(100)), 100, 80, 80, torch.float32)
    known = torch.ones(100, dtype=torch.bool, device=DEVICE)
    expected = attention_weights(query, key, rows, known, AttentionParams(0.1))
    for splits in (1, 3):  # the first rows see no key of the last part
        result = context_scores(query, key, rows, known, AttentionParams(0.1), splits=splits)
        assert relative_error(result, expected) < 1e-5


def test_the_same_prompt_gets_the_same_scores() -> None:
    query, key, _, rows = operands(6, 2, list(range(60, 100)), 100, 64, 64, torch.float32)
    known = torch.ones(100, dtype=torch.bool, device=DEVICE)
    first, second = (context_scores(query, key, rows, known, AttentionParams(0.1)) for _ in range(2))
    assert torch.equal(first, second)
