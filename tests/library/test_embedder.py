"""The default embedding model gives the same numbers without sentence-transformers; other models are left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcfuse_rag.bundled import corpus, default_embedder
from qcfuse_rag.errors import ModelNotFound
from qcfuse_rag.library.embedder import BATCH_TEXTS, Embedder


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer  # takes seconds, which no other test should wait for

    own, reference = Embedder(default_embedder()), SentenceTransformer(default_embedder(), device="cpu")
    texts = [line for text in corpus().values() for line in text.splitlines()][: 2 * BATCH_TEXTS + 5]
    assert len(texts) > 2 * BATCH_TEXTS
    long = " ".join(corpus().values())  # beyond what the model reads
    for batch in (texts, [long, "short", ""], ["Who keeps the paint?"], ["ÄÖÜ ½ 漢字 \u200b  two  spaces "]):
        expected = reference.encode(batch, normalize_embeddings=True, show_progress_bar=False)
        assert np.array_equal(own(batch), expected)
    assert len(own([])) == 0


@pytest.mark.slow
def test_the_default_model_does_not_import_sentence_transformers() -> None:
    program = (
        "import sys; from qcfuse_rag.bundled import default_embedder; "
        "from qcfuse_rag.library.embedder import Embedder; print(Embedder(default_embedder())(['a']).shape); "
        "sys.exit('sentence_transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "1_Pooling/config.json": lambda pooling: {**pooling, "pooling_mode_cls_token": True},
    "config_sentence_transformers.json": lambda about: {**about, "prompts": {"query": "q: "}},
    "modules.json": lambda modules: modules[:2],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_models_that_do_anything_else_are_left_to_it(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "model"
    shutil.copytree(default_embedder(), folder)
    file = folder / name
    file.write_text(json.dumps(CHANGES[name](json.loads(file.read_text()))))
    own = Embedder(str(folder))
    assert isinstance(own._model, SentenceTransformer)
    expected = SentenceTransformer(str(folder), device="cpu").encode(["a text"], normalize_embeddings=True)
    assert np.array_equal(own(["a text"]), expected)


def test_a_damaged_model_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(default_embedder(), folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelNotFound, match="cannot load the embedding model"):
        Embedder(str(folder))
