"""`qcfuse serve`: a library's model and caches behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import ERR, status
from qcfuse_rag.cli.library import disk_folder, is_encrypted, kv_folder, open_kv
from qcfuse_rag.cli.open_engine import note_verdict, open_engine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method

TOKEN_VARIABLE = "QCFUSE_TOKEN"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `qcfuse serve` was given."""

    model: str | None
    name: str | None
    host: str
    port: int
    remote: str | None
    waiting: int
    most_tokens: int
    device: str | None
    dtype: str | None
    ray: str | None = None
    replicas: int = 2
    most_replicas: int | None = None
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0


def serve_library(library: Path, method: Method, options: ServeOptions) -> None:
    """Serve until interrupted; then finish what is being answered.

    Raises:
        QCFuseError: if others than this machine could ask without a token, or a package is missing.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(options.host):
        raise QCFuseError(
            f"{options.host} is open to other machines: set {TOKEN_VARIABLE} to a token that clients give, or listen "
            "at 127.0.0.1"
        )
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[serve]'`") from error
    name = options.name or Path(options.model or default_model()).name
    if options.ray is None:
        _serve_here(library, method, options, name, token)
    else:
        _serve_on_ray(library, method, options, name, token)


def _serve_here(library: Path, method: Method, options: ServeOptions, name: str, token: str | None) -> None:
    from qcfuse_rag.engine.engine_handle import ServedEngine
    from qcfuse_rag.engine.scheduler import SchedulerSettings
    from qcfuse_rag.server.app import make_app
    from qcfuse_rag.server.auth_middleware import LOOPBACK
    from qcfuse_rag.server.backend import EngineBackend
    from qcfuse_rag.server.listen import make_server

    if options.remote is None:
        disk_folder(library)  # a name that is misspelt is not a new library
    listening = _listen(options)
    with open_kv(library, remote=options.remote) as store:
        engine = open_engine(store, options.model, method, options.device, options.dtype)
        note_verdict(engine)
        with status("warming up"):
            engine.compile()
        for what, refusal in (("fused passes", engine.passes.refusal), ("decode steps", engine.step.refusal)):
            if engine.lm.device.type == "cuda" and refusal is not None:
                ERR.print(f"{what} are launched kernel by kernel: {refusal}", highlight=False)
        requests = options.waiting + SchedulerSettings().active
        served = ServedEngine.of(engine, SchedulerSettings(waiting=requests))
        backend = EngineBackend(served, name, most_tokens=options.most_tokens, requests=requests)
        hosts = (*LOOPBACK, options.host)
        app = make_app(backend, token=token, hosts=hosts, metrics=_metrics(engine), closing=backend.close)
        _say(options, name, token)
        # uvicorn hands on the signal that ended it, which would end this before the store is closed.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        with suppress(KeyboardInterrupt):
            make_server(app, requests=requests).run(sockets=[listening])
        signal.signal(signal.SIGTERM, before)


def _serve_on_ray(library: Path, method: Method, options: ServeOptions, name: str, token: str | None) -> None:
    from qcfuse_rag.cluster.pool import connect
    from qcfuse_rag.cluster.workers import RayWorkers

    if is_encrypted(library):
        raise QCFuseError("secrets do not leave this machine: an encrypted store is served without --ray")
    connect(options.ray or "auto")
    from qcfuse_rag.server.auth_middleware import LOOPBACK
    from qcfuse_rag.server.ray_serve import Fleet, run_fleet, stop_fleet

    shared: dict[str, Any] = {"folder": str(kv_folder(library).resolve()), "remote": options.remote}
    replica = RayWorkers(
        model=options.model or default_model(),
        store=shared,
        count=options.replicas,
        cpus=options.cpus_per_replica,
        gpus=options.gpus_per_replica,
        device=options.device,
        dtype=options.dtype,
    )
    scale = (
        None
        if options.most_replicas is None
        else {"min_replicas": options.replicas, "max_replicas": options.most_replicas}
    )
    fleet = Fleet(
        replica,
        name,
        method=method,
        token=token,
        hosts=(*LOOPBACK, options.host),
        most_tokens=options.most_tokens,
        queued=options.waiting,
        autoscaling=scale,
    )
    try:
        run_fleet(fleet, host=options.host, port=options.port)
        _say(options, name, token)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        stop_fleet()


def _metrics(engine: Any) -> Any:
    """Return what gives the engine's metrics as text; None if prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from qcfuse_rag.monitoring.metrics import Metrics
    except ImportError:
        return None
    registry = CollectorRegistry()
    engine.observe(Metrics(registry))
    return lambda: generate_latest(registry)


def _listen(options: ServeOptions) -> socket.socket:
    """Take the address before the model is loaded, which takes longer than to find out that it is taken.

    Raises:
        QCFuseError: if it is.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
        listening.listen()  # others could bind to it too until then; who asks now waits until the model is there
    except OSError as error:
        listening.close()
        raise QCFuseError(f"cannot listen at {options.host}:{options.port}: {error.strerror or error}") from error
    return listening


def _say(options: ServeOptions, name: str, token: str | None) -> None:
    asked = "with the token" if token is not None else "without a token"
    ERR.print(f"{name} at http://{options.host}:{options.port}/v1, {asked}; Ctrl-C ends", highlight=False)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
