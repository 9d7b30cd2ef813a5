"""The bundled model is verified in the dtypes that CPUs compute in; if not, `scripts/package_verdicts.py` does it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from qcfuse_rag import FusionEngine
from qcfuse_rag.bundled import default_model


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_load_of_the_bundled_model_warns_of_nothing(tmp_path: Path, dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = FusionEngine.load(default_model(), store=tmp_path, device="cpu", dtype=dtype, verdict="require")
    with engine:
        assert engine.verdict is not None
        assert engine.method.ratio == engine.verdict.ratio
