"""Find the chunks that a chunk is likely to be retrieved with, by vectors of an index or the model's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.documents.sources import may_be_built_on

BLOCK = 1024


def nearest_chunks(
    vectors: NDArray[np.float32], n: int, readers: Sequence[frozenset[str]] | None = None
) -> list[list[int]]:
    """Return the nearest other chunks of each chunk by cosine similarity, best first.

    Args:
        vectors: `[N, D]`, the vector of each chunk; need not be normalised.
        n: most neighbours of a chunk.
        readers: the tags of each chunk's readers, see `store.documents.sources`. A chunk's neighbours are then those
            that all its readers may read, and can be fewer. None means that everybody may read every chunk.
    """
    denied, kinds = _denied_pairs(readers) if readers is not None else (None, None)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    neighbours: list[list[int]] = []
    for start in range(0, len(unit), BLOCK):
        similarity = unit[start : start + BLOCK] @ unit.T
        similarity[np.arange(len(similarity)), np.arange(start, start + len(similarity))] = -np.inf
        if denied is not None and kinds is not None:
            similarity[denied[kinds[start : start + BLOCK]][:, kinds]] = -np.inf
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :n]
        neighbours += [
            [index for index in indices if scores[index] > -np.inf]
            for indices, scores in zip(order.tolist(), similarity, strict=True)
        ]
    return neighbours


def _denied_pairs(readers: Sequence[frozenset[str]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Group chunks by their readers.

    Returns:
        `[K, K]`, whether a group must not be built on another one, and `[N]`, the group of each chunk.
    """
    groups = list(dict.fromkeys(readers))
    denied = np.array([[not may_be_built_on(group, other) for other in groups] for group in groups], dtype=np.bool_)
    number = {group: index for index, group in enumerate(groups)}
    return denied, np.array([number[group] for group in readers], dtype=np.int64)


@torch.inference_mode()
def token_vectors(lm: LanguageModel, chunks: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return a vector for each chunk from the model's own input embeddings, where there is no embedding model.

    It is the mean of the embeddings of its tokens, weighted by inverse document frequency, minus the mean over all
    chunks: related chunks share rare tokens. An embedding model is better.

    Returns:
        `[N, H]` float32.
    """
    embeddings = lm.model.get_input_embeddings()
    document_counts = Counter(token for ids in chunks for token in set(ids))
    vectors = np.zeros((len(chunks), embeddings.embedding_dim), np.float32)
    for index, ids in enumerate(chunks):
        if ids:
            tokens = torch.tensor(list(ids), device=lm.device)
            weight = torch.tensor(
                [np.log((1 + len(chunks)) / document_counts[token]) for token in ids], device=lm.device
            )
            vectors[index] = (weight[:, None] * embeddings(tokens).float()).mean(0).cpu().numpy()
    return vectors - vectors.mean(0) if len(chunks) > 1 else vectors
