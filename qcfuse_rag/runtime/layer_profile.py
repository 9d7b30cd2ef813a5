"""A layer profile: the measured recall of a model's layers, and the layers chosen as critical."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import ProfileError
from qcfuse_rag.runtime.language_model import LanguageModel

FORMAT = "qcfuse-profile-1"
MAKE_AGAIN = "make it again with `python -m benchmarks profile`"

Labels = Literal["answers", "leave-one-out"]
"""How the evidence was found: by known answers, or by the passage that the model's own answer depends on."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The layers of a model that attend to the answer.

    Attributes:
        model: the user's name for the model; for reports only.
        fingerprint: fields of the model's `Fingerprint`; the profile is valid for this model only.
        layers: ascending indices of the critical layers.
        recall: for each layer of the model the mean Recall@10 %, 0 to 1; see `evaluation.profile.measure`.
        labels: how the evidence was found.
        samples: number of questions that the means are over.
        skipped: number of questions that could not be used, by reason.
        depth_penalty: the `depth_penalty` of `choose_layers` that the layers were chosen with.

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

    def mismatch(self, lm: LanguageModel) -> str | None:
        """Return why this profile does not belong to a model, or None if it does."""
        differing = lm.fingerprint.differences(dict(self.fingerprint))
        if differing:
            return f"it is of another model ({self.model or 'without a name'}): {', '.join(differing)} differ"
        if len(self.recall) != lm.n_layers:
            return f"it has {len(self.recall)} layers and the model {lm.n_layers}"
        return None

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
        except FileNotFoundError as error:
            raise ProfileError(f"there is no profile at {path}; `python -m benchmarks profile` makes one") from error
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


def choose_layers(recall: Sequence[float], count: int, depth_penalty: float = 0.0) -> tuple[int, ...]:
    """Return the layers of highest recall minus a penalty for depth; of equal layers, the earlier.

    Args:
        recall: each layer's recall, 0 to 1.
        count: number of layers to choose.
        depth_penalty: subtracted from a layer's recall after multiplication by the layer's index over the number of
            layers. A probe runs up to its last layer, so shallow layers are cheaper.

    Raises:
        ValueError: if the model has fewer layers, or the penalty is negative.
    """
    if not 1 <= count <= len(recall):
        raise ValueError(f"the model has {len(recall)} layers; choose 1 to {len(recall)} of them, not {count}")
    if depth_penalty < 0:
        raise ValueError(f"the depth penalty must not be negative, got {depth_penalty}")
    penalized = [value - depth_penalty * layer / len(recall) for layer, value in enumerate(recall)]
    best = sorted(range(len(recall)), key=lambda layer: -penalized[layer])
    return tuple(sorted(best[:count]))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value and abs(value) != float("inf")  # type: ignore[arg-type]


def _maps_strings_to(value: object, kind: type) -> bool:
    return isinstance(value, Mapping) and all(type(k) is str and type(v) is kind for k, v in value.items())


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


PROFILE_FILE = "profile.json"
"""File name of a profile in the folder of a store."""


@dataclass(frozen=True, slots=True)
class LayerProfileLookup:
    """The result of looking for a profile.

    Attributes:
        profile: the profile to use, or None.
        ignored: why an existing profile is not used, or None.
    """

    profile: LayerProfile | None = None
    ignored: str | None = None

    def applied(self, lm: LanguageModel) -> LanguageModel:
        """Return the model with the profile's critical layers, or unchanged without a profile; weights are shared."""
        return lm if self.profile is None else replace(lm, critical_layers=self.profile.layers)


def find_profile(lm: LanguageModel, path: str | Path | None, folder: Path | None) -> LayerProfileLookup:
    """Find a model's profile.

    Args:
        lm: the model.
        path: a file that must hold this model's profile, or None.
        folder: a store's folder, which may hold a profile. If that profile is of another model or cannot be read, the
            model keeps its layers and the reason is returned.

    Raises:
        ProfileError: if the profile at `path` is of another model or cannot be read.
    """
    if path is not None:
        profile = LayerProfile.load(path)
        mismatch = profile.mismatch(lm)
        if mismatch is not None:
            raise ProfileError(f"the profile {path} is not of this model: {mismatch}; {MAKE_AGAIN}")
        return LayerProfileLookup(profile)
    if folder is None or not os.path.exists(folder / PROFILE_FILE):
        return LayerProfileLookup()
    try:
        profile = LayerProfile.load(folder / PROFILE_FILE)
    except ProfileError as error:
        return LayerProfileLookup(ignored=str(error))
    mismatch = profile.mismatch(lm)
    if mismatch is not None:
        return LayerProfileLookup(ignored=f"the profile {folder / PROFILE_FILE} is not used: {mismatch}; {MAKE_AGAIN}")
    return LayerProfileLookup(profile)
