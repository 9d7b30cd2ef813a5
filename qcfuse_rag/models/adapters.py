"""Merge peft adapters, such as LoRAs, into the weights of their model.

A merged model is a plain one: it computes as fast, and the hash of its weights tells its caches from the base model's.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qcfuse_rag.errors import QCFuseError, UnsupportedModel


def load_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Merge the adapter that peft saved in a folder into its base model, which is changed, and return the model.

    Raises:
        QCFuseError: if peft is not installed.
        UnsupportedModel: if it has weights for layers that the model lacks, or lacks some; see also `merge_adapters`.
        Exception: of peft, if the adapter cannot be read, or its weights have other shapes than the model's.
    """
    try:
        from peft import PeftConfig, get_peft_model, load_peft_weights
    except ImportError as error:
        raise QCFuseError(f"{folder} has an adapter: run `pip install 'qcfuse-rag[adapters]'`") from error
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    with warnings.catch_warnings(action="ignore"):
        stored = load_peft_weights(folder, device="cpu").get(f"base_model.model.{name}.weight")
        if stored is not None and len(stored) != len(embeddings.weight):  # trained with a larger vocabulary
            model.resize_token_embeddings(len(stored), mean_resizing=False)
        adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(folder, inference_mode=True))
        keys = adapted.load_adapter(folder, "default")
    if unmatched := [*keys.unexpected_keys, *keys.missing_keys]:
        raise UnsupportedModel(
            f"the adapter in {folder} belongs to another model: {len(unmatched)} of its weights and those of the base "
            f"model do not match, such as {min(unmatched)}; name its own base model in adapter_config.json"
        )
    return merge_adapters(adapted)


def merge_adapters(model: Any) -> PreTrainedModel:
    """Merge the active adapters of a `PeftModel`, or of a model that has adapters attached, and return the model.

    The model itself is changed, and other adapters are dropped.

    Raises:
        UnsupportedModel: if the adapters cannot be merged exactly, or are disabled.
    """
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    kind = next(iter(model.peft_config.values())).peft_type
    if hasattr(model, "get_base_model"):
        tuner = model.base_model
    else:  # the constructor of peft's class would attach another adapter
        tuner = BaseTuner.__new__(PEFT_TYPE_TO_TUNER_MAPPING[kind])
        nn.Module.__init__(tuner)
        tuner.model, tuner.peft_config = model, model.peft_config
    if not isinstance(tuner, BaseTuner):
        raise UnsupportedModel(f"an adapter of type {kind.value} adds to the prompt instead of to the weights")
    layers = [layer for layer in tuner.modules() if isinstance(layer, BaseTunerLayer)]
    if any(layer.disable_adapters for layer in layers):
        raise UnsupportedModel("the model's adapters are disabled: enable them, or take the model of its `unload()`")
    weights = [weight for layer in layers for weight in layer.get_base_layer().state_dict().values()]
    if any(hasattr(w, "__tensor_flatten__") or not w.is_floating_point() or w.element_size() < 2 for w in weights):
        raise UnsupportedModel(
            "an adapter cannot be merged exactly into quantised weights: name the base model that is not quantised in "
            "adapter_config.json, and quantise by `weights` as it is loaded"
        )
    try:
        merged: Any = tuner.merge_and_unload(safe_merge=True)
    except Exception as error:  # of the kind of adapter
        raise UnsupportedModel(f"the adapter cannot be merged into the model's weights: {error}") from error
    merged._hf_peft_config_loaded = False
    return merged
