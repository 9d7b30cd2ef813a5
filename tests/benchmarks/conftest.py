"""`run` runs `python -m benchmarks ...`, and `qcfuse` the package's own command."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from tests.support.cli import Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys, main)


@pytest.fixture
def qcfuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)
