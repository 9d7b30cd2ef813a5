"""Routing by cache affinity, and the ingress when a replica is lost, full or failing; tests/ray loses real replicas."""

from __future__ import annotations

import signal
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from qcfuse_rag import EngineConfig, RayWorkers
from qcfuse_rag.server import ray_serve
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import Event, LastPiece, Piece
from qcfuse_rag.server.ray_serve import (
    CHOICES,
    MAX_ATTEMPTS,
    CacheAffinity,
    DeploymentBackend,
    EngineDeployment,
    EngineReplica,
    Ingress,
    home_replicas,
)
from qcfuse_rag.server.settings import ServerSettings
from qcfuse_rag.store.factory import open_store
from tests.support.cli import Run
from tests.support.engines import METHOD
from tests.support.serving import ASKED, ask, client, error

TINY = ServerSettings(name="tiny")
WHOLE = [Piece("The "), Piece("mill."), LastPiece(usage={}, report={})]


class Answers:
    """A deployment handle whose calls end in a given way, in order."""

    def __init__(self, *ends: tuple[int, BaseException | None]) -> None:
        self.ends, self.asked, self.cancelled = list(ends), 0, 0
        self.unrouted: BaseException | None = None

    def options(self, *, stream: bool) -> Answers:
        assert stream
        return self

    @property
    def answer(self) -> Answers:
        return self

    def remote(self, asked: dict[str, Any]) -> Answers:
        assert asked["messages"]
        self.asked += 1
        return self

    def cancel(self) -> None:
        """Raise, as Serve does, what a call failed with before it was at a replica."""
        self.cancelled += 1
        if self.unrouted is not None:
            raise self.unrouted

    async def __aiter__(self) -> AsyncIterator[Event]:
        count, error = self.ends.pop(0)
        self.unrouted = None if count else error
        for event in WHOLE[:count]:
            yield event
        if error is not None:
            raise error


async def events(answers: Answers, *, stream: bool) -> list[Event]:
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], stream=stream)  # type: ignore[list-item]
    return [event async for event in DeploymentBackend("tiny", answers).answer(request)]


@pytest.mark.parametrize(("stream", "begun"), [(True, 0), (False, 0), (False, 2)])
async def test_a_request_that_has_sent_nothing_is_asked_again(stream: bool, begun: int) -> None:
    answers = Answers((begun, ActorDiedError()), (3, None))
    assert await events(answers, stream=stream) == WHOLE
    assert answers.asked == answers.cancelled == 2


async def test_a_stream_that_has_begun_ends_in_an_error_and_is_not_begun_again() -> None:
    answers = Answers((1, ActorDiedError()))
    first, last = await events(answers, stream=True)
    assert first == WHOLE[0]
    assert (last.status, last.message) == (502, "the replica was lost while it answered; ask again")


async def test_a_request_is_not_asked_for_ever() -> None:
    answers = Answers(*[(0, ActorDiedError())] * MAX_ATTEMPTS)
    (only,) = await events(answers, stream=False)
    assert (only.status, answers.asked) == (503, MAX_ATTEMPTS)


async def test_a_full_line_is_429() -> None:
    (only,) = await events(Answers((0, BackPressureError(9, 8))), stream=True)
    assert only.status == 429
    app = Ingress(
        EngineDeployment(RayWorkers(model="model", store={}), TINY), Answers((0, BackPressureError(9, 8)))
    ).__serve_build_asgi_app__()
    async with client(app, host="localhost") as http:
        assert (await ask(http)).headers["retry-after"] == "1"


async def test_a_request_that_no_replica_could_answer_is_refused_before_routing() -> None:
    answers = Answers()
    app = Ingress(EngineDeployment(RayWorkers(model="model", store={}), TINY), answers).__serve_build_asgi_app__()
    async with client(app, host="localhost") as http:
        for refused in ({"documents": ["\ud800"]}, {"guided_json": {"type": "object"}}, {"stop": ["x"] * 17}):
            assert (await ask(http, **refused)).status_code == 400
    assert answers.asked == 0


