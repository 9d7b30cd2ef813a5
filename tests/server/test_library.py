"""A server over a library: it retrieves what `qcfuse ask` retrieves, and clients may add and remove documents."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, SchedulerSettings, make_method
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.errors import Busy, Closed, StoreError
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.library.embedder import Embedder
from qcfuse_rag.library.index import DEFAULT_EMBEDDER, PassageIndex, RetrievalLog, embedder_source
from qcfuse_rag.library.readers import is_markdown
from qcfuse_rag.library.retriever import Retriever
from qcfuse_rag.server import documents as document_jobs
from qcfuse_rag.server import idle_warming
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.auth_middleware import MAX_ALL_BODIES_BYTES
from qcfuse_rag.server.backend import CLIENTS, EngineBackend
from qcfuse_rag.server.documents import Jobs, progress_stream
from qcfuse_rag.server.idle_warming import IdleWarming
from qcfuse_rag.store.factory import open_store
from tests.support.cli import Run
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.library import HARBOUR, stored
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import JSON, ask, chunks_of, client, error, run_server, serving, until

NAMES = ["ferry.md", "hull.md", "mill.md"]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = build_tokenizer(lambda: [*PASSAGES, HARBOUR, QUESTION])
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), tokenizer)


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder(embedder_source(DEFAULT_EMBEDDER))


@pytest.fixture
def engine(lm: LanguageModel) -> FusionEngine:
    engine = make_engine(lm, MemoryStore(), method=make_method("qcfuse"))
    engine.warm(PASSAGES, sources=NAMES)
    return engine


@pytest.fixture
def folder(tmp_path: Path, embedder: Embedder) -> Path:
    index = PassageIndex(DEFAULT_EMBEDDER)
    index.replace({name: [text] for name, text in zip(NAMES, PASSAGES, strict=True)}, embedder.windows(PASSAGES))
    index.save(tmp_path / "passages")
    return tmp_path / "passages"


@pytest.fixture
def library(folder: Path, engine: FusionEngine) -> ServedLibrary:
    return ServedLibrary(Retriever.open(folder), engine, count=2)


async def add(http: httpx.AsyncClient, documents: dict[str, str], **fields: Any) -> httpx.Response:
    listed = [{"source": source, "text": text} for source, text in documents.items()]
    return await http.post("/v1/documents", content=json.dumps({"documents": listed, **fields}), headers=JSON)


async def test_what_is_retrieved_is_answered_from_and_named(
    http: httpx.AsyncClient, engine: FusionEngine, folder: Path
) -> None:
    body = (await ask(http, documents="library")).json()
    found = Retriever.open(folder).retrieve(QUESTION, 2)
    expected = engine.generate(
        engine.prompt(QUESTION, [passage.text for passage in found]), SamplingParams(max_new_tokens=12)
    )
    assert body["choices"][0]["message"]["content"] == expected.text
    assert [document["source"] for document in body["documents"]] == [passage.source for passage in found]
    assert [set(document) for document in body["documents"]] == [{"source", "title", "score"}] * 2
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stream_names_the_documents_first(http: httpx.AsyncClient) -> None:
    whole = (await ask(http, documents="library")).json()
    chunks = chunks_of(await ask(http, documents="library", stream=True))
    assert chunks[0]["documents"] == whole["documents"]
    assert not any("documents" in chunk for chunk in chunks[1:])


@pytest.mark.slow
async def test_a_follow_up_is_retrieved_for_behind_the_question_before_it(http: httpx.AsyncClient) -> None:
    follow_up = {"role": "user", "content": "And when?"}
    scores = []
    for turns in ([follow_up], [{"role": "user", "content": "When does the council meet?"}, follow_up]):
        body = (await ask(http, documents="library", messages=turns)).json()
        scores.append({document["source"]: document["score"] for document in body["documents"]}.get("mill.md", 0.0))
    assert scores[1] > scores[0] + 0.1


async def test_a_server_that_retrieves_by_default_leaves_what_clients_give(
    engine: FusionEngine, library: ServedLibrary
) -> None:
    """Given documents, none, a conversation without a question, and passages that a client has retrieved itself."""
    own = [{"role": "user", "content": f'<source id="1">{PASSAGES[0]}</source>\n{QUESTION}'}]
    system = [{"role": "system", "content": "Say something."}]
    async with serving(engine, library=library, retrieve=True) as http:
        assert "documents" in (await ask(http, documents=None)).json()
        for changes in ({"documents": []}, {"documents": PASSAGES[:1]}, {"documents": None, "messages": system}):
            reply = await ask(http, **changes)
            assert (reply.status_code, "documents" in reply.json()) == (200, False)
        reply = (await ask(http, documents=None, messages=own)).json()
        assert "documents" not in reply
        assert [lookup["hit"] for lookup in reply["fusion"]["lookups"] if lookup["role"] == "chunk"] == [True]


async def test_a_request_without_documents_is_not_retrieved_for_unless_that_is_set(http: httpx.AsyncClient) -> None:
    assert "documents" not in (await ask(http, documents=None)).json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": "archive"}, "documents"),
        ({"documents": "library", "messages": [{"role": "system", "content": "x"}]}, "need a user's message"),
    ],
)
async def test_what_cannot_be_retrieved_is_refused(
    http: httpx.AsyncClient, changes: dict[str, Any], message: str
) -> None:
    response = await ask(http, **changes)
    assert (response.status_code, message in error(response)) == (400, True)


async def test_a_server_without_a_library_says_so(engine: FusionEngine) -> None:
    async with serving(engine) as http:
        response = await ask(http, documents="library")
        assert (response.status_code, "does not retrieve" in error(response)) == (400, True)
        for refused in (await add(http, {"a.md": "x"}), await http.delete("/v1/documents/a.md")):
            assert (refused.status_code, "--editable" in error(refused)) == (403, True)
        listed = await http.get("/v1/documents")
        assert (listed.status_code, "serve a library" in error(listed)) == (404, True)


async def test_documents_are_listed_by_short_names_with_their_passages(http: httpx.AsyncClient) -> None:
    listed = [{"source": name, "name": name, "passages": 1} for name in NAMES]
    assert (await http.get("/v1/documents")).json() == {"object": "list", "data": listed, "editable": True}
    await add(http, {"/docs/b.md": f"{HARBOUR}\n\n" * 40, "/docs/a/c.md": HARBOUR})
    await http.delete("/v1/documents/mill.md")
    documents = (await http.get("/v1/documents")).json()["data"]
    assert [(document["source"], document["name"]) for document in documents] == [
        ("/docs/a/c.md", "a/c.md"),
        ("/docs/b.md", "b.md"),
        ("ferry.md", "ferry.md"),
        ("hull.md", "hull.md"),
    ]
    assert documents[1]["passages"] > 1
    await add(http, {"b.md": HARBOUR})
    assert (await http.delete("/v1/documents/b.md")).json()["passages"] == 1, "a short name is taken too"
    assert (await http.delete("/v1/documents//docs/a/c.md")).json()["passages"] == 1


async def test_a_library_that_is_not_editable_is_listed_and_left_as_it_is(
    engine: FusionEngine, backend: EngineBackend, folder: Path
) -> None:
    library = ServedLibrary(Retriever.open(folder), engine, editable=False)
    async with client(make_app(backend, library=library)) as http:
        listed = (await http.get("/v1/documents")).json()
        assert (len(listed["data"]), listed["editable"]) == (3, False)
        for refused in (await add(http, {"a.md": "x"}), await http.delete("/v1/documents/mill.md")):
            assert (refused.status_code, "--editable" in error(refused)) == (403, True)
    assert len(PassageIndex.load(folder).passages) == 3


async def test_an_explanation_names_the_documents_that_were_retrieved(
    http: httpx.AsyncClient, library: ServedLibrary
) -> None:
    body = (await ask(http, documents="library", explain=True)).json()
    sections = [section for section in body["explanation"]["sections"] if section["role"] == "chunk"]
    names = [document["source"] for document in body["documents"]]
    assert [section["heading"] for section in sections] == [f"Passage {n}: {name}" for n, name in enumerate(names, 1)]
    texts = ["".join(text for _, text in section["pieces"]).strip() for section in sections]
    by_source = library.index.by_source()
    assert texts == [by_source[name][0] for name in names]


async def test_an_added_document_is_warm_and_retrieved(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    summary = (await add(http, {"harbour.md": HARBOUR})).json()
    assert (summary["documents"], summary["passages"], summary["warmed"] > 0) == (1, 1, True)
    assert HARBOUR in stored(engine)
    asked = [{"role": "user", "content": "Where does the harbour master live?"}]
    body = (await ask(http, documents="library", messages=asked)).json()
    assert body["documents"][0]["source"] == "harbour.md"
    assert body["fusion"]["fallback"] is None


async def test_adding_tells_the_progress_if_asked(http: httpx.AsyncClient) -> None:
    *steps, summary = chunks_of(await add(http, {"harbour.md": HARBOUR}, stream=True))
    assert steps[-1]["done"] == steps[-1]["total"] == summary["tokens"] > 0


def test_questions_are_retrieved_for_while_documents_are_added(
    library: ServedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, embed = list[int](), Embedder.__call__
    monkeypatch.setattr(
        Embedder,
        "__call__",
        lambda self, texts: together.append(len(texts)) or embed(self, texts),  # type: ignore[func-returns-value]
    )
    library.add({f"{number}.txt": f"{HARBOUR} {number}" for number in range(20)}, lambda done, total: None)
    assert together == [8, 8, 4]


def test_a_markdown_file_is_known_by_its_ending_in_capitals_too() -> None:
    assert [is_markdown(name) for name in ("a.md", "A.MD", "a.txt")] == [True, True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_job_that_waits_is_dropped_with_its_client_and_the_one_that_runs_is_not(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_jobs, "FORGET_WAIT_S", 0.1)
    jobs, go_on, begun, made = Jobs(), threading.Event(), list[int](), list[int]()

    def change(number: int) -> dict[str, Any]:
        begun.append(number)
        go_on.wait(20)
        made.append(number)
        return {}

    running, *waiting = [asyncio.ensure_future(jobs.run(partial(change, number))) for number in range(4)]
    await until(lambda: begun)
    for job in (running, *waiting[:2]):
        if stream:
            events = progress_stream(job, asyncio.Queue())
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.wait({reading})
            await events.aclose()
        else:
            job.cancel()
    with pytest.raises(Busy, match="being added"):
        await jobs.run(lambda: None, wait_s=0.1)
    go_on.set()
    assert (await waiting[2], made) == ({}, [0, 3])
    assert [job.cancelled() for job in waiting] == [True, True, False]


async def test_sixty_streams_of_8_mb_are_bounded_by_their_bytes_and_end_with_their_clients(
    backend: EngineBackend, library: ServedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_jobs, "FORGET_WAIT_S", 0.1)
    go_on, made = threading.Event(), list[int]()

    def change(documents: dict[str, str], progress: object) -> dict[str, Any]:
        made.append(len(documents))
        go_on.wait(60)
        return {}

    monkeypatch.setattr(library, "add", change)
    app = make_app(backend, library=library)
    long = json.dumps({"documents": [{"source": "a.md", "text": "x" * 8_300_000}], "stream": True}).encode()
    begun, left = list[dict[str, Any]](), asyncio.Event()

    async def ask_to_add() -> None:
        messages = [{"type": "http.request", "body": long}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await left.wait()
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                begun.append({"status": message["status"], **{name.decode(): v for name, v in message["headers"]}})

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(long)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/documents", "headers": headers, "query_string": b""}
        await app(scope, receive, send)

    asked = [asyncio.ensure_future(ask_to_add()) for _ in range(60)]
    await until(lambda: len(begun) == 60)
    assert [start["status"] for start in begun].count(200) == MAX_ALL_BODIES_BYTES // len(long) == 8
    assert all(start["retry-after"] for start in begun if start["status"] != 200)
    assert {start["status"] for start in begun} == {200, 429}
    left.set()
    done, _ = await asyncio.wait(asked, timeout=10)
    assert (len(done), made) == (60, [1]), "those that waited were dropped"
    async with client(app) as http:
        assert (await http.delete("/v1/documents/mill.md")).status_code == 409
        go_on.set()
        assert (await http.post("/v1/documents", content=long, headers=JSON)).status_code == 200


async def test_adding_ends_with_the_server(library: ServedLibrary, folder: Path) -> None:
    """Between the embedding of texts, and between batches."""
    steps = list[int]()

    def progress(done: int, total: int) -> None:
        steps.append(done)
        library.close()

    documents = {f"{number}.md": f"{HARBOUR} {number} " * 30 for number in range(6)}
    for _ in range(2):
        with pytest.raises(Closed, match="the server ends"):
            library.add(documents, progress)
    assert len(steps) == 1


async def test_adding_a_name_again_replaces_the_document(
    http: httpx.AsyncClient, engine: FusionEngine, folder: Path
) -> None:
    await add(http, {"ferry.md": HARBOUR})
    assert PassageIndex.load(folder).by_source()["ferry.md"] == [HARBOUR]
    assert PASSAGES[0] not in stored(engine)


async def test_a_removed_document_is_gone_and_others_stay(
    http: httpx.AsyncClient, engine: FusionEngine, folder: Path
) -> None:
    removed = (await http.delete("/v1/documents/mill.md")).json()
    assert (removed["caches"] > 0, removed["passages"]) == (True, 1)
    assert stored(engine) == {*PASSAGES[:2]}
    assert set(PassageIndex.load(folder).by_source()) == {"ferry.md", "hull.md"}
    body = (await ask(http, documents="library")).json()
    assert "mill.md" not in [document["source"] for document in body["documents"]]
    again = await http.delete("/v1/documents/mill.md")
    assert (again.status_code, "no document 'mill.md'" in error(again)) == (404, True)


async def test_a_log_that_cannot_be_written_leaves_the_index_that_is_on_disk(
    http: httpx.AsyncClient, library: ServedLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RetrievalLog, texts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RetrievalLog, "keep_only", full)
    response = await http.delete("/v1/documents/mill.md")
    assert (response.status_code, "cannot be written" in error(response)) == (500, True)
    assert "mill.md" not in library.index.by_source()
    assert library.index.by_source() == PassageIndex.load(folder).by_source()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"documents": []}, 400, "documents: List should have at least 1 item"),
        ({"documents": [{"source": "", "text": "x"}]}, 400, "documents.0.source"),
        ({"documents": [{"source": "a.md", "text": ""}]}, 400, "documents.0.text"),
        ({"documents": [{"source": "a.md", "text": " \n"}]}, 400, "a.md has no text"),
        ({"documents": [{"source": "a.md", "text": "x"}] * 2}, 400, "2 documents are named 'a.md'"),
        ({"documents": [{"source": "a.md", "text": "x"}] * 257}, 400, "documents has 257 entries, and at most 256"),
    ],
)
async def test_bad_additions_say_what_is_wrong(
    backend: EngineBackend, library: ServedLibrary, folder: Path, body: Any, status: int, message: str
) -> None:
    before = PassageIndex.load(folder).passages
    async with client(make_app(backend, library=library)) as http:
        response = await http.post("/v1/documents", content=json.dumps(body), headers=JSON)
    assert (response.status_code, message in error(response)) == (status, True), response.text
    assert PassageIndex.load(folder).passages == before


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_beside_another_job_nothing_changes(engine: FusionEngine, folder: Path, stream: bool) -> None:
    @contextmanager
    def busy() -> Iterator[None]:
        raise Busy("another job is warming")
        yield

    async with serving(engine, library=ServedLibrary(Retriever.open(folder), engine, changing=busy)) as http:
        added = await add(http, {"a.md": "x"}, stream=stream)
        assert "another job is warming" in added.text
        assert added.status_code == (200 if stream else 409)
        assert (await http.delete("/v1/documents/mill.md")).status_code == 409
    assert len(PassageIndex.load(folder).passages) == 3


@pytest.fixture
def keep(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[IdleWarming, EngineHandle]]:
    monkeypatch.setattr(idle_warming, "IDLE_S", 0.02)
    handle = EngineHandle.wrap(engine, SchedulerSettings())
    keep = IdleWarming(handle)
    yield keep, handle
    keep.close()


async def test_what_clients_send_and_the_store_lacks_is_warm_the_next_time(
    engine: FusionEngine, keep: tuple[IdleWarming, EngineHandle]
) -> None:
    backend = EngineBackend(keep[1], "tiny", idle_warming=keep[0])
    async with client(make_app(backend)) as http:
        first = (await ask(http, documents=[HARBOUR])).json()
        assert "absent" in first["fusion"]["fallback"]
        await until(lambda: keep[0].warmed == 1)
        assert (await ask(http, documents=[HARBOUR])).json()["fusion"]["fallback"] is None
    assert engine.forget(CLIENTS) > 0
    assert HARBOUR not in stored(engine)
    backend.close()


async def test_what_is_removed_while_it_waits_is_not_warmed(
    engine: FusionEngine, library: ServedLibrary, keep: tuple[IdleWarming, EngineHandle]
) -> None:
    """By this process, or by another one, which changes the index and the manifest and tells nobody."""
    warming, passage, (base,) = IdleWarming(keep[1], library), library.index.passages[0], engine.corpus.bases[:1]
    key = engine.corpus.keys(engine.prompts.chunk_ids(passage.text), [base])[0]
    engine.forget(passage.source)
    now = warming.generation()
    assert now is not None
    warming._warm(passage.text, "gone.md", now)
    with pytest.raises(StoreError, match="forgotten meanwhile"):
        warming._warm(passage.text, passage.source, now - 1)
    assert (warming.warmed, key in engine.store) == (0, False)
    warming._warm(passage.text, passage.source, now)
    assert (warming.warmed, key in engine.store) == (1, True)
    warming.close()


@pytest.mark.parametrize("client_sent", [False, True])
async def test_a_request_keeps_nothing_that_is_forgotten_during_its_answer(
    client_sent: bool, engine: FusionEngine, library: ServedLibrary, keep: tuple[IdleWarming, EngineHandle]
) -> None:
    """It was retrieved before the index changed, or sent before the clients' passages were forgotten."""
    source, began, go_on = CLIENTS if client_sent else NAMES[0], threading.Event(), threading.Event()
    engine.store.clear()
    warming, submit = IdleWarming(keep[1], library), keep[1].submit

    def slow(*given: Any, **rest: Any) -> Any:
        request = submit(*given, **rest)
        began.set()
        go_on.wait(20)
        return request

    keep[1].submit = slow  # type: ignore[method-assign]
    async with client(make_app(EngineBackend(keep[1], "tiny", library=library, idle_warming=warming))) as http:
        asking = asyncio.ensure_future(ask(http, documents=PASSAGES if client_sent else "library"))
        assert await asyncio.to_thread(began.wait, 20)
        other = PassageIndex.load(library._folder)
        other.remove({source})
        other.save(library._folder)
        engine.forget(source)
        go_on.set()
        assert (await asking).json()["fusion"]["fallback"]
        await until(lambda: not warming._waiting)
        assert source not in engine.corpus.open_sources().names()
        assert not {*PASSAGES[: 3 if client_sent else 1]} & stored(engine)
        keep[1].submit = submit  # type: ignore[method-assign]
        again = (await ask(http, documents="library")).json()
        assert source not in [document["source"] for document in again["documents"]]
    warming.close()


