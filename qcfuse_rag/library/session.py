"""Answer questions over an open library: its passages and its engine, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fusion.pipeline import answer_room
from qcfuse_rag.generation.decoding import Generation, TextStream
from qcfuse_rag.generation.response_format import Delta, ResponseFormat, ResponseReader
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.generation.tool_parsers import ParsedResponse
from qcfuse_rag.library.retriever import RetrievedPassage, Retriever
from qcfuse_rag.monitoring.explain import PassageOrigin, explain_html
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import Message


@dataclass(frozen=True, slots=True, eq=False)
class LibraryAnswer:
    """An answer over a library: the retrieved passages, best first, with short names, and the stream of its text.

    `documents` has each passage once for every document that has it.
    """

    passages: list[RetrievedPassage]
    documents: list[RetrievedPassage]
    names: list[str]
    places: list[str]
    prompt: Prompt
    stream: TextStream
    reader: ResponseReader

    def pieces(self) -> Iterator[Delta]:
        """Yield the answer's reasoning and text as they are written; only once."""
        for piece in self.stream:
            yield self.reader.push(piece)
        yield self.reader.finish(self.stream.result())[0]

    @property
    def response(self) -> ParsedResponse:
        """The whole answer, with its reasoning apart from its text."""
        return self.reader.finish(self.stream.result())[1]

    @property
    def sources(self) -> list[str]:
        """The short names of all documents with the retrieved passages, best first, each with its page or heading."""
        return list(dict.fromkeys(self.places))

    def to_dict(self, question: str) -> dict[str, Any]:
        """Wait for the answer and return it with its documents as JSON-compatible data, each fact once."""
        response, generation = self.response, self.stream.result()
        return {
            "question": question,
            "answer": response.content,
            "reasoning": response.reasoning or None,
            "documents": [asdict(document) for document in self.documents],
            "tokens": len(generation.ids),
            "finish_reason": generation.finish_reason,
            "decode_s": generation.decode_s,
            "healing": None if generation.healing is None else asdict(generation.healing),
            "report": generation.report.to_dict(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class LibrarySession:
    """An open library that answers questions; `count` passages are retrieved for each."""

    engine: FusionEngine
    retriever: Retriever
    count: int = 6
    fidelity: Fidelity = "fast"

    def retrieve(self, question: str, history: Sequence[Message] = ()) -> list[RetrievedPassage]:
        """Retrieve passages for a question after earlier turns."""
        asked = [text for role, text in history if role == "user"]
        return self.retriever.retrieve(question, self.count, after=asked[-1] if asked else None)

    def answer(
        self, question: str, passages: list[RetrievedPassage], *, history: Sequence[Message] = (), max_new_tokens: int
    ) -> LibraryAnswer:
        """Prefill a question after earlier turns over retrieved passages; return the answer as a stream.

        Raises:
            PromptTooLong: if passages exceed the model's context window, or do with history and the whole answer.
        """
        prompt = self.engine.prompt(question, [passage.text for passage in passages], history)
        if history and answer_room(self.engine.lm, prompt, max_new_tokens) < max_new_tokens:
            raise PromptTooLong(f"the earlier turns leave no room for an answer of {max_new_tokens:,} tokens")
        tokenizer, text = self.engine.lm.tokenizer, ResponseFormat()
        params = SamplingParams(max_new_tokens=max_new_tokens, fidelity=self.fidelity)
        stream = self.engine.stream(prompt, text.sampling(params, tokenizer))
        reader = ResponseReader(tokenizer, text, prompt)
        names, documents = self.retriever.short_names(passages), self.retriever.with_copies(passages)
        return LibraryAnswer(passages, documents, names, self.retriever.places(documents), prompt, stream, reader)

    def write_page(self, answer: LibraryAnswer, path: Path) -> None:
        """Wait for an answer and write the page that explains it; only its owner can read the page."""
        generation: Generation = answer.stream.result()
        scores = answer.stream.prefilled.scores
        page = explain_html(
            self.engine.lm.tokenizer,
            answer.prompt,
            generation.report,
            None if scores is None else scores.mean,
            answer=answer.response.content,
            origins=[
                PassageOrigin(name, passage.title) for name, passage in zip(answer.names, answer.passages, strict=True)
            ],
        )
        write_atomically(path, page)