async def test_a_server_of_this_machine_alone_takes_its_own_host_names() -> None:
    deployment = EngineDeployment(RayWorkers(model="model", store={}), TINY)
    async with client(Ingress(deployment, Answers()).__serve_build_asgi_app__(), host="page.example") as http:
        assert "set QCFUSE_TOKEN" in error(await http.get("/v1/models"))


async def test_what_a_replica_raises_is_not_told_to_clients() -> None:
    failed = RayTaskError("answer", "Traceback: /home/somebody/secret", ValueError("secret"))
    (only,) = await events(Answers((0, failed)), stream=False)
    assert (only.status, "secret" in str(only.message)) == (500, False)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reuses"), [({}, True), ({"prefix_bytes": 0}, False)])
async def test_replicas_keep_as_many_bytes_of_requests_as_the_deployment_says(
    model_folder: str, settings: dict[str, Any], reuses: bool
) -> None:
    replica_settings = RayWorkers(model=model_folder, store={}, device="cpu")
    deployment = EngineDeployment(replica_settings, TINY, config=EngineConfig(**settings), method=METHOD)
    replica = EngineReplica(deployment)
    reports = []
    for _ in range(2):
        events = [event async for event in replica.answer(ASKED)]
        reports.append(events[-1].report)
    replica._backend.close()
    assert [bool(report["prefix_tokens"]) for report in reports] == [False, reuses]


@pytest.mark.parametrize(
    ("option", "expected"), [((), 10**9), (("--prefix-mb", 0), 0), (("--prefix-mb", 7), 7 * 10**6)]
)
def test_serve_passes_the_limits_of_memory_to_replicas(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[object, ...], expected: int
) -> None:
    deployments: list[EngineDeployment] = []
    monkeypatch.setattr("qcfuse_rag.cluster.workers.connect", lambda address: None)
    monkeypatch.setattr(ray_serve, "run_deployment", deployments.append)
    monkeypatch.setattr(ray_serve, "stop_deployment", lambda: None)
    monkeypatch.setattr(signal, "sigwait", lambda signals: signal.SIGINT)
    open_store(tmp_path).close()
    run.text("serve", "--store", tmp_path, "--ray", "local", "--memory-gb", 3, *option)
    (deployment,) = deployments
    assert deployment.config.prefix_bytes == expected
    assert deployment.replica.store["memory_bytes"] == 3 * 10**9


def test_a_server_that_runs_already_is_neither_replaced_nor_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[None] = []
    monkeypatch.setattr("qcfuse_rag.cluster.workers.connect", lambda address: None)
    status = SimpleNamespace(applications={ray_serve.APPLICATION: None}, proxies={})
    monkeypatch.setattr(ray_serve.serve, "status", lambda: status)
    monkeypatch.setattr(ray_serve, "stop_deployment", lambda: stopped.append(None))
    open_store(tmp_path).close()
    code, _, err = run("serve", "--store", tmp_path, "--ray", "local")
    assert code == 1
    assert "runs on this cluster already" in err
    assert not stopped


REPLICAS = [f"replica-{number}" for number in range(8)]


