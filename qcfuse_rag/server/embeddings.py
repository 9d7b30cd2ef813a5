"""`POST /v1/embeddings`: OpenAI's embeddings, by the embedding model of the served library.

https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from anyio import CapacityLimiter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.library.documents import ServedLibrary
from qcfuse_rag.server.bodies import JsonBodies, error_response, long_json_response, run_while_connected
from qcfuse_rag.server.protocol.failures import Failure, unknown_model
from qcfuse_rag.server.protocol.generation_request import FailFastList, refuse_more

MAX_TEXTS = 2048
"""Most texts of a request, as in OpenAI's API."""


class EmbeddingsRequest(BaseModel):
    """The body of a request for embeddings: as numbers, or as float32 in little-endian order as base64."""

    model_config = ConfigDict(extra="ignore")

    input: str | FailFastList[str | int | FailFastList[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, strict=True)

    @property
    def texts(self) -> list[str]:
        """The texts.

        Raises:
            InvalidSetting: if there are none, too many or other things, or a field is not supported.
        """
        texts = [self.input] if isinstance(self.input, str) else self.input
        if self.dimensions is not None:
            raise InvalidSetting("dimensions is not supported; omit it", "dimensions", "unsupported_parameter")
        if not texts or "" in texts:
            raise InvalidSetting("input has no text, or an empty one", "input")
        refuse_more(MAX_TEXTS, texts, "input")
        if not all(isinstance(text, str) for text in texts):
            raise InvalidSetting(
                "input has to be text; token ids are not supported (LangChain's OpenAIEmbeddings sends text with "
                "check_embedding_ctx_length=False)",
                "input",
            )
        return [str(text) for text in texts]


def embedding_route(library: ServedLibrary | None, bodies: JsonBodies) -> Route:
    """Return the route; without a library every request is refused."""
    jobs = CapacityLimiter(1)

    async def embed(request: Request) -> Response:
        embeddings_request = await bodies.read(request, EmbeddingsRequest)
        if library is None:
            refusal = "there is no embedding model here: serve a library of `qcfuse warm run`, without --ray"
            return error_response(Failure(404, refusal, "model_not_found", "model"))
        wanted, model = embeddings_request.model, library.index.embedder
        if wanted and wanted != model:
            return error_response(unknown_model(wanted, model))
        work = partial(embedded, library, embeddings_request.texts, embeddings_request.encoding_format)
        return await long_json_response(await run_while_connected(work, request, jobs))

    return Route("/v1/embeddings", embed, methods=["POST"])


def embedded(
    library: ServedLibrary, texts: list[str], encoding_format: str | None, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Return the body of a response; `stopped` says whether nobody waits for it any more."""
    vectors, tokens = library.embed(texts, stopped)
    written: list[Any] = vectors.tolist()
    if encoding_format == "base64":
        written = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding} for index, embedding in enumerate(written)
        ],
        "model": library.index.embedder,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
