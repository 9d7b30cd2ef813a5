"""Give transformers the tensors of a GGUF file one at a time, not all of them dequantised first.

transformers dequantises the whole file before it looks at the model. Here each tensor is read and dequantised when the
model takes it, some rows at a time, by the same functions of `gguf` and transformers: `gguf` holds what it dequantises
twice. The file is read, not mapped: mapped pages would stay in memory beside the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils as gguf_support

DEQUANTISED = 1 << 22
"""About as many numbers are dequantised at a time; a row consists of whole blocks, so rows are independent."""


class GgufTensor:
    """A tensor of a GGUF file that is read whenever it is indexed.

    Args:
        file: path of the GGUF file.
        stored: the tensor's entry in the reader of `gguf`.
        process: transformers' changes of a dequantised tensor, such as the order of Llama's query and key channels.
        dtype: of the tensor to return; None is float32.
    """

    def __init__(self, file: str, stored: Any, process: Callable[..., Any], dtype: torch.dtype | None) -> None:
        self._file, self._stored, self._process, self._dtype = file, stored, process, dtype

    def get_dtype(self) -> str:
        """Return that it holds floating-point numbers, in the way of a slice of safetensors."""
        return "F32"

    def __getitem__(self, _: Any) -> Tensor:
        """Return the whole tensor.

        Raises:
            NotImplementedError: if the tensor is one of several that make up a weight.
        """
        import gguf

        return_freed_memory()  # of the tensors before
        stored, mapped = self._stored, self._stored.data
        weights = np.empty(tuple(reversed(stored.shape.tolist())), np.float32)
        rows, row_bytes = weights.reshape(-1, weights.shape[-1]), mapped.shape[-1] * mapped.itemsize
        with Path(self._file).open("rb") as file:
            file.seek(int(stored.data_offset))
            for block in np.array_split(rows, max(1, rows.size // DEQUANTISED)):
                numbers = np.frombuffer(file.read(len(block) * row_bytes), mapped.dtype).reshape(len(block), -1)
                block[:] = gguf.dequantize(numbers, stored.tensor_type)
        result = self._process(weights=weights, name=stored.name)
        if result.name != stored.name:
            raise NotImplementedError(f"{stored.name} is a part of a weight")
        return torch.from_numpy(np.ascontiguousarray(result.weights)).to(self._dtype or torch.float32)


@contextmanager
def read_one_at_a_time() -> Iterator[None]:
    """Have transformers' `from_pretrained` take a GGUF file's tensors one at a time until the block ends."""
    whole = gguf_support.load_gguf_checkpoint

    def load(
        gguf_checkpoint_path: str,
        return_tensors: bool = False,
        model_to_load: nn.Module | None = None,
        torch_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        parsed: dict[str, Any] = whole(gguf_checkpoint_path)
        if return_tensors:
            parsed["tensors"] = _tensors(gguf_checkpoint_path, parsed["config"], model_to_load, torch_dtype)
        return parsed

    gguf_support.load_gguf_checkpoint = load
    try:
        yield
    finally:
        gguf_support.load_gguf_checkpoint = whole


def _tensors(
    file: str, config: dict[str, Any], model: nn.Module | None, dtype: torch.dtype | None
) -> dict[str, GgufTensor]:
    """Return a file's tensors by the names of the model's weights."""
    import gguf

    reader = gguf.GGUFReader(file)
    (architecture,) = gguf_support.read_field(reader, "general.architecture")
    processor = gguf_support.TENSOR_PROCESSORS.get(architecture, gguf_support.TensorProcessor)(config=config)
    names = gguf_support.get_gguf_hf_weights_map(model, processor)

    def process(**tensor: Any) -> Any:
        return processor.process(tensor_key_mapping=names, parsed_parameters={"tensors": {}}, **tensor)

    tensors = {
        names[stored.name]: GgufTensor(file, stored, process, dtype)
        for stored in reader.tensors
        if stored.name in names
    }
    if hasattr(gguf.GGUFReader, "cache_clear"):  # by `cached_gguf_header`; the vocabulary takes hundreds of megabytes
        gguf.GGUFReader.cache_clear()
    return tensors


def return_freed_memory() -> None:
    """Give freed memory back to the system; glibc keeps that of all but the largest weights for later allocations."""
    with suppress(OSError, AttributeError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
