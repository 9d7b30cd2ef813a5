"""A tokenizer's vocabulary as grammars need it: which bytes each token stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    """Return llguidance's form of a vocabulary, as wide as the model's scores; making it can take seconds.

    Raises:
        QCFuseError: if llguidance is not installed.
    """
    try:
        from llguidance import hf
    except ImportError as error:
        raise QCFuseError(
            "answers by a grammar or schema need llguidance: run `pip install 'qcfuse-rag[structured]'`"
        ) from error
    width = model.get_input_embeddings().weight.shape[0]
    return hf.from_tokenizer(tokenizer, n_vocab=max(width, len(tokenizer)), eos_token=tokenizer.eos_token_id)
