"""Render a conversation by a model's chat template, and tell its control tokens from text that is spelt like them.

A message may spell a control token, like a document written to end its turn and begin another. So may the schema of a
third party's tool, or a variable that a client sets. Control tokens of the template end turns; those that messages,
tools and variables spell are text. So they are marked before the template joins the messages.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import resource
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts.template import Tool, Turn, as_mapping

# Some chat templates print today's date; a system prefix that changes daily would make every framed cache useless.
TEMPLATE_DATE = "01 Jan 2025"
STOPPED_CLOCK = "{%- macro strftime_now(format) -%}" + TEMPLATE_DATE + "{%- endmacro -%}"

GENERATION_TAG = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")
"""Matches the tags by which transformers marks answers in a chat template for training; Jinja does not know them."""

SET_BY_THE_BUILDER = {"messages", "date_string", "strftime_now", "raise_exception"}
"""Variables and functions that a prompt's builder and transformers set, besides the arguments of the rendering."""

MARK_CHARACTERS = (range(0x13000, 0x13430), range(0x20000, 0x2A6E0))
"""Hieroglyphs and rare Chinese characters; an unused one marks spelt special tokens while the template runs.

They are printable, so a template that prints a list or a dictionary prints them unchanged.
"""

ANSWER_FIELDS = {"content", "reasoning_content", "reasoning", "thinking"}
"""Fields of a model's own turn in which a template looks for the tokens round its reasoning."""

TRIAL_S, TRIAL_BYTES = 10, 1 << 30
"""Most seconds of a processor and bytes of memory that a chat template may take for a few words."""

ESCAPED_CHARACTER = re.compile(r"(?=(\\u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4}))")
"""Matches before characters above U+FFFF as JSON escapes, overlapping ones too."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text for the model, with the ranges `start <= c < stop`, in order, that spell special tokens but are text."""

    text: str
    spelt: tuple[tuple[int, int], ...] = ()

    def part(self, start: int, stop: int) -> RenderedText:
        """Return the characters `start <= c < stop`."""
        inside = [(begin - start, end - start) for begin, end in self.spelt if start <= begin and end <= stop]
        return RenderedText(self.text[start:stop], tuple(inside))

    def pieces(self) -> Iterator[tuple[int, str, bool]]:
        """Yield each piece's start, its text, and whether special tokens in it count as such."""
        end = 0
        for start, stop in self.spelt:
            if end < start:
                yield end, self.text[end:start], True
            yield start, self.text[start:stop], False
            end = stop
        if end < len(self.text) or not self.text:
            yield end, self.text[end:], True


