"""The fixed passages in front of every primed passage.

A model reads the first passage of a prompt differently from all others: unused attention gathers at its beginning. A
passage prefilled directly behind the system prefix is such a first passage, so a fused prompt has several. A passage
prefilled behind the system prefix *and other passages* is not, and it stands about as far from the beginning as it does
in prompts. Several passages are needed; which ones matters less, see benchmarks/results/quality.md. So they are
always the same, unrelated to any question. A primed cache depends on its passage alone, like a framed one, and carries
nothing of other documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcfuse_rag.ingestion.prefill import Ids

PRIMER = (
    "# Replacing the filter\n\n"
    "Switch the pump off and wait until the pressure gauge shows zero. Turn the grey lever to the left, then lift the "
    "cover. The old filter can now be pulled out by its ring. Rinse the housing with clean water; never use "
    "solvents.\n\n"
    "- Put the new filter in with the arrow pointing down.\n"
    "- Close the cover and turn the lever back.\n"
    "- Switch the pump on and check for some minutes that no water leaks.\n\n"
    "Filters last half a year. Ask your dealer for the order number.",
    "## Leave and absence\n\n"
    "Employees have six weeks of paid leave a year. Leave is requested in the staff portal at least two weeks in "
    "advance and approved by the team lead. Unused days may be carried over to March of the next year. For a longer "
    "sick leave a doctor's note is needed, which is sent to hr@example.org. Parents may take up to a year off; their "
    "contract is kept. Questions are answered by the HR desk on the second floor, on weekdays in the morning.",
    "The reading room of the Corlett Institute opened in the last years of the queen's reign. It was paid for by a "
    "merchant, Abel Thorne, who had no children and left his fortune to the town. The architect, Sir Percival Vane, "
    "gave it a wide glass dome, which was destroyed in a storm and rebuilt three years later. Scholars from all over "
    "Europe came to see its collection of maps, nearly half of which had never been printed.",
    "In biology, the term diapause refers to a period of suspended development in insects and other invertebrates. "
    "Unlike ordinary dormancy, it begins before conditions become unfavourable; in most species it is triggered by the "
    "length of the day. Later studies showed that the hormone responsible is produced in the brain, and that a few "
    "hours of light may suffice to end it. Farmers use this knowledge to predict when pests will appear.",
    "The Harrow Valley Rovers are a football club based in Stenfield, which competes in the Northern League. Founded "
    "as a workers' team before the war, the club won the national cup twice, both times under its coach Walter Dring. "
    "Its captain, Luis Okoro, scored more goals in one season than anybody before him, a record that still stands. The "
    "team plays its home games at Weaver Park, and its supporters sing a song that was written by the composer Ada "
    "Brune.",
    "The film Winter Harbour was directed by Helen Marsh and stars Tom Aldridge and Vera Kohl as two fishermen's "
    "children who find a letter in a wrecked boat. The screenplay is based on a novel by the Danish writer Jens Toft. "
    "Critics praised its photography, but it earned less than it had cost. Marsh later called it the best of her nine "
    "films. A second version for television was made by her daughter.",
    "Marisa Delgado, born in Puerto Azul, is a retired engineer and politician. She studied in Lisbon and worked on "
    "dams in three countries before she was elected mayor of her home town. During her two terms the harbour was "
    "deepened, a tram line was opened and taxes fell. Later she became minister of transport under President Aurelio "
    "Santos, but resigned within a year after a dispute over the cost of the northern railway. Her memoirs sold better "
    "than anybody had expected.",
    "Glasswort is a salt-tolerant plant that grows on the shores of northern seas. Its ashes were once used for making "
    "soap and glass, which is where its name comes from. Whole villages lived by burning it; a family needed many "
    "cartloads of the plant for a small sack of ash. The trade ended when a cheaper way to make soda from common salt "
    "was invented. Today the young shoots are sold as a vegetable, mostly in France and in the Netherlands, during the "
    "summer.",
)
"""Passages written for this purpose. They have no digits, since numbers in front of a passage blur the numbers in it.
Other passages give other caches: raise the revision of `store.key.PRIMED`."""

PRIMER_TOKENS = 1024
"""Most tokens of the primer."""

WINDOW_SHARE = 4
"""The primer takes at most this part of the context window: a quarter."""


def primer_ids(passages: Sequence[Ids], context_tokens: int) -> Ids:
    """Return the token ids in front of primed passages: the last of these passages that fit.

    Args:
        passages: token ids of the passages, each as a prompt contains it; of one that is too long the end is taken.
        context_tokens: tokens of the model's context window.
    """
    limit = min(PRIMER_TOKENS, context_tokens // WINDOW_SHARE)
    ids: Ids = ()
    for passage in reversed(passages):
        if ids and len(passage) + len(ids) > limit:
            break
        ids = passage[-limit:] + ids
    return ids