def simulate(choices: int, *, seed: int, by_turns: bool = False) -> tuple[float, int]:
    """Return the share of passages found in the replicas' memory, of 150 passages each, and the longest queue.

    The questions are about topics, some far more often than others (Zipf 1.1); each retrieves five of a topic's 20
    passages, and its answer takes as long as six questions come.
    """
    affinity, draw = CacheAffinity(600), np.random.default_rng(seed)  # it does not know how much fits
    share = 1 / np.arange(1, 201) ** 1.1
    memories: list[OrderedDict[str, None]] = [OrderedDict() for _ in REPLICAS]
    queues: list[list[int]] = [[] for _ in REPLICAS]
    found = longest = 0
    topics = draw.choice(200, size=6000, p=share / share.sum())
    for number, topic in enumerate(topics):
        passages = [f"{topic}/{n}" for n in draw.choice(20, size=5, replace=False)]
        queues = [[end for end in ends if end > number] for ends in queues]
        homes = [REPLICAS.index(name) for name in affinity.choose(passages, REPLICAS)[:choices]]
        chosen = number % len(REPLICAS) if by_turns else min(homes, key=lambda replica: len(queues[replica]))
        affinity.record(passages, REPLICAS[chosen])
        queues[chosen].append(max([number, *queues[chosen]]) + 6)
        longest = max(longest, len(queues[chosen]))
        for passage in passages:
            found += passage in memories[chosen]
            memories[chosen][passage] = None
            memories[chosen].move_to_end(passage)
        while len(memories[chosen]) > 150:
            memories[chosen].popitem(last=False)
    return found / (5 * len(topics)), longest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_workload_finds_half_as_much_again_in_memory(seed: int) -> None:
    turns, affine = simulate(CHOICES, seed=seed, by_turns=True)[0], simulate(CHOICES, seed=seed)[0]
    print(f"found in memory: {turns:.2f} by turns, {affine:.2f} by affinity, {affine / turns:.2f} times")
    assert affine >= 1.5 * turns


def test_what_many_ask_for_has_two_homes_and_not_one() -> None:
    """A single home would have a line as long as the favourite topic is popular; two halve it."""
    assert simulate(CHOICES, seed=5)[1] < simulate(1, seed=5)[1]


passage_lists = st.lists(st.text(max_size=8), min_size=1, max_size=6)


@given(passages=passage_lists, count=st.integers(1, 8))
def test_candidates_are_two_of_the_replicas_whatever_order_they_come_in(passages: list[str], count: int) -> None:
    replicas = REPLICAS[:count]
    affinity = CacheAffinity()
    chosen = affinity.choose(passages, replicas)
    assert len(chosen) == len(set(chosen)) == min(CHOICES, max(1, count // 2))
    assert set(chosen) <= set(replicas)
    assert affinity.choose(passages, replicas[::-1]) == chosen
    affinity.record(passages, replicas[-1])
    assert replicas[-1] in affinity.choose(passages, replicas), "it has them now"
    assert replicas[-1] not in affinity.choose(passages, replicas[:-1])
    assert affinity.choose(passages, []) == []


@given(passage=st.text(max_size=8), gone=st.sampled_from(REPLICAS))
def test_a_replica_that_goes_moves_only_what_was_at_home_there(passage: str, gone: str) -> None:
    before, after = (
        home_replicas(passage, REPLICAS),
        home_replicas(passage, [name for name in REPLICAS if name != gone]),
    )
    assert [name for name in before if name != gone] == after[: len(before) - (gone in before)]


def test_text_that_is_no_unicode_is_routed_like_any_other() -> None:
    """A router that raises would never answer the request, nor whoever waits behind it."""
    affinity = CacheAffinity()
    for _ in range(2):
        (chosen,) = affinity.choose(["\ud800"], REPLICAS[:2])
        affinity.record(["\ud800"], chosen)
    assert home_replicas("\ud800", REPLICAS) != home_replicas("\ud801", REPLICAS)


def test_homes_are_even() -> None:
    counts = Counter(name for number in range(4000) for name in home_replicas(f"passage {number}", REPLICAS))
    assert set(counts) == set(REPLICAS)
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_a_request_without_passages_may_go_anywhere() -> None:
    assert CacheAffinity().choose([], REPLICAS) == REPLICAS


def test_what_is_remembered_is_bounded() -> None:
    affinity = CacheAffinity(remembered=3)
    affinity.record(["a", "b", "c", "d"], REPLICAS[7])
    assert affinity._recent[REPLICAS[7]].keys() == {xxhash.xxh64_intdigest(passage) for passage in (b"b", b"c", b"d")}
