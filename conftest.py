"""For all tests, the integrations' too: a plain default method, unless a test asks for the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Before anything imports a kernel: without a device to compile for, Triton interprets them.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from qcfuse_rag import Method, make_method, methods
from qcfuse_rag.store.prefill_base import FRAMED


@pytest.fixture(scope="session", autouse=True)
def plain_default() -> Iterator[None]:
    """Have tests that do not name a method read one cache of each passage and always fuse.

    The real default reads two and refuses to fuse prompts as short as most tests', so counts would be twice what a test
    is about, and depend on the machine. What it does is tested by those that ask for `real_default`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "default_method", lambda: make_method("qcfuse", ratio=0.15, base=FRAMED))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_kernels() -> Iterator[None]:
    """Have kernels interpreted in less time."""
    try:
        import triton  # noqa: F401
    except ImportError:
        yield
        return
    from tests.support.interpreted import quickly

    with quickly():
        yield


@pytest.fixture
def real_default(monkeypatch: pytest.MonkeyPatch) -> Method:
    """Return the default method users get, in force during one test."""
    monkeypatch.setattr(methods, "default_method", lambda: make_method("auto"))
    return make_method("auto")
