"""The first passes of a process, made before anybody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil

from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.generation.decode import TextStream
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.ingestion.primer import PRIMER
from qcfuse_rag.ingestion.target import PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.runtime.kernels.support import kernels_run_on
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.prefill_base import FRAMED

TOKENS = 64
"""Of a passage."""
FEW, MANY = 2, 18
"""Passages of a prompt. Over many, kernels split the keys, which is compiled apart."""
SHORT, LONG = 1, 32
"""Tokens of a question. Of a short one kernels take all rows at once, which is compiled apart too."""
SOME, MOST = 0.1, 0.9
"""Shares to recompute. Of very many rows kernels take more at once, see `runtime.kernels.launch`."""


def run_first_passes(lm: LanguageModel, prompts: PromptBuilder) -> None:
    """Warm a passage, fuse prompts of it and decode two tokens: kernels are compiled, libraries find their feet.

    Args:
        lm: the model.
        prompts: whose head the prompts have.
    """
    store, text = MemoryStore(), prompts.chunk_ids(PRIMER)
    head, passage = prompts.prefix_ids or text[:1], text[:TOKENS]
    WarmJob(PrefillTarget(lm, store, head), [passage], bases=(FRAMED,)).run()
    runner = ModelRunner(lm, store, overlap=False)
    for passages, asked, ratio in _ways(lm):
        segments = [(Role.HEAD, head), *[(Role.CHUNK, passage)] * passages, (Role.QUESTION, text[:asked])]
        prompt = Prompt(tuple(Segment(role, ids, "") for role, ids in segments), prefix_ids=head)
        if len(prompt) + 2 <= lm.window.tokens:
            method = make_method("prophetkv", ratio=ratio, base=FRAMED)
            TextStream(
                runner, prefill(runner, prompt, method, answer_tokens=2), SamplingParams(max_new_tokens=2)
            ).result()


def _ways(lm: LanguageModel) -> Iterator[tuple[int, int, float]]:
    """Yield passages, tokens of a question and a share to recompute: prompts that take all kernels in all forms."""
    dim = lm.widest_head
    if not kernels_run_on(lm.device, lm.dtype, dim):
        yield FEW, LONG, SOME
        return
    from qcfuse_rag.runtime.kernels.launch import fewest_tall
    from qcfuse_rag.runtime.kernels.sparse_attention import takes_tall  # for which Triton has to be there

    for passages, asked in product((FEW, MANY), (SHORT, LONG)):
        yield passages, asked, SOME
    if takes_tall(lm.device, lm.dtype, dim):
        heads = int(lm.model.config.get_text_config().num_attention_heads)
        rows = max(fewest_tall(shape.kv_heads, lm.device) * shape.kv_heads for shape in lm.shapes) / heads
        yield ceil(rows / (MOST * TOKENS)) + 1, LONG, MOST