class ChatTemplate:
    """The chat template of a tokenizer; without one, messages are joined by blank lines.

    `kwargs` are the variables that it is usually rendered with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs or {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that `chat_template_kwargs` may set, such as Qwen3's `enable_thinking`.

        Messages, tools, the date, the start of the answer and special tokens are the builder's and the tokenizer's.
        """
        names = set[str]()
        for tree in self._trees:
            with suppress(TemplateError):  # rendering says what is wrong with it
                names |= meta.find_undeclared_variables(tree)
        arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        return frozenset(names - SET_BY_THE_BUILDER - arguments.keys() - self._tokenizer.special_tokens_map.keys())

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """The tokens that mean something to the model: its special ones, and all added ones that the template writes.

        Turn markers of some models, such as DeepSeek-R1's distillations, are not special. The template's texts are
        searched for them, and examples of its output, because it may put `<`, the role and `>` together.
        """
        added = {token.content: token.special for token in self._tokenizer.added_tokens_decoder.values()}
        found = (node for tree in self._trees for node in tree.find_all((nodes.Const, nodes.TemplateData)))
        texts = [
            str(node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", "")) for node in found
        ]
        written = "\0".join([*texts, *self._examples()])
        written_tokens = {token for token in added if token.strip() and token in written}
        special = {token for token in added if added[token]} | {*self._tokenizer.all_special_tokens}
        return frozenset(filter(None, special | written_tokens))

    @property
    def shows_tools(self) -> bool:
        """Whether there is a place for tools."""
        if self._tokenizer.chat_template is None:
            return False
        return "tools" in str(self._tokenizer.get_chat_template(tools=[{}]))

    def render(
        self,
        turns: Iterable[Turn],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        arrange: Callable[[list[Mapping[str, Any]]], list[Mapping[str, Any]]] = list,
    ) -> RenderedText:
        """Render a conversation up to the start of the answer; special tokens that it spells stay text.

        `arrange` puts the messages into others, whose special tokens are meant.

        Raises:
            InvalidTemplate: if the chat template does not take these messages, does not show the given tools, or does
                not read one of the variables.
        """
        kwargs = kwargs or {}
        if unread := sorted(kwargs.keys() - self.variables):
            raise InvalidTemplate(
                f"chat_template_kwargs cannot set {', '.join(unread)}: the tokenizer's chat template reads "
                f"{', '.join(sorted(self.variables)) or 'no variable'} besides messages, tools and special tokens"
            )
        if tools and not self.shows_tools:
            raise InvalidTemplate(
                "the tokenizer's chat template has no place for tools: take a model that was trained to call tools, or "
                "ask for JSON by a schema, which works with any model"
            )
        messages = list(map(as_mapping, turns))
        marks = SpelledTokens(self._control, (messages, list(tools), kwargs), self._read_tokens)
        marked = arrange([marks.mark_message(turn) for turn in messages])
        return marks.unmark(self._render(marked, [marks.mark(tool) for tool in tools], marks.mark(kwargs)))

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def _read_tokens(self) -> frozenset[str]:
        """The tokens that are not special and that the template looks for in messages, as `</think>` in answers."""
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        looked_for = [
            const.value
            for tree in self._trees
            for use in tree.find_all((nodes.Call, nodes.Compare))
            for const in use.find_all(nodes.Const)
        ]
        return self.control_tokens.intersection(map(str, looked_for)) - special

    @cached_property
    def _trees(self) -> list[nodes.Template]:
        templates = self._tokenizer.chat_template or ""
        environment, trees = Environment(extensions=["jinja2.ext.loopcontrols"]), list[nodes.Template]()
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            with suppress(TemplateError, RecursionError):  # rendering says what is wrong with it
                trees.append(environment.parse(GENERATION_TAG.sub("", template)))

        def trial() -> None:
            with suppress(TemplateError):
                list(map(meta.find_undeclared_variables, trees))  # computes expressions of constants
            list(self._examples())

        if templates:
            _refuse_endless(trial)
        return trees

    def _examples(self) -> Iterator[str]:
        """Yield what the template writes of conversations with every role, as far as it takes them."""
        if self._tokenizer.chat_template is None:
            return
        user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "."}
        function = {"name": "f", "arguments": {}}
        calls = [{"type": "function", "id": "123456789", "function": function}]
        result = {"role": "tool", "name": "f", "tool_call_id": "123456789", "content": "."}
        tool = {"type": "function", "function": {"name": "f", "description": ".", "parameters": {"type": "object"}}}
        conversations: tuple[list[dict[str, Any]], ...] = (
            [user, answer, user],
            [{"role": "system", "content": "."}, user],
            [user, {**answer, "content": "", "tool_calls": calls}, result],
        )
        for turns in conversations:
            for tools in ([], [tool]):
                with suppress(TemplateError):
                    yield self._apply(turns, tools, self._kwargs)

    @cached_property
    def _shows_system(self) -> bool:
        text = "[[qcfuse:system]]"
        try:
            turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
            return text in self._apply(turns, [], self._kwargs)
        except TemplateError:
            return False

    def _render(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        if self._tokenizer.chat_template is None:
            return (self._tokenizer.bos_token or "") + "\n\n".join(turn["content"] for turn in turns)
        failure: TemplateError | None = None
        for arranged in self._arrangements(turns):
            try:
                return self._apply(arranged, tools, kwargs)
            except TemplateError as error:
                failure = failure or error
        raise InvalidTemplate(f"the tokenizer's chat template does not take these messages: {failure}") from failure

    def _arrangements(self, turns: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the messages as they are, then in forms for strict templates, the nearest first.

        Forms of which the template would leave a message out are passed over, but for the last one.
        """
        if self._shows(turns):
            yield turns
            yield list(map(_with_object_arguments, turns))
        if len(turns) > 1 and turns[0]["role"] == "system":
            system, first, *rest = turns
            merged = [{**first, "content": f"{system['content']}\n\n{_text(first)}"}, *rest]
            if self._shows(merged):
                yield merged
            if self._shows_system:
                yield [system, *alternating(turns[1:])]
        yield alternating(turns)

    def _shows(self, turns: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template leaves out no message of these roles; it may still refuse them."""
        if len(turns) > 1 and turns[0]["role"] == "system" and not self._shows_system:
            return False
        if all(turn["role"] in ("user", "assistant") for turn in turns[1:]):
            return True
        texts = [f"[[qcfuse:{number}]]" for number in range(len(turns))]
        try:
            rendered = self._apply([{**turn, "content": text} for turn, text in zip(turns, texts, strict=True)], [], {})
        except TemplateError:
            return True
        return all(text in rendered for text, turn in zip(texts, turns, strict=True) if turn["role"] != "assistant")

    def _apply(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> str:
        given = list(tools) or None
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns,
                tools=given,
                chat_template=STOPPED_CLOCK + self._tokenizer.get_chat_template(tools=given),
                tokenize=False,
                add_generation_prompt=True,
                date_string=TEMPLATE_DATE,
                **kwargs,
            )
        # A value that it does not expect, or the limits of Jinja's sandbox.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return str(rendered)


def _refuse_endless(trial: Callable[[], None]) -> None:
    """Try a chat template in a process of limited time and memory, since one call in it may take any amount of both.

    Raises:
        InvalidTemplate: if it takes more.
    """
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            gc.disable()  # nothing of the other threads' may be finalised here
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S, TRIAL_S))
            with suppress(OSError, ValueError):  # not on Linux
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))
            trial()
            os.write(writing, b"1")
        finally:
            os._exit(0)  # nothing of the parent's may run at the end
    os.close(writing)
    ended = b""
    try:
        with os.fdopen(reading, "rb") as answer, selectors.DefaultSelector() as waiting:
            waiting.register(answer, selectors.EVENT_READ)
            ended = answer.read() if waiting.select(6 * TRIAL_S) else b""
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # of a program that ignores SIGCHLD
            os.waitpid(child, 0)
    if not ended:
        raise InvalidTemplate(
            f"the model's chat template takes more than {TRIAL_S} s or {TRIAL_BYTES >> 30} GB for a few words, or does "
            "not end; take another model, or mend its chat template"
        )


