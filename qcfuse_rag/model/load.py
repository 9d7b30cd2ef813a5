"""Load a model and its tokenizer from a Hugging Face id, a local folder or a GGUF file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.model.gguf_header import header_read_once


def load_pretrained(
    name: str, *, device: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load weights for inference.

    Args:
        name: a folder with a saved model, a `.gguf` file, or a Hugging Face id.
        device: such as `cpu` or `cuda:0`; a GPU if there is one.
        dtype: such as `bfloat16`; float32 on a CPU, the checkpoint's own on a GPU.

    Raises:
        ModelNotFound: if nothing of that name can be read or fetched.
        UnsupportedModel: if the tokenizer has no fast (Rust) version.
        QCFuseError: if there is no such device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted: Any = dtype_of(dtype) if dtype else (torch.float32 if device == "cpu" else "auto")
    _check_device(device)
    source, options = _source(name)
    try:
        with header_read_once() if options else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            # Every model has an eager attention; ours takes its place. Naming one keeps GGUF from choosing its own.
            model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, attn_implementation="eager", **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFound(f"cannot load {name!r}: {_first_line(error)}") from error
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
        return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot load the tokenizer of {name!r}: {_first_line(error)}") from error


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
        return str(path), {}
    if name.startswith((".", "/", "~")):
        raise ModelNotFound(f"no model folder at {path}")
    return name, {}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
