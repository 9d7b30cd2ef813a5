"""The first passes of a process, made before anybody waits for them."""

from __future__ import annotations

from itertools import product

from qcfuse_rag.fuse.kernels.support import kernels_run_on, widest_head
from qcfuse_rag.fuse.prefill import prefill
from qcfuse_rag.generate.decode import TextStream
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.ingest.base import FRAMED
from qcfuse_rag.ingest.primer import PRIMER
from qcfuse_rag.ingest.warm import WarmJob
from qcfuse_rag.methods import make_method
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.builder import PromptBuilder
from qcfuse_rag.prompt.segments import Prompt, Role, Segment
from qcfuse_rag.store.memory import MemoryStore

TOKENS = 64
"""Of a passage."""
FEW, MANY = 2, 18
"""Passages of a prompt. Over many, kernels split the keys, which is compiled apart."""
SHORT, LONG = 1, 32
"""Tokens of a question. Of a short one kernels take all rows at once, which is compiled apart too."""


def warm_up(lm: LanguageModel, prompts: PromptBuilder) -> None:
    """Warm a passage, fuse prompts of it and decode two tokens: kernels are compiled, libraries find their feet.

    Args:
        lm: the model.
        prompts: whose head the prompts have.
    """
    store, text = MemoryStore(), prompts.chunk_ids(PRIMER)
    head, passage = prompts.frame or text[:1], text[:TOKENS]
    WarmJob(lm, store, head, [passage], bases=(FRAMED,), primer=passage).run()
    method = make_method("prophetkv", ratio=0.1, base=FRAMED)
    kernels = kernels_run_on(lm.device, lm.dtype, widest_head(lm))
    for passages, asked in product((FEW, MANY), (SHORT, LONG)) if kernels else ((FEW, LONG),):
        segments = [(Role.HEAD, head), *[(Role.CHUNK, passage)] * passages, (Role.QUESTION, text[:asked])]
        prompt = Prompt(tuple(Segment(role, ids, "") for role, ids in segments), frame=head)
        if len(prompt) + 2 <= lm.window.tokens:
            TextStream(lm, prefill(lm, store, prompt, method, room=2), SamplingParams(max_new_tokens=2)).result()
