"""Find the profile a model is to be used with: one that is named, or the one beside its store."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from qcfuse_rag.errors import ProfileError
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.profile.profile import MAKE_ANEW, Profile

NAME = "profile.json"
"""A profile's name in the folder of a store."""


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """What came of looking for a profile.

    Attributes:
        profile: the one to use, or None.
        ignored: why one that is there is not used, or None.
    """

    profile: Profile | None = None
    ignored: str | None = None

    def applied(self, lm: LanguageModel) -> LanguageModel:
        """Return the model with the profile's critical layers, if there is one; weights are shared."""
        return lm if self.profile is None else replace(lm, critical_layers=self.profile.layers)


def find_profile(lm: LanguageModel, named: str | Path | None, folder: Path | None) -> FoundProfile:
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
        profile = Profile.load(named)
        mismatch = profile.mismatch(lm)
        if mismatch is not None:
            raise ProfileError(f"the profile {named} is not of this model: {mismatch}; {MAKE_ANEW}")
        return FoundProfile(profile)
    if folder is None or not os.path.exists(folder / NAME):
        return FoundProfile()
    try:
        profile = Profile.load(folder / NAME)
    except ProfileError as error:
        return FoundProfile(ignored=str(error))
    mismatch = profile.mismatch(lm)
    if mismatch is not None:
        return FoundProfile(ignored=f"the profile {folder / NAME} is not used: {mismatch}; {MAKE_ANEW}")
    return FoundProfile(profile)
