"""A profile: what was measured of a model's layers, and which of them are taken for critical."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from qcfuse_rag.errors import ProfileError
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.atomic_write import write_atomically

FORMAT = "qcfuse-profile-1"
MAKE_ANEW = "make it anew with `qcfuse profile`"

Labels = Literal["answers", "leave-one-out"]
"""What was taken for the evidence: answers that were known, or the passage the model's own answer rests on."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Which layers of a model look at the answer.

    Attributes:
        model: how the user called it; for reports only.
        fingerprint: fields of the model's `Fingerprint`; the profile is of this model alone.
        layers: ascending indices of the critical layers.
        recall: for each layer of the model the mean Recall@10 %, 0 to 1; see `evaluation.profile.measure`.
        labels: what was taken for the evidence.
        samples: questions the means are over.
        skipped: questions that could not be used, by reason.
        depth_penalty: that of `choose_layers` when they were chosen.

    Raises:
        ValueError: if it cannot be a profile.
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
        _check(_maps(self.fingerprint, str), "fingerprint must be an object of strings")
        _check(_maps(self.skipped, int), "skipped must be an object of numbers")
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
        """Say why this profile is not of a model, or return None if it is."""
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
        """Make a profile of what `to_dict` returned.

        Raises:
            ValueError: with what is wrong.
        """
        _check(isinstance(data, dict) and data.get("format") == FORMAT, f"its format is not {FORMAT}")
        missing = [field.name for field in fields(cls) if field.name not in data]
        _check(not missing, f"it has no {', '.join(missing)}")
        for name in ("layers", "recall"):
            _check(isinstance(data[name], list), f"{name} must be a list")
        given = {field.name: data[field.name] for field in fields(cls)}
        return cls(**{**given, "layers": tuple(given["layers"]), "recall": tuple(given["recall"])})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile.

        Raises:
            ProfileError: if there is none or it is damaged.
        """
        try:
            return cls.from_dict(json.loads(Path(path).expanduser().read_text("utf-8")))
        except FileNotFoundError as error:
            raise ProfileError(f"no profile at {path}; `qcfuse profile --out {path}` makes one") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read the profile {path} ({error}); {MAKE_ANEW}") from error

    def save(self, path: str | Path) -> None:
        """Write a profile; whoever reads meanwhile sees the old one or the new one, whole.

        Raises:
            ProfileError: if it cannot be written.
        """
        try:
            write_atomically(Path(path).expanduser(), json.dumps(self.to_dict(), indent=2, ensure_ascii=False))
        except OSError as error:
            raise ProfileError(f"cannot write {path} ({error}); name another place") from error


def choose_layers(recall: Sequence[float], count: int, depth_penalty: float = 0.0) -> tuple[int, ...]:
    """Return the layers of highest recall, less a penalty for their depth; of equals, the earlier.

    Args:
        recall: of each layer, 0 to 1.
        count: how many.
        depth_penalty: times a layer's index over the number of layers, it is taken off the layer's recall. A probe
            runs up to its last layer, so shallow layers are cheaper.

    Raises:
        ValueError: if there are not as many, or the penalty is negative.
    """
    if not 1 <= count <= len(recall):
        raise ValueError(f"the model has {len(recall)} layers; choose 1 to {len(recall)} of them, not {count}")
    if depth_penalty < 0:
        raise ValueError(f"the depth penalty must not be negative, got {depth_penalty}")
    worth = [value - depth_penalty * layer / len(recall) for layer, value in enumerate(recall)]
    best = sorted(range(len(recall)), key=lambda layer: -worth[layer])
    return tuple(sorted(best[:count]))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value and abs(value) != float("inf")  # type: ignore[arg-type]


def _maps(value: object, to: type) -> bool:
    return isinstance(value, Mapping) and all(type(k) is str and type(v) is to for k, v in value.items())


def _check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


NAME = "profile.json"
"""A profile's name in the folder of a store."""


@dataclass(frozen=True, slots=True)
class LayerProfileLookup:
    """What came of looking for a profile.

    Attributes:
        profile: the one to use, or None.
        ignored: why one that is there is not used, or None.
    """

    profile: LayerProfile | None = None
    ignored: str | None = None

    def applied(self, lm: LanguageModel) -> LanguageModel:
        """Return the model with the profile's critical layers, if there is one; weights are shared."""
        return lm if self.profile is None else replace(lm, critical_layers=self.profile.layers)


def find_profile(lm: LanguageModel, named: str | Path | None, folder: Path | None) -> LayerProfileLookup:
    """Find a model's profile.

    Args:
        lm: the model.
        named: a file that has to be this model's profile, or None.
        folder: of a store, where one may be; if it is not of this model or cannot be read, the model keeps the layers
            it has and the reason is returned.

    Raises:
        ProfileError: if the one that is named is not of this model or cannot be read.
    """
    if named is not None:
        profile = LayerProfile.load(named)
        mismatch = profile.mismatch(lm)
        if mismatch is not None:
            raise ProfileError(f"the profile {named} is not of this model: {mismatch}; {MAKE_ANEW}")
        return LayerProfileLookup(profile)
    if folder is None or not os.path.exists(folder / NAME):
        return LayerProfileLookup()
    try:
        profile = LayerProfile.load(folder / NAME)
    except ProfileError as error:
        return LayerProfileLookup(ignored=str(error))
    mismatch = profile.mismatch(lm)
    if mismatch is not None:
        return LayerProfileLookup(ignored=f"the profile {folder / NAME} is not used: {mismatch}; {MAKE_ANEW}")
    return LayerProfileLookup(profile)
