"""Turn a question and passages into a prompt whose segment boundaries are known.

The chat template is rendered once around markers and cut there, so the fixed head, the passages and the question are
tokenised apart and no boundary is ever searched for in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.prompts.special_tokens import RenderedText, SpecialTokenMarker
from qcfuse_rag.prompts.template import PromptTemplate, Tool, Turn

# Some chat templates print today's date, and a head that changes overnight would make every framed cache useless.
TEMPLATE_DATE = "01 Jan 2025"
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro -%}"

MARKERS = ("context", "question")
NUMBERS = re.compile(r"\[\[qcfuse:([0-9]+):")
"""Of markers that a conversation or a tool speaks of."""


@dataclass(frozen=True)
class PromptBuilder:
    """Builds prompts for one tokenizer and one template.

    Raises:
        InvalidTemplate: if the tokenizer's chat template rewrites the messages so that they cannot be cut apart.
    """

    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Token ids of the fixed text before the passages; empty if the question comes before them."""
        parts = self._fixed_parts
        return self._encode(parts[0][1]) if parts[1][0] == "context" else ()

    def chunk_ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a passage as it stands in every prompt."""
        return self._plain_ids(self.template.format_chunk(text))

    @cached_property
    def longest_token(self) -> int:
        """How many characters a token stands for at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def chunk_lead(self) -> int:
        """How many characters a chunk has in front of its passage's text."""
        return len(self.template.chunk.partition("{text}")[0].format())

    def chunk_offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return for each of a passage's token ids which characters `start <= c < stop` of its chunk it stands for.

        Tokens that share a character, as parts of one outside ASCII may, each have all of it.
        """
        written = self.template.format_chunk(text)
        return tuple(self._without_special.encode(written, add_special_tokens=False).offsets)

    def build(
        self, question: str, chunks: Sequence[str], history: Sequence[Turn] = (), tools: Sequence[Tool] = ()
    ) -> Prompt:
        """Assemble a prompt.

        Args:
            question: the user's question.
            chunks: retrieved passages, in the order they shall have; may be empty.
            history: earlier turns of the conversation, placed after a leading system message; never stored. System
                messages it begins with become part of that, or one if the template has none.
            tools: what the model may call, shown where its chat template shows them; never stored.

        Returns:
            Segments: head, chunks, question, answer header, in the template's order.
        """
        parts = self._parts(history, tools) if history or tools else self._fixed_parts
        segments: list[Segment] = []
        fixed = not history and not tools and parts[1][0] == "context"
        for index, (kind, rendered) in enumerate(parts):
            if kind == "context":
                segments += [
                    Segment(Role.CHUNK, self.chunk_ids(chunk), self.template.format_chunk(chunk)) for chunk in chunks
                ]
            elif kind == "question":
                segments.append(Segment(Role.QUESTION, self._plain_ids(question), question))
            else:
                role = Role.HEAD if index == 0 and fixed else Role.TEXT
                segments.append(Segment(role, self._encode(rendered), rendered.text))
        return Prompt(tuple(segments), prefix_ids=self.prefix_ids)

    def turns(self, question: str, chunks: Sequence[str], history: Sequence[Turn] = ()) -> list[Turn]:
        """Return the messages that `build` makes a prompt of, for conversations that go on after the question."""
        context = "".join(self.template.format_chunk(chunk) for chunk in chunks)
        return self._messages(question, context, history)

    def encode_whole(self, rendered: RenderedText, *, begin: bool) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Tokenise finished text as the model's own pipeline does, special tokens included but those only spelt.

        Args:
            rendered: the text.
            begin: put the tokenizer's start token in front, if it is not there.

        Returns:
            Token ids, and for each which characters `start <= c < stop` it stands for.
        """
        ids, offsets = list[int](), list[tuple[int, int]]()
        for at, text, meant in rendered.pieces():
            core = self._with_special if meant else self._without_special
            started = at > 0 or text.startswith(self.tokenizer.bos_token or "\0")
            encoding = core.encode(text, add_special_tokens=begin and not started)
            ids += encoding.ids
            offsets += [(start + at, stop + at) for start, stop in encoding.offsets]
        return tuple(ids), offsets

    @cached_property
    def _fixed_parts(self) -> list[tuple[str, RenderedText]]:
        return self._parts((), ())

    def _parts(self, history: Sequence[Turn], tools: Sequence[Tool]) -> list[tuple[str, RenderedText]]:
        """Return the rendered template in order: literal text, context, literal, question, literal (or swapped)."""
        taken = set(NUMBERS.findall(f"{history}{tools}"))
        number = next(number for number in map(str, count()) if number not in taken)
        markers = {name: f"[[qcfuse:{number}:{name}]]" for name in MARKERS}
        # The wording of the prompt is the developer's, and special tokens in it are meant.
        spelling = SpecialTokenMarker(self._special, map(_as_mapping, history), tools)
        asked = self._messages(markers["question"], markers["context"], spelling.turns)
        rendered = spelling.read(self._render(list(map(_as_mapping, asked)), tools))
        places = sorted((rendered.text.find(marker), name) for name, marker in markers.items())
        if any(rendered.text.count(marker) != 1 for marker in markers.values()):
            raise InvalidTemplate("the tokenizer's chat template repeats or drops message text; it cannot be cut apart")
        parts, at = [], 0
        for place, name in places:
            parts += [("literal", rendered.part(at, place)), (name, RenderedText(""))]
            at = place + len(markers[name])
        return [*parts, ("literal", rendered.part(at, len(rendered.text)))]

    def _messages(self, question: str, context: str, history: Sequence[Turn]) -> list[Turn]:
        asked = [(role, content.format(context=context, question=question)) for role, content in self.template.messages]
        own = 1 if asked[0][0] == "system" else 0
        said = list(takewhile(_says_as_system, history))
        # Chat templates take one system message, at the start, or lose sight of the first when there is another.
        texts = [turn[1] for turn in asked[:own]] + [_as_mapping(turn)["content"] for turn in said]
        lead: list[Turn] = [("system", "\n\n".join(filter(None, texts)))] if texts else []
        return [*lead, *history[len(said) :], *asked[own:]]

    def render(self, messages: Sequence[Turn], tools: Sequence[Tool] = ()) -> RenderedText:
        """Return a conversation as the chat template writes it, up to where the answer begins.

        Special tokens that messages spell are told from the template's own, see `prompts.special_tokens`.

        Raises:
            InvalidTemplate: if the chat template does not take these messages, or shows no tools and there are some.
        """
        spelling = SpecialTokenMarker(self._special, map(_as_mapping, messages), tools)
        return spelling.read(self._render(spelling.turns, tools))

    def _render(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> str:
        if tools and not self.shows_tools:
            raise InvalidTemplate(
                "the tokenizer's chat template has no place for tools: take a model that was taught tools, or ask for "
                "JSON by a schema, which any model can give"
            )
        if self.tokenizer.chat_template is None:
            start = self.tokenizer.bos_token or ""
            return start + "\n\n".join(turn["content"] for turn in turns)
        mergeable = len(turns) > 1 and turns[0]["role"] == "system"
        try:
            if not mergeable or self._shows_system:
                return self._apply(turns, tools)
        except TemplateError as error:
            if not mergeable:
                raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error
        # Some chat templates know no system role, and refuse or omit it: its text goes to the head of the first turn.
        system, first, *rest = turns
        try:
            return self._apply([{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest], tools)
        except TemplateError as error:
            raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {error}") from error

    @cached_property
    def _shows_system(self) -> bool:
        """Whether the tokenizer's chat template does not leave out what a system message says."""
        said = "[[qcfuse:system]]"
        try:
            return said in self._apply([{"role": "system", "content": said}, {"role": "user", "content": "?"}], ())
        except TemplateError:
            return False

    @property
    def shows_tools(self) -> bool:
        """Whether the tokenizer's chat template has a place for tools."""
        if self.tokenizer.chat_template is None:
            return False
        return "tools" in str(self.tokenizer.get_chat_template(tools=[{}]))

    def _apply(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> str:
        given = list(tools) or None
        rendered = self.tokenizer.apply_chat_template(
            turns,
            tools=given,
            chat_template=STOPPED_CLOCK + self.tokenizer.get_chat_template(tools=given),
            tokenize=False,
            add_generation_prompt=True,
            date_string=TEMPLATE_DATE,
        )
        return str(rendered)

    def _encode(self, rendered: RenderedText) -> tuple[int, ...]:
        return self.encode_whole(rendered, begin=False)[0]

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise one segment. Only the template's own text may hold special tokens: a passage cannot end a turn."""
        return tuple(self._without_special.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return tuple(token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    # Whether special tokens are recognised is a switch on the tokenizer itself, which threads share; hence two copies.
    @cached_property
    def _with_special(self) -> Tokenizer:
        return _private_copy(self.tokenizer, split_special=False)

    @cached_property
    def _without_special(self) -> Tokenizer:
        return _private_copy(self.tokenizer, split_special=True)


def _as_mapping(turn: Turn) -> Mapping[str, Any]:
    return turn if isinstance(turn, Mapping) else {"role": turn[0], "content": turn[1]}


def _says_as_system(turn: Turn) -> bool:
    message = _as_mapping(turn)
    return message["role"] == "system" and isinstance(message.get("content"), str)


def _private_copy(tokenizer: PreTrainedTokenizerBase, *, split_special: bool) -> Tokenizer:
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = split_special
    return core
