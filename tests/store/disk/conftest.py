"""A store on disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    with DiskStore(folder) as store:
        yield store


@pytest.fixture
def gone() -> int:
    """Give the id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid
