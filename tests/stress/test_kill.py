"""kill -9 at any moment, while entries are written, evicted, quarantined, repaired or warmed, loses at most the last.

Afterwards nothing that is read is wrong, the folder is within its limit without anybody's help, and one `fsck` leaves
index and files agreeing.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, LanguageModel, MemoryStore
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.key import FRAMED, ChunkKey
from qcfuse_rag.store.testing import example_key
from tests.stress.campaign import Tally, sized
from tests.stress.content import chunk_of, files_of, wrong_bytes
from tests.stress.victim import NUMBERS, churn, killed_after, warming
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES

LIMIT_BYTES = 700_000
TEXTS = [f"{PASSAGES[index % 3]} Page {index}. {'More. ' * (7 * index % 40)}" for index in range(10)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_while_putting_and_evicting(tmp_path: Path) -> None:
    rng, tally = random.Random(0), Tally("kill -9 while putting, evicting, quarantining, repairing")
    expected = {example_key(number): chunk_of(number) for number in range(NUMBERS)}
    for trial in range(sized(15, 400)):
        record = killed_after(rng.uniform(0.0, 0.2), churn(tmp_path, LIMIT_BYTES, seed=trial))
        tally.trials += 1
        tally.note("steps", record.steps)
        tally.note(f"killed in {record.last}")
        tally.wrong_bytes += record.wrong
        if record.last == "failed":
            tally.errors.append(f"trial {trial}: the process failed before it was killed")
        recovers(tmp_path, LIMIT_BYTES, expected, example_key(trial % NUMBERS), tally)
    assert tally.notes["steps"] > 3 * tally.trials, "the processes were killed before they did anything"
    tally.finish()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_while_warming(tmp_path: Path, llama: LanguageModel) -> None:
    rng, tally = random.Random(1), Tally("kill -9 while warming a model's passages")
    expected = warmed(llama)
    limit = int(0.6 * sum(chunk.nbytes + 40_000 for chunk in expected.values()))
    for _ in range(sized(8, 150)):
        record = killed_after(rng.uniform(0.02, 0.4), warming(llama, tmp_path, limit, TEXTS))
        tally.trials += 1
        tally.note(f"killed in {record.last}")
        if record.last == "failed":
            tally.errors.append("the process failed before it was killed")
        recovers(tmp_path, limit, expected, next(iter(expected)), tally)
    with DiskStore(tmp_path, 10 * limit) as store:
        summary = make_engine(llama, store).warm(TEXTS, batch_tokens=1)
        assert summary.warmed > 0
        assert summary.warmed + summary.present == len(TEXTS)
    tally.finish()


def warmed(lm: LanguageModel) -> dict[ChunkKey, ChunkKV]:
    """Return what warming must store, computed where nothing is killed."""
    engine = make_engine(lm, MemoryStore())
    engine.warm(TEXTS, batch_tokens=1)
    keys = [engine.corpus.keys(engine.prompts.chunk_ids(text), [FRAMED])[0] for text in TEXTS]
    found = {key: engine.store.get(key) for key in keys}
    return {key: chunk for key, chunk in found.items() if isinstance(chunk, ChunkKV)}


def recovers(folder: Path, limit: int, expected: dict[ChunkKey, ChunkKV], again: ChunkKey, tally: Tally) -> None:
    """Check a store whose process was killed and count what is wrong with it; `again` can be put again."""

    def check(condition: bool, what: str) -> None:
        if not condition:
            tally.errors.append(f"trial {tally.trials}: {what}")

    before = sum(size for path, size in files_of(folder).items() if path.suffix != ".json")
    check(before <= limit, f"{before:,} bytes of {limit:,}")
    with DiskStore(folder, limit) as store:
        check(store.health()[0].ok, f"health: {store.health()[0].problems}")
        for key, chunk in expected.items():
            found = store.get(key)
            if isinstance(found, Miss):
                check(found.reason == "absent", f"a chunk is gone: {found.reason}")
            else:
                tally.reads += 1
                tally.wrong_bytes += wrong_bytes(found, to_format(chunk, found.kv_dtype))
        first, second = fsck(store), fsck(store)
        tally.note("bytes taken back", first.reclaimed_bytes)
        check(not first.damaged, f"damaged: {first.damaged}")
        check(second.clean, f"not clean after fsck: {second}")
        check(not list((folder / "tmp").iterdir()), "files left in tmp")
        sizes = sum(size for path, size in files_of(folder).items() if path.suffix == ".kv")
        check(sizes == store.quota.index.size(), f"files take {sizes:,}, the index says {store.quota.index.size():,}")
        check(sizes <= limit, f"{sizes:,} bytes of {limit:,} after fsck")
        store.put(again, expected[again])
        found = store.get(again)
        tally.reads += 1
        tally.wrong_bytes += wrong_bytes(found, to_format(expected[again], found.kv_dtype))
