"""Load a model and its tokenizer from a Hugging Face id, a local folder or a GGUF file.

Reading the vocabulary and dequantising take most of a start from a GGUF file. So it is kept converted: a folder with
safetensors in their dtype, the tokenizer and the configuration, among the assets of huggingface_hub (`HF_ASSETS_CACHE`,
by default `~/.cache/huggingface/assets/qcfuse-rag/gguf`). It may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from huggingface_hub import cached_assets_path
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AutoQuantizationConfig

import qcfuse_rag
from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel
from qcfuse_rag.models.cpu_threads import bound_threads
from qcfuse_rag.models.cpu_weights import fastest_cpu_format, pack_float16, pack_linears
from qcfuse_rag.models.fingerprint import hash_weights
from qcfuse_rag.models.quantized_weights import quantize_weights
from qcfuse_rag.models.result_cache import FileState, hash_once
from qcfuse_rag.models.source import (
    QUANTIZED_FORMATS,
    check_weight_format,
    damage,
    model_source,
    named_adapter,
    snapshot_folder,
    unreachable_reason,
)

LOG = logging.getLogger(__name__)

SWITCH = "QCFUSE_GGUF_CACHE"
"""Environment variable; `0` turns conversions off."""
SOURCE_FILE = "source.json"
"""File with the fields that saving changes in the configuration. It is written last: a folder with it is complete."""
CONVERTED_TOKENIZER = PreTrainedTokenizerFast
"""Takes the rules of `tokenizer.json`; a class such as Qwen2Tokenizer would build its own from the vocabulary."""
FREE_BYTES = 2 << 30  # disk space to leave free
ABANDONED_S = 3600.0
"""Age from which on an unfinished conversion is taken for that of a process that was killed."""


@dataclass(frozen=True, slots=True)
class GgufConversion:
    """A GGUF file and the folder of its conversion, which may not exist yet.

    The folder's name hashes the file's bytes, the dtype and the version of transformers.
    """

    gguf: Path
    folder: Path

    @classmethod
    def locate(cls, gguf: Path, dtype: torch.dtype | str) -> GgufConversion | None:
        """Return where a conversion lies, by hashing the file once; None if conversions are off or it is unreadable."""
        if os.environ.get(SWITCH) == "0":
            return None
        settings = f"{dtype} model {transformers.__version__} "
        try:
            name = hash_once(FileState.read(gguf), {"bytes": settings}, lambda: _hash_file(gguf, settings))
            return cls(gguf, cached_assets_path("qcfuse-rag", "gguf", name))
        except (OSError, ValueError) as error:  # huggingface_hub raises ValueError for a file in the folder's place
            LOG.info("no conversion of %s is kept: %s", gguf.name, error)
            return None

    @property
    def exists(self) -> bool:
        """Whether the folder holds a complete conversion."""
        return (self.folder / SOURCE_FILE).is_file()

    def restore_config(self, model: PreTrainedModel) -> None:
        """Give a model loaded from the folder the configuration it has when loaded from the GGUF file."""
        source = json.loads((self.folder / SOURCE_FILE).read_text("utf-8"))
        model.config.architectures = source["architectures"]
        model.config.name_or_path = str(self.gguf.parent)
        if source["quantization"] is not None:  # older versions of transformers do not name the format
            model.config.quantization_config = AutoQuantizationConfig.from_dict(source["quantization"])
            model.config.quantization_config.gguf_file = self.gguf.name

    def save(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep a model loaded from the GGUF file; whatever prevents that is logged and ignored."""
        part = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(8)}.part")
        size = sum({weight.data_ptr(): weight.nbytes for weight in model.state_dict().values()}.values())
        try:
            for other in self.folder.parent.glob(f"{self.folder.name}.*.part"):
                with suppress(FileNotFoundError):  # another process may remove it at the same time
                    if time.time() - other.stat().st_mtime > ABANDONED_S:
                        shutil.rmtree(other, ignore_errors=True)
            if shutil.disk_usage(self.folder.parent).free < size + FREE_BYTES:
                LOG.info("no conversion of %s is kept: %d MB would fill the disk", self.gguf.name, size >> 20)
                return
            _write(part, model, tokenizer)
            if not self.exists:
                self.discard()
            part.replace(self.folder)  # an empty folder is replaced; fails if another process was faster
        except Exception as error:  # of safetensors, tokenizers or the disk; the model is loaded all the same
            LOG.info("no conversion of %s is kept: %s", self.gguf.name, error)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def discard(self) -> None:
        """Delete a conversion that is incomplete or unreadable."""
        with suppress(OSError):
            (self.folder / SOURCE_FILE).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def _hash_file(path: Path, settings: str) -> str:
    state = xxhash.xxh3_128(settings.encode())
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            state.update(block)
    return state.hexdigest()


