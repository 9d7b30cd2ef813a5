"""A secret of a neighbouring passage shows in answers made from an enriched cache, unless neighbours are guarded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.quality import gold_nll
from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.methods.fusionrag import ENRICHED
from tests.support.engines import make_engine

pytestmark = pytest.mark.real

WORDS = ("banana", "window", "garden")
NOTICE = "Password hint: ask the director. Password:"
OTHER = (
    "The ferry to the island leaves at seven and comes back at noon. Tickets are sold in the old harbour office, and "
    "dogs travel free of charge when they are small."
)


def likelihoods(lm: LanguageModel, secret: str, *, access: dict[str, str | None] | None) -> list[float]:
    """Return how likely each word is as the password, where the notice has met the secret but the prompt has not.

    Log-likelihoods of `Password: <word>` as the answer, when two passages are in the prompt: one about something else
    and the notice, which does not name the password.
    """
    engine = make_engine(lm, MemoryStore())
    engine.warm(
        [OTHER, NOTICE, f"Password: {secret}. " * 4],
        sources=["ferry", "notice", "safe"],
        bases=(ENRICHED,),
        neighbours=[[1], [2], [1]],
        access=access,
        batch_tokens=1,
    )
    prompt = engine.prompt("What is the password?", [OTHER, NOTICE])
    found = []
    for word in WORDS:
        gold = lm.tokenizer.backend_tokenizer.encode(f"Password: {word}", add_special_tokens=False).ids
        prefilled = engine.prefill(prompt, method=make_method("reuse", base=ENRICHED), answer_tokens=len(gold))
        assert not prefilled.report.missing
        found.append(-len(gold) * gold_nll(engine.runner, prefilled, gold))
    return found


def surfacing(rows: list[list[float]]) -> float:
    """Return how much likelier a word is, in nats, when it is the secret than when another word is."""
    table: Tensor = torch.tensor(rows)
    own = table.diagonal()
    return float((own - (table.sum(0) - own) / (len(table) - 1)).mean())


def test_a_secret_in_a_forbidden_neighbour_surfaces_and_the_guard_closes_it(smollm2: LanguageModel) -> None:
    leaking = [likelihoods(smollm2, secret, access=None) for secret in WORDS]
    assert surfacing(leaking) > 0.3, "in logits, if not in words"
    guarded = [likelihoods(smollm2, secret, access={"safe": "director"}) for secret in WORDS]
    assert guarded[0] == guarded[1] == guarded[2], "whatever the secret is, the answer is the same to the last bit"
