"""Find what a model's name means: a folder, a GGUF file or a Hugging Face id. This module imports quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from qcfuse_rag.errors import ModelNotFound, UnsupportedModel

WeightFormat = Literal["model", "float16", "int8", "auto"]
"""`model`: as loaded, in the model's dtype; `float16` and `int8`: rounded, see `models.weights`; `auto`: float16 on a
CPU that can, unless bfloat16 is faster there."""


def model_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name or path that transformers loads from, and the options for it.

    Raises:
        ModelNotFound: if a file or folder is named that does not exist or holds no model.
        UnsupportedModel: if the folder holds an adapter.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"there is no GGUF file at {path}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UnsupportedModel(f"{path} has an adapter: merge it into its model's weights and save those first")
        return str(path), _gguf_option(path)
    if name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no model folder at {path}")
    return name, {}


def _gguf_option(folder: Path) -> dict[str, Any]:
    """Return the option that names the only GGUF file of a folder; none for a folder with a saved model."""
    files = sorted(folder.glob("*.gguf"))
    if not files and not any(folder.glob("*.json")):
        raise ModelNotFound(f"there is no model in {folder}: it has neither a config.json nor a GGUF file")
    if not files or (folder / "config.json").is_file():
        return {}
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files; name one of them: {names}")
    return {"gguf_file": files[0].name}
