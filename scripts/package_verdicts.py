"""Verify models and put the verdicts into the package, one for each dtype that CPUs compute in.

usage: python scripts/package_verdicts.py [--quick] [MODEL ...]

Without a name it is the bundled model. A verdict counts for the same weights, configuration, tokenizer, dtype and
method alone, so run this again when any of them changes, after `rm qcfuse_rag/bundled/verdicts/*.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from qcfuse_rag import FusionEngine
from qcfuse_rag.bundled import default_model
from qcfuse_rag.verification.sweep import QUICK, VerifySettings, verify
from qcfuse_rag.verification.verdict import PACKAGED

DTYPES = ("float32", "bfloat16")


def main(arguments: list[str]) -> None:
    """Verify each model in each dtype, and say what was found."""
    settings = VerifySettings(**(QUICK if "--quick" in arguments else {}))
    for model in [name for name in arguments if name != "--quick"] or [default_model()]:
        for dtype in DTYPES:
            loading = {"device": "cpu", "dtype": dtype, "weights": "model", "verdict": "ignore"}
            with TemporaryDirectory() as folder, FusionEngine.load(model, store=folder, **loading) as engine:
                verdict = verify(engine, engine.method, settings=settings)
            path = verdict.save(PACKAGED)
            path.chmod(0o644)  # a store's are its owner's alone
            print(f"{Path(model).name}, {dtype}: {verdict.recommendation}: {path.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