async def test_servers_follow_what_others_change_in_the_library(
    http: httpx.AsyncClient, library: ServedLibrary, engine: FusionEngine, folder: Path
) -> None:
    """Another server, `qcfuse store forget` and `qcfuse warm run` forget, replace and add documents."""
    other = ServedLibrary(Retriever.open(folder), engine, count=2)
    other.forget("ferry.md")
    other.add({"mill.md": HARBOUR, "new.md": PASSAGES[0]}, lambda done, total: None)
    listed = (await http.get("/v1/documents")).json()["data"]
    assert [document["source"] for document in listed] == ["hull.md", "mill.md", "new.md"]
    assert library.has(HARBOUR, "mill.md")
    found = library.retrieve_for(QUESTION, None)
    assert [passage.source for passage in found if passage.text == PASSAGES[0]] == ["new.md"]
    assert library.embed(["x"], lambda: False)[0].shape == (1, library.index.embeddings.shape[1])
    other.forget("new.md")
    assert "new.md" in library.short_names([*found])  # an answer in progress still names it


@pytest.mark.parametrize("when", ["waiting", "being warmed"])
async def test_what_clients_sent_can_be_forgotten_before_it_is_warm(
    when: str,
    engine: FusionEngine,
    library: ServedLibrary,
    keep: tuple[IdleWarming, EngineHandle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go_on, plain = threading.Event(), threading.Event(), engine.warm

    def slow(*given: Any, **rest: Any) -> Any:
        began.set()
        go_on.wait(20)
        return plain(*given, **rest)

    monkeypatch.setattr(engine, "warm", slow)
    warming = IdleWarming(keep[1], library)
    texts = [HARBOUR, f"{HARBOUR} Twice."]
    waiting = [(text, CLIENTS) for text in texts[: 1 if when == "being warmed" else 2]]
    warming.add(waiting, warming.generation())
    assert await asyncio.to_thread(began.wait, 20)
    async with client(make_app(EngineBackend(keep[1], "tiny"), library=library)) as http:
        forgotten = await http.delete("/v1/documents/clients")
    assert (forgotten.status_code, forgotten.json()["waiting"]) == (200, 1 if when == "being warmed" else 2)
    go_on.set()
    warming.close()
    assert warming.warmed == 0
    assert not {*texts} & {*stored(engine)}


async def test_without_that_setting_nothing_that_is_sent_is_kept(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    await ask(http, documents=[HARBOUR])
    assert HARBOUR not in stored(engine)


async def test_nothing_is_warmed_while_a_request_is_answered(
    engine: FusionEngine, keep: tuple[IdleWarming, EngineHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, plain = threading.Event(), engine.prefill_in_parts

    def slow(*given: Any, **rest: Any) -> Any:
        go_on.wait(20)
        return (yield from plain(*given, **rest))

    monkeypatch.setattr(engine, "prefill_in_parts", slow)
    answer = keep[1].scheduler.submit(engine.prompt(QUESTION), SamplingParams(max_new_tokens=1))
    keep[0].add([(HARBOUR, CLIENTS)], keep[0].generation())
    await asyncio.sleep(0.2)
    assert keep[0].warmed == 0
    go_on.set()
    answer.result(20)
    await until(lambda: keep[0].warmed == 1)


async def test_only_the_newest_wait_and_long_passages_are_left(
    engine: FusionEngine, keep: tuple[IdleWarming, EngineHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_warming, "LONGEST", 100)
    monkeypatch.setattr(idle_warming, "MAX_WAITING", 3)
    texts = [f"{HARBOUR} {number}." for number in range(6)]
    for waiting in ([f"{HARBOUR} " * 20, *texts], [f"{HARBOUR} " * 20]):
        keep[0].add([(text, CLIENTS) for text in waiting], keep[0].generation())
    await until(lambda: keep[0].warmed == 2 and not keep[0]._waiting)
    (base,) = engine.corpus.bases[:1]
    keys = [engine.corpus.keys(engine.prompts.chunk_ids(text), [base])[0] for text in texts]
    assert [key in engine.store for key in keys] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("option", ["--retrieve", "--editable"])
def test_a_store_without_passages_cannot_be_retrieved_from(
    run: Run, model_folder: str, tmp_path: Path, option: str
) -> None:
    code, _, said = run("serve", "--store", tmp_path, "--model", model_folder, option)
    assert (code, "no passages in" in said) == (1, True)


@pytest.mark.parametrize("option", ["--retrieve", "--editable", "--keep"])
def test_replicas_neither_retrieve_nor_change_documents(run: Run, tmp_path: Path, option: str) -> None:
    code, _, said = run("serve", "--store", tmp_path, "--ray", "auto", option)
    assert (code, f"Ray have no {option};" in said) == (1, True)


@pytest.mark.slow
@pytest.mark.enable_socket
def test_the_command_serves_what_it_warmed(run: Run, model_folder: str, corpus_file: Path, tmp_path: Path) -> None:
    """Warm, serve, retrieve, add, retrieve again and remove, over sockets; end by SIGTERM, as systemd does.

    What was counted since it began is written then.
    """
    library = tmp_path / "library"
    run.json("warm", "run", corpus_file, "--store", library, "--model", model_folder, "--device", "cpu")
    with open_store(library / "kv") as store:
        before = sum(entry.uses or 0.0 for entry in store.entries())
    with (
        run_server(library, "--retrieve", "--editable", "--keep") as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        asked = {"messages": [{"role": "user", "content": "Where does the harbour master live?"}], "max_tokens": 2}
        found = http.post("/v1/chat/completions", json=asked).json()["documents"]
        assert {document["source"] for document in found} == {str(corpus_file)}
        assert http.get("/v1/models", headers={"Host": "page.example"}).status_code == 421
        new = {"source": "new.md", "text": HARBOUR}
        assert http.post("/v1/documents", json={"documents": [new]}).json()["passages"] == 1
        found = http.post("/v1/chat/completions", json=asked).json()["documents"]
        assert found[0]["source"] == "new.md"
        assert http.delete("/v1/documents/new.md").json()["passages"] == 1
        long = json.dumps({"documents": [{"source": "long.md", "text": f"{HARBOUR} " * 40_000}], "stream": True})
        with (
            suppress(httpx.ReadTimeout),
            http.stream("POST", "/v1/documents", content=long, headers=JSON, timeout=1),
        ):
            time.sleep(1)
    with open_store(library / "kv") as store:
        assert sum(entry.uses or 0.0 for entry in store.entries()) > before
