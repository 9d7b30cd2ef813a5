"""Keep the results of slow work, so that later processes on the same machine do not repeat it.

A result is a small JSON file in `qcfuse-rag` among the assets of huggingface_hub (`HF_ASSETS_CACHE`, by default
`~/.cache/huggingface/assets`), which may be deleted at any time. A result that cannot be read is missing. A result that
cannot be written is computed again by the next process.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.fingerprint import digest

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The place of a result.

    Attributes:
        folder: of all results of this kind.
        file_name: of the result.
        identity: all that the result depends on: a text, or other data ready for JSON.
        field: name of the identity in the file.
    """

    folder: str
    file_name: str
    identity: Any
    field: str = "identity"

    def read(self) -> dict[str, Any] | None:
        """Return the kept fields; None if there is no readable file of this identity."""
        try:
            kept = json.loads(self._path().read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return kept if isinstance(kept, dict) and kept.get(self.field) == self.identity else None

    def keep(self, **fields: Any) -> None:
        """Write the fields of a result, ready for JSON."""
        try:
            write_atomically(self._path(), json.dumps({self.field: self.identity, **fields}), sync=False)
        except (OSError, ValueError) as error:  # huggingface_hub raises ValueError for a file in the folder's place
            LOG.info("%s is not kept: %s", self.file_name, error)

    def _path(self) -> Path:
        text = self.identity if isinstance(self.identity, str) else json.dumps(self.identity, sort_keys=True)
        return cached_assets_path("qcfuse-rag", self.folder, digest(text.encode())) / self.file_name
