"""Process rows with a pool of workers on Ray Data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qcfuse_rag.errors import QCFuseError

Columns = dict[str, Any]
"""Input and output of a worker: columns by name, with one value for each row."""


def map_with_workers(
    rows: Sequence[Columns],
    worker: type[Any],
    arguments: tuple[Any, ...],
    *,
    doing: str,
    count: int,
    batch_size: int,
    resources: dict[str, Any],
) -> Iterator[Columns]:
    """Yield the workers' results for rows, in any order. The process must be connected to a cluster.

    A worker is made with `arguments`, then called with columns of `batch_size` rows. An error names the activity
    `doing`. Ray gives the rows of a lost worker to another one.
    """
    ray, batches = import_ray(), -(-len(rows) // batch_size)
    pool = ray.data.from_items(rows, override_num_blocks=batches).map_batches(
        worker,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=min(count, batches), max_tasks_in_flight_per_actor=2),
        **resources,
    )
    try:
        yield from pool.iter_rows()
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        raise QCFuseError(
            f"{doing} on Ray stopped: {worker_error(error)}; run it again, what is stored stays"
        ) from error


def worker_error(error: BaseException) -> str:
    """Return the message of the worker's `QCFuseError` without the stack traces around it, else the whole message."""
    messages = re.findall(r"qcfuse_rag\.errors\.\w+: (.+)", "\n".join(map(str, _chain(error))))
    return messages[-1] if messages else str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__


LOCAL = "local"


def connect(address: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect this process to a cluster, if it is not connected yet."""
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
            f"there is no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or name `local`"
        ) from error


def import_ray() -> Any:
    """Import and return the module `ray`."""
    try:
        import ray
    except ImportError as error:
        raise QCFuseError("a cluster needs Ray: run `pip install 'qcfuse-rag[ray]'`") from error
    return ray
