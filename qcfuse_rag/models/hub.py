"""Find out whether the Hugging Face hub answers, so that a model that cannot be fetched is an error within seconds."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session

HUB_TIMEOUT_S = 6.0
"""Most seconds to wait for the hub's first answer. Its own client would try each file six times."""


def fetch_options(name: str) -> dict[str, Any]:
    """Return the options with which transformers and sentence-transformers load a model by its name.

    If the hub does not answer, nothing but its cache is used, as if HF_HUB_OFFLINE was set. Nothing is asked for a
    file or a folder.
    """
    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or hub_answers():
        return {}
    return {"local_files_only": True}


def unreachable_reason(name: str) -> str:
    """Say that a model is not in the cache and that the hub does not answer."""
    return (
        f"cannot load {name!r}: {constants.ENDPOINT} does not answer, and the model is not complete in "
        f"{constants.HF_HUB_CACHE}; check the connection, or name the folder of a model"
    )


def hub_answers() -> bool:
    """Ask the hub for anything; any answer counts, an error of the server too."""
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