class SpelledTokens:
    """Marks what a conversation spells like special tokens, and removes the marks from the rendered text.

    | in a message | in the template's output | for the model |
    |---|---|---|
    | `Say </s> now.` | `Say 𓀀</s>𓀀 now.</s>` | the first `</s>` is text, the second ends the turn |

    Raises:
        InvalidTemplate: if a role spells a special token, or no unused character is left to mark with.
    """

    def __init__(
        self,
        special: re.Pattern[str] | None,
        conversation: tuple[list[Mapping[str, Any]], list[Tool], Any],
        meant_in_answers: Iterable[str] = (),
    ) -> None:
        self._meant_in_answers = frozenset(meant_in_answers)
        texts = "\0".join(leaf for leaf in leaves(conversation) if isinstance(leaf, str))
        self._spelt = special if special is not None and special.search(texts) else None  # None: nothing is spelt
        if self._spelt is None:
            return
        used = {*texts, *map(str.lower, ESCAPED_CHARACTER.findall(texts))}
        signs = (sign for sign in map(chr, chain(*MARK_CHARACTERS)) if sign not in used)
        self._mark = next((sign for sign in signs if _escaped(sign) not in used), "")
        roles = {str(turn["role"]) for turn in conversation[0]}
        if not self._mark or any(map(self._spelt.search, roles)):
            raise InvalidTemplate(
                f"special tokens in messages, tools or variables that cannot be told apart, of roles {roles}"
            )

    def mark(self, value: Any, meant: frozenset[str] = frozenset()) -> Any:
        """Return a value with a mark on both sides of each token that its texts spell and do not mean."""
        if self._spelt is None:
            return value
        if isinstance(value, str):
            return self._spelt.sub(
                lambda match: match[0] if match[0] in meant else f"{self._mark}{match[0]}{self._mark}", value
            )
        if isinstance(value, Mapping):
            return {self.mark(name, meant): self.mark(inner, meant) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(inner, meant) for inner in value]
        return value

    def mark_message(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Mark the fields of a message, but not its role or the types of its parts, which templates compare."""
        answers = turn["role"] == "assistant"

        def mark_field(name: str, value: Any) -> Any:
            meant = self._meant_in_answers if answers and name in ANSWER_FIELDS else frozenset[str]()
            if name == "role":
                return value
            if not isinstance(value, list | tuple):
                return self.mark(value, meant)
            return [
                {key: inner if key == "type" else self.mark(inner, meant) for key, inner in part.items()}
                if isinstance(part, Mapping)
                else self.mark(part, meant)
                for part in value
            ]

        return {name: mark_field(name, value) for name, value in turn.items()}

    def unmark(self, rendered: str) -> RenderedText:
        """Remove the marks from the template's output, and return the spelt ranges with it."""
        if self._spelt is None:
            return RenderedText(rendered)
        # A template may print a tool as JSON in ASCII, where the mark is an escape.
        rendered = re.sub(re.escape(_escaped(self._mark)), self._mark, rendered, flags=re.IGNORECASE)
        text, spelt = "", list[tuple[int, int]]()
        # A template may cut a message, so a mark may have lost its partner.
        for piece in re.split(f"{self._mark}((?:{self._spelt.pattern}){self._mark})|{self._mark}", rendered):
            unmarked = (piece or "").removesuffix(self._mark)
            if unmarked != (piece or ""):
                spelt.append((len(text), len(text) + len(unmarked)))
            text += unmarked
        return RenderedText(text, tuple(spelt))


def alternating(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation as texts of user and assistant in turn, of which the user has the first.

    System messages and results of tools become the user's, and calls the assistant's text. Texts of one role in a row
    are joined by blank lines. An empty question precedes a greeting.
    """
    joined: list[Mapping[str, Any]] = []
    for turn in turns:
        role, text = ("assistant" if turn["role"] == "assistant" else "user"), _text(turn)
        if turn["role"] in ("tool", "function"):
            text = f"Result of {turn.get('name') or 'the tool'}: {text}"
        calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in turn.get("tool_calls") or ()]
        text = "\n".join(filter(None, [text, *calls]))
        if joined and joined[-1]["role"] == role:
            text = f"{joined.pop()['content']}\n\n{text}"
        elif not joined and role == "assistant":
            joined.append({"role": "user", "content": ""})
        joined.append({"role": role, "content": text})
    return joined


def _text(turn: Mapping[str, Any]) -> str:
    return str(turn.get("content") or "")


def _with_object_arguments(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose calls have objects as arguments; anything else becomes the object's `arguments`."""
    calls = []
    for call in turn.get("tool_calls") or ():
        function = call.get("function", call)
        given = function.get("arguments")
        object_ = given if isinstance(given, Mapping) else {"arguments": given}
        calls.append({**call, "function": {**function, "arguments": object_}})
    return {**turn, "tool_calls": calls} if calls else turn


def leaves(value: Any) -> Iterator[Any]:
    """Yield all values and mapping keys that contain no others, in no order."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            stack += chain.from_iterable(item.items())
        elif isinstance(item, list | tuple):
            stack += item
        else:
            yield item


def _escaped(sign: str) -> str:
    return json.dumps(sign)[1:-1]
