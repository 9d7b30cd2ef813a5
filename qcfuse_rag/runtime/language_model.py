"""A transformers model made ready for fusion: measured, fingerprinted, with our attention switched on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.compatibility import (
    ContextWindow,
    refuse_mismatched_tokenizer,
    refuse_unsupported,
    stock_attention_name,
)
from qcfuse_rag.models.fingerprint import Fingerprint, fingerprint_model
from qcfuse_rag.models.load import load_pretrained
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.models.rope_probe import measure_rope
from qcfuse_rag.models.window_probe import measure_windows
from qcfuse_rag.runtime.attention import dispatch as attention

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def default_critical_layers(n_layers: int) -> tuple[int, ...]:
    """Return the three layers around 0.53 of the depth: the guess for a model that was not profiled.

    Where question-to-evidence attention is sharpest lies between 0.41 and 0.59 of the depth for the Llama, Mistral and
    Qwen3 8B models that QCFuse (arXiv 2606.05875) publishes lists for. Models of one or two layers get all they have.
    """
    middle = min(max(round(0.53 * n_layers), 1), n_layers - 2)
    return tuple(layer for layer in (middle - 1, middle, middle + 1) if 0 <= layer < n_layers)


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


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """What the engine knows about a model.

    Attributes:
        model: the transformers model, in evaluation mode, with the `qcfuse` attention switched on.
        tokenizer: its fast tokenizer.
        name: how the user called it; for reports only.
        ropes: each layer's measured rotation.
        shapes: each layer's cache sizes.
        sliding: each layer's sliding window in tokens, or None.
        window: how many tokens fit.
        fingerprint: identity of everything stored keys and values depend on.
        stock_attention: transformers' own attention for this model, which ours is checked against.
        critical_layers: ascending indices of the layers that a question's probe reads. Three by depth until a profile
            says better; `dataclasses.replace` makes the same model with others.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    ropes: tuple[LayerRope, ...]
    shapes: tuple[KVShape, ...]
    sliding: tuple[int | None, ...]
    window: ContextWindow
    fingerprint: Fingerprint
    stock_attention: str
    critical_layers: tuple[int, ...]

    @classmethod
    def load(cls, name: str, *, device: str | None = None, dtype: str | None = None) -> LanguageModel:
        """Load a model by id, folder or GGUF file; see `load_pretrained` for arguments and errors."""
        model, tokenizer = load_pretrained(name, device=device, dtype=dtype)
        return cls.wrap(model, tokenizer, name=name)

    @classmethod
    def wrap(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str = "") -> LanguageModel:
        """Make an already loaded model ready.

        The model's attention is switched to `qcfuse`, which computes what its own did, so that it stays usable for
        anything else. Later changes to its weights are not noticed: wrap it again after them.

        Raises:
            UnsupportedModel: with the property that makes reuse wrong.
        """
        window = refuse_unsupported(model)
        refuse_mismatched_tokenizer(model, tokenizer)
        ropes, shapes = measure_rope(model, max_position=window.tokens - 1)
        sliding = measure_windows(model)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        return cls(
            model=model.eval(),
            tokenizer=tokenizer,
            name=name or str(model.config._name_or_path),
            ropes=ropes,
            shapes=shapes,
            sliding=sliding,
            window=window,
            fingerprint=fingerprint_model(model, tokenizer, ropes),
            stock_attention=stock_attention_name(model),
            critical_layers=default_critical_layers(len(shapes)),
        )

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.shapes)

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where prompts start."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that keys and values are computed and stored in."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @cached_property
    def grammar_vocabulary(self) -> LLTokenizer:
        """The vocabulary as grammars need it; made when the first answer has to follow one."""
        return grammar_vocabulary(self.model, self.tokenizer)

    @property
    def widest_head(self) -> int:
        """The most channels that keys or values of a head have."""
        return max(max(shape.key_dim, shape.value_dim) for shape in self.shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the keys and values of one token take, over all layers."""
        channels = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.shapes)
        return channels * torch.empty(0, dtype=self.dtype).element_size()
