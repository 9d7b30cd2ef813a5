"""Read GGUF files once: cache their header while they are loaded, and keep the converted model for later starts.

Reading the vocabulary and dequantising take most of a start. A converted model is a folder with the weights as
safetensors in their dtype, the tokenizer and the configuration. It lies among the assets of huggingface_hub
(`HF_ASSETS_CACHE`, by default `~/.cache/huggingface/assets/qcfuse-rag/gguf`) and may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from huggingface_hub import cached_assets_path
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.quantizers.auto import AutoQuantizationConfig

from qcfuse_rag.models.kept import FileState, hash_once

LOG = logging.getLogger(__name__)

SWITCH = "QCFUSE_GGUF_CACHE"
"""Environment variable; `0` turns conversions off."""
SOURCE_FILE = "source.json"
"""File with the fields that saving changes in the configuration. It is written last: a folder with it is complete."""
CONVERTED_TOKENIZER = PreTrainedTokenizerFast
"""Takes the rules of `tokenizer.json`; a class such as Qwen2Tokenizer would build its own from the vocabulary."""
FREE_BYTES = 2 << 30
"""Disk space to leave free."""
ABANDONED_S = 3600.0
"""Age from which on an unfinished conversion is taken for that of a process that was killed."""


@dataclass(frozen=True, slots=True)
class GgufConversion:
    """The place of a GGUF file's conversion, which may not exist yet.

    Attributes:
        gguf: the GGUF file.
        folder: the folder of the converted model; its name hashes the file's bytes, the dtype and the version of
            transformers.
    """

    gguf: Path
    folder: Path

    @classmethod
    def locate(cls, gguf: Path, dtype: torch.dtype | str) -> GgufConversion | None:
        """Return where the conversion of a file lies; None if conversions are off or the file cannot be read.

        Reads the whole file the first time, in about 0.1 s per GB if the system has it in memory.
        """
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
        """Return whether the folder holds a complete conversion."""
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
            self._remove_abandoned_parts()
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

    def _remove_abandoned_parts(self) -> None:
        """Delete parts that processes left when they were killed; others may be at work on younger ones."""
        for part in self.folder.parent.glob(f"{self.folder.name}.*.part"):
            with suppress(FileNotFoundError):  # another process may remove it at the same time
                if time.time() - part.stat().st_mtime > ABANDONED_S:
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

    transformers (5.15 to 5.23) reads a GGUF header three times, for the configuration, the tokenizer and the weights,
    each time with the whole vocabulary, and lists the tensor names once for each module of the model. That takes longer
    than reading the weights. `GGUFReader` is a function until the block ends.
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
