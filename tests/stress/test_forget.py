"""A document is forgotten while other processes warm and use it and are killed at random.

No entry stays without an owner, nothing that was forgotten comes back, and no process retrieves it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, SamplingParams
from qcfuse_rag.cli import store as store_commands
from qcfuse_rag.cli.library import open_engine, open_session
from qcfuse_rag.cli.options import AskOptions, CorpusOptions, JobOptions
from qcfuse_rag.cli.warm import run_warming
from qcfuse_rag.engine.config import EngineConfig
from qcfuse_rag.errors import Busy, QCFuseError
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.folder import index_folder, open_library_store, open_store_and_sources
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, embedder_source
from qcfuse_rag.server import idle_warming
from qcfuse_rag.server.serve import LibraryServer, ServerSettings, open_passages
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey
from tests.store.test_forget_while_warming import entries, forget, warm
from tests.stress.campaign import Tally, sized
from tests.stress.processes import Counters, fork, kill, wait
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES
from tests.support.serving import ask, client

TEXTS = [f"passage {number} of the report: {'some words ' * 30}" for number in range(12)]
KEPT = [f"passage {number} of another document: {'other words ' * 30}" for number in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forget_while_a_killed_job_warms(tmp_path: Path, llama: LanguageModel) -> None:
    tally, rng = Tally("forget x warm x kill"), random.Random(0)
    folder = tmp_path / "kv"
    warm(llama, folder, KEPT, "kept")
    kept = entries(folder)
    started = time.monotonic()
    warm(llama, folder, TEXTS, "report")
    seconds = 1.5 * (time.monotonic() - started)
    forget(folder)
    for _ in tally.rounds(sized(10, 300)):
        killed = rng.random() < 0.7
        times = Counters(("claimed", "forgotten"))
        warmer = fork(partial(warm_and_record, llama, folder, times))
        time.sleep(rng.uniform(0.0, seconds))
        forgetter = fork(partial(forget_and_record, folder, times))
        if killed:
            time.sleep(rng.uniform(0.0, seconds) * rng.choice((0.1, 1.0)))
        statuses = [kill(warmer) if killed else wait(warmer), wait(forgetter)]
        if not set(statuses) <= {0, -signal.SIGKILL if killed else 0}:
            tally.errors.append(f"processes ended with {statuses}")
        if 0 < times.total("claimed") < times.total("forgotten"):
            tally.note("forgotten after the job had begun")
            if report_is_there(folder):
                tally.errors.append("the document is back, and its job began before it was forgotten")
        check(tally, folder, kept)
        forget(folder)  # a job that began after the forgetting has its document back
        if entries(folder) != kept:
            tally.errors.append(f"{len(entries(folder) - kept)} entries stay, {len(kept - entries(folder))} lost")
    tally.finish()


def check(tally: Tally, folder: Path, kept: set[str]) -> None:
    """Check that every entry has an owner after garbage collection, and that fsck named those that had none."""
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        owned = {address for name in sources.names() for address in sources.addresses(name)}
        stored = entries(folder)
        left = stored - owned - kept
        tally.reads += len(stored)
        tally.note("trials after which the document is there", "report" in sources.names())
        tally.note("entries without an owner", len(left))
        if set(fsck(store).ownerless) != left:
            tally.errors.append(f"fsck does not name {left - set(fsck(store).ownerless)}")
        sources.garbage.collect_ownerless()
        if entries(folder) - owned - kept:
            tally.errors.append("an entry without an owner stays")


def warm_and_record(lm: LanguageModel, folder: Path, times: Counters) -> None:
    """Warm the document, and record when the list of documents had it."""
    add = Sources.add

    def recorded(sources: Sources, source: str, keys: Iterable[ChunkKey], **options: int | None) -> None:
        add(sources, source, keys, **options)
        times.add(0, "claimed", time.monotonic_ns())

    Sources.add = recorded  # type: ignore[method-assign] # this process ends soon
    warm(lm, folder, TEXTS, "report")


def forget_and_record(folder: Path, times: Counters) -> None:
    """Forget the document, and record when that began."""
    times.add(0, "forgotten", time.monotonic_ns())
    forget(folder)


def report_is_there(folder: Path) -> bool:
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        return "report" in sources.names()


TRIAL_SECONDS = 60
"""Most seconds that forgetting a document may take; it waits for other jobs."""


class RunningLibrary:
    """A library of which one document after another is forgotten beside processes that use it.

    `forgotten` has for each document the time in ns from which on no request that begins may find it.
    """

    def __init__(self, folder: Path, documents: int) -> None:
        self.documents, self.folder = folder / "documents", folder / "library"
        self.config = EngineConfig(model="tiny", device="cpu")
        self.forgotten = Counters([str(number) for number in range(documents)])
        self.found = Counters(("requests", "found", "found 1 s later", "number"))
        self.documents.mkdir()
        for number in range(3):
            (self.documents / f"kept-{number}.md").write_text(PASSAGES[number])

    def path(self, number: int) -> Path:
        return self.documents / f"{number}.md"

    def text(self, number: int) -> str:
        return f"Report {number}. {PASSAGES[number % 3]} So said number {number * 7919 % 1009}."

    def note(self, begun: int, sources: Iterable[str]) -> None:
        """Count what a request has found that had been forgotten when it began."""
        self.found.add(0, "requests")
        for source in sources:
            name = Path(source).stem
            since = self.forgotten.total(name) if name.isdigit() else 0
            if 0 < since < begun:
                self.found.add(0, "found")
                self.found.add(0, "found 1 s later", begun - since > 1e9)

    def question(self) -> str:
        return f"What does report {self.found.total('number')} say?"

    def warm(self) -> None:
        """`qcfuse warm run`, again and again."""
        while True:
            self.warm_once()
            time.sleep(0.05)

    def warm_once(self) -> None:
        sys.stdout = sys.stderr = Path("/dev/null").open("w")  # noqa: SIM115 # this process ends soon
        until_free(
            lambda: run_warming(
                self.folder, self.config, CorpusOptions(paths=(self.documents,)), JobOptions(), as_json=True
            )
        )

    def serve(self, *, keep: bool) -> None:
        """`qcfuse serve --retrieve`, with a client that asks again and again."""
        with open_library_store(self.folder) as store, open_engine(store, self.config) as engine:
            settings = ServerSettings(name="tiny", retrieve=True, editable=True, keep=keep)
            server = LibraryServer(engine, self.folder, settings, open_passages(self.folder, None))

            async def asking() -> None:
                async with client(server._app, host="127.0.0.1") as http:
                    while True:
                        begun, asked = time.monotonic_ns(), [{"role": "user", "content": self.question()}]
                        body = (await ask(http, messages=asked, documents="library", max_tokens=1)).json()
                        listed = (await http.get("/v1/documents")).json()["data"]
                        self.note(begun, [document["source"] for document in (*body["documents"], *listed)])
                        await asyncio.sleep(0.02)

            asyncio.run(asking())

    def chat(self) -> None:
        """`qcfuse chat`."""
        with open_session(self.folder, self.config, AskOptions()) as session:
            while True:
                begun = time.monotonic_ns()
                asked = self.question()
                answer = session.answer(asked, session.retrieve(asked), max_new_tokens=1)
                answer.stream.result()
                self.note(begun, [passage.source for passage in answer.passages])
                time.sleep(0.02)

    def replica(self) -> None:
        """An engine with a memory tier and finished requests, as on Ray: it is given the passages' texts."""
        with (
            open_library_store(self.folder) as store,
            FusionEngine.load(
                self.config, store=store, method="qcfuse", check=False, verdict="ignore", prefix_bytes=1 << 26
            ) as engine,
        ):
            while True:
                begun, number = time.monotonic_ns(), self.found.total("number")
                prompt = engine.prompt(self.question(), [PASSAGES[0], self.text(number)])
                report = engine.generate(prompt, SamplingParams(max_new_tokens=1)).report
                hits = [lookup.hit for lookup in report.lookups if lookup.role == "chunk"]
                self.note(begun, [f"{number}.md"] if hits[1:] == [True] else [])
                time.sleep(0.02)

    def forget(self, number: int, way: str) -> None:
        """Delete a file, and forget it by a command, at another server, or by warming its folder again.

        The job that warms in the background may have seen before that the file is gone.
        """
        source = str(self.path(number))
        self.path(number).unlink()
        if way == "command":
            sys.stdout = Path("/dev/null").open("w")  # noqa: SIM115 # this process ends soon
            try:
                until_free(lambda: store_commands.forget(self.folder, source))
            except QCFuseError as error:
                if "there is no document" not in str(error):
                    raise
        elif way == "server":
            with open_library_store(self.folder) as store, open_engine(store, self.config) as engine:
                server = LibraryServer(
                    engine, self.folder, ServerSettings(name="tiny", editable=True), open_passages(self.folder, None)
                )

                async def delete() -> int:
                    async with client(server._app, host="127.0.0.1") as http:
                        return (await http.delete(f"/v1/documents/{source}")).status_code

                while (status := asyncio.run(delete())) == 409:
                    time.sleep(0.01)
                assert status in (200, 404), status
        else:
            self.warm_once()
        self.forgotten.add(0, str(number), time.monotonic_ns())

    def left(self) -> list[str]:
        """Return where forgotten documents still are: the record of documents, the passages, the last job."""
        gone = {n for n in range(len(self.forgotten._names)) if self.forgotten.total(str(n))}
        with open_store_and_sources(self.folder) as (_, sources):
            names = {f"sources.db: {name}": name for name in sources.names()}
        names |= {f"passages: {p.source}": p.source for p in PassageIndex.load(index_folder(self.folder)).passages}
        record = json.loads((self.folder / "warm.json").read_text())
        names |= {f"warm.json: {path}": path for path in record["arguments"]["paths"]}
        return [where for where, name in names.items() if Path(name).stem.isdigit() and int(Path(name).stem) in gone]


