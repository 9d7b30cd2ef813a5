"""What form a chat API's request gives an answer: calls of tools, JSON by a schema, or text as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.detokenizer import partial_mark_length
from qcfuse_rag.generation.grammar import json_grammar
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.generation.tool_parsers import BrokenCall, ParsedResponse, tool_call_parser
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import Tool, Turn


class PromptSource(Protocol):
    """Builds prompts; `FusionEngine` does."""

    @property
    def prompts(self) -> PromptBuilder:
        """The builder of the prompts' parts."""
        ...

    def prompt(
        self, question: str, passages: Sequence[str] = (), history: Sequence[Turn] = (), tools: Sequence[Tool] = ()
    ) -> Prompt:
        """Build a prompt from a question and passages."""
        ...

    def prompt_from_text(self, conversation: Sequence[Turn] | str, tools: Sequence[Tool] = ()) -> Prompt:
        """Build a prompt from a conversation in which warmed passages are found."""
        ...


ToolChoice = str | bool | Mapping[str, Any] | None
"""Which tool to call: `auto` or None as the model likes, `none`, `required` or `any` for one of them, a tool's name, or
`{"type": "function", "function": {"name": ...}}`."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an answer may be, as OpenAI's chat API says it and other APIs do after it.

    Attributes:
        given: tools, as `{"type": "function", "function": {...}}`.
        choice: which of them to call.
        response_format: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema":
            {"schema": ...}}`; None is text.

    Raises:
        QCFuseError: if the choice names none of the tools, or the format is of no known type.
    """

    given: Sequence[Tool] = ()
    choice: ToolChoice = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        schema = self.schema
        if self.demanded == () and self.choice in (True, "any", "required"):
            raise QCFuseError("tool_choice demands a call, and there are no tools to call")
        if self.tools and schema is not None:
            raise QCFuseError("ask for tools or for JSON by a schema, and for the other when the one is there")

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools to show the model."""
        return () if self.choice == "none" else self.given

    @property
    def demanded(self) -> Sequence[Tool]:
        """Of which tools one must be called; none if the model may do as it likes."""
        if self.choice in (None, False, "auto", "none"):
            return ()
        if self.choice in (True, "any", "required"):
            return tuple(self.given)
        named = self.choice.get("function") if isinstance(self.choice, Mapping) else {"name": self.choice}
        name = named.get("name") if isinstance(named, Mapping) else None
        found = [tool for tool in self.given if tool["function"]["name"] == name]
        if not found:
            names = ", ".join(tool["function"]["name"] for tool in self.given) or "none"
            raise QCFuseError(f"tool_choice names {name!r}, which is no tool that was given; there are: {names}")
        return found

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer has to follow; None if it need be no JSON."""
        wanted = self.response_format or {"type": "text"}
        if wanted.get("type") in ("text", "json_object"):
            return {"type": "object"} if wanted["type"] == "json_object" else None
        try:
            if wanted["type"] == "json_schema":
                schema = wanted["json_schema"]["schema"]
                if isinstance(schema, Mapping):
                    return schema
        except (KeyError, TypeError):
            pass
        raise QCFuseError(
            'response_format has to be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            f'"json_schema": {{"schema": ...}}}}, not {dict(wanted)}'
        )

    def prompt(
        self, engine: PromptSource, turns: Sequence[Mapping[str, Any]], passages: Sequence[str] | None = None
    ) -> Prompt:
        """Return the prompt of a conversation, whose last question is told what form its answer takes.

        Args:
            engine: builds it.
            turns: messages as a chat template reads them. The last user's is the question, and if there is none the
                last one; others may follow, such as what tools have said.
            passages: what the question is about, put before it by the RAG prompt. None finds warmed passages in the
                messages.

        Raises:
            InvalidTemplate: if the model's chat template does not take the messages or shows no tools.
        """
        asked = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1)
        history, since = turns[:asked], turns[asked + 1 :]
        question = self.told(turns[asked]["content"])
        if passages is None:
            return engine.prompt_from_text([*history, {**turns[asked], "content": question}, *since], self.tools)
        if since:
            return engine.prompt_from_text([*engine.prompts.turns(question, passages, history), *since], self.tools)
        return engine.prompt(question, passages, history, self.tools)

    def told(self, question: str) -> str:
        """Return a question with the schema that its answer has to follow, for the model to know it."""
        if self.schema is None or "properties" not in self.schema:
            return question
        return f"{question}\n\nAnswer with JSON that follows this schema: {json.dumps(self.schema)}"

    def sampling(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
        """Return settings by which the answer takes this form.

        Raises:
            UnsupportedModel: if a call is demanded and it is not known how the model writes calls.
        """
        if self.tools:
            tool_call_parser(tokenizer, self.tools)  # else what it answers could not be read
        if self.demanded:
            grammar = tool_call_parser(tokenizer, self.given).grammar(tokenizer, self.demanded)
        elif self.schema is not None:
            grammar = json_grammar(self.schema)
        else:
            return params
        return replace(params, grammar=grammar)


class ResponseReader:
    """Reads one answer of a model that may have been offered tools.

    Args:
        tokenizer: the model's.
        form: what it may be.

    Raises:
        UnsupportedModel: if it is not known how the model writes calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: ResponseFormat) -> None:
        self._tokenizer, self._tools, self._demanded = tokenizer, form.tools, bool(form.demanded)
        self._syntax = tool_call_parser(tokenizer, form.tools) if form.tools else None
        self._text = ""
        self._shown = 0
        # A special token is no part of the text, so where a call begins is not seen until the answer is whole.
        self._unseen = self._syntax is not None and self._syntax.opens in tokenizer.all_special_tokens

    def show(self, piece: str) -> str:
        """Take a piece of the answer; return what is no part of a call, often nothing."""
        self._text += piece
        if self._syntax is None:
            return self._upto(len(self._text))
        if self._unseen or self._text.lstrip()[:1] in ("", "{", "[", "`"):  # it may all be a call
            return ""
        at = self._text.find(self._syntax.opens)
        return self._upto(at if at >= 0 else len(self._text) - partial_mark_length(self._text, (self._syntax.opens,)))

    def end(self, generation: Generation) -> tuple[str, ParsedResponse]:
        """Take the finished answer; return what of its content was not shown yet, and all of it."""
        if self._syntax is None or generation.finish_reason == "stop":
            text = generation.text
        else:  # with the special tokens that open a call
            ids = generation.ids[:-1] if generation.finish_reason == "end" else generation.ids
            text = self._tokenizer.decode(ids)
        reply = ParsedResponse(text) if self._syntax is None else self._syntax.read(text, self._tools)
        if not reply.calls and not reply.broken:
            cut = BrokenCall(generation.text, "it is no whole call")
            reply = ParsedResponse("", broken=(cut,)) if self._demanded else ParsedResponse(generation.text)
        return reply.content[self._shown :], reply

    def _upto(self, stop: int) -> str:
        shown, self._shown = self._text[self._shown : stop], max(self._shown, stop)
        return shown
