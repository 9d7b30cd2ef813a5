"""What HTTP clients see of passages that could not be read."""

from __future__ import annotations

import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.key import BLIND, ChunkKey
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES
from tests.support.serving import ask, serving

REASONS = ("remote redis cannot be reached: Error 111 connecting to 10.1.2.3:6399", "cannot be read: [Errno 5] /srv/kv")
SECRETS = ("10.1.2.3", "/srv/kv")


class Troubled(MemoryStore):
    """A store that misses every chunk, with alternating reasons."""

    asked = 0

    def get(self, key: ChunkKey) -> Miss:
        """Return a miss with the next reason."""
        self.asked += 1
        return Miss(REASONS[self.asked % len(REASONS)])


async def test_clients_are_told_the_reason_and_the_log_the_rest(
    llama: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(make_engine(llama, Troubled())) as http:
        response = await ask(http)
    report = response.json()["fusion"]
    assert {lookup["reason"] for lookup in report["lookups"]} == {"remote redis cannot be reached", "cannot be read"}
    assert report["fallback"] == "3 of 3 passages computed in full: cannot be read; remote redis cannot be reached"
    assert not any(secret in response.text for secret in SECRETS)
    assert all(secret in caplog.text for secret in SECRETS)


async def test_what_is_not_stored_is_told_as_it_is(engine: FusionEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.warm(PASSAGES[:1], bases=[BLIND])
    async with serving(engine) as http:
        report = (await ask(http)).json()["fusion"]
    assert report["fallback"] == "3 of 3 passages computed in full: absent; absent: stored blind, not framed"
    assert not caplog.records


async def test_clients_are_not_told_where_a_manifest_is(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*text: object) -> None:
        raise StoreError("cannot open /srv/kv/sources.db: unable to open database file")

    monkeypatch.setattr(engine.corpus.index, "find", away)
    async with serving(engine) as http:
        response = await ask(http, documents=None)
    assert response.json()["fusion"]["fallback"] == "no passages were looked for"
    assert "/srv/kv/sources.db" in caplog.text