def _write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    config: Any = model.config
    architectures = config.architectures  # saving fills them in
    folder.mkdir(mode=0o700)
    quantization = getattr(config, "quantization_config", None)
    quantizer = getattr(model, "hf_quantizer", None)
    # transformers refuses to save a model that says it is in GGUF's format, though its weights are plain by now.
    if quantization is not None:
        del config.quantization_config
    model.hf_quantizer = None
    try:
        model.save_pretrained(folder)
    finally:
        if quantization is not None:
            config.quantization_config = quantization
        model.hf_quantizer = quantizer
        config.architectures = architectures
    tokenizer.save_pretrained(folder)
    saved = CONVERTED_TOKENIZER.from_pretrained(folder)
    if saved.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise OSError(f"transformers does not load the tokenizer of {config.model_type} as it was saved")
    source = {"architectures": architectures, "quantization": quantization and quantization.to_dict()}
    (folder / SOURCE_FILE).write_text(json.dumps(source), "utf-8")


@contextmanager
def cached_gguf_header() -> Iterator[None]:
    """Cache what `gguf` reads until the block ends; one block at a time.

    transformers (5.15 to 5.23) reads a GGUF header three times, and lists the tensor names once for each module. That
    takes longer than reading the weights. `GGUFReader` is a function until the block ends.
    """
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in originals.items():
            setattr(gguf, name, lru_cache(maxsize=1)(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


OWN_TOKENIZER = "tokenizer.json"  # of an adapter that was trained with one
MAX_LAYERS = 10_000
"""Limit of layers, and of experts in a layer; large models have some hundreds."""
_LOAD_LOCK = threading.Lock()
"""transformers changes methods of its classes while it loads; two threads at once could leave them changed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as `load_model` returns it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights_hash: str  # of its weights before any were rounded or quantised
    weight_format: str = "model"  # or what the weights were quantised to, for the fingerprint


def load_model(name: str, *, device: str | None = None, dtype: str | None = None, weights: str = "auto") -> LoadedModel:
    """Load weights for inference.

    Args:
        name: a folder with a saved model, a `.gguf` file, or a Hugging Face id. An adapter of peft, in a folder or by
            id, is merged into the model that it names.
        device: such as `cpu` or `cuda:0`; None is a GPU if there is one.
        dtype: of computed keys and values, such as `bfloat16`; None is the checkpoint's own on a GPU, and float32 on a
            CPU, or bfloat16 if that is measured to be faster; see `models.cpu_weights`.
        weights: `model` keeps the weights in the dtype; `float16` rounds them on a CPU, and computes in float32; `auto`
            is the measured choice, and `model` for models that do not fit. On a GPU also a format of
            `models.quantized_weights`.

    Raises:
        ModelNotFound: if the model cannot be read or fetched completely.
        UnsupportedModel: if the tokenizer has no fast (Rust) version, the adapter does not fit or cannot be merged, or
            the model is no text decoder, or brings its own code, which is never run.
        QCFuseError: if the device does not exist, or there are no such weights.
        ValueError: if there is no such dtype.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    check_weight_format(weights, device)
    torch_dtype: Any = _parse_dtype(dtype) if dtype else "auto"
    if on_cpu := torch.device(device).type == "cpu":
        bound_threads()
    cpu_format = fastest_cpu_format() if on_cpu and (dtype is None or weights == "auto") else None
    if on_cpu and dtype is None:
        bfloat16 = cpu_format == "bfloat16" and weights != "float16"
        torch_dtype = torch.bfloat16 if bfloat16 else torch.float32
    adapter, name, fetch = named_adapter(name)
    source, options = model_source(name)
    gguf = Path(source) / options["gguf_file"] if options else None
    files = _weight_files(source, gguf)
    model, tokenizer = _load_gguf(name, gguf, torch_dtype) if gguf else _load_source(name, torch_dtype, **fetch)
    if adapter is not None:
        from qcfuse_rag.models.adapters import load_adapter

        try:
            model, files = load_adapter(model, adapter), None
            if Path(adapter, OWN_TOKENIZER).is_file():
                tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
        except QCFuseError:
            raise
        except Exception as error:  # of peft, for whatever is in the folder
            raise _load_error(adapter, error, unreachable=False) from error
    quantized = weights in QUANTIZED_FORMATS
    if quantized and getattr(model, "hf_quantizer", None) is not None and gguf is None:
        raise UnsupportedModel(f"the weights of {name!r} are quantised already; load it with weights='model'")
    try:
        model = (model if quantized else model.to(device)).eval()
    except (ValueError, RuntimeError, AssertionError) as error:  # packed weights that stay where they were packed
        if getattr(model, "hf_quantizer", None) is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModel(
            f"{name!r} has packed weights that cannot be moved to {device}: {_summary(error)}; name the device that "
            "they were packed for, or load a checkpoint that is not quantised"
        ) from error
    if files != _weight_files(source, gguf):  # the hub has sent newer files than the cached ones
        files = None
    weights_hash = _hash_once(model, files, torch_dtype)
    if weights == "float16" or (weights == "auto" and cpu_format == "float16" and torch_dtype == torch.float32):
        try:
            pack_float16(model)
        except UnsupportedModel as error:
            if weights == "float16":
                raise
            LOG.info("weights are not rounded: %s", error)
    weight_format = quantize_weights(model, weights, torch.device(device)) if quantized else "model"
    if on_cpu:
        pack_linears(model)
    return LoadedModel(model, tokenizer, weights_hash, weight_format)


def _hash_once(model: PreTrainedModel, files: FileState | None, dtype: Any) -> str:
    if getattr(model, "hf_quantizer", None) is not None:  # transformers may quantise the weights as it loads
        return hash_weights(model)
    settings = {
        "model": f"{type(model).__name__}, {model.dtype}, asked for {dtype}",
        "versions": ", ".join((qcfuse_rag.__version__, *map(version, ("torch", "transformers", "gguf")))),
    }
    return hash_once(files, settings, lambda: hash_weights(model))


def _weight_files(source: str, gguf: Path | None) -> FileState | None:
    path = gguf or (Path(source) if Path(source).is_dir() else snapshot_folder(source))
    return None if path is None else FileState.read(path)


def _load_gguf(name: str, gguf: Path, dtype: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    conversion = GgufConversion.locate(gguf, dtype)
    if conversion is not None and conversion.exists:
        try:
            model, tokenizer = _load_source(str(conversion.folder), dtype, CONVERTED_TOKENIZER)
            conversion.restore_config(model)
            return model, tokenizer
        except Exception as error:  # a broken file makes its parser raise anything
            LOG.warning("the conversion of %s cannot be read and is made again: %s", gguf.name, error)
            conversion.discard()
    model, tokenizer = _load_source(name, dtype)
    if conversion is not None:
        conversion.save(model, tokenizer)
    return model, tokenizer


def _load_source(
    name: str, dtype: Any, tokenizer_class: Any = AutoTokenizer, **fetch: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source, options = model_source(name)
    try:
        with _LOAD_LOCK, cached_gguf_header() if options else nullcontext():
            _refuse_endless(name, PreTrainedConfig.get_config_dict(source, **options, **fetch)[0])
            tokenizer = tokenizer_class.from_pretrained(source, trust_remote_code=False, **options, **fetch)
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
    return model, tokenizer


def _refuse_endless(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with so many layers or experts that building the model would take hours."""
    for field, value in config.items():
        if isinstance(value, Mapping):
            _refuse_endless(name, value)
        elif isinstance(value, int | float) and ("layer" in field or "expert" in field) and value > MAX_LAYERS:
            raise UnsupportedModel(f"{name!r} sets {field} to {value:,}; the limit is {MAX_LAYERS:,}")


def _check_device(device: str) -> None:
    if device.partition(":")[0] == "mps" and not torch.backends.mps.is_available():
        raise QCFuseError(f"there is no device {device!r} here: this torch or machine has no Apple GPU")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise QCFuseError(f"there is no device {device!r} here: {_summary(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of a model; raise `ModelNotFound` if it cannot be read or fetched."""
    adapter, name, fetch = named_adapter(name)
    own = adapter is not None and Path(adapter, OWN_TOKENIZER).is_file()
    source, options = (adapter, {}) if own else model_source(name)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options, **fetch)
    except Exception as error:  # a broken file makes its parser raise anything
        raise _load_error(name, error, unreachable=bool(fetch)) from error


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {name!r}")
    return dtype


def _load_error(name: str, error: BaseException, *, unreachable: bool) -> QCFuseError:
    message = str(error)
    if cause := damage(*model_source(name)):
        return ModelNotFound(f"cannot load {name!r}: {cause}")
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
    return ModelNotFound(f"cannot load {name!r}: {_summary(error)}")


def _summary(error: BaseException) -> str:
    """Return the first line of an error's message, with two more if it ends with a colon; its type if it has none."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:3]) if lines[0].endswith(":") else lines[0]
