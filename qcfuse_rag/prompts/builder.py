"""Build a prompt with known segment boundaries from a question and passages.

The chat template is rendered once around markers and cut there. So the system prefix, the passages and the question are
tokenised separately, and no boundary is ever searched for in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, takewhile
from typing import Any

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate, PromptTooLong
from qcfuse_rag.prompts.bounded_render import render_bounded
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.prompts.special_tokens import RenderedText, SpecialTokenMarker, special_tokens_of, tokenizer_copy
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn, as_mapping, is_system_text
from qcfuse_rag.prompts.template_variables import template_variables

# Some chat templates print today's date; a system prefix that changes daily would make every framed cache useless.
TEMPLATE_DATE = "01 Jan 2025"
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro -%}"

WRITTEN_WHITESPACE = dict.fromkeys(map(ord, "\u0120\u010a\u0109\u010d\u2581 \n\t\r"))
"""How vocabularies write whitespace."""

MARKERS = ("context", "question")
MARKER_NUMBERS = re.compile(r"\[\[qcfuse:([0-9]+):")
"""Matches the numbers of markers that a conversation or a tool mentions."""

OF_THE_TOKENIZER = ("variables", "_special", "_with_special", "_without_special")
"""What a builder computes from its tokenizer alone, some of it slowly."""

PIECE_CHARACTERS = 1 << 14
"""Characters of a long text that are tokenised at a time to count its tokens."""

CHEAP_TOKENS = 1 << 16
"""Tokens that are made for any window."""

TemplateParts = list[tuple[str, RenderedText]]
"""A prompt's kinds of text in order, `literal`, `context` and `question`; a literal with its text."""


