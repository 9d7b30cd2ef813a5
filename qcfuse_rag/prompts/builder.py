"""Build a prompt with known segment boundaries from a question and passages.

The chat template is rendered once around markers and cut there. So the system prefix, the passages and the question are
tokenised separately, and no boundary is ever searched for in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count, groupby, takewhile
from operator import attrgetter
from typing import Any

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate, PromptTooLong
from qcfuse_rag.prompts.chat_template import ChatTemplate, RenderedText
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn, as_mapping

TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

MARKERS = ("context", "question")
MARKER_NUMBERS = re.compile(r"\[\[qcfuse:([0-9]+):")
"""Matches the numbers of markers that a conversation or a tool mentions."""

PIECE_CHARACTERS = 1 << 14
"""Characters of a long text that are tokenised at a time to count its tokens."""
CHEAP_TOKENS = 1 << 16
"""Tokens that are made for any window, so that errors name exact lengths."""

TemplateParts = list[tuple[str, RenderedText]]
"""A prompt's kinds of text in order, `literal`, `context` and `question`; a literal with its text."""


class PromptTokenizer:
    """A model's tokenizer with and without special tokens, bounded by the model's context window.

    A tokenizer takes seconds and gigabytes for a text of many megabytes, so text that cannot fit is refused: tokenising
    stops with `PromptTooLong` beyond twice the window or `CHEAP_TOKENS`, whichever is more: each token takes
    half a kilobyte of memory. Without a window there is no bound.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: ChatTemplate, context_tokens: int | None = None
    ) -> None:
        self._tokenizer, self._chat_template, self._context_tokens = tokenizer, chat_template, context_tokens

    @cached_property
    def longest_token(self) -> int:
        """The largest number of characters of one token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def ids(self, text: str, *, bounded: bool = True) -> tuple[int, ...]:
        """Tokenise text without special tokens: a passage cannot end a turn."""
        return tuple(self._encoding(self._without_special, text, bounded=bounded).ids)

    def encode(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Tokenise a passage; return its ids, and the characters `start <= c < stop` of each.

        Tokens of parts of one character have the whole character.
        """
        encoding = self._encoding(self._without_special, text, bounded=False)
        return tuple(encoding.ids), encoding.offsets

    def encode_whole(self, rendered: RenderedText, *, begin: bool) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Tokenise finished text as the model's own pipeline does, but keep spelt special tokens as text.

        `begin` puts the tokenizer's start token in front if it is missing. Returns token ids, and the characters
        `start <= c < stop` of each.
        """
        ids, offsets = list[int](), list[tuple[int, int]]()
        for piece_start, text, is_special in rendered.pieces():
            core = self._with_special if is_special else self._without_special
            started = piece_start > 0 or text.startswith(self._tokenizer.bos_token or "\0")
            encoding = self._encoding(core, text, add_special_tokens=begin and not started)
            ids += encoding.ids
            self.require_fitting(len(ids))
            offsets += [(start + piece_start, stop + piece_start) for start, stop in encoding.offsets]
        return tuple(ids), offsets

    def require_fitting(self, tokens: int) -> None:
        """Refuse more tokens than are made for the context window."""
        if self._context_tokens is not None and tokens > max(2 * self._context_tokens, CHEAP_TOKENS):
            raise PromptTooLong(
                f"a prompt of over {tokens:,} tokens exceeds the context window of {self._context_tokens:,} tokens"
            )

    def _encoding(
        self, core: Tokenizer, text: str, *, add_special_tokens: bool = False, bounded: bool = True
    ) -> Encoding:
        # Other threads run beside `encode_batch`, as they do not beside `encode`.
        window = self._context_tokens
        if bounded and window is not None and len(text) > max(2 * window, PIECE_CHARACTERS):
            tokens = 0
            for start in range(0, len(text), PIECE_CHARACTERS):
                (piece,) = core.encode_batch([text[start : start + PIECE_CHARACTERS]], add_special_tokens=False)
                tokens += len(piece)
                self.require_fitting(tokens)
        (encoding,) = core.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding

    @cached_property
    def _with_special(self) -> Tokenizer:
        return tokenizer_copy(self._tokenizer)

    @cached_property
    def _without_special(self) -> Tokenizer:
        return tokenizer_copy(self._tokenizer, split=self._chat_template.control_tokens)


class PromptBuilder:
    """Build prompts for one tokenizer and one template; `shared` is another builder for the tokenizer.

    Raises:
        InvalidTemplate: if the tokenizer's chat template rewrites the messages, so that they cannot be separated, or
            does not read one of the wording's `chat_template_kwargs`.
        PromptTooLong: if a prompt has far more tokens than the context window.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
        context_tokens: int | None = None,
        *,
        shared: PromptBuilder | None = None,
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.chat_template: ChatTemplate
        self.chat_template = shared.chat_template if shared else ChatTemplate(tokenizer, template.chat_template_kwargs)
        self.tokens: PromptTokenizer
        self.tokens = shared.tokens if shared else PromptTokenizer(tokenizer, self.chat_template, context_tokens)

    def with_kwargs(self, chat_template_kwargs: Mapping[str, Any] | None) -> PromptBuilder:
        """Return the builder for a request that sets variables of the chat template, over those of the wording."""
        if not chat_template_kwargs:
            return self
        merged = {**self.template.chat_template_kwargs, **chat_template_kwargs}
        return PromptBuilder(self.tokenizer, replace(self.template, chat_template_kwargs=merged), shared=self)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids of the system prefix, the fixed text before the passages; empty if the question precedes them."""
        parts = self._fixed_parts
        return self._encode(parts[0][1]) if parts[1][0] == "context" else ()

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a passage's chunk, the same in every prompt."""
        return self.tokens.ids(self.template.format_chunk(text), bounded=False)

    def build(
        self,
        question: str,
        chunks: Sequence[str],
        history: Sequence[Turn] = (),
        tools: Sequence[Tool] = (),
        later: Sequence[Turn] = (),
        split_text: Callable[[RenderedText], Sequence[Segment]] | None = None,
    ) -> Prompt:
        """Build a prompt: system prefix, chunks, question and answer header, in the template's order.

        Args:
            question: the user's question.
            chunks: retrieved passages, in the order of the prompt; may be empty.
            history: earlier turns, placed after the system message. Leading system messages are merged into it.
            tools: tools that the model may call, at the place of the chat template.
            later: turns after the question, such as a tool call and its result.
            split_text: returns the segments of a text between question and chunks; None makes each text one segment.
        """
        parts = self._parts(history, tools, later) if history or tools or later else self._fixed_parts
        segments: list[Segment] = []
        for index, (kind, rendered) in enumerate(parts):
            if kind == "context":
                tokens = 0
                for chunk in map(self.template.format_chunk, chunks):
                    ids = self.tokens.ids(chunk)
                    tokens += len(ids)
                    self.tokens.require_fitting(tokens)
                    segments.append(Segment(Role.CHUNK, ids, chunk))
            elif kind == "question":
                segments.append(Segment(Role.QUESTION, self.tokens.ids(question), question))
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

    def render(self, messages: Sequence[Turn], tools: Sequence[Tool] = ()) -> RenderedText:
        """Render a conversation with the wording's variables, see `ChatTemplate.render`."""
        return self.chat_template.render(messages, tools, self.template.chat_template_kwargs)

    @cached_property
    def _fixed_parts(self) -> TemplateParts:
        return self._parts()

    def _parts(
        self, history: Sequence[Turn] = (), tools: Sequence[Tool] = (), later: Sequence[Turn] = ()
    ) -> TemplateParts:
        kwargs = self.template.chat_template_kwargs
        number = marker_number(history, tools, later, kwargs)
        markers = {name: f"[[qcfuse:{number}:{name}]]" for name in MARKERS}

        # The prompt template is the developer's, so special tokens in it count as such; in everything else they do not.
        def around(turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            messages = self._messages(markers["question"], markers["context"], turns[: len(history)])
            return list(map(as_mapping, [*messages, *turns[len(history) :]]))

        rendered = self.chat_template.render([*history, *later], tools, kwargs, arrange=around)
        if any(rendered.text.count(marker) != 1 for marker in markers.values()):
            raise InvalidTemplate("the tokenizer's chat template repeats or drops message text; it cannot be cut apart")
        parts, end = [], 0
        for start, name in sorted((rendered.text.find(marker), name) for name, marker in markers.items()):
            parts += [("literal", rendered.part(end, start)), (name, RenderedText(""))]
            end = start + len(markers[name])
        return [*parts, ("literal", rendered.part(end, len(rendered.text)))]

    def _messages(self, question: str, context: str, history: Sequence[Turn]) -> list[Turn]:
        messages = [
            (role, content.format(context=context, question=question)) for role, content in self.template.messages
        ]
        n_system = 1 if messages[0][0] == "system" else 0
        texts = [content for _, content in messages[:n_system]]
        # Chat templates take one system message, at the start; some drop the first one if there are two.
        earlier = list(map(as_mapping, history))
        leading = list(
            takewhile(lambda turn: turn["role"] == "system" and isinstance(turn.get("content"), str), earlier)
        )
        texts += [turn["content"] for turn in leading]
        system: list[Turn] = [("system", "\n\n".join(filter(None, texts)))] if texts else []
        return [*system, *history[len(leading) :], *messages[n_system:]]

    def _encode(self, rendered: RenderedText) -> tuple[int, ...]:
        return self.tokens.encode_whole(rendered, begin=False)[0]


def tokenizer_copy(tokenizer: PreTrainedTokenizerBase, *, split: Collection[str] = ()) -> Tokenizer:
    """Return a copy of a tokenizer without truncation and padding, which shares the vocabulary.

    With tokens to split, these and all special ones are not recognised in text. That is a setting of the tokenizer,
    which threads share; so each setting has its copy. Copying the vocabulary as well would take half a second for
    150,000 tokens.
    """
    original = tokenizer.backend_tokenizer
    core = Tokenizer(original.model)
    for part in TOKENIZER_PARTS:
        if getattr(original, part) is not None:
            setattr(core, part, getattr(original, part))
    added = [token for _, token in sorted(original.get_added_tokens_decoder().items())]
    for token in added:
        token.special = token.special or token.content in split
    for special, tokens in groupby(added, key=attrgetter("special")):
        (core.add_special_tokens if special else core.add_tokens)(list(tokens))
    core.encode_special_tokens = bool(split)
    return core


def marker_number(*texts: object) -> str:
    """Return a number that no marker in messages, tools or variables has."""
    used = set(MARKER_NUMBERS.findall("".join(map(str, texts))))
    return next(number for number in map(str, count()) if number not in used)
