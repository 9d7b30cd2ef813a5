"""A GGUF file's header, read once while a model is loaded.

transformers (5.15 to 5.23) reads it three times, for the configuration, the tokenizer and the weights, with all of the
vocabulary, and lists what tensors are called once for each module of the model. That takes longer than the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

REMEMBERED = ("GGUFReader", "get_tensor_name_map")
"""What transformers takes from `gguf` that comes out the same for the same arguments; nobody changes what it gets."""

_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def header_read_once() -> Iterator[None]:
    """Have `gguf` remember what it has just read, until the block ends; blocks of other threads wait for that.

    A thread that reads with `gguf` meanwhile is given what is remembered too. `GGUFReader` is a function until then:
    what asks whether something is one, or derives from it, must not be run or imported meanwhile.
    """
    import gguf

    with _ONE_AT_A_TIME:
        own = {name: getattr(gguf, name) for name in REMEMBERED}
        try:
            for name, function in own.items():
                setattr(gguf, name, lru_cache(maxsize=1)(function))
            yield
        finally:
            for name, function in own.items():
                setattr(gguf, name, function)
