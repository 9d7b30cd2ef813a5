"""Shared by the tests of commands: a folder of documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.passages import PASSAGES


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for i, text in enumerate(PASSAGES):
        (folder / f"{i}.txt").write_text(text)
    return folder
