"""The first passes of a process, made before anybody waits for them."""

from __future__ import annotations

from qcfuse_rag.fuse.prefill import prefill
from qcfuse_rag.generate.decode import TextStream
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.ingest.base import FRAMED
from qcfuse_rag.ingest.primer import PRIMER
from qcfuse_rag.ingest.warm import WarmJob
from qcfuse_rag.methods import make_method
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt, Role, Segment
from qcfuse_rag.prompt.template import PromptBuilder
from qcfuse_rag.store.memory import MemoryStore

TOKENS = 64
"""Of a passage."""


def warm_up(lm: LanguageModel, prompts: PromptBuilder) -> None:
    """Warm two passages, fuse a prompt of them and decode two tokens: kernels are compiled, libraries find their feet.

    Args:
        lm: the model.
        prompts: whose head the prompt has.
    """
    store, text = MemoryStore(), prompts.chunk_ids(PRIMER)
    head, passages = prompts.frame or text[:1], [text[:TOKENS]] * 2
    segments = [(Role.HEAD, head), *((Role.CHUNK, ids) for ids in passages), (Role.QUESTION, text[:8])]
    prompt = Prompt(tuple(Segment(role, ids, "") for role, ids in segments), frame=head)
    WarmJob(lm, store, head, passages, bases=(FRAMED,), primer=passages[0]).run()
    done = prefill(lm, store, prompt, make_method("prophetkv", ratio=0.1, base=FRAMED), room=2)
    TextStream(lm, done, SamplingParams(max_new_tokens=2)).result()