@dataclass(frozen=True)
class PromptBuilder:
    """Build prompts for one tokenizer and one template.

    Attributes:
        tokenizer: of the model.
        template: wording of the prompt.
        context_tokens: tokens of the model's context window; None for no bound. Tokenising stops with `PromptTooLong`
            beyond twice the window or `CHEAP_TOKENS`, whichever is more: each token takes half a kilobyte of memory.

    Raises:
        InvalidTemplate: if the tokenizer's chat template rewrites the messages, so that they cannot be separated, or
            does not read one of the wording's `chat_template_kwargs`.
        PromptTooLong: if a prompt has more tokens than that.
    """

    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    context_tokens: int | None = None

    def with_kwargs(self, chat_template_kwargs: Mapping[str, Any] | None) -> PromptBuilder:
        """Return the builder for a request that sets variables of the chat template, over those of the wording."""
        if not chat_template_kwargs:
            return self
        merged = {**self.template.chat_template_kwargs, **chat_template_kwargs}
        builder = replace(self, template=replace(self.template, chat_template_kwargs=merged))
        builder.__dict__.update({name: getattr(self, name) for name in OF_THE_TOKENIZER})
        return builder

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables of the chat template that `chat_template_kwargs` may set."""
        return template_variables(self.tokenizer)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids of the system prefix, the fixed text before the passages; empty if the question precedes them."""
        parts = self._fixed_parts
        return self._encode(parts[0][1]) if parts[1][0] == "context" else ()

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a passage's chunk, the same in every prompt."""
        return self._text_ids(self.template.format_chunk(text), bounded=False)

    @cached_property
    def longest_token(self) -> int:
        """The largest number of characters of one token."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def longest_visible_token(self) -> int:
        """The largest number of characters of one token that are no whitespace."""
        return max(len(token.translate(WRITTEN_WHITESPACE)) for token in self.tokenizer.get_vocab())

    @property
    def chunk_lead(self) -> int:
        """The number of characters of a chunk before its passage's text."""
        return len(self.template.chunk.partition("{text}")[0].format())

    def chunk_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the characters `start <= c < stop` of a passage's chunk for each of its token ids.

        Tokens that share a character outside ASCII each have the whole character.
        """
        chunk = self.template.format_chunk(text)
        return tuple(self._encoding(self._without_special, chunk, bounded=False).offsets)

    def build(
        self,
        question: str,
        chunks: Sequence[str],
        history: Sequence[Turn] = (),
        tools: Sequence[Tool] = (),
        later: Sequence[Turn] = (),
        split_text: Callable[[RenderedText], Sequence[Segment]] | None = None,
    ) -> Prompt:
        """Build a prompt.

        Args:
            question: the user's question.
            chunks: retrieved passages, in the order of the prompt; may be empty.
            history: earlier turns of the conversation, placed after the system message. Its leading system messages are
                merged into the template's system message, or become it if there is none.
            tools: tools that the model may call, at the place of the chat template.
            later: turns after the question, such as a tool call and its result.
            split_text: returns the segments of a text between question and chunks, so that passages in other turns are
                chunks too. With None, each of these texts is one segment.

        Returns:
            The segments system prefix, chunks, question and answer header, in the template's order.
        """
        parts = self._parts(history, tools, later) if history or tools or later else self._fixed_parts
        segments: list[Segment] = []
        for index, (kind, rendered) in enumerate(parts):
            if kind == "context":
                tokens = 0
                for chunk in chunks:
                    ids = self._text_ids(self.template.format_chunk(chunk))
                    tokens += len(ids)
                    self._require_fitting(tokens)
                    segments.append(Segment(Role.CHUNK, ids, self.template.format_chunk(chunk)))
            elif kind == "question":
                segments.append(Segment(Role.QUESTION, self._text_ids(question), question))
            elif index == 0 and self.prefix_ids and rendered == self._fixed_parts[0][1]:
                segments.append(Segment(Role.SYSTEM_PREFIX, self.prefix_ids, rendered.text))
            elif split_text is not None:
                segments += split_text(rendered)
            else:
                segments.append(Segment(Role.TEXT, self._encode(rendered), rendered.text))
        return Prompt(tuple(segments), prefix_ids=self.prefix_ids)

    def turns(self, question: str, chunks: Sequence[str], history: Sequence[Turn] = ()) -> list[Turn]:
        """Return the messages of the prompt that `build` makes, for conversations that continue after the question."""
        context = "".join(self.template.format_chunk(chunk) for chunk in chunks)
        return self._messages(question, context, history)

    def encode_whole(self, rendered: RenderedText, *, begin: bool) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Tokenise finished text as the model's own pipeline does, but keep spelt special tokens as text.

        Args:
            rendered: the text.
            begin: put the tokenizer's start token in front if it is missing.

        Returns:
            Token ids, and the characters `start <= c < stop` of each token.
        """
        ids, offsets = list[int](), list[tuple[int, int]]()
        for piece_start, text, is_special in rendered.pieces():
            core = self._with_special if is_special else self._without_special
            started = piece_start > 0 or text.startswith(self.tokenizer.bos_token or "\0")
            encoding = self._encoding(core, text, add_special_tokens=begin and not started)
            ids += encoding.ids
            self._require_fitting(len(ids))
            offsets += [(start + piece_start, stop + piece_start) for start, stop in encoding.offsets]
        return tuple(ids), offsets

    @cached_property
    def _fixed_parts(self) -> TemplateParts:
        return self._parts()

    def _parts(
        self, history: Sequence[Turn] = (), tools: Sequence[Tool] = (), later: Sequence[Turn] = ()
    ) -> TemplateParts:
        """Return the rendered template in order: literal, context, literal, question, literal, or question first."""
        number = marker_number(history, tools, later, self.template.chat_template_kwargs)
        markers = {name: f"[[qcfuse:{number}:{name}]]" for name in MARKERS}
        # The prompt template is the developer's, so special tokens in it count as such; everything else is marked.
        special_tokens = self._mark([*history, *later], tools)
        turns = special_tokens.turns
        messages = self._messages(markers["question"], markers["context"], turns[: len(history)])
        rendered = self._render(list(map(as_mapping, [*messages, *turns[len(history) :]])), special_tokens)
        positions = sorted((rendered.text.find(marker), name) for name, marker in markers.items())
        if any(rendered.text.count(marker) != 1 for marker in markers.values()):
            raise InvalidTemplate("the tokenizer's chat template repeats or drops message text; it cannot be cut apart")
        parts, end = [], 0
        for start, name in positions:
            parts += [("literal", rendered.part(end, start)), (name, RenderedText(""))]
            end = start + len(markers[name])
        return [*parts, ("literal", rendered.part(end, len(rendered.text)))]

    def _messages(self, question: str, context: str, history: Sequence[Turn]) -> list[Turn]:
        messages = [
            (role, content.format(context=context, question=question)) for role, content in self.template.messages
        ]
        n_system = 1 if messages[0][0] == "system" else 0
        leading = list(takewhile(is_system_text, history))
        # Chat templates take one system message, at the start; some drop the first one if there are two.
        texts = [content for _, content in messages[:n_system]] + [as_mapping(turn)["content"] for turn in leading]
        system: list[Turn] = [("system", "\n\n".join(filter(None, texts)))] if texts else []
        return [*system, *history[len(leading) :], *messages[n_system:]]

    def render(self, messages: Sequence[Turn], tools: Sequence[Tool] = ()) -> RenderedText:
        """Render a conversation with the chat template, up to the start of the answer.

        Special tokens that messages and tools spell stay text, see `prompts.special_tokens`.

        Raises:
            InvalidTemplate: if the chat template does not take these messages, does not show the given tools, or does
                not read one of the `chat_template_kwargs`.
        """
        special_tokens = self._mark(messages, tools)
        return self._render(special_tokens.turns, special_tokens)

    def _mark(self, messages: Sequence[Turn], tools: Sequence[Tool]) -> SpecialTokenMarker:
        kwargs = self.template.chat_template_kwargs
        return SpecialTokenMarker(self._special, map(as_mapping, messages), tools, kwargs)

    def _render(self, turns: Sequence[Mapping[str, Any]], special_tokens: SpecialTokenMarker) -> RenderedText:
        """Render turns, with the tools and variables in which special tokens are marked, and unmark these."""
        tools, kwargs = special_tokens.tools, special_tokens.kwargs
        if unread := sorted(kwargs.keys() - self.variables):
            raise InvalidTemplate(
                f"chat_template_kwargs cannot set {', '.join(unread)}: the tokenizer's chat template reads "
                f"{', '.join(sorted(self.variables)) or 'no variable'} besides messages, tools and special tokens"
            )
        return special_tokens.unmark(self._render_marked(turns, tools, kwargs))

    def _render_marked(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]
    ) -> str:
        if tools and not self.shows_tools:
            raise InvalidTemplate(
                "the tokenizer's chat template has no place for tools: take a model that was trained to call tools, or "
                "ask for JSON by a schema, which works with any model"
            )
        if self.tokenizer.chat_template is None:
            start = self.tokenizer.bos_token or ""
            return start + "\n\n".join(turn["content"] for turn in turns)
        mergeable = len(turns) > 1 and turns[0]["role"] == "system"
        try:
            if not mergeable or self._shows_system:
                return self._apply(turns, tools, kwargs)
        except TemplateError as error:
            if not mergeable:
                raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error
        # Some chat templates refuse or omit the system role: put its text in front of the first turn.
        system, first, *rest = turns
        merged = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        try:
            return self._apply(merged, tools, kwargs)
        except TemplateError as error:
            raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error

    @cached_property
    def _shows_system(self) -> bool:
        """Whether the tokenizer's chat template shows system messages."""
        text = "[[qcfuse:system]]"
        try:
            turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
            return text in self._apply(turns, (), self.template.chat_template_kwargs)
        except TemplateError:
            return False

    @property
    def shows_tools(self) -> bool:
        """Whether the tokenizer's chat template has a place for tools."""
        if self.tokenizer.chat_template is None:
            return False
        return "tools" in str(self.tokenizer.get_chat_template(tools=[{}]))

    def _apply(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        tool_list = list(tools) or None

        def render() -> str:
            try:
                rendered = self.tokenizer.apply_chat_template(
                    turns,
                    tools=tool_list,
                    chat_template=STOPPED_CLOCK + self.tokenizer.get_chat_template(tools=tool_list),
                    tokenize=False,
                    add_generation_prompt=True,
                    date_string=TEMPLATE_DATE,
                    **kwargs,
                )
            except (TypeError, ValueError, LookupError, AttributeError) as error:  # a value that it does not expect
                raise TemplateError(f"{type(error).__name__}: {error}") from error
            return str(rendered)

        return render_bounded(render)

    def _encode(self, rendered: RenderedText) -> tuple[int, ...]:
        return self.encode_whole(rendered, begin=False)[0]

    def _text_ids(self, text: str, *, bounded: bool = True) -> tuple[int, ...]:
        """Tokenise a segment without special tokens: a passage cannot end a turn."""
        return tuple(self._encoding(self._without_special, text, bounded=bounded).ids)

    def _encoding(
        self, core: Tokenizer, text: str, *, add_special_tokens: bool = False, bounded: bool = True
    ) -> Encoding:
        """Tokenise a text; other threads run meanwhile, as they do not beside `Tokenizer.encode`."""
        if bounded and self.context_tokens is not None and len(text) > max(2 * self.context_tokens, PIECE_CHARACTERS):
            tokens = 0
            for start in range(0, len(text), PIECE_CHARACTERS):
                (piece,) = core.encode_batch([text[start : start + PIECE_CHARACTERS]], add_special_tokens=False)
                tokens += len(piece)
                self._require_fitting(tokens)
        (encoding,) = core.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding

    def _require_fitting(self, tokens: int) -> None:
        if self.context_tokens is not None and tokens > max(2 * self.context_tokens, CHEAP_TOKENS):
            raise PromptTooLong(
                f"more than {tokens:,} tokens cannot fit a context window of {self.context_tokens:,} tokens"
            )

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return special_tokens_of(self.tokenizer)

    @cached_property
    def _with_special(self) -> Tokenizer:
        return tokenizer_copy(self.tokenizer, split_special=False)

    @cached_property
    def _without_special(self) -> Tokenizer:
        return tokenizer_copy(self.tokenizer, split_special=True)


def marker_number(*texts: object) -> str:
    """Return a number that no marker in messages, tools or variables has."""
    used = set(MARKER_NUMBERS.findall("".join(map(str, texts))))
    return next(number for number in map(str, count()) if number not in used)
