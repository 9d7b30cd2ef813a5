"""The critical layers of a model: those of its profile beside the store, or three around the middle of the depth."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from qcfuse_rag.runtime.language_model import LanguageModel

LOG = logging.getLogger(__name__)
FORMAT = "qcfuse-profile-1"
MAKE_AGAIN = "make it again with `python -m benchmarks profile`"
PROFILE_FILE = "profile.json"
"""File name of a profile in the folder of a store; `python -m benchmarks profile` makes one."""


def layers_by_depth(n_layers: int) -> tuple[int, ...]:
    """Return the three layers around 0.53 of the depth: the default for a model without a profile.

    QCFuse (arXiv 2606.05875) publishes lists for the Llama, Mistral and Qwen3 8B models. There, attention from question
    to evidence is sharpest between 0.41 and 0.59 of the depth. For a model of one or two layers, return all layers.
    """
    middle = min(max(round(0.53 * n_layers), 1), n_layers - 2)
    return tuple(layer for layer in (middle - 1, middle, middle + 1) if 0 <= layer < n_layers)


def critical_layers(lm: LanguageModel, folder: Path | None) -> tuple[int, ...]:
    """Return a model's critical layers, ascending.

    Args:
        lm: the model.
        folder: a store's folder, which may hold a profile. One that is of another model or cannot be read is logged.
    """
    path = None if folder is None else folder / PROFILE_FILE
    if path is not None and path.exists():
        try:
            return _profiled(lm, json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            LOG.warning("the profile %s is not used: %s; %s", path, error, MAKE_AGAIN)
    return layers_by_depth(lm.n_layers)


def _profiled(lm: LanguageModel, profile: dict[str, object]) -> tuple[int, ...]:
    layers, recall, fingerprint = profile["layers"], profile["recall"], profile["fingerprint"]
    if profile["format"] != FORMAT or not isinstance(layers, list) or not isinstance(recall, list):
        raise ValueError(f"its format is not {FORMAT}")
    differing = lm.fingerprint.differences(dict(fingerprint))  # type: ignore[call-overload]
    if differing:
        raise ValueError(f"it is of another model ({profile['model']}): {', '.join(differing)} differ")
    if len(recall) != lm.n_layers:
        raise ValueError(f"it has {len(recall)} layers and the model {lm.n_layers}")
    if not layers or any(type(layer) is not int or not 0 <= layer < lm.n_layers for layer in layers):
        raise ValueError(f"layers must be indices of the {lm.n_layers} layers")
    return tuple(sorted(set(layers)))
