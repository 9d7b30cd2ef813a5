"""The default embedding model gives the same numbers without sentence-transformers; other models are left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from qcfuse_rag.bundled import corpus, default_embedder
from qcfuse_rag.errors import ModelNotFound
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.mean_pooling import BATCH_TEXTS, MeanPoolingModel


@pytest.fixture(scope="module")
def own() -> MeanPoolingModel:
    model = MeanPoolingModel.load(default_embedder())
    assert model is not None
    return model


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(default_embedder(), device="cpu")


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers(own: MeanPoolingModel, reference: SentenceTransformer) -> None:
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


def _other_pooling(folder: Path) -> None:
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pooling_mode_cls_token": True}))


def _prompt(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prompts": {"query": "q: "}}))


def _no_normalisation(folder: Path) -> None:
    file = folder / "modules.json"
    file.write_text(json.dumps(json.loads(file.read_text())[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("change", [_other_pooling, _prompt, _no_normalisation])
def test_models_that_do_anything_else_are_left_to_it(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(default_embedder(), folder)
    change(folder)
    assert MeanPoolingModel.load(str(folder)) is None
    expected = SentenceTransformer(str(folder), device="cpu").encode(["a text"], normalize_embeddings=True)
    assert np.array_equal(Embedder(str(folder))(["a text"]), expected)


def test_a_damaged_model_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(default_embedder(), folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelNotFound, match="cannot load the embedding model"):
        Embedder(str(folder))
