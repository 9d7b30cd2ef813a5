"""What workers of a Ray cluster are made of, and how they are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.contract import KVStore
from qcfuse_rag.store.open import open_store

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """Workers that prefill.

    Attributes:
        model: Hugging Face id, folder or GGUF file, as every worker finds it.
        store: options of `open_store` by which a worker opens the store that all share: `remote`, or a `folder` on a
            file system that all machines have.
        address: of the cluster: `auto` for the one this machine is part of, `local` to start one here, or an address.
        count: how many.
        cpus, gpus: of each.
        device, dtype: see `LanguageModel.load`; say the dtype where this machine has no GPU and the workers have.
        runtime_env: what Ray is to bring to the workers, in its own words.
    """

    model: str
    store: Mapping[str, Any]
    address: str = "auto"
    count: int = 2
    cpus: float = 1
    gpus: float = 0
    device: str | None = None
    dtype: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> tuple[LanguageModel, KVStore]:
        """Load the model and open the store, in a worker."""
        return LanguageModel.load(self.model, device=self.device, dtype=self.dtype), open_store(**self.store)

    def resources(self) -> dict[str, Any]:
        """Return what Ray is to set aside for one."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


def connect(address: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect this process to a cluster, unless it is connected.

    Raises:
        QCFuseError: if Ray is not installed, or there is no cluster at that address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address,
            runtime_env=dict(runtime_env or {}),
            log_to_driver=False,
            include_dashboard=False if address == LOCAL else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise QCFuseError(
            f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or name `local`"
        ) from error


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        QCFuseError: if it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise QCFuseError("a cluster needs Ray: run `pip install 'qcfuse-rag[ray]'`") from error
    return ray
