"""`POST /v1/rerank` and `/rerank`: order a client's documents, in the form that Cohere, Jina and llama-server share.

https://docs.cohere.com/reference/rerank
https://jina.ai/reranker
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.server.backend import Backend
from qcfuse_rag.server.bodies import JsonBodies, error_response, run_while_connected
from qcfuse_rag.server.protocol.failures import Failure, unknown_model
from qcfuse_rag.server.protocol.generation_request import MAX_DOCUMENTS, FailFastList, refuse_more

MAX_DOCUMENT_TOKENS = 1 << 17
"""Most tokens of all documents of a request: those that are not stored are computed."""

AT_ONCE = 16
"""Documents to score between two looks whether the client is still there."""


def _text(document: Any) -> Any:
    return document.get("text", document) if isinstance(document, dict) else document


class RerankRequest(BaseModel):
    """The body of a request; a document is a text or an object with a `text`."""

    model_config = ConfigDict(extra="ignore")

    query: str
    documents: FailFastList[Annotated[str, BeforeValidator(_text)]] = Field(min_length=1)
    model: str | None = None
    top_n: int | None = Field(default=None, ge=1, strict=True)
    return_documents: bool | None = None


def rerank_routes(backend: Backend, bodies: JsonBodies) -> list[Route]:
    """Return the routes; requests are answered one at a time."""
    jobs = CapacityLimiter(1)

    async def rerank(request: Request) -> Response:
        asked = await bodies.read(request, RerankRequest)
        if asked.model and asked.model != backend.name:
            return error_response(unknown_model(asked.model, backend.name))
        engine = backend.engine
        if engine is None:
            return error_response(Failure(404, "replicas on Ray do not rerank: serve without --ray"))
        refuse_more(MAX_DOCUMENTS, asked.documents, "documents")
        found = await run_while_connected(partial(reranked, engine, asked), request, jobs)
        return JSONResponse({"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": backend.name} | found)

    return [Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")]


def reranked(engine: FusionEngine, asked: RerankRequest, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Return the results, best first, and their usage; `stopped` says whether nobody waits for them any more.

    Raises:
        InvalidSetting: if the query has no text, or the documents have too many tokens.
        PromptTooLong: if a document with the query exceeds the context window.
    """
    texts, relevance = asked.documents, list[float]()
    tokens = sum(len(engine.prompts.tokens.ids(text)) for text in texts)
    if tokens > MAX_DOCUMENT_TOKENS:
        message = f"the documents have {tokens:,} tokens, and at most {MAX_DOCUMENT_TOKENS:,} are allowed; send fewer"
        raise InvalidSetting(message, "documents")
    prompt_tokens = rows = 0
    for start in range(0, len(texts), AT_ONCE):
        if stopped():
            break
        found = engine.rerank(asked.query, texts[start : start + AT_ONCE])
        relevance += found.relevance
        prompt_tokens, rows = prompt_tokens + found.prompt_tokens, rows + found.rows
    best = sorted(range(len(relevance)), key=lambda index: -relevance[index])[: asked.top_n]
    shown = [{"document": {"text": text}} if asked.return_documents else {} for text in texts]
    return {
        "results": [{"index": index, "relevance_score": relevance[index], **shown[index]} for index in best],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens - rows},
        },
    }
