"""Warming on Ray leaves the store that warming here leaves, though a worker is killed in the middle."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from qcfuse_rag import FusionEngine, QCFuseError, RayWorkers, open_store
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.key import FRAMED, PRIMED
from tests.support.cli import Run
from tests.support.engines import METHOD, METHOD_OPTIONS
from tests.support.passages import PASSAGES, QUESTION

pytestmark = [pytest.mark.ray, pytest.mark.enable_socket, pytest.mark.timeout(600)]
CHUNKS = [f"{number}. {PASSAGES[number % 3]} So said number {number * 7919 % 1009}." for number in range(500)]


def entries(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every stored entry by its address."""
    return {path.stem: path.read_bytes() for path in sorted(folder.rglob("objects/**/*")) if path.is_file()}


def kill_a_worker() -> int:
    """Kill a process that prefills, as a machine that is lost does; return how many there were."""
    mine = psutil.Process().children(recursive=True)
    found = [process for process in mine if "MapWorker" in " ".join(process.cmdline() or [process.name()])]
    if found:
        found[0].send_signal(signal.SIGKILL)
    return len(found)


def test_500_chunks_with_a_worker_killed_are_the_local_jobs_500_chunks(
    cluster: str, model: str, tmp_path: Path
) -> None:
    workers = RayWorkers(model=model, store={"folder": str(tmp_path / "ray")}, address=cluster)
    killed = 0

    def kill_halfway(done: int, total: int) -> None:
        nonlocal killed
        if not killed and done > total // 3:
            killed = kill_a_worker()

    options: dict[str, Any] = {"sources": [f"doc {n % 50}" for n in range(500)], "bases": [FRAMED], "batch_tokens": 500}
    with FusionEngine.load(model, store=tmp_path / "local", device="cpu", method=METHOD, verdict="ignore") as here:
        local = here.warm(CHUNKS, **options)
        known_here = sorted(here.corpus.open_sources().names())
    with FusionEngine.load(model, store=tmp_path / "ray", device="cpu", method=METHOD, verdict="ignore") as there:
        spread = there.warm(CHUNKS, **options, workers=workers, progress=kill_halfway)
        known_there = sorted(there.corpus.open_sources().names())
        again = there.warm(CHUNKS, **options, workers=workers)
        report = there.generate(there.prompt(QUESTION, CHUNKS[:3])).report
        assert there.forget("doc 0") == 10, "the manifest knows what the workers wrote"
    assert killed == 2, "there were two workers, and one was killed"
    assert known_here == known_there
    counts = ("chunks", "warmed", "present", "left_out", "tokens", "computed_tokens", "size_bytes", "failed")
    assert [getattr(spread, name) for name in counts] == [getattr(local, name) for name in counts]
    assert (again.warmed, again.present) == (0, 500)
    assert report.fallback is None
    mine, theirs = entries(tmp_path / "local"), entries(tmp_path / "ray")
    assert len(mine) == 501
    assert theirs.items() <= mine.items(), "the same keys and the same bytes"
    assert len(theirs) == 491


def test_what_is_made_of_others_is_made_after_them(cluster: str, model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bases": [FRAMED, PRIMED, ENRICHED], "batch_tokens": 300}
    workers = RayWorkers(model=model, store={"folder": str(tmp_path / "ray")}, address=cluster)
    with FusionEngine.load(model, store=tmp_path / "local", device="cpu", method=METHOD, verdict="ignore") as here:
        here.warm(CHUNKS[:12], **options)
    with FusionEngine.load(model, store=tmp_path / "ray", device="cpu", method=METHOD, verdict="ignore") as there:
        there.warm(CHUNKS[:12], **options, workers=workers)
    assert entries(tmp_path / "local") == entries(tmp_path / "ray")


def test_a_shared_bucket(cluster: str, model: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    workers = RayWorkers(model=model, store={"remote": url}, address=cluster)
    store = open_store(tmp_path / "mine", remote=url)
    with FusionEngine.load(model, store=store, device="cpu", method=METHOD, verdict="ignore") as engine:
        assert engine.warm(CHUNKS[:20], bases=[FRAMED], workers=workers).warmed == 20
    with FusionEngine.load(model, store=open_store(remote=url), device="cpu", method=METHOD, verdict="ignore") as other:
        assert other.generate(other.prompt(QUESTION, CHUNKS[:3])).report.fallback is None
    store.close()


def test_a_worker_with_another_model_says_so(cluster: str, model: str, tmp_path: Path) -> None:
    workers = RayWorkers(model=model, store={"folder": str(tmp_path / "ray")}, address=cluster, dtype="bfloat16")
    with (
        FusionEngine.load(model, store=tmp_path / "ray", device="cpu", method=METHOD, verdict="ignore") as engine,
        pytest.raises(QCFuseError, match="same dtype"),
    ):
        engine.warm(CHUNKS[:4], workers=workers)


@pytest.mark.real
def test_the_command(cluster: str, model: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(PASSAGES):
        (tmp_path / "corpus" / f"{number}.md").write_text(text * 3)
    broken = tmp_path / "corpus" / "broken.md"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    warm = ("warm", "run", str(tmp_path / "corpus"), "--model", model, "--max-tokens", "64", "--json")
    code, here, _ = run(*warm, "--store", str(tmp_path / "here"))
    assert code == 0
    code, there, error = run(*warm, "--store", str(tmp_path / "there"), "--ray", cluster)
    assert code == 0, error
    counts = ("documents", "passages", "warmed", "tokens", "size_bytes", "unread")
    assert [json.loads(here)[name] for name in counts] == [json.loads(there)[name] for name in counts]
    assert list(json.loads(there)["unread"].values()) == [["broken.md"]]
    assert entries(tmp_path / "here") == entries(tmp_path / "there")
    code, _, error = run(
        "warm", "run", str(broken), "--model", model, "--store", str(tmp_path / "new"), "--ray", cluster
    )
    assert (code, f"cannot read {broken}" in error.replace("\n", "")) == (1, True), "it was named outright"
    ask = ("ask", QUESTION, "--store", str(tmp_path / "there"), "--model", model, *METHOD_OPTIONS, "--json")
    code, answer, _ = run(*ask)
    assert code == 0
    assert json.loads(answer)["report"]["fallback"] is None
