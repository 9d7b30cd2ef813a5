"""Decode the answers of many methods to one prompt as one batch.

All methods see the same ids, so their buffers have the same length and one pass serves all of them. A sequence gets the
same tokens as alone. Only the time differs, so times to first token are measured method by method beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.detokenizer import Detokenizer
from qcfuse_rag.generation.stop_criteria import end_tokens
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import model_inputs
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan

GOLD_ROWS = 16
"""Rows of the gold answer in one pass, which bounds the memory of the logits."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchedDecoder:
    """Prefilled prompts in one batch.

    Attributes:
        lm: the model.
        buffer: keys and values of `B` sequences.
        logits: `[B, vocabulary]` float32, scores of the first new token.
        length: tokens of each prompt.
    """

    lm: LanguageModel
    buffer: KVBuffer
    logits: Tensor
    length: int

    @classmethod
    def stack(
        cls, lm: LanguageModel, prefilled: Iterable[Prefilled], count: int, length: int, room: int
    ) -> BatchedDecoder:
        """Copy `count` prefilled prompts side by side as they come, so that their own buffers exist one at a time."""
        buffer = KVBuffer.allocate(lm.shapes, length + room, dtype=lm.dtype, device=lm.device, batch=count)
        logits = []
        for index, result in enumerate(prefilled):
            sources, targets = (*result.buffer.keys, *result.buffer.values), (*buffer.keys, *buffer.values)
            for target, source in zip(targets, sources, strict=True):
                target[index, :, :length] = source[0, :, :length]
            logits.append(result.logits)
        return cls(lm, buffer, torch.stack(logits), length)

    @torch.inference_mode()
    def gold_nll(self, gold: Sequence[int]) -> list[float]:
        """Return each sequence's mean negative log-likelihood of the gold answer, in nats a token; 0 without tokens."""
        if not gold:
            return [0.0] * len(self.logits)
        ids = torch.tensor(gold, device=self.lm.device)
        total = -self.logits.double().log_softmax(-1)[:, ids[0]]
        for start in range(0, len(gold) - 1, GOLD_ROWS):
            fed = ids[start : min(start + GOLD_ROWS, len(gold) - 1)]
            expected = ids[start + 1 : start + 1 + len(fed)]
            logits = self._forward(fed.expand(len(self.logits), -1), self.length + start, keep=len(fed))
            chosen = logits.log_softmax(-1).gather(2, expected[None, :, None].expand(len(logits), -1, 1))
            total -= chosen.double().sum((1, 2))
        return [float(value) / len(gold) for value in total]

    @torch.inference_mode()
    def greedy(self, max_new_tokens: int) -> list[tuple[int, ...]]:
        """Return each sequence's most likely tokens, up to and including its end token."""
        ends = end_tokens(self.lm)
        answers: list[list[int]] = [[] for _ in range(len(self.logits))]
        unfinished, logits = set(range(len(answers))), self.logits
        for step in range(max_new_tokens):
            tokens = logits.argmax(-1)
            listed = tokens.tolist()
            for i in sorted(unfinished):
                answers[i].append(listed[i])
                if listed[i] in ends:
                    unfinished.discard(i)
            if not unfinished or step + 1 == max_new_tokens:
                break
            logits = self._forward(tokens[:, None], self.length + step, keep=1)[:, -1]
        return [tuple(answer) for answer in answers]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens as streaming would give it, without surrounding white space."""
        assembler = Detokenizer(self.lm.tokenizer.backend_tokenizer, ())
        return ("".join(assembler.push(token) for token in ids) + assembler.flush()).strip()

    def _forward(self, ids: Tensor, position: int, keep: int) -> Tensor:
        """Compute rows of all sequences from `position` on: ids `[B, R]` to logits `[B, keep, vocabulary]` float32."""
        plan = RowsPlan.between(position, position + ids.shape[1], ids.device, self.lm.sliding)
        logits: Tensor = self.lm.model(**model_inputs(ids, plan, self.buffer), logits_to_keep=keep).logits
        return logits[:, -keep:].float()
