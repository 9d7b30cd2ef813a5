"""`qcfuse serve`: an OpenAI-compatible HTTP endpoint over a library."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import ERR, print_line, print_note, status
from qcfuse_rag.cli.library import open_engine, print_verdict_note, with_settings
from qcfuse_rag.cli.options import ServeOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.folder import (
    existing_store_folder,
    has_secret,
    index_folder,
    library_of,
    open_library_store,
    store_folder,
)
from qcfuse_rag.library.index import METADATA
from qcfuse_rag.library.jobs import forget_source, job_lock
from qcfuse_rag.library.settings import LibrarySettings

if TYPE_CHECKING:  # needs the extra `cli`
    from qcfuse_rag.library.documents import ServedLibrary

TOKEN_VARIABLE = "QCFUSE_TOKEN"


def serve_library(library: Path, config: EngineConfig, options: ServeOptions) -> None:
    """Serve requests until interrupted, then finish the requests in progress."""
    settings = LibrarySettings.load(library)
    config = replace(with_settings(config, settings), prefix_bytes=options.prefix_mb * 1_000_000)
    settings.require_caches(config.chosen_method())
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(options.host):
        raise QCFuseError(
            f"{options.host} is open to other machines: set {TOKEN_VARIABLE} to a token for clients, or listen "
            "on 127.0.0.1"
        )
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[serve]'`") from error
    name = options.name or served_model_id(config.model or default_model())
    refused = [f"--{flag}" for flag in ("retrieve", "editable", "keep") if getattr(options, flag)]
    if options.ray is not None and refused:
        raise QCFuseError(f"replicas on Ray have no {' and no '.join(refused)}; leave that out, or --ray")
    if (options.retrieve or options.editable) and not _has_passages(library):
        raise QCFuseError(f"no passages in {library}; --retrieve and --editable need a library of `qcfuse warm run`")
    if options.remote is None:
        existing_store_folder(library)  # do not create a library under a misspelt name
    if options.ray is None:
        _serve_in_process(library, config, options, settings, name, token)
    else:
        _serve_on_ray(library, config, options, name, token)


def served_model_id(model: str) -> str:
    """Return the id of a model for clients.

    It is the Hugging Face id, also for a folder of the hub's cache, or the name of a folder or of a GGUF file without
    its ending.
    """
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.name


def _serve_in_process(
    library: Path, config: EngineConfig, options: ServeOptions, settings: LibrarySettings, name: str, token: str | None
) -> None:
    from qcfuse_rag.engine.engine_handle import EngineHandle
    from qcfuse_rag.engine.scheduler import SchedulerSettings
    from qcfuse_rag.server.app import make_app
    from qcfuse_rag.server.auth_middleware import LOOPBACK
    from qcfuse_rag.server.backend import EngineBackend
    from qcfuse_rag.server.http_server import make_server
    from qcfuse_rag.server.idle_warming import IdleWarming
    from qcfuse_rag.server.playground import add_playground

    listener = _bind(options)
    with open_library_store(library, remote=options.remote, memory_bytes=int(options.memory_gb * 1e9)) as store:
        engine = open_engine(store, config, settings)
        print_verdict_note(engine)
        if not engine.prompts.chat_template.shows_tools:
            print_note(
                "note:", "the model's chat template has no place for tools; requests are answered without theirs"
            )
        with status("warming up"):
            engine.compile()
            if options.fidelity == "heal":
                engine.runner.step_costs()  # or the first request would wait for them
        for work, refusal in (
            ("fused passes", engine.runner.prefills.refusal),
            ("decode steps", engine.runner.decodes.refusal),
        ):
            if engine.lm.device.type == "cuda" and refusal is not None:
                print_line(f"{work} are launched kernel by kernel: {refusal}", ERR)
        requests = options.waiting + SchedulerSettings().active
        served = EngineHandle.wrap(engine, SchedulerSettings(waiting=requests))
        documents = _served_library(library, engine, options)
        backend = EngineBackend(
            served,
            name,
            most_tokens=options.most_tokens,
            fidelity=options.fidelity,
            max_requests=requests,
            library=documents,
            retrieve=options.retrieve,
            idle_warming=IdleWarming(served, documents) if options.keep else None,
        )
        app = make_app(
            backend,
            token=token,
            hosts=(*LOOPBACK, options.host),
            metrics=_metrics(engine),
            library=documents,
            on_shutdown=backend.close,
        )
        if not options.no_playground:
            add_playground(app)
        _print_address(options, name, token)
        # uvicorn raises the signal that stopped it again, which would end this process before the store is closed.
        previous_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        with suppress(KeyboardInterrupt):
            make_server(app, max_requests=requests).run(sockets=[listener])
        signal.signal(signal.SIGTERM, previous_handler)


def _has_passages(folder: Path) -> bool:
    return (index_folder(library_of(folder)) / METADATA).is_file()


def _served_library(folder: Path, engine: FusionEngine, options: ServeOptions) -> ServedLibrary | None:
    """Return the library to retrieve from; None if there are no passages, or the extra for that is not installed."""
    if not _has_passages(folder):
        return None
    try:
        from qcfuse_rag.library.documents import ServedLibrary
    except ImportError as error:
        if options.retrieve or options.editable:
            raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[cli,serve]'`") from error
        print_note(
            "note:",
            f"clients cannot use the documents: {error.name} is missing; run `pip install 'qcfuse-rag[cli,serve]'`",
        )
        return None
    library = library_of(folder)
    return ServedLibrary(
        index_folder(library),
        engine,
        count=options.top_k,
        editable=options.editable,
        changing=partial(job_lock, library),
        on_forget=partial(forget_source, library),
    )


def _serve_on_ray(library: Path, config: EngineConfig, options: ServeOptions, name: str, token: str | None) -> None:
    from qcfuse_rag.cluster.pool import connect
    from qcfuse_rag.cluster.workers import RayWorkers

    if has_secret(library):
        raise QCFuseError("secrets do not leave this machine: serve without --ray, or unset QCFUSE_SECRET")
    connect(options.ray or "auto")
    from qcfuse_rag.server.auth_middleware import LOOPBACK
    from qcfuse_rag.server.ray_serve import EngineDeployment, run_deployment, stop_deployment

    store_settings: dict[str, Any] = {
        "folder": str(store_folder(library).resolve()),
        "remote": options.remote,
        "memory_bytes": int(options.memory_gb * 1e9),
    }
    replica = RayWorkers(
        model=config.model,
        store=store_settings,
        count=options.replicas,
        cpus=options.cpus_per_replica,
        gpus=options.gpus_per_replica,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights,
    )
    autoscaling = None
    if options.most_replicas is not None:
        autoscaling = {"min_replicas": options.replicas, "max_replicas": options.most_replicas}
    deployment = EngineDeployment(
        replica,
        name,
        config=config,
        token=token,
        hosts=(*LOOPBACK, options.host),
        most_tokens=options.most_tokens,
        fidelity=options.fidelity,
        playground=not options.no_playground,
        max_queued=options.waiting,
        autoscaling=autoscaling,
    )
    run_deployment(deployment, host=options.host, port=options.port)
    try:
        _print_address(options, name, token)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        stop_deployment()


def _metrics(engine: FusionEngine) -> Callable[[], bytes] | None:
    """Return a function that renders the engine's metrics as text; None if prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from qcfuse_rag.monitoring.metrics import Metrics
    except ImportError:
        return None
    registry = CollectorRegistry()
    engine.observe(Metrics(registry))
    return lambda: generate_latest(registry)


def _bind(options: ServeOptions) -> socket.socket:
    """Bind the address before the model is loaded, so that an address in use is reported at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        listener.listen()  # prevents another bind to the address; early clients wait until the model is loaded
    except OSError as error:
        listener.close()
        raise QCFuseError(f"cannot listen at {options.host}:{options.port}: {error.strerror or error}") from error
    return listener


def _print_address(options: ServeOptions, name: str, token: str | None) -> None:
    access = "with the token" if token is not None else "without a token"
    host = f"[{options.host}]" if ":" in options.host else options.host
    page = "" if options.no_playground else f", a page to try it at http://{host}:{options.port}/"
    print_line(f"{name} at http://{host}:{options.port}/v1, {access}{page}; Ctrl-C ends", ERR)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
