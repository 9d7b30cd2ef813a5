"""The endpoint on Ray Serve: an application in front, engines behind it, each with tiers of its own.

The store is shared, so any replica answers rightly; requests go where their passages are likely to be in memory. A
request whose replica is lost goes to another one, unless a part of its answer has been sent: then that is an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import ServedEngine
from qcfuse_rag.engine.scheduler import SchedulerSettings
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.auth_middleware import Limits
from qcfuse_rag.server.backend import EngineBackend, Event
from qcfuse_rag.server.request import ChatRequest
from qcfuse_rag.server.routing import Affinity
from qcfuse_rag.store.factory import open_store

TRIES = 4
LOST = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    WorkerCrashedError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)
APPLICATION = "qcfuse"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and what they are made of.

    Attributes:
        replica: model, store and resources of each; `count` is how many there are if nothing scales them.
        name: how clients call the model.
        method: what to reuse and recompute.
        token: that clients give; None lets everybody ask.
        limits: of requests.
        hosts: names to be asked by where there is no token, see `Guard`; None takes any.
        most_tokens: of an answer.
        ongoing: requests that a replica takes at a time.
        queued: requests that wait for a replica; one more is refused with 429.
        autoscaling: Serve's own configuration, such as `{"min_replicas": 1, "max_replicas": 8}`.
        drain_s: seconds that a replica has to finish what it is answering when it is to go.
        load_limit_s: see `FusionEngine`.
    """

    replica: RayWorkers
    name: str
    method: Method | None = None
    token: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] | None = None
    most_tokens: int = 4096
    ongoing: int = 16
    queued: int = 64
    autoscaling: Mapping[str, Any] | None = None
    drain_s: float = 60.0
    load_limit_s: float | None = 30.0

    def application(self) -> serve.Application:
        """Return what `serve.run` takes."""
        scale: dict[str, Any] = (
            {"num_replicas": self.replica.count}
            if self.autoscaling is None
            else {"autoscaling_config": dict(self.autoscaling)}
        )
        engines = serve.deployment(
            EngineReplica,
            name="engine",
            ray_actor_options=self.replica.resources(),
            max_ongoing_requests=self.ongoing,
            max_queued_requests=self.queued,
            graceful_shutdown_timeout_s=self.drain_s,
            request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
            **scale,
        )
        door = serve.deployment(
            serve.ingress()(Door),
            name="door",
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=10_000,
            graceful_shutdown_timeout_s=self.drain_s,
        )
        return door.bind(self, engines.bind(replace(self, token=None)))


class EngineReplica:
    """An engine in an actor of its own.

    Args:
        fleet: what it is made of.
    """

    def __init__(self, fleet: Fleet) -> None:
        one = fleet.replica
        engine = FusionEngine.load(
            one.model,
            store=open_store(**one.store),
            method=fleet.method,
            device=one.device,
            dtype=one.dtype,
            verdict="ignore",
            load_limit_s=fleet.load_limit_s,
        )
        engine.compile()
        self._served = ServedEngine.of(engine, SchedulerSettings(waiting=fleet.ongoing + 1))
        self._backend = EngineBackend(self._served, fleet.name, most_tokens=fleet.most_tokens)

    async def answer(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer a request; events as plain data."""
        async for event in self._backend.answer(ChatRequest(**asked)):
            yield event.to_dict()

    async def memory(self) -> dict[str, int]:
        """Return how often passages were found in the nearest tier, and how often not."""
        near = self._served.engine.store.stats()[0]
        return {"hits": near.hits, "misses": near.misses}

    def check_health(self) -> None:
        """Have Serve replace this replica if it cannot answer any more.

        Raises:
            RuntimeError: with the reason.
        """
        reason = self._backend.ready()
        if reason is not None:
            raise RuntimeError(reason)


class AffinityRouter(RequestRouter):  # type: ignore[misc] # Ray's classes are taken as they are
    """Sends a request to one of the two replicas that have most of its passages, the less busy one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the two, then the others, in case both are full."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        chosen = self._affinity.choose(passages_of(pending_request), by_name)
        others = [one for name, one in by_name.items() if name not in chosen]
        return [[by_name[name] for name in chosen], others] if others else [[by_name[name] for name in chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember what a replica is asked about."""
        self._affinity.note(passages_of(pending_request), replica_id.unique_id)


def passages_of(pending: PendingRequest | None) -> Sequence[str]:
    """Return the passages of a request on its way to a replica."""
    asked = pending.args[0] if pending is not None and pending.args else {}
    return asked.get("documents") or () if isinstance(asked, dict) else ()


class Door:
    """The application in front of the replicas.

    Args:
        fleet: what is behind it.
        engines: a handle to the replicas.
    """

    def __init__(self, fleet: Fleet, engines: DeploymentHandle) -> None:
        self._fleet, self._backend = fleet, FleetBackend(fleet.name, engines)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, in the process where it runs."""
        fleet = self._fleet
        return make_app(self._backend, token=fleet.token, limits=fleet.limits, hosts=fleet.hosts)


class FleetBackend:
    """Answers with whichever replica Serve's router chooses.

    Args:
        name: how clients call the model.
        engines: a handle to the replicas.
    """

    def __init__(self, name: str, engines: DeploymentHandle) -> None:
        self.name, self._engines = name, engines.options(stream=True)

    def ready(self) -> str | None:
        """Serve itself looks after the replicas' health."""
        return None

    async def answer(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a request; one that has sent nothing when its replica is lost is sent to another."""
        asked = request.model_dump(exclude_none=True)
        for _ in range(TRIES):
            held: list[Event] = []  # an answer that is not streamed can begin anew until it is whole
            sent = False
            events = self._engines.answer.remote(asked)
            try:
                async for data in events:
                    if request.stream:
                        sent = True
                        yield Event(**data)
                    else:
                        held.append(Event(**data))
            except BackPressureError as error:
                yield Event(status=429, error=f"{error}; ask again later")
                return
            except LOST:
                if sent:
                    yield Event(status=502, error="the replica was lost while it answered; ask again")
                    return
                continue
            except (RayError, TaskCancelledError) as error:
                yield Event(status=500, error=f"a replica failed: {type(error).__name__}")
                return
            finally:
                with suppress(Exception):  # Serve raises here again what kept the request from a replica
                    events.cancel()
            for event in held:
                yield event
            return
        yield Event(status=503, error=f"no replica could answer, {TRIES} were tried; ask again later")


def stop_fleet() -> None:
    """Let replicas finish what they are answering, and end them; other applications of the cluster stay."""
    serve.delete(APPLICATION)


def run_fleet(fleet: Fleet, *, host: str = "127.0.0.1", port: int = 8000) -> DeploymentHandle:
    """Start the replicas and listen; returns when they can answer, and they go on until `serve.shutdown`.

    Args:
        fleet: what to run.
        host: address that the proxies on every node listen at.
        port: and their port.

    Raises:
        QCFuseError: if Serve listens already, perhaps elsewhere, and there is no token to keep others out.
    """
    if fleet.token is None and serve.status().proxies:
        raise QCFuseError(
            "Ray Serve runs on this cluster already, at an address of its own: set QCFUSE_TOKEN to a token that "
            "clients give, or end it with `serve shutdown`"
        )
    serve.start(http_options={"host": host, "port": port})
    return serve.run(fleet.application(), name=APPLICATION, route_prefix="/")
