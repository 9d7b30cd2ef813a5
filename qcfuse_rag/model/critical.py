"""Critical layers: those in which a question looks at the tokens that answer it."""

from __future__ import annotations


def default_critical_layers(n_layers: int) -> tuple[int, ...]:
    """Return the three layers around 0.53 of the depth: the guess for a model that was not profiled.

    Where question-to-evidence attention is sharpest lies between 0.41 and 0.59 of the depth for the Llama, Mistral and
    Qwen3 8B models that QCFuse (arXiv 2606.05875) publishes lists for. Models of one or two layers get all they have.
    """
    middle = min(max(round(0.53 * n_layers), 1), n_layers - 2)
    return tuple(layer for layer in (middle - 1, middle, middle + 1) if 0 <= layer < n_layers)
