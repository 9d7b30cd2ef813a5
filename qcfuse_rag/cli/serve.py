"""`qcfuse serve`: an OpenAI-compatible HTTP endpoint over a library."""

from __future__ import annotations

import os
import signal
from dataclasses import fields, replace
from pathlib import Path

from qcfuse_rag.cli.console import ERR, print_line, print_note, status
from qcfuse_rag.cli.library import open_engine, print_model_note, print_verdict_note, with_settings
from qcfuse_rag.cli.options import ServeOptions
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.folder import existing_store_folder, has_secret, open_library_store, store_folder
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.library.settings import LibrarySettings
from qcfuse_rag.server.settings import ServerSettings

TOKEN_VARIABLE = "QCFUSE_TOKEN"


def serve_library(library: Path, config: EngineConfig, options: ServeOptions) -> None:
    """Serve requests until interrupted, then finish the requests in progress."""
    settings = LibrarySettings.load(library)
    config = with_settings(config, settings)
    config = replace(config, weights=config.weights or "auto", prefix_bytes=options.prefix_mb * 1_000_000)
    settings.require_caches(config.chosen_method())
    try:
        from qcfuse_rag.server.serve import open_passages
    except ImportError as error:
        raise QCFuseError(f"{error.name} is missing; run `pip install 'qcfuse-rag[serve]'`") from error
    options = replace(options, token=os.environ.get(TOKEN_VARIABLE) or None)
    refused = [f"--{flag}" for flag in ("retrieve", "editable", "keep") if getattr(options, flag)]
    if options.ray is not None and refused:
        raise QCFuseError(f"replicas on Ray have no {' and no '.join(refused)}; leave that out, or --ray")
    options.check()
    opened = open_passages(library, options.embedder) if options.ray is None else None  # the model takes longer to load
    if (options.retrieve or options.editable) and opened is None:
        raise QCFuseError(f"no passages in {library}; --retrieve and --editable need a library of `qcfuse warm run`")
    if options.remote is None:
        existing_store_folder(library)  # do not create a library under a misspelt name
    if options.ray is None:
        _serve_in_process(library, config, options, settings, opened)
    else:
        _serve_on_ray(library, config, options)


def _serve_in_process(
    library: Path, config: EngineConfig, options: ServeOptions, settings: LibrarySettings, opened: Retriever | None
) -> None:
    from qcfuse_rag.server.serve import LibraryServer

    listener = options.listen()
    with open_library_store(library, remote=options.remote, memory_bytes=int(options.memory_gb * 1e9)) as store:
        engine = open_engine(store, config, settings)
        print_verdict_note(engine)
        with status("warming up"):
            engine.compile()
        running = LibraryServer(engine, library, options, opened)
        for note in running.notes():
            print_note("note:", note)
        _print_address(options, config)
        running.run(listener)


def _serve_on_ray(library: Path, config: EngineConfig, options: ServeOptions) -> None:
    from qcfuse_rag.cluster.workers import RayWorkers, connect

    if has_secret(library):
        raise QCFuseError("secrets do not leave this machine: serve without --ray, or unset QCFUSE_SECRET")
    print_model_note(config)
    connect(options.ray or "auto")
    from qcfuse_rag.server.ray_serve import EngineDeployment, run_deployment, stop_deployment

    memory_bytes, folder = int(options.memory_gb * 1e9), str(store_folder(library).resolve())
    replica = RayWorkers(
        model=config.model,
        store={"folder": folder, "remote": options.remote, "memory_bytes": memory_bytes},
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
    # A plain object: the command line's packages may be missing on the cluster.
    server = ServerSettings(**{field.name: getattr(options, field.name) for field in fields(ServerSettings)})
    # Named here: the cluster may lack the model's folder.
    server = replace(server, name=server.served_name(config.model))
    run_deployment(EngineDeployment(replica, server, config=config, autoscaling=autoscaling))
    try:
        _print_address(server, config)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        stop_deployment()


def _print_address(server: ServerSettings, config: EngineConfig) -> None:
    name, host = server.served_name(config.model), server.host
    access = "with the token" if server.token is not None else "without a token"
    host = f"[{host}]" if ":" in host else host
    page = "" if server.no_playground else f", a page to try it at http://{host}:{server.port}/"
    print_line(f"{name} at http://{host}:{server.port}/v1, {access}{page}; Ctrl-C ends", ERR)
