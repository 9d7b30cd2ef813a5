"""Which chunks a chunk is likely to be retrieved with: what enriched caches are made from.

Any source will do: vectors of an embedding index, edges of a graph, or what was retrieved together before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.documents.acl import may_be_built_on

BLOCK = 1024


def nearest_chunks(
    vectors: NDArray[np.float32], n: int, readers: Sequence[frozenset[str]] | None = None
) -> list[list[int]]:
    """Return each chunk's nearest others by cosine, best first.

    Args:
        vectors: `[N, D]`, one for each chunk, of any length but zero.
        n: how many.
        readers: who may read each chunk, see `store.documents.acl`; a chunk's neighbours are then among those that all its
            readers may read, and can be fewer. None is everybody.
    """
    hidden, groups = _hidden(readers) if readers is not None else (None, None)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    found: list[list[int]] = []
    for start in range(0, len(unit), BLOCK):
        similarity = unit[start : start + BLOCK] @ unit.T
        similarity[np.arange(len(similarity)), np.arange(start, start + len(similarity))] = -np.inf
        if hidden is not None and groups is not None:
            similarity[hidden[groups[start : start + BLOCK]][:, groups]] = -np.inf
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :n]
        rows = zip(order.tolist(), similarity, strict=True)
        found += [[one for one in row if own[one] > -np.inf] for row, own in rows]
    return found


def permitted_neighbours(neighbours: Sequence[Sequence[int]], readers: Sequence[frozenset[str]]) -> list[list[int]]:
    """Return neighbours without those that not all of a chunk's readers may read, see `store.documents.acl`."""
    return [
        [other for other in related if may_be_built_on(readers[one], readers[other])]
        for one, related in enumerate(neighbours)
    ]


def _hidden(readers: Sequence[frozenset[str]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which kinds of chunk must not remember which, `[kinds, kinds]`, and the kind of each chunk."""
    kinds = list(dict.fromkeys(readers))
    table = np.array([[not may_be_built_on(own, other) for other in kinds] for own in kinds], dtype=np.bool_)
    number = {kind: index for index, kind in enumerate(kinds)}
    return table, np.array([number[own] for own in readers], dtype=np.int64)


def retrieved_together(retrievals: Sequence[Sequence[int]], chunks: int, n: int) -> list[list[int]]:
    """Return the chunks each was most often retrieved with, most often first.

    Args:
        retrievals: indices of the chunks of each past retrieval.
        chunks: how many chunks there are.
        n: how many to return for each, at most.
    """
    together: list[Counter[int]] = [Counter() for _ in range(chunks)]
    for found in retrievals:
        for one in found:
            together[one].update(other for other in set(found) if other != one)
    return [[other for other, _ in sorted(own.items(), key=lambda pair: (-pair[1], pair[0]))[:n]] for own in together]


def merge_rankings(first: Sequence[Sequence[int]], then: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """Return each chunk's neighbours from a first list, filled up from a second one to `n`."""
    return [list(dict.fromkeys((*one, *other)))[:n] for one, other in zip(first, then, strict=True)]


def covering_groups(neighbours: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return groups of related chunks in which every chunk stands behind others at least once.

    What to capture (see `ingestion.capture`) when it is not known yet what will be retrieved together: each chunk that no
    group has taken in yet stands last in a group of its own, behind its nearest neighbours.

    Args:
        neighbours: of each chunk, best first.
        size: chunks in a group.
    """
    groups: list[list[int]] = []
    behind: set[int] = set()
    for chunk, related in enumerate(neighbours):
        if chunk not in behind and related:
            groups.append([*related[: size - 1], chunk])
            behind.update(groups[-1][1:])
    return groups


@torch.inference_mode()
def token_vectors(lm: LanguageModel, chunks: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return a vector for each chunk from the model's own input embeddings, for want of an embedding model.

    The mean of its tokens' embeddings, rare tokens counting more (inverse document frequency), less the mean over all
    chunks; related chunks share rare tokens. An embedding model does better.

    Returns:
        `[N, H]` float32.
    """
    table = lm.model.get_input_embeddings().weight
    seen = Counter(token for ids in chunks for token in set(ids))
    vectors = np.zeros((len(chunks), table.shape[1]), np.float32)
    for index, ids in enumerate(chunks):
        if ids:
            tokens = torch.tensor(list(ids), device=table.device)
            weight = torch.tensor([np.log((1 + len(chunks)) / seen[token]) for token in ids], device=table.device)
            vectors[index] = (weight[:, None] * table[tokens].float()).mean(0).cpu().numpy()
    return vectors - vectors.mean(0) if len(chunks) > 1 else vectors
