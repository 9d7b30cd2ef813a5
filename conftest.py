"""For all tests, the integrations' too: kernels run in Triton's interpreter where there is no device."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from filelock import FileLock

# Before anything imports a kernel: without a device to compile for, Triton interprets them.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
os.environ["QCFUSE_CPU_DTYPE"] = "float32"  # on every processor, in commands that tests start as well
gc.disable()  # until the tests are collected: much is imported for them


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--families`, which chooses the models of tests that ask for `family`."""
    parser.addoption(
        "--families",
        default="main",
        help="Families of models that tests run on: main (6), all (22), or names between commas.",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported and collected out of garbage collection: each full one would walk a million objects."""
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # packages made with nanobind report what is left then


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


@pytest.fixture(scope="session", autouse=True)
def templates_tried_once() -> Iterator[Any]:
    """Have a chat template tried in a process of its own once, and not for every engine; yield what does so."""
    from qcfuse_rag.prompts.chat_template import ChatTemplate

    original, parsed = ChatTemplate._trees, dict[str, list[Any]]()

    def trees(template: ChatTemplate) -> list[Any]:
        tokenizer = template._tokenizer
        key = repr((tokenizer.chat_template, tokenizer.special_tokens_map, template._kwargs))
        if key not in parsed:
            parsed[key] = original.func(template)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "_trees", property(trees))
        yield original


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the real SmolLM2-135M-Instruct; the first of several workers saves it for all."""
    from tests.support.smollm2 import save_smollm2

    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    folder = session / "smollm2"
    with FileLock(session / "smollm2.lock"):
        if not folder.exists():
            unfinished = session / "smollm2.unfinished"
            save_smollm2(unfinished)
            unfinished.rename(folder)
    return str(folder)
