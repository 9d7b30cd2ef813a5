"""The tokens of recorded chat requests that caches of prefixes and of passages would reuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from typer import Argument

from benchmarks.studies.conversations import BLOCK_TOKENS
from benchmarks.studies.runner import StudyResult, StudyRun, load_engine
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.prefix_cache import common_length
from qcfuse_rag.library.readers import TextSplitting
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.system_prefix import system_prefix
from qcfuse_rag.server.protocol.chat_request import ChatRequest

DOCUMENT = r"\[Document \d+: (.*?)\]\n\n(?=\[Document \d+: |Question: )"
"""Matches the documents in the messages of the public trace glbyktjys/NonPrefix_LMCacheDataset."""

GAP = 4
"""Most tokens, such as blank lines, between two passages that stand one behind the other in a document."""


@dataclass(slots=True)
class ReuseCounts:
    """Tokens of requests.

    Attributes:
        requests: number of requests.
        tokens: their prompts' tokens.
        prefix: tokens that an earlier request of the same session begins with.
        system: tokens behind these of a system prefix that an earlier session has.
        passages: tokens behind these of warmed passages.
        blocks: the same if passages are found in whole blocks only.
    """

    requests: int = 0
    tokens: int = 0
    prefix: int = 0
    system: int = 0
    passages: int = 0
    blocks: int = 0

    def add(self, other: ReuseCounts) -> None:
        """Add the counts of further requests."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def trace(
    run: StudyRun,
    folder: Annotated[Path, Argument(help="Folder of recorded sessions, a JSON lines file for each.")],
    model: str | None = None,
    passage_tokens: int = 384,
) -> StudyResult:
    """Count what the requests of recorded sessions would reuse, in the tokens of a model; nothing is computed.

    A session is a file of lines such as `{"type": "request", "body": {"messages": [...], "tools": [...]}}`; what its
    name has before the first underscore is its corpus. The documents in its messages are warmed beforehand, split as
    `qcfuse warm run` splits them, and found as the server finds them. Each request is compared with all earlier ones of
    its session, without a limit of memory. Blocks are of 256 tokens, counted from the beginning of a document.
    """
    sessions = sorted(folder.glob("*.jsonl"))
    if not sessions:
        raise QCFuseError(f"there is no session in {folder}")
    by_corpus: dict[str, ReuseCounts] = {}
    with load_engine(model) as engine:
        engine.prompts = replace(engine.prompts, context_tokens=None)
        splitting, systems = TextSplitting(engine.lm.tokenizer, passage_tokens), set[tuple[int, ...]]()
        for session in run.track(sessions):
            requests = list(_requests(session))
            _recognise(engine, splitting, requests)
            counts = by_corpus.setdefault(session.name.partition("_")[0], ReuseCounts())
            counts.add(_count(engine, requests, systems))
        name = engine.lm.name
    total = ReuseCounts()
    for counts in by_corpus.values():
        total.add(counts)
    rows = {**by_corpus, "all": total}
    data = {"model": name, "sessions": len(sessions), "corpora": {key: asdict(row) for key, row in rows.items()}}
    return StudyResult(data, [_table(rows)])


def _requests(session: Path) -> Iterator[ChatRequest]:
    """Yield the chat requests of a session."""
    with session.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["type"] == "request" and record["body"].get("messages"):
                body: dict[str, Any] = record["body"]
                yield ChatRequest.model_validate({name: body[name] for name in ("messages", "tools") if name in body})


def _recognise(engine: FusionEngine, splitting: TextSplitting, requests: Sequence[ChatRequest]) -> None:
    """Let the engine recognise the passages of the documents in some messages, as if they were warmed."""
    texts = [message.text for request in requests for message in request.messages if message.role == "user"]
    documents = {document for text in set(texts) for document in re.findall(DOCUMENT, text, re.DOTALL)}
    passages = {passage for document in documents for passage in splitting.split(document, markdown=False)}
    bases = engine.corpus.bases[:1]
    keyed = [(text, engine.corpus.keys(engine.prompts.chunk_ids(text), bases)) for text in sorted(passages)]
    engine.corpus.signatures.add((text, keys[0]) for text, keys in keyed if keys)


def _count(engine: FusionEngine, requests: Sequence[ChatRequest], systems: set[tuple[int, ...]]) -> ReuseCounts:
    """Count the reusable tokens of a session, and note its system prefixes in `systems`."""
    counts, earlier, own = ReuseCounts(), list[NDArray[np.int64]](), set[tuple[int, ...]]()
    for request in requests:
        prompt = request.make_prompt(engine, None)
        ids = np.array(prompt.ids, dtype=np.int64)
        prefix = max((common_length(ids, other) for other in earlier), default=0)
        tools = request.to_response_format().visible_tools
        system = system_prefix(engine.prompts, [message.turn() for message in request.messages], tools).ids
        exact = max(prefix, len(system)) if system in systems else prefix
        runs = list(_stored_runs(prompt, exact))
        counts.add(
            ReuseCounts(
                requests=1,
                tokens=len(ids),
                prefix=prefix,
                system=exact - prefix,
                passages=sum(tokens for tokens, _ in runs),
                blocks=sum(length // BLOCK_TOKENS * BLOCK_TOKENS for _, length in runs),
            )
        )
        earlier.append(ids)
        own.add(system)
    systems |= own
    return counts


def _stored_runs(prompt: Prompt, start: int) -> Iterator[tuple[int, int]]:
    """Yield for each run of adjacent passages the tokens of passages and the length of the run, both behind `start`."""
    tokens, first, end = 0, start, start
    for span in prompt.chunks:
        if span.start > end + GAP and tokens:
            yield tokens, end - first
            tokens = 0
        if span.stop > start:
            if not tokens:
                first = max(start, span.start)
            tokens += span.stop - max(start, span.start)
            end = span.stop
    if tokens:
        yield tokens, end - first


def _table(rows: dict[str, ReuseCounts]) -> Table:
    table = Table(
        "corpus", "requests", "tokens", "prefix", "system prefix", "passages", "all reused", "prefix and blocks"
    )
    for name, row in rows.items():
        shares = [part / row.tokens for part in (row.prefix, row.system, row.passages)]
        table.add_row(
            name, str(row.requests), f"{row.tokens:,}", *(f"{share:.1%}" for share in shares), f"{sum(shares):.1%}",
            f"{(row.prefix + row.blocks) / row.tokens:.1%}",
        )  # fmt: skip
    return table
