"""The short text in front of every primed passage.

A model reads the first passage of a prompt differently from all others: unused attention gathers at its beginning. A
passage prefilled directly behind the system prefix is such a first passage, so a fused prompt has several. A passage
prefilled behind the system prefix *and another passage* is not. It hardly matters which other passage that is, see
docs/notes/auto.md. So it is always the same text, unrelated to any question. A primed cache depends on its passage
alone, like a framed one, and carries nothing of other documents.
"""

from __future__ import annotations

PRIMER = (
    "The village of Aldersund lies on the eastern bank of a slow river, half a day's walk from the coast. It has a "
    "stone bridge, a small school and a mill that was rebuilt after a fire. Every autumn its people hold a market in "
    "the square, where they sell apples, wool and honey. The oldest house stands beside the bridge and belonged to a "
    "family of boat builders. In winter the river freezes, and children cross it on their way to school. A road leads "
    "north through the forest to the next town, which has a railway station and a library. Travellers who miss the "
    "last train often stay at the inn, whose keeper is known for her bread and for her stories about the forest."
)
"""Written for this purpose. Another text gives other caches, so the base would need another name."""

PRIMER_TOKENS = 256
"""Most tokens of the primer, far more than word or subword tokenizers need; limits its share of the window."""
