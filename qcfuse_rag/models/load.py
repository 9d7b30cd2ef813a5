"""Load a model and its tokenizer from a Hugging Face id, a local folder or a GGUF file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.models.cpu_dtype import chosen_cpu_dtype, multiplies_bfloat16
from qcfuse_rag.models.fingerprint import hash_weights
from qcfuse_rag.models.gguf_cache import CONVERTED_TOKENIZER, GgufConversion, cached_gguf_header
from qcfuse_rag.models.hub import fetch_options, unreachable_reason
from qcfuse_rag.models.kept_hash import FileState, hash_once, snapshot_folder
from qcfuse_rag.models.source import model_source
from qcfuse_rag.models.weights.formats import (
    HeldFormat,
    choose_weight_format,
    refuse_other_weights,
    round_weights,
    weight_format,
)
from qcfuse_rag.models.weights.gguf_tensors import read_one_at_a_time, return_freed_memory
from qcfuse_rag.models.weights.packed_checkpoint import load_packed
from qcfuse_rag.models.weights.rounded_load import rounding_while_loading

LOG = logging.getLogger(__name__)

MAX_LAYERS = 10_000
"""Limit of layers, and of experts in a layer; large models have some hundreds."""

_LOAD_LOCK = threading.Lock()
"""transformers changes methods of its classes while it loads; two threads at once could leave them changed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as `load_model` returns it, and the state of the files its weights were read from.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        files: their state before they were read; None if it is not known.
        asked_dtype: the dtype it was loaded with, or `auto`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    files: FileState | None
    asked_dtype: str

    def hash_weights(self, model: PreTrainedModel) -> str:
        """Return the hash of the weights, which must be as loaded; from an earlier start if it is kept for the files.

        The hash is not kept if transformers quantises the weights while it loads them.
        """
        if getattr(model, "hf_quantizer", None) is not None:
            return hash_weights(model)
        settings = {
            "architecture": type(model).__name__,
            "dtype": f"{model.dtype}, asked for {self.asked_dtype}",
            "weights": weight_format(model),
            "versions": ", ".join(
                f"{name} {_version(name)}" for name in ("qcfuse-rag", "torch", "transformers", "gguf")
            ),
            "code": str(max(path.stat().st_mtime_ns for path in Path(__file__).parent.rglob("*.py"))),
        }
        return hash_once(self.files, settings, lambda: hash_weights(model))


def load_model(
    name: str, *, device: str | None = None, dtype: str | None = None, weights: str = "model"
) -> LoadedModel:
    """Load weights for inference.

    Args:
        name: a folder with a saved model, a `.gguf` file, or a Hugging Face id.
        device: such as `cpu` or `cuda:0`; None is a GPU if there is one.
        dtype: such as `bfloat16`; None is the checkpoint's own on a GPU, and float32 on a CPU, or bfloat16 if that is
            measured to be faster with weights in the dtype; see `models.cpu_dtype`.
        weights: `model` keeps the weights in the dtype; `float16` and `int8` round them, on CPUs; `auto` is float16 on
            a CPU that can, if the model allows, unless bfloat16 is faster there.

    Raises:
        ModelNotFound: if the model cannot be read or fetched completely.
        UnsupportedModel: if the tokenizer has no fast (Rust) version, or the model is an adapter alone, is no text
            decoder, or brings its own code, which is never run.
        QCFuseError: if the device does not exist, or does not compute with such weights.
        ValueError: if there is no such dtype or format of weights.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    asked_dtype = _parse_dtype(dtype) if dtype else None
    format_here = choose_weight_format(
        weights, device, bfloat16=weights == "auto" and _is_bfloat16(device, asked_dtype)
    )
    torch_dtype: Any = asked_dtype or _default_dtype(device, format_here)
    source, options = model_source(name)
    gguf = Path(source) / options["gguf_file"] if options else None
    conversion = gguf and GgufConversion.locate(gguf, torch_dtype, format_here)
    existed = conversion is not None and conversion.exists
    files = _weight_files(source, gguf, conversion if existed else None)
    loaded = _load_conversion(conversion, torch_dtype, format_here) if conversion and existed else None
    model, tokenizer = loaded or _load_in_format(name, torch_dtype, format_here, optional=weights == "auto")
    if conversion and not loaded:
        conversion.save(model, tokenizer)
    try:
        model = model.to(device).eval()
    except (ValueError, RuntimeError, AssertionError) as error:  # packed weights that stay where they were packed
        if getattr(model, "hf_quantizer", None) is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModel(
            f"{name!r} has packed weights that cannot be moved to {device}: {_first_line(error)}; name the device that "
            "they were packed for, or load a checkpoint that is not quantised"
        ) from error
    # The hub may have sent newer files than the cached ones.
    same = files is not None and files == _weight_files(source, gguf, conversion if existed else None)
    return LoadedModel(model, tokenizer, files if same and existed == bool(loaded) else None, str(torch_dtype))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _weight_files(source: str, gguf: Path | None, conversion: GgufConversion | None) -> FileState | None:
    """Return the state of the files that a model's weights will be read from; None if they are not here yet."""
    folder = Path(source) if Path(source).is_dir() else snapshot_folder(source)
    path = conversion.folder if conversion else gguf or folder
    return None if path is None else FileState.read(path)


