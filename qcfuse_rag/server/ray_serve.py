"""Serve the HTTP application on Ray Serve: an ingress in front of engine replicas with their own memory tiers.

The replicas share the store, so each of them can answer any request. A request goes to a replica that probably has its
passages in memory. If the replica is lost, another replica answers, unless a part of the answer was sent already: then
the request ends with an error.

A passage without requests so far has two home replicas by rendezvous hashing (Thaler & Ravishankar 1998), the same ones
in every routing process; a replica that joins or leaves moves only the passages it gets or had. The two best replicas
are candidates, and the less busy one answers. This is cache affinity with the power of two choices, as in DualMap; a
popular passage has two homes instead of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, WorkerCrashedError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette

from qcfuse_rag.cluster.workers import RayWorkers
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.scheduler import EngineHandle, SchedulerSettings
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import Event, Queued
from qcfuse_rag.server.protocol.failures import Failure
from qcfuse_rag.server.protocol.generation_request import MAX_ANSWERS, CompletionRequest, GenerationRequest
from qcfuse_rag.server.settings import ServerSettings
from qcfuse_rag.store.factory import open_store

CHOICES = 2
REMEMBERED = 2048
"""Passages to remember for each replica; the replica may have dropped some of them."""


def passage_hash(text: str) -> int:
    """Return the hash of a text; invalid Unicode is allowed, because requests are routed before they are refused."""
    return xxhash.xxh64_intdigest(text.encode("utf-8", "surrogatepass"))


def home_replicas(passage: str, replicas: Iterable[str]) -> list[str]:
    """Return the home replicas of a passage, best first."""
    return sorted(replicas, key=lambda name: passage_hash(f"{name}\0{passage}"), reverse=True)[:CHOICES]


class CacheAffinity:
    """Remembers the passages of each replica's recent requests, as seen by one router. Passages are kept as hashes."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def choose(self, passages: Sequence[str], replicas: Collection[str]) -> list[str]:
        """Return the two candidate replicas, best first; all replicas if there are no passages.

        Of two or three replicas only the best one is returned: a choice from all of them would have no affinity. The
        most relevant passage is first.
        """
        for stopped in self._recent.keys() - set(replicas):
            del self._recent[stopped]
        if not passages:
            return sorted(replicas)
        hashes = [passage_hash(passage) for passage in passages]
        home_rank = {home: CHOICES - index for index, home in enumerate(home_replicas(passages[0], replicas))}

        def affinity(replica: str) -> tuple[int, int, str]:
            recent = self._recent.get(replica, ())
            return sum(digest in recent for digest in hashes), home_rank.get(replica, 0), replica

        return sorted(replicas, key=affinity, reverse=True)[: min(CHOICES, max(1, len(replicas) // 2))]

    def record(self, passages: Sequence[str], replica: str) -> None:
        """Record which replica answers a request."""
        recent = self._recent.setdefault(replica, OrderedDict())
        for passage in passages:
            digest = passage_hash(passage)
            recent[digest] = None
            recent.move_to_end(digest)
        while len(recent) > self._remembered:
            recent.popitem(last=False)


MAX_ATTEMPTS = 4
DRAIN_S = 60.0
"""Seconds for a stopping replica to finish its answers."""

REPLICA_LOST = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    WorkerCrashedError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)
APPLICATION = "qcfuse"


@dataclass(frozen=True, slots=True)
class EngineDeployment:
    """The settings of a deployment on Ray Serve.

    Attributes:
        replica: model, store and resources of each replica; `count` is the number of replicas without autoscaling.
        server: the settings of the deployment; at most `waiting` requests wait for a replica.
        config: the other options of each replica's engine, such as the wording of prompts.
        method: instead of the config's, see `FusionEngine.load`.
        max_ongoing: most requests at a time in a replica.
        autoscaling: Ray Serve's autoscaling options, such as `{"min_replicas": 1, "max_replicas": 8}`.
    """

    replica: RayWorkers
    server: ServerSettings = field(default_factory=ServerSettings)
    config: EngineConfig = field(default_factory=EngineConfig)
    method: Method | None = None
    max_ongoing: int = 16
    autoscaling: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.server.served_name(self.replica.model)

    def application(self) -> serve.Application:
        """Return the application for `serve.run`."""
        scaling: dict[str, Any] = {"num_replicas": self.replica.count}
        if self.autoscaling is not None:
            scaling = {"autoscaling_config": dict(self.autoscaling)}
        engines = serve.deployment(
            EngineReplica,
            name="engine",
            ray_actor_options=self.replica.resources(),
            max_ongoing_requests=self.max_ongoing,
            max_queued_requests=self.server.waiting,
            graceful_shutdown_timeout_s=DRAIN_S,
            request_router_config=RequestRouterConfig(request_router_class=CacheAffinityRouter),
            **scaling,
        )
        ingress = serve.deployment(
            serve.ingress()(Ingress),
            name="ingress",
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=10_000,
            graceful_shutdown_timeout_s=DRAIN_S,
        )
        return ingress.bind(self, engines.bind(replace(self, server=replace(self.server, token=None))))


class EngineReplica:
    """An engine in a Ray actor."""

    def __init__(self, deployment: EngineDeployment) -> None:
        replica = deployment.replica
        model = {"model": replica.model, **replica.load_options()}
        config = replace(deployment.config, verdict="ignore", compiled=False, **model)
        engine = FusionEngine.load(config, store=open_store(**replica.store), method=deployment.method)
        engine.compile()
        self._handle = EngineHandle.wrap(engine, SchedulerSettings(waiting=deployment.max_ongoing * MAX_ANSWERS + 1))
        self._backend = EngineBackend(
            self._handle,
            deployment.name,
            most_tokens=deployment.server.most_tokens,
            fidelity=deployment.server.fidelity,
        )

    async def answer(self, body: dict[str, Any]) -> AsyncIterator[Event]:
        """Answer the request with this body; yield events."""
        request = CompletionRequest(**body) if "prompt" in body else ChatRequest(**body)
        async for event in self._backend.answer(request):
            yield event

    def check_health(self) -> None:
        """Raise `RuntimeError` if this replica cannot answer any more, so that Ray Serve replaces it."""
        reason = self._backend.ready()
        if reason is not None:
            raise RuntimeError(reason)


class CacheAffinityRouter(RequestRouter):  # type: ignore[misc] # Ray has no types
    """Routes a request to the less busy of the two replicas with most of its passages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = CacheAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the two best replicas, then the others in case both are full."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = self._affinity.choose(passages_of(pending_request), by_name)
        best = [by_name[name] for name in chosen]
        others = [replica for name, replica in by_name.items() if name not in chosen]
        return [best, others] if others else [best]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which passages a replica gets."""
        self._affinity.record(passages_of(pending_request), replica_id.unique_id)


def passages_of(pending: PendingRequest | None) -> Sequence[str]:
    """Return the passages of a pending request."""
    body = pending.args[0] if pending is not None and pending.args else {}
    documents = body.get("documents") if isinstance(body, dict) else None
    return documents if isinstance(documents, list) else ()


class Ingress:
    """The HTTP application in front of the replicas."""

    def __init__(self, deployment: EngineDeployment, engines: DeploymentHandle) -> None:
        self._deployment, self._backend = deployment, DeploymentBackend(deployment.name, engines)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application; Ray calls this in the process that runs it."""
        server = self._deployment.server
        return make_app(
            self._backend,
            token=server.token,
            hosts=server.hosts,
            playground=not server.no_playground,
            origins=server.allowed_origins,
        )


class DeploymentBackend:
    """Answers with the replica that Ray Serve's router chooses."""

    def __init__(self, name: str, engines: DeploymentHandle) -> None:
        self.name, self._engines = name, engines.options(stream=True)

    def ready(self) -> str | None:
        """Return None: Ray Serve checks the replicas' health."""
        return None

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answer a request; if its replica is lost before anything was sent, another replica answers."""
        body = request.model_dump(exclude_none=True)
        for _ in range(MAX_ATTEMPTS):
            held: list[Event] = []  # an answer that is not streamed can be repeated until it is complete
            sent = False
            events = self._engines.answer.remote(body)
            try:
                async for event in events:
                    if request.stream:
                        sent |= not isinstance(event, Queued)
                        yield event
                    else:
                        held.append(event)
            except BackPressureError as error:
                yield Failure(429, f"{error}; ask again later")
                return
            except REPLICA_LOST:
                if sent:
                    yield Failure(502, "the replica was lost while it answered; ask again")
                    return
                continue
            except RayError as error:
                yield Failure(500, f"a replica failed: {type(error).__name__}")
                return
            finally:
                with suppress(Exception):  # Ray Serve raises a routing error here a second time
                    events.cancel()
            for event in held:
                yield event
            return
        yield Failure(503, f"no replica could answer in {MAX_ATTEMPTS} attempts; ask again later")


def stop_deployment() -> None:
    """Stop the replicas after their current answers; other applications of the cluster stay."""
    serve.delete(APPLICATION)


def run_deployment(deployment: EngineDeployment) -> DeploymentHandle:
    """Start the replicas and the HTTP proxies, and return when they can answer; they run until `serve.shutdown`.

    Raises:
        QCFuseError: if Ray Serve listens already, perhaps on a public address, and there is no token; or if a server of
            this library runs on the cluster, which would be replaced.
    """
    if APPLICATION in serve.status().applications:
        raise QCFuseError(f"the application {APPLICATION!r} runs on this cluster already; end its `qcfuse serve` first")
    if deployment.server.token is None and serve.status().proxies:
        raise QCFuseError(
            "Ray Serve runs on this cluster already, perhaps on a public address: set QCFUSE_TOKEN to a token for "
            "clients, or stop Ray Serve with `serve shutdown`"
        )
    serve.start(http_options={"host": deployment.server.host, "port": deployment.server.port})
    try:
        return serve.run(deployment.application(), name=APPLICATION, route_prefix="/")
    except BaseException:
        stop_deployment()
        raise
