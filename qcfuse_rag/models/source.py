"""What a model's name means: a folder, a GGUF file or a Hugging Face id; and whether the hub answers.

This module imports quickly.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import ModelNotFound, QCFuseError, UnsupportedModel

HUB_TIMEOUT_S = 6.0
"""Most seconds to wait for the hub's first answer. Its own client would try each file six times."""

GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
"""Matches the name of one of several files into which llama.cpp's `gguf-split` has cut a model."""
ADAPTER_CONFIG = "adapter_config.json"
LFS_POINTER = b"version https://git-lfs."


def model_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name or path that transformers loads from, and the options for it.

    Raises:
        ModelNotFound: if a file or folder is named that does not exist or holds no model.
        UnsupportedModel: if the file is a part of a model.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ModelNotFound(f"there is no GGUF file at {path}")
        if _is_part(path):
            raise _part_error(path)
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), _gguf_option(path)
    if name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no model folder at {path}")
    return name, {}


def named_adapter(name: str) -> tuple[str | None, str, dict[str, Any]]:
    """Return the folder of the peft adapter that is named or None, its base model or the model, and how to fetch that.

    An adapter that a Hugging Face id names is fetched, unless it is in the hub's cache. Errors: see `adapter_base`.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    (folder, gguf), fetch = model_source(name), fetch_options(name)
    if (cached := None if Path(folder).exists() else snapshot_folder(name)) is not None:
        folder = str(cached)
    elif not Path(folder).exists():
        with suppress(Exception):  # a model, no id, or no hub that answers: loading a model of that name says which
            hf_hub_download(name, ADAPTER_CONFIG, **fetch)
            folder = snapshot_download(name, allow_patterns=["adapter_*", "*.json", "*.jinja"], **fetch)
    base = None if gguf else adapter_base(folder)
    return (None, name, fetch) if base is None else (folder, base, fetch_options(base))


def adapter_base(name: str) -> str | None:
    """Return the name of the base model if a folder with a peft adapter is named, else None.

    Raises:
        ModelNotFound, UnsupportedModel: if that is not named or not there, or either is not what it should be.
    """
    config = Path(name, ADAPTER_CONFIG).expanduser()
    if not config.is_file():
        return None
    if any(config.parent.glob("model*.safetensors")):
        raise UnsupportedModel(f"{name} has a model and an adapter: move one of them to another folder")
    if not any(config.parent.glob("adapter_model.*")):
        raise ModelNotFound(f"the adapter in {name} has no adapter_model.safetensors: fetch or save it again")
    try:
        base = str(Path(found := json.loads(config.read_text("utf-8"))["base_model_name_or_path"]).expanduser())
    except (ValueError, LookupError, TypeError) as error:
        raise ModelNotFound(f"{config} names no base model: set its base_model_name_or_path") from error
    if found.startswith((".", "/", "~")) and not Path(base).exists():
        raise ModelNotFound(f"{config} names the base model {base}, which is not there: set base_model_name_or_path")
    if Path(base, ADAPTER_CONFIG).is_file():
        raise UnsupportedModel(f"the base model of {name} is an adapter too: merge {base} and save its model first")
    return base


def _gguf_option(folder: Path) -> dict[str, Any]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    if not files and not any(folder.glob("*.json")):
        raise ModelNotFound(f"there is no model in {folder}: it has neither a config.json nor a GGUF file")
    if not files or (folder / "config.json").is_file():
        return {}
    if not (whole := [file for file in files if not _is_part(file)]):
        raise _part_error(files[0])
    if len(files := whole) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files; name one of them: {names}")
    return {"gguf_file": files[0].name}


def _is_part(path: Path) -> bool:
    match = GGUF_PART.fullmatch(path.name)
    return match is not None and int(match[2]) > 1


def _part_error(path: Path) -> UnsupportedModel:
    stem, count = GGUF_PART.fullmatch(path.name).groups()  # type: ignore[union-attr]
    return UnsupportedModel(
        f"{path.name} is one of {int(count)} parts of a model, which is loaded from one file: put all parts into one "
        f"folder and merge them there, `llama-gguf-split --merge {stem}-00001-of-{count}.gguf {stem}.gguf`"
    )


def damage(source: str, options: dict[str, Any]) -> str | None:
    """Say which file of a model that cannot be loaded is the cause, and why; None if no cause is found."""
    folder = Path(source)
    files = [folder / options["gguf_file"]] if options else sorted(folder.glob("*.[jsb]*"))
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            head = opened.read(len(LFS_POINTER))
            if head == LFS_POINTER:
                return f"{file} is a pointer of git-lfs in place of the file; run `git lfs pull` in its folder"
            if options and head.startswith(b"GGUF"):
                try:
                    import gguf

                    gguf.GGUFReader(file)
                except Exception:  # a broken file makes its parser raise anything
                    return f"{file} is cut off or damaged: it ends at {file.stat().st_size:,} bytes; fetch it again"
    return None


WEIGHT_FORMATS = ("auto", "model", "float16")
QUANTIZED_FORMATS = ("nf4", "int8_weight_only")
"""See `models.quantized_weights`."""


def check_weight_format(weights: str, device: str) -> None:
    """Raise `QCFuseError` for a format of weights that there is not, or not on this device (such as `cuda:0`)."""
    formats = (*WEIGHT_FORMATS, *QUANTIZED_FORMATS)
    if weights not in formats:
        raise QCFuseError(f"weights must be one of {', '.join(formats)}, got {weights!r}")
    kind = device.partition(":")[0]
    if weights == "float16" and kind != "cpu":
        raise QCFuseError(f"float16 weights are for CPUs; on {device} use dtype='float16'")
    if weights in QUANTIZED_FORMATS and kind != "cuda":
        raise QCFuseError(f"{weights} weights are for NVIDIA GPUs; {device} has none of them")


def fetch_options(name: str) -> dict[str, Any]:
    """Return the options with which transformers and sentence-transformers load a model by its name.

    If the hub does not answer, nothing but its cache is used, as if HF_HUB_OFFLINE was set. Nothing is asked for a
    file or a folder.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or hub_answers():
        return {}
    return {"local_files_only": True}


def unreachable_reason(name: str) -> str:
    """Say that a model is not in the cache and that the hub does not answer."""
    from huggingface_hub import constants

    return (
        f"cannot load {name!r}: {constants.ENDPOINT} does not answer, and the model is not complete in "
        f"{constants.HF_HUB_CACHE}; check the connection, or name the folder of a model"
    )


def hub_answers() -> bool:
    """Ask the hub for anything; any answer counts, an error of the server too."""
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # of the connection; which ones depends on the version of huggingface_hub
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            answered.set()

    # A thread, because looking up the hub's address has no time limit of its own.
    asking = threading.Thread(target=ask, name="qcfuse-hub", daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return answered.is_set()


def snapshot_folder(model: str) -> Path | None:
    """Return the folder of a Hugging Face id in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no id
        return None
    return Path(config).parent if isinstance(config, str) else None
