"""Text that others write meets no expression and no splitter whose time grows with the square of its length."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import PromptTemplate
from qcfuse_rag.generation.tool_parsers import TOOL_CALL_PARSERS
from qcfuse_rag.library.index import IndexedPassage
from qcfuse_rag.library.readers import DEEP_MARKDOWN, TextSplitting
from qcfuse_rag.library.retriever import _title
from qcfuse_rag.prompts.atoms import Atoms
from qcfuse_rag.prompts.builder import PromptBuilder, marker_number
from qcfuse_rag.server.protocol.chat_request import delimited_passages
from tests.support.tool_templates import LOOK_UP

MEGABYTE = 1_000_000
TOOLS: list[Any] = [{"type": "function", "function": {"name": f"tool {number}"}} for number in range(5_000)]


def repeated(piece: str, size: int = MEGABYTE) -> str:
    return piece * (size // len(piece))


def nested(level: str, size: int = MEGABYTE) -> str:
    """Return lists or quotes, each one level deeper than the last."""
    lines, length = list[str](), 0
    while length < size:
        lines.append(f"{level * len(lines)}- a\n")
        length += len(lines[-1])
    return "".join(lines)


def parse_calls(text: str) -> None:
    for parser in TOOL_CALL_PARSERS:
        parser.parse(text, [LOOK_UP])


def parse_many_calls(text: str) -> None:
    TOOL_CALL_PARSERS[0].parse(f"<tool_call>[{text}0]", TOOLS)


def title(text: str) -> None:
    _title([IndexedPassage("a", text), IndexedPassage("a", "b")], 1)


def delimited(text: str) -> None:
    for whole in (text, f"{text}]]></source>"):
        delimited_passages(whole)


def rewritten(text: str) -> None:
    Atoms.of(text).undo()


SPACES = " " * MEGABYTE
READERS: dict[Callable[[str], object], tuple[str, ...]] = {
    parse_calls: (f"{SPACES}x", f"```json{SPACES}x", repeated("```json "), repeated("<tool_call>")),
    parse_many_calls: (repeated('{"name":"x"},', 100_000),),
    title: (f"# a{SPACES}x", f"#{SPACES}", repeated("# a #\t"), repeated("# a\n"), "#" * MEGABYTE),
    delimited: tuple(map(repeated, ("<source ", "<![CDATA[", "[CONTEXT 1]:\n", "\n[END CONTEXT ", "]]>", "</source>"))),
    Atoms.of: (repeated("\\n "), "a" * MEGABYTE, repeated("\\"), repeated("e\u0301", 200_000), "\u0301" * MEGABYTE),
    rewritten: (repeated("\u201ca\u201d ", 200_000),),
    marker_number: (repeated("[[qcfuse:1"), f"[[qcfuse:{'1' * MEGABYTE}", "[" * MEGABYTE),
    DEEP_MARKDOWN.search: (repeated("> "), repeated("1"), SPACES, repeated("\n "), repeated("- - x\n")),
}
CASES = [(read, text) for read, texts in READERS.items() for text in texts]


@pytest.mark.parametrize(("read", "text"), CASES, ids=map(str, range(len(CASES))))
def test_a_megabyte_is_read_in_seconds(read: Callable[[str], object], text: str) -> None:
    started = time.process_time()
    read(text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [("# A title ##  \n", "A title"), ("  ## B\t", "B"), ("# C #1 #\r", "C #1"), ("#  # #\n#no\n    # code", None)],
)
def test_a_title_ends_before_its_closing_signs(text: str, expected: str | None) -> None:
    assert _title([IndexedPassage("a", text)], 0) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        nested("  "),
        nested("> "),
        repeated(nested("> ", 2_000)),
        "".join(f"[a{number}]: x\n" for number in range(80_000)),
    ],
    ids=["lists", "quotes", "quotes again", "references"],
)
def test_a_megabyte_of_markdown_is_split_in_a_minute(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    started = time.process_time()
    passages = TextSplitting(tokenizer, 384).split(text, markdown=True)
    assert time.process_time() - started < 120
    read, given = ("".join(each.split()) for each in ("".join(passages), text))  # splitting drops white space
    assert len(read) > 0.3 * len(given)


def test_control_tokens_of_a_megabyte_are_marked_in_seconds(tokenizer: PreTrainedTokenizerFast) -> None:
    builder, started = PromptBuilder(tokenizer, PromptTemplate()), time.process_time()
    builder.render([("user", repeated("</s>"))])
    assert time.process_time() - started < 5
