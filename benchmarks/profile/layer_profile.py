"""A layer profile: the measured recall of a model's layers, and the layers chosen as critical."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.methods.qcfuse.layers import FORMAT, MAKE_AGAIN

Labels = Literal["answers", "leave-one-out"]
"""How the evidence was found: by known answers, or by the passage that the model's own answer depends on."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The measured layers of a model that attend to the answer.

    Attributes:
        model: the user's name for the model; for reports only.
        fingerprint: fields of the model's `Fingerprint`; the profile is valid for this model only.
        layers: ascending indices of the critical layers.
        recall: for each layer of the model the mean Recall@10 %, 0 to 1.
        labels: how the evidence was found.
        samples: number of questions that the means are over.
        skipped: number of questions that could not be used, by reason.
        depth_penalty: subtracted from a layer's recall, times its index over the number of layers, to choose layers.

    Raises:
        ValueError: if a field is not valid.
    """

    model: str
    fingerprint: Mapping[str, str]
    layers: tuple[int, ...]
    recall: tuple[float, ...]
    labels: Labels
    samples: int
    skipped: Mapping[str, int]
    depth_penalty: float

    def __post_init__(self) -> None:
        _check(isinstance(self.model, str), "model must be a string")
        _check(_maps_strings_to(self.fingerprint, str), "fingerprint must be an object of strings")
        _check(_maps_strings_to(self.skipped, int), "skipped must be an object of numbers")
        _check(self.labels in get_args(Labels), f"labels must be one of {', '.join(get_args(Labels))}")
        _check(type(self.samples) is int and self.samples > 0, "samples must be a number above 0")
        _check(_is_number(self.depth_penalty), "depth_penalty must be a number")
        _check(
            len(self.recall) > 0 and all(_is_number(value) and 0 <= value <= 1 for value in self.recall),
            "recall must be numbers from 0 to 1, one for each layer",
        )
        known = all(type(layer) is int and 0 <= layer < len(self.recall) for layer in self.layers)
        _check(
            known and len(self.layers) > 0 and list(self.layers) == sorted(set(self.layers)),
            f"layers must be ascending indices of the {len(self.recall)} layers",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format": FORMAT, **asdict(self), "layers": list(self.layers), "recall": list(self.recall)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build a profile from the data that `to_dict` returns.

        Raises:
            ValueError: if the data is not a valid profile; the message says why.
        """
        _check(isinstance(data, dict) and data.get("format") == FORMAT, f"its format is not {FORMAT}")
        missing = [field.name for field in fields(cls) if field.name not in data]
        _check(not missing, f"it has no {', '.join(missing)}")
        for name in ("layers", "recall"):
            _check(isinstance(data[name], list), f"{name} must be a list")
        values = {field.name: data[field.name] for field in fields(cls)}
        return cls(**{**values, "layers": tuple(values["layers"]), "recall": tuple(values["recall"])})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile.

        Raises:
            ProfileError: if the file is missing or damaged.
        """
        try:
            return cls.from_dict(json.loads(Path(path).expanduser().read_text("utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read the profile {path} ({error}); {MAKE_AGAIN}") from error

    def save(self, path: str | Path) -> None:
        """Write a profile atomically: a concurrent reader gets the complete old or new one.

        Raises:
            ProfileError: if the file cannot be written.
        """
        try:
            write_atomically(Path(path).expanduser(), json.dumps(self.to_dict(), indent=2, ensure_ascii=False))
        except OSError as error:
            raise ProfileError(f"cannot write {path} ({error}); name another path") from error


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value and abs(value) != float("inf")  # type: ignore[arg-type]


def _maps_strings_to(value: object, kind: type) -> bool:
    return isinstance(value, Mapping) and all(type(k) is str and type(v) is kind for k, v in value.items())


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
