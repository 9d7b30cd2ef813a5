"""A short text that every primed passage has stood behind, so that none of them takes itself for the first.

The first passage of a prompt is read differently from all others: attention that has nowhere else to go gathers at its
beginning. A passage prefilled right behind the prompt's head is such a first passage, and a prompt fused of several has
as many. Prefilled behind the head *and another passage*, it is not. Which other passage hardly matters, see
docs/auto.md; so it is always the same one, which has nothing to do with any question: a primed cache depends on the
passage alone, as a framed one does, and remembers nobody else's.
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
"""Written for this purpose. With another text the base would need another name, see `store.prefill_base`: other caches."""

PRIMER_TOKENS = 256
"""Tokens to cut it to, which no tokenizer of words or word pieces comes near: a window has to have room for it."""
