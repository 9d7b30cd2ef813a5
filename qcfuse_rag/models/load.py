"""Load a model and its tokenizer from a Hugging Face id, a local folder or a GGUF file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.models.gguf_header import header_read_once

LOADING_ERRORS = (OSError, ValueError, TypeError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)


def load_pretrained(
    name: str, *, device: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load weights for inference.

    Args:
        name: a folder with a saved model, a `.gguf` file, or a Hugging Face id.
        device: such as `cpu` or `cuda:0`; a GPU if there is one.
        dtype: such as `bfloat16`; float32 on a CPU, the checkpoint's own on a GPU.

    Raises:
        ModelNotFound: if nothing of that name can be read or fetched, or not all of it.
        UnsupportedModel: if the tokenizer has no fast (Rust) version, or the model is none that can be used here: an
            adapter alone, no text decoder, or one that brings its own code, which is never run.
        QCFuseError: if there is no such device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted: Any = dtype_of(dtype) if dtype else (torch.float32 if device == "cpu" else "auto")
    _check_device(device)
    source, options = _source(name)
    try:
        with header_read_once() if options else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
            # Every model has an eager attention; ours takes its place. Naming one keeps GGUF from choosing its own.
            model, read = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=wanted,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except LOADING_ERRORS as error:
        raise _refusal(name, error) from error
    if read["missing_keys"]:  # they would be drawn at random, anew with each loading
        raise ModelNotFound(
            f"{name!r} is not complete: {len(read['missing_keys'])} weights are missing, such as "
            f"{min(read['missing_keys'])}; save or fetch it again"
        )
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"the tokenizer of {name!r} has no fast version (a tokenizer.json)")
    return model.to(device).eval(), tokenizer


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise QCFuseError(f"no device {device!r} here: {_first_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone.

    Raises:
        ModelNotFound: if nothing of that name can be read or fetched.
    """
    source, options = _source(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except LOADING_ERRORS as error:
        raise _refusal(f"the tokenizer of {name}", error) from error


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of that name.

    Raises:
        ValueError: if it is not a floating-point dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {name!r}")
    return dtype


def _source(name: str) -> tuple[str, dict[str, Any]]:
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"no GGUF file at {path}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UnsupportedModel(f"{path} has an adapter: merge it into its model's weights and save those first")
        return str(path), {}
    if name.startswith((".", "/", "~")):
        raise ModelNotFound(f"no model folder at {path}")
    return name, {}


def _refusal(name: str, error: BaseException) -> QCFuseError:
    said = str(error)
    if "trust_remote_code" in said:
        return UnsupportedModel(f"{name!r} brings its own code, which is never run; take a model transformers knows")
    if "Unrecognized configuration class" in said:
        return UnsupportedModel(f"{name!r} is no text decoder that transformers loads by AutoModelForCausalLM")
    if "ignore_mismatched_sizes" in said:
        return ModelNotFound(f"the weights of {name!r} have other shapes than its configuration asks for")
    return ModelNotFound(f"cannot load {name!r}: {_in_a_line(said) or type(error).__name__}")


def _in_a_line(said: str) -> str:
    first, *rest = said.strip().splitlines() or [""]
    # Some say no more in the first line than that the reason follows.
    return " ".join([first.strip(), *(line.strip() for line in rest[:2])]) if first.endswith((":", ": ")) else first


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