def until_free(job: Callable[[], object]) -> None:
    """Do a job as soon as no other job has the library."""
    while True:
        try:
            job()
            return
        except Busy:
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forget_beside_every_running_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = sized(6, 300)
    tally, rng, library = Tally("forget x serve, keep, chat, warm, replica x kill"), random.Random(2), None
    tokenizer = build_tokenizer(lambda: [*PASSAGES, "What does report 0123456789 say?", "So said number"])
    lm = LanguageModel.wrap(build_model("llama", max_position_embeddings=4096), tokenizer, name="tiny")
    embedder = Embedder(embedder_source(DEFAULT_EMBEDDER))
    monkeypatch.setattr(LanguageModel, "load", lambda *given, **options: lm)
    for module in ("qcfuse_rag.library.retriever.Embedder", "qcfuse_rag.cli.warm.Embedder"):
        monkeypatch.setattr(module, lambda name: embedder)
    monkeypatch.setattr(idle_warming, "IDLE_S", 0.01)
    library = RunningLibrary(tmp_path, trials)
    assert wait(fork(library.warm_once)) == 0
    roles = {
        "serve": partial(library.serve, keep=False),
        "serve --keep": partial(library.serve, keep=True),
        "chat": library.chat,
        "replica": library.replica,
        "warm": library.warm,
    }
    running = {name: fork(role) for name, role in roles.items()}
    for number in tally.rounds(trials):
        library.found.add(0, "number", number - library.found.total("number"))
        if number % 3 == 0:
            for other in range(number, number + 3):
                library.path(other).write_text(library.text(other))
            assert wait(fork(library.warm_once)) == 0
        time.sleep(rng.uniform(0.0, 0.3))
        forgetter = fork(partial(library.forget, number, rng.choice(("command", "server", "warm"))))
        for name in rng.sample(sorted(roles), rng.choice((0, 1, 1, 2))):
            time.sleep(rng.uniform(0.0, 0.1))
            status = kill(running[name])
            tally.note(f"{name} killed")
            if status != -signal.SIGKILL:
                tally.errors.append(f"{name} had ended with {status}")
            running[name] = fork(roles[name])
        if wait(forgetter, most_seconds=TRIAL_SECONDS) != 0:
            tally.errors.append(f"forgetting {number} failed")
        tally.errors += library.left()
    time.sleep(3.0)  # for what a request of before keeps when nothing else is asked
    for name, child in running.items():
        if kill(child) != -signal.SIGKILL:
            tally.errors.append(f"{name} has ended by itself")
    tally.errors += library.left()
    with open_store_and_sources(library.folder) as (store, sources):
        sources.garbage.collect_ownerless()
        engine = make_engine(lm, store)
        owned = {address for name in sources.names() for address in sources.addresses(name)}
        stay = {entry.address for entry in store.entries()} - owned
        if len(stay) > 1:  # the system prefix has no owner
            tally.errors.append(f"{len(stay) - 1} entries without an owner stay")
        engine.corpus.close()
    for name in ("requests", "found", "found 1 s later"):
        tally.note(name, library.found.total(name))
    tally.reads = library.found.total("requests")
    if library.found.total("found 1 s later"):
        tally.errors.append("something was found that had been forgotten")
    tally.finish()
