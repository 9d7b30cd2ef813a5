"""Why each method recomputes the tokens that it chooses, in plain words, and what its scores measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """How a method chooses tokens to recompute.

    Attributes:
        reason: why it chose a token; completes the sentence "They were recomputed because ...".
        score: the quantity that a token's score measures; None for methods without scores.
    """

    reason: str
    score: str | None = None


ATTENTION = "attention of the question"
CHANGE = "change of keys and values"

_BY_ATTENTION = Choice("the question pays them more attention than the other tokens of the passages", ATTENTION)
_BY_CHANGE = Choice("their stored keys and values differ most from what this prompt gives them", CHANGE)

CHOICES: dict[str, Choice] = {
    "auto": Choice("the question and the text behind the passages pay them the most attention", ATTENTION),
    "full": Choice("full prefill computes the whole prompt"),
    "reuse": Choice("the method recomputes nothing"),
    "random": Choice("the method chooses at random; it is the control that other methods are compared with"),
    "epic": Choice("they are the first of their passage, which was stored as if nothing stood before them"),
    "cacheblend": _BY_CHANGE,
    "cachecraft": Choice(
        "they paid much attention to other passages when they were stored, and those are not in this prompt",
        "attention to earlier passages",
    ),
    "fusionrag": Choice("the question pays them the most attention in the last layer", ATTENTION),
    "prophetkv": _BY_ATTENTION,
    "qcfuse": Choice("the question pays them the most attention in the model's critical layers", ATTENTION),
    "relaxkv": Choice("in at least one layer the question pays them the most attention", ATTENTION),
    "agentkvshift": _BY_CHANGE,
    "relaycaching": Choice("they changed most, or were attended to most, in the layers where the method measures that"),
    "kamera": _BY_ATTENTION,
    "kvcomm": _BY_ATTENTION,
}
"""By the names of `methods.METHODS`."""


def choice_of(method: str) -> Choice:
    """Return how a method chooses; for a method of somebody else's only that it does."""
    return CHOICES.get(method, Choice(f"the method {method} chose them"))