def _load_in_format(
    name: str, dtype: Any, weights: HeldFormat, *, optional: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and round its weights; if that is optional, a model that cannot be rounded stays as it is."""
    if weights == "model":
        return _load_source(name, dtype)
    try:
        try:
            model, tokenizer = _load_source(name, dtype, weights=weights)
        except UnsupportedModel:
            raise
        except Exception as error:  # other versions of transformers may load otherwise
            if not Path(name).expanduser().exists():
                raise
            LOG.info("%s is loaded as a whole before its weights are rounded: %s", name, error)
            model, tokenizer = _load_source(name, dtype)
            round_weights(model, weights)
    except UnsupportedModel as error:
        if not optional:
            raise
        LOG.info("weights stay as they are: %s", error)
        return _load_source(name, dtype)
    return_freed_memory()
    return model, tokenizer


def _load_source(
    name: str, dtype: Any, tokenizer_class: Any = AutoTokenizer, *, weights: HeldFormat = "model"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model as transformers does, rounding each weight as it is read, and refuse what is not complete."""
    source, options = model_source(name)
    fetch = fetch_options(source)
    try:
        with _LOAD_LOCK, ExitStack() as contexts:
            if options:
                contexts.enter_context(cached_gguf_header())
            _refuse_endless(name, PreTrainedConfig.get_config_dict(source, **options, **fetch)[0])
            tokenizer = tokenizer_class.from_pretrained(source, trust_remote_code=False, **options, **fetch)
            if weights != "model":
                config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options, **fetch)
                refuse_other_weights(_without_memory(config))
                if options:
                    contexts.enter_context(read_one_at_a_time())
            rounded = contexts.enter_context(rounding_while_loading(weights))
            # Every model has an eager attention, which this library replaces. Without a name GGUF chooses one itself.
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                **options,
                **fetch,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # a broken file makes its parser raise anything
        raise _load_error(name, error, unreachable=bool(fetch)) from error
    if info["missing_keys"]:  # transformers would fill them with random numbers
        raise ModelNotFound(
            f"{name!r} is not complete: {len(info['missing_keys'])} weights are missing, such as "
            f"{min(info['missing_keys'])}; save or fetch it again"
        )
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"the tokenizer of {name!r} has no fast version (a tokenizer.json)")
    if weights != "model":
        round_weights(model, weights, rounded)
    return model, tokenizer


def _without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _refuse_endless(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with so many layers or experts that building the model would take hours.

    Raises:
        UnsupportedModel: if it has more than `MAX_LAYERS` layers or experts.
    """
    for field, value in config.items():
        if isinstance(value, Mapping):
            _refuse_endless(name, value)
        elif isinstance(value, int | float) and ("layer" in field or "expert" in field) and value > MAX_LAYERS:
            raise UnsupportedModel(f"{name!r} sets {field} to {value:,}; the limit is {MAX_LAYERS:,}")


def _load_conversion(
    conversion: GgufConversion, dtype: Any, weights: HeldFormat
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Load a converted GGUF model; one that cannot be read is deleted, and None is returned."""
    try:
        if conversion.is_packed:
            tokenizer = CONVERTED_TOKENIZER.from_pretrained(conversion.folder)
            model = load_packed(conversion.folder, weights)
        else:
            model, tokenizer = _load_source(str(conversion.folder), dtype, CONVERTED_TOKENIZER)
        conversion.restore_config(model)
    except Exception as error:  # a broken file makes its parser raise anything
        LOG.warning("the conversion of %s cannot be read and is made again: %s", conversion.gguf.name, error)
        conversion.discard()
        return None
    return model, tokenizer


def _default_dtype(device: str, weights: HeldFormat) -> Any:
    if torch.device(device).type != "cpu":
        return "auto"
    return chosen_cpu_dtype() if weights == "model" else torch.float32  # the formats' products are in float32


def _is_bfloat16(device: str, asked: torch.dtype | None) -> bool:
    """Return whether the device is a CPU that multiplies bfloat16 numbers, and they are asked for or faster there."""
    if torch.device(device).type != "cpu" or not multiplies_bfloat16():
        return False
    return (asked or chosen_cpu_dtype()) == torch.bfloat16


def _check_device(device: str) -> None:
    if device.partition(":")[0] == "mps" and not torch.backends.mps.is_available():
        raise QCFuseError(f"there is no device {device!r} here: this torch or machine has no Apple GPU")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise QCFuseError(f"there is no device {device!r} here: {_first_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of a model.

    Raises:
        ModelNotFound: if the tokenizer cannot be read or fetched.
    """
    source, options = model_source(name)
    fetch = fetch_options(source)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options, **fetch)
    except Exception as error:  # a broken file makes its parser raise anything
        raise _load_error(name, error, unreachable=bool(fetch)) from error


def _parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name such as `bfloat16`.

    Raises:
        ValueError: if the name is not a floating-point dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {name!r}")
    return dtype


def _load_error(name: str, error: BaseException, *, unreachable: bool) -> QCFuseError:
    """Return the error to raise for a failed load, by the message of transformers."""
    message = str(error)
    if "trust_remote_code" in message:
        return UnsupportedModel(f"{name!r} brings its own code, which is never run; take a model transformers knows")
    if "Unrecognized configuration class" in message:
        return UnsupportedModel(f"{name!r} is no text decoder that transformers loads by AutoModelForCausalLM")
    if "weights_only" in message:  # torch advises to run what the file asks for
        return ModelNotFound(f"the weights of {name!r} are damaged or hold more than numbers; save them as safetensors")
    if "ignore_mismatched_sizes" in message:
        return ModelNotFound(f"the weights of {name!r} have other shapes than its configuration asks for")
    if unreachable:
        return ModelNotFound(unreachable_reason(name))
    return ModelNotFound(f"cannot load {name!r}: {_summary_line(message) or type(error).__name__}")


def _summary_line(message: str) -> str:
    """Return the first line of a message, and two more if it ends with a colon."""
    first, *rest = message.strip().splitlines() or [""]
    return " ".join([first.strip(), *(line.strip() for line in rest[:2])]) if first.endswith((":", ": ")) else first


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
