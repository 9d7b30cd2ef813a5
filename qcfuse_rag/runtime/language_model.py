"""A transformers model prepared for fusion: measured, fingerprinted and switched to the `qcfuse` attention."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.models.compatibility import (
    FEED_FORWARD_LAYERS,
    RECURRENT_LAYERS,
    ContextWindow,
    layers_of,
    measure_windows,
    refuse_mismatched_tokenizer,
    refuse_unsupported,
    refusing_errors,
    stock_attention_name,
)
from qcfuse_rag.models.cpu_weights import has_float16_weights
from qcfuse_rag.models.fingerprint import Fingerprint, fingerprint_model
from qcfuse_rag.models.load import load_model
from qcfuse_rag.models.recurrence import RecurrentLayer, measure_recurrence
from qcfuse_rag.models.rope import KVShape, LayerRope, measure_rope
from qcfuse_rag.runtime.attention import dispatch
from qcfuse_rag.runtime.buffer import BufferPool, KVBuffer
from qcfuse_rag.runtime.fused_layers.fused_modules import fused_view
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.recurrent_rows import recurrent_view

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from qcfuse_rag.runtime.loading.host_to_device import HostToDevice


NOTHING = KVShape(1, 1, 1)
"""Feed-forward layers store two zeros for each token, so that every layer keeps its index."""

_LINKING = threading.Lock()  # `cached_property` has none since Python 3.12


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its tokenizer and its measured properties.

    Attributes:
        model: the transformers model, in evaluation mode, with the `qcfuse` attention switched on.
        tokenizer: its fast tokenizer.
        name: the user's name for the model; for reports only.
        ropes: each layer's measured rotation.
        shapes: shape of keys and values of each layer that has its own; only these layers have ropes and windows too.
        sliding: each layer's sliding window in tokens, or None.
        recurrent: the layers among these that keep a state; their shapes are those of its inputs.
        context_window: the number of tokens that fit.
        fingerprint: identifies everything that stored keys and values depend on.
        stock_attention: transformers' own attention for this model, used to check the `qcfuse` attention.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    ropes: tuple[LayerRope, ...]
    shapes: tuple[KVShape, ...]
    sliding: tuple[int | None, ...]
    recurrent: dict[int, RecurrentLayer]
    context_window: ContextWindow
    fingerprint: Fingerprint
    stock_attention: str

    def empty_buffer(self, capacity: int, *, batch: int = 1, pool: BufferPool | None = None) -> KVBuffer:
        """Allocate a buffer for `batch` sequences of `capacity` tokens; see `KVBuffer.allocate`."""
        buffer = KVBuffer.allocate(self.shapes, capacity, dtype=self.dtype, device=self.device, batch=batch, pool=pool)
        for layer, shape in enumerate(self.shapes):
            if shape is NOTHING:
                buffer.keys[layer].zero_(), buffer.values[layer].zero_()
        return buffer

    @classmethod
    def load(
        cls, name: str, *, device: str | None = None, dtype: str | None = None, weights: str = "auto"
    ) -> LanguageModel:
        """Load a model by id, folder or GGUF file; see `load_model` for arguments and errors."""
        loaded = load_model(name, device=device, dtype=dtype, weights=weights)
        known = {"weights_hash": loaded.weights_hash, "weight_format": loaded.weight_format}
        return cls.wrap(loaded.model, loaded.tokenizer, name=name, **known)

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "",
        weights_hash: str | None = None,
        weight_format: str = "model",
    ) -> LanguageModel:
        """Prepare a loaded model.

        This switches the model's attention to `qcfuse`. Outside fused passes it gives the same results as before, so
        the model stays usable for anything else. Later changes of its weights are not noticed: wrap it again then.
        Active adapters of a `PeftModel`, or attached by transformers, are merged into the model itself.
        `name` is for reports; `weights_hash` is that of `hash_weights`, if it is known, before the weights were
        quantised to the `weight_format`.

        Raises:
            UnsupportedModel: if reuse would be wrong for the model; the error names the property.
        """
        if hasattr(model, "peft_config"):
            from qcfuse_rag.models.adapters import merge_adapters

            model = merge_adapters(model)
        with refusing_errors(model):
            context_window = refuse_unsupported(model)
            refuse_mismatched_tokenizer(model, tokenizer)
            model.eval()
            config = model.config.get_text_config()
            recurrent = measure_recurrence(model, layers_of(config, RECURRENT_LAYERS))
            feed_forward = dict.fromkeys(layers_of(config, FEED_FORWARD_LAYERS), NOTHING)
            stored = {index: layer.shape for index, layer in recurrent.items()}
            sliding = measure_windows(model)
            ropes, shapes = measure_rope(model, context_window.tokens - 1, len(sliding), stored | feed_forward)
        dispatch.register()
        model.set_attn_implementation(dispatch.ATTENTION_NAME)
        return cls(
            model=model,
            tokenizer=tokenizer,
            name=name or str(model.config._name_or_path),
            ropes=ropes,
            shapes=shapes,
            sliding=sliding,
            recurrent=recurrent,
            context_window=context_window,
            fingerprint=fingerprint_model(model, tokenizer, ropes, weights_hash, weight_format, recurrent.values()),
            stock_attention=stock_attention_name(model),
        )

    @property
    def n_layers(self) -> int:
        """Number of decoder layers with keys and values of their own."""
        return len(self.shapes)

    @cached_property
    def n_sharing(self) -> int:
        """Number of decoder layers behind these that read the keys and values of one of them."""
        return int(self.model.config.get_text_config().num_hidden_layers) - self.n_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with keys and values."""
        others = {layer for layer, shape in enumerate(self.shapes) if shape is NOTHING or layer in self.recurrent}
        return tuple(layer for layer in range(self.n_layers) if layer not in others)

    @cached_property
    def needs_torch_steps(self) -> str | None:
        """Why kernels cannot compute decode steps, and nothing can be recorded; None if they can."""
        if self.recurrent:
            return "some layers are recurrent"
        return "torch expands the latents of layers" if any(shape.latent for shape in self.shapes) else None

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, which receive the prompt's ids."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of computed and stored keys and values."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def weight_format(self) -> str:
        """Format of the weights: `model`, `float16`, whose caches are those of `model`, or that of the fingerprint."""
        return "float16" if has_float16_weights(self.model) else self.fingerprint.weight_format

    @property
    def number_formats(self) -> str:
        """The dtype, and the weights' format if it is another: such as `float32` or `float32, float16 weights`."""
        return replace(self.fingerprint, weight_format=self.weight_format).number_formats

    @cached_property
    def grammar_vocabulary(self) -> LLTokenizer:
        """The vocabulary for llguidance, padded to the width of the logits; converting it can take seconds.

        Raises:
            QCFuseError: if llguidance is not installed.
        """
        try:
            from llguidance import hf
        except ImportError as error:
            raise QCFuseError(
                "answers by a grammar or schema need llguidance: run `pip install 'qcfuse-rag[structured]'`"
            ) from error
        tokenizer, width = self.tokenizer, self.model.get_input_embeddings().weight.shape[0]
        return hf.from_tokenizer(tokenizer, n_vocab=max(width, len(tokenizer)), eos_token=tokenizer.eos_token_id)

    @cached_property
    def fused_model(self) -> PreTrainedModel:
        """A view of the model with the same weights, which all passes run; the model itself if nothing changes.

        Recurrent layers compute rows over a buffer; where kernels are used, norms, rotations and gates are fused.
        """
        model = recurrent_view(self.model, self.recurrent) if self.recurrent else self.model
        if not kernels_available(self.device, self.dtype, self.widest_head):
            return model
        return fused_view(model)

    def transfer(self) -> HostToDevice | None:
        """Return the link by which chunks reach the model's device; None if placement copies them itself."""
        with _LINKING:
            return self._link if kernels_available(self.device, self.dtype, self.widest_head) else None

    @cached_property
    def _link(self) -> HostToDevice:
        from qcfuse_rag.runtime.loading.host_to_device import HostToDevice  # page-locked memory

        return HostToDevice(self.device)

    @property
    def widest_head(self) -> int:
        """The largest number of channels of a head's keys or values."""
        return max(max(shape.key_dim, shape.value_dim) for shape in self.shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        channels = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self.shapes)
        return channels * torch.empty(0, dtype=self.dtype).element_size()
