"""Three passages about a harbour, and a question that needs all of them."""

from __future__ import annotations

PASSAGES = [
    "The ferry to the island leaves at seven. Its captain is called Orla, and its hull is green.",
    "A green hull is repainted every spring by the harbour school. The paint is kept in the old mill.",
    "The old mill belongs to the council, which meets on Mondays; nobody else has a key to it.",
]
QUESTION = "Who keeps the paint of the ferry?"
