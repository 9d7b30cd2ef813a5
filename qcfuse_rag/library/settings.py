"""The settings of a library, saved in its folder: the model, caches and wording that its documents were warmed with."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.bundled import default_model
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.library.folder import SETTINGS_NAME, library_of
from qcfuse_rag.library.index import DEFAULT_EMBEDDER
from qcfuse_rag.methods import DEFAULT_METHOD, choose_method
from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.prompts.template import PromptTemplate
from qcfuse_rag.store.key import Base

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct (the default)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySettings:
    """What a library's documents were warmed with. The embedding model is named in the passage index.

    Attributes:
        model: Hugging Face id or absolute path of the model; None for the default model.
        fingerprint: the fields of the model's fingerprint; empty if nothing was warmed yet.
        method: name of the method that answers questions, unless a command names another.
        base: name of the base that the last job named; None for the method's own.
        bases: names of all bases that documents were warmed under.
        template: the wording of prompts; None for the current default.
    """

    folder: Path
    model: str | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)
    method: str | None = None
    base: str | None = None
    bases: tuple[str, ...] = ()
    template: PromptTemplate | None = None

    @classmethod
    def load(cls, folder: Path) -> LibrarySettings:
        """Read the settings of a library, given its folder or that of its store; empty settings if there are none.

        Raises:
            QCFuseError: if they cannot be read.
        """
        library = library_of(folder)
        path = library / SETTINGS_NAME
        try:
            saved = json.loads(path.read_text())
            messages = tuple((role, text) for role, text in saved["template"]["messages"])
            template = PromptTemplate(**{**saved["template"], "messages": messages})
            return cls(**{**saved, "folder": library, "bases": tuple(saved["bases"]), "template": template})
        except FileNotFoundError:
            return cls(folder=library)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, QCFuseError) as error:
            raise QCFuseError(f"cannot read {path} ({error}); remove it and run `qcfuse warm run` again") from error

    def save(self) -> None:
        """Write the settings; a library that cannot be written keeps those that it has."""
        data = asdict(self)
        del data["folder"]
        with suppress(OSError):
            write_atomically(self.folder / SETTINGS_NAME, json.dumps(data, indent=2))

    @property
    def exists(self) -> bool:
        """Whether documents were warmed with known settings."""
        return bool(self.fingerprint)

    def model_settings(self, *, model: str | None = None, dtype: str | None = None) -> dict[str, Any]:
        """Return the model and dtype that the library was warmed with; {} if nothing was.

        Raises:
            QCFuseError: if the user names another one than the library has.
        """
        if not self.exists:
            return {}
        given = None if model is None else model_name(model)
        own = self.model or DEFAULT_MODEL_NAME
        if self.model is None and given is not None and given == model_name(default_model()):
            own = given
        self._require_same("model", given, own)
        self._require_same("dtype", dtype, self.fingerprint["dtype"])
        return {"model": self.model, "dtype": self.fingerprint["dtype"]}

    def require_caches(self, method: Method) -> None:
        """Refuse a method that reads no caches that the library has."""
        read = [plain_name(base) for base in method.bases]
        if self.exists and read and not set(read) & set(self.bases):
            raise QCFuseError(
                f"the library {self.folder} was warmed for {' and '.join(self.bases)} caches, but the method "
                f"{method.name} reads {' and '.join(read)} ones; leave out --method and --base, or run "
                f"`qcfuse warm run --base {read[0]}` on its documents"
            )

    def after_job(
        self, fingerprint: Fingerprint, template: PromptTemplate, *, model: str | None, base: str | None
    ) -> LibrarySettings:
        """Return the settings of the library once a job with this model and base has warmed documents."""
        warmed = choose_method(base=base).bases
        earlier = self.bases if self.change_of_model(fingerprint) is None else ()
        return replace(
            self,
            model=None if model is None else model_name(model),
            fingerprint=fingerprint.fields(),
            method=self.method or DEFAULT_METHOD,
            base=base,
            bases=tuple(dict.fromkeys((*earlier, *map(plain_name, warmed)))),
            template=template,
        )

    def change_of_model(self, fingerprint: Fingerprint) -> str | None:
        """Say how a loaded model differs from the one that documents were warmed with; None if it does not."""
        if not self.exists or not (differences := fingerprint.differences(self.fingerprint)):
            return None
        return (
            f"the model {self.model or DEFAULT_MODEL_NAME} has changed since {self.folder} was warmed "
            f"({', '.join(differences)}), so nothing can be reused; run `qcfuse warm run` again"
        )

    def _require_same(self, setting: str, given: str | None, own: str) -> None:
        if given is not None and given != own:
            raise QCFuseError(
                f"the library {self.folder} was warmed with the {setting} {own}, not {given}; "
                f"leave out --{setting}, or warm the documents into another library"
            )


def model_name(model: str) -> str:
    """Return the name under which a model is recorded: an absolute path for a file or folder, else the id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def embedder_name(embedder: str | None) -> str:
    """Return the name under which an embedding model is recorded; None is the default one."""
    return DEFAULT_EMBEDDER if embedder is None else model_name(embedder)


def plain_name(base: Base) -> str:
    """Return a base's name without its ranking of tokens, as `--base` takes it."""
    return base.name.split("+")[0]
